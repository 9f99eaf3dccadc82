//! The heartbeat: one thread that renews every lease of a handle, and the trust that each lease has left.
//!
//! The database decides who holds a row. Local time may only end trust early: it counts from when the last acknowledged
//! renewal was *sent*, on a clock that goes on during suspend, and ends a margin before the row can be taken over.

use std::collections::HashMap;
use std::future::pending;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;

use crate::boottime;
use crate::config::{MaxAge, Settings};
use crate::dedicated::Dedicated;
use crate::error::LockError;
use crate::key::{Job, LockKey};
use crate::run::{RunId, owner_id};
use crate::store::Renewal;

/// When the newest groomer peer takes a groomer row over.
const GROOMER_AGE: Duration = Duration::from_secs(90);

/// The longest margin between the end of trust and the moment the row can be taken over.
const LONGEST_MARGIN: Duration = Duration::from_secs(5);

/// How long the thread sleeps without a lease. A new one wakes it.
const IDLE: Duration = Duration::from_mins(1);

/// How many leases one statement renews. In larger chunks Postgres cannot update in place.
pub(crate) const CHUNK: usize = 50;

/// The bounds of one renewal: long enough to open a connection, short enough to leave time for another try.
const CALL_BOUNDS: (Duration, Duration) = (Duration::from_millis(150), Duration::from_secs(5));

/// Why a lease is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// Another run holds the key: the row had expired.
    #[error("the lease was lost: run {} took the lock over", .by.as_str().escape_debug())]
    TakenOver {
        /// The new holder.
        by: RunId,
    },
    /// The row is gone, or has no holder: somebody removed it. It is not made again. Also said of a run whose end no
    /// longer finds its row: an end does not look who has it instead.
    #[error("the lease was lost: its row was removed")]
    Removed,
    /// No renewal was acknowledged in time. The row may still be ours, but nobody may rely on it.
    #[error("the lease was lost: no renewal was acknowledged in time")]
    NotRenewed,
    /// [`SyncLock::shutdown`](crate::SyncLock::shutdown) was called.
    #[error("the lease was given up: this process shuts down")]
    ShutDown,
}

/// What a lease may still rely on.
pub(crate) struct Trust {
    pub(crate) key: LockKey,
    pub(crate) sync_type: Option<String>,
    pub(crate) run_id: RunId,
    pub(crate) max_age: MaxAge,
    /// How long a renewal is worth, from its sending.
    window: Duration,
    interval: Duration,
    /// `None` while the lease is held.
    loss: watch::Sender<Option<Loss>>,
    state: Mutex<TrustState>,
}

struct TrustState {
    until: Duration,
    /// The run has ended, and only the end is left to be written.
    ended: bool,
    /// The row is being freed: that it goes is no loss.
    leaving: bool,
}

impl Trust {
    /// Trust in a claim that was sent at that time, renewed as often as the maximum age asks for and the interval allows.
    pub(crate) fn new(job: &Job, run_id: RunId, max_age: MaxAge, sent: Duration, longest_interval: Duration) -> Self {
        let age = max_age.duration();
        let taken_over_after = if *job.key() == LockKey::GROOMER { age.min(GROOMER_AGE) } else { age };
        let window = taken_over_after.saturating_sub((taken_over_after / 10).min(LONGEST_MARGIN));
        Self {
            key: job.key().clone(),
            sync_type: job.sync_type().map(str::to_owned),
            run_id,
            max_age,
            window,
            interval: (age / 3).min(longest_interval),
            loss: watch::Sender::new(None),
            state: Mutex::new(TrustState { until: sent.saturating_add(window), ended: false, leaving: false }),
        }
    }

    fn state(&self) -> MutexGuard<'_, TrustState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the lease is lost, or `None` while it may be relied on. Looks at the clock itself, so that it is right even
    /// where no thread of ours gets to run.
    pub(crate) fn loss(&self) -> Option<Loss> {
        if self.left().is_zero() {
            self.lose(&Loss::NotRenewed);
        }
        self.loss.borrow().clone()
    }

    /// How much longer the lease may be relied on without a renewal.
    fn left(&self) -> Duration {
        self.state().until.saturating_sub(boottime::now())
    }

    /// Waits for the loss.
    pub(crate) async fn lost(&self) -> Loss {
        /// Timers stop during suspend, so the clock is looked at again and again.
        const LOOK: Duration = Duration::from_secs(1);
        let mut changes = self.loss.subscribe();
        loop {
            if self.has_ended() {
                return pending().await;
            }
            if let Some(loss) = self.loss() {
                return loss;
            }
            let look = self.left().min(LOOK);
            // The sender is in `self`; either way the loss is looked at again.
            let _ = tokio::time::timeout(look, changes.changed()).await;
        }
    }

    /// A renewal sent at that time was acknowledged. What was lost before stays lost, and what has ended is not renewed.
    pub(crate) fn renewed(&self, sent: Duration) {
        if self.loss().is_none() && !self.has_ended() {
            let mut state = self.state();
            state.until = state.until.max(sent.saturating_add(self.window));
            drop(state);
            tracing::debug!(key = %self.key, sync_type = self.sync_type, run_id = %self.run_id, owner = owner_id(), "renewed");
        }
    }

    /// Ends the run, once: says whether nobody has ended it before. From now on nothing is a loss.
    pub(crate) fn end(&self) -> bool {
        !std::mem::replace(&mut self.state().ended, true)
    }

    fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// Whether the last acknowledged renewal is too long ago.
    pub(crate) fn has_run_out(&self) -> bool {
        self.left().is_zero()
    }

    /// Says whether the row is being freed by a transaction that may yet fail: that it goes is no loss meanwhile.
    pub(crate) fn leave(&self, leaving: bool) {
        self.state().leaving = leaving;
    }

    /// Loses the lease for good. Only the first reason counts, and is told once.
    pub(crate) fn lose(&self, loss: &Loss) {
        let expected = {
            let state = self.state();
            state.ended || state.leaving && matches!(loss, Loss::Removed | Loss::TakenOver { .. })
        };
        if expected {
            return;
        }
        let told = self.loss.send_if_modified(|told| {
            let first = told.is_none();
            if first {
                *told = Some(loss.clone());
            }
            first
        });
        if told {
            let (key, run_id) = (&self.key, &self.run_id);
            tracing::error!(%key, sync_type = self.sync_type, %run_id, owner = owner_id(), reason = %loss, "lost");
        }
    }
}

/// Renews the leases that it watches. Dropped, it lets go of those that are left.
pub(crate) struct Heartbeat {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Settings,
    beats: Mutex<Beats>,
    wake: Condvar,
}

#[derive(Default)]
struct Beats {
    watched: HashMap<RunId, Beat>,
    /// A thread works on it.
    attended: bool,
    /// The handle is gone.
    closed: bool,
}

struct Beat {
    trust: Arc<Trust>,
    due: Duration,
}

impl Heartbeat {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { shared: Arc::new(Shared { settings, beats: Mutex::default(), wake: Condvar::new() }) }
    }

    /// Renews a lease from now on, until it is lost or forgotten.
    pub(crate) fn watch(&self, trust: &Arc<Trust>) -> Result<(), LockError> {
        let mut beats = self.shared.beats();
        if !beats.attended {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("sync-lock-heartbeat".to_owned());
            thread.spawn(move || shared.beat()).map_err(|_| LockError::CutOff)?;
            beats.attended = true;
        }
        let due = boottime::now() + jittered(trust.interval);
        beats.watched.insert(trust.run_id.clone(), Beat { trust: Arc::clone(trust), due });
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Renews a lease no longer.
    pub(crate) fn forget(&self, run_id: &RunId) {
        self.shared.beats().watched.remove(run_id);
    }

    /// The leases that are held at the moment.
    pub(crate) fn watched(&self) -> Vec<Arc<Trust>> {
        self.shared.beats().watched.values().map(|beat| Arc::clone(&beat.trust)).collect()
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.shared.beats().closed = true;
        self.shared.wake.notify_one();
    }
}

impl Shared {
    fn beats(&self) -> MutexGuard<'_, Beats> {
        self.beats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beat(&self) {
        let mut dedicated = Dedicated::new(self.settings.clone());
        while let Some(due) = self.wait_for_due() {
            for chunk in due.chunks(CHUNK) {
                let sent = boottime::now();
                let bound = chunk.iter().map(|trust| trust.interval).min().unwrap_or(CALL_BOUNDS.1);
                let outcome = renew(&mut dedicated, chunk, bound.clamp(CALL_BOUNDS.0, CALL_BOUNDS.1));
                match outcome {
                    Ok(renewals) => self.settle(chunk, &renewals, sent),
                    Err(error) => {
                        tracing::warn!(%error, leases = chunk.len(), owner = owner_id(), "a renewal failed");
                        self.settle(chunk, &[], sent);
                    }
                }
            }
        }
    }

    /// Waits until some lease is due and hands out all that soon will be, so that they share a statement. Leases whose
    /// trust has run out are told so and dropped. `None` when the handle is gone.
    fn wait_for_due(&self) -> Option<Vec<Arc<Trust>>> {
        let mut beats = self.beats();
        loop {
            if beats.closed {
                return None;
            }
            let now = boottime::now();
            // A run that has ended is renewed until its end is written, which may be never; one that was told to shut down,
            // until it has ended.
            beats.watched.retain(|_, Beat { trust, .. }| {
                let given_up = || matches!(trust.loss(), None | Some(Loss::ShutDown));
                if trust.has_ended() { !trust.left().is_zero() } else { given_up() }
            });
            if beats.watched.values().any(|beat| beat.due <= now) {
                let soon = |beat: &&Beat| beat.due <= now + beat.trust.interval / 4;
                return Some(beats.watched.values().filter(soon).map(|beat| Arc::clone(&beat.trust)).collect());
            }
            // The end of trust is told in time; where it is over, only the next beat is left to wait for.
            let deadline =
                |trust: &Trust| Some(trust.left()).filter(|left| !left.is_zero()).map(|left| now.saturating_add(left));
            let wake = |beat: &Beat| deadline(&beat.trust).map_or(beat.due, |deadline| beat.due.min(deadline));
            let next = beats.watched.values().map(wake).min();
            let pause = next.map_or(IDLE, |next| next.saturating_sub(now));
            beats = match self.wake.wait_timeout(beats, pause) {
                Ok((beats, _)) => beats,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Draws the conclusions from a renewal: trust where it was acknowledged, loss where the row is gone or in other hands,
    /// another try soon where the row was only locked or nothing was heard.
    fn settle(&self, chunk: &[Arc<Trust>], renewals: &[Renewal], sent: Duration) {
        for trust in chunk {
            let renewal = renewals.iter().find(|renewal| renewal.run_id == trust.run_id.as_str());
            let renewed = renewal.is_some_and(|renewal| renewal.renewed);
            match renewal {
                Some(_) if renewed => trust.renewed(sent),
                Some(renewal) if !renewal.ours => {
                    trust.lose(&match renewal.holder.clone() {
                        Some(by) => Loss::TakenOver { by: RunId::from_row(by) },
                        None => Loss::Removed,
                    });
                    if trust.has_ended() {
                        self.beats().watched.remove(&trust.run_id);
                    }
                }
                _ => {}
            }
            let pause =
                if renewed { jittered(trust.interval) } else { (trust.interval / 8).min(Duration::from_secs(1)) };
            if let Some(beat) = self.beats().watched.get_mut(&trust.run_id) {
                // Never in the past: beats that were missed are not made up for.
                let now = boottime::now();
                beat.due = if renewed { (sent + pause).max(now) } else { now + pause };
            }
        }
    }
}

fn renew(dedicated: &mut Dedicated, chunk: &[Arc<Trust>], bound: Duration) -> Result<Vec<Renewal>, LockError> {
    let leases: Vec<_> = chunk.iter().map(Arc::clone).collect();
    dedicated.call(bound, move |store, conn| {
        let keys: Vec<_> = leases.iter().map(|trust| trust.key.as_str()).collect();
        let run_ids: Vec<_> = leases.iter().map(|trust| trust.run_id.as_str()).collect();
        store.bounded(conn, |conn| store.renew(conn, &keys, &run_ids))
    })
}

/// Somewhere between three quarters of the interval and all of it, so that replicas do not beat in step.
pub(crate) fn jittered(interval: Duration) -> Duration {
    let random = uuid::Uuid::new_v4().as_u128() % 1024;
    let share = random as u32;
    interval * 3 / 4 + interval / 4 * share / 1024
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::SyncType;

    fn trust(job: impl Into<Job>, max_age_ms: u64, sent: Duration) -> Trust {
        let max_age = MaxAge::new(Duration::from_millis(max_age_ms)).unwrap_or_default();
        Trust::new(&job.into(), RunId::new(), max_age, sent, Duration::from_secs(30))
    }

    #[test]
    fn a_lease_is_renewed_thrice_within_the_maximum_age_and_every_thirty_seconds_at_least() {
        let interval = |max_age_ms| trust(SyncType::Reconcile, max_age_ms, Duration::ZERO).interval;
        assert_eq!(interval(600), Duration::from_millis(200));
        assert_eq!(interval(1_800_000), Duration::from_secs(30));
        for _ in 0..1000 {
            let pause = jittered(Duration::from_secs(30));
            assert!((22_500..=30_000).contains(&pause.as_millis()), "{pause:?}");
        }
    }

    #[test]
    fn trust_ends_a_margin_before_the_row_can_be_taken_over() {
        let window = |job: Job, max_age_ms| trust(job, max_age_ms, Duration::ZERO).window;
        assert_eq!(window(SyncType::Reconcile.into(), 1_000), Duration::from_millis(900));
        assert_eq!(window(SyncType::Reconcile.into(), 1_800_000), Duration::from_secs(1_795));
        assert_eq!(
            window(LockKey::GROOMER.into(), 1_800_000),
            Duration::from_secs(85),
            "newer peers take over after 90 s"
        );
        assert_eq!(window(LockKey::GROOMER.into(), 10_000), Duration::from_secs(9));
    }

    #[test]
    fn trust_counts_from_the_sending_and_what_is_lost_stays_lost() {
        let now = boottime::now();
        let fresh = trust(SyncType::Reconcile, 60_000, now);
        assert_eq!(fresh.loss(), None);
        let late = trust(SyncType::Reconcile, 1_000, now.saturating_sub(Duration::from_millis(901)));
        assert_eq!(late.loss(), Some(Loss::NotRenewed));
        late.renewed(boottime::now());
        assert_eq!(late.loss(), Some(Loss::NotRenewed));
        fresh.lose(&Loss::Removed);
        fresh.lose(&Loss::ShutDown);
        assert_eq!(fresh.loss(), Some(Loss::Removed));
    }
}
