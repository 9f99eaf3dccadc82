//! [`SyncLock`]: the lock for async code, with the names of the TypeScript module.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::blocking::{Acquisition, LockRow};
use crate::boottime;
use crate::cleanup::{Cleanup, Leftover, OnDrop};
use crate::config::{InvalidMaxAge, MaxAge, Settings};
use crate::error::LockError;
use crate::heartbeat::{Heartbeat, Loss, Trust};
use crate::key::{Job, LockKey};
use crate::lease::{Lease, LeaseAttempt};
use crate::pool::Pool;
use crate::run::{Ending, RunId, RunReport};

/// The pause after the first attempt of a claim that waits, and the longest one.
const RETRY_PAUSES: (Duration, Duration) = (Duration::from_millis(25), Duration::from_secs(1));

/// How long after a loss a claim looks first. Whoever asks again and again loses cheaply; whoever asks once a tick claims at
/// once.
const CONTESTED_FOR: Duration = Duration::from_secs(1);

/// How long a shutdown waits for jobs that were told to stop.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// How often to look for a claim of ours whose answer was lost: it may still be under way on the server.
const LOST_CLAIM_LOOKS: u32 = 4;

/// A handle on the locks of one database. Cheap to clone; all clones share one pool and one heartbeat.
///
/// Making one connects to nothing: connections are opened when a call needs them, so an application starts while its
/// database is down. No call blocks a thread of the runtime, and every call but those that wait by their nature (the
/// two `…_within`, [`SyncLock::run`], [`SyncLock::shutdown`]) ends within [`Settings::with_call_timeout`]. Have one
/// handle a process: it is the handle that knows which jobs are running.
///
/// # Panics
///
/// Like tokio itself, every async function here panics outside of a tokio runtime with its timer enabled.
#[derive(Clone)]
pub struct SyncLock {
    inner: Arc<Inner>,
}

struct Inner {
    pool: Arc<Pool>,
    heartbeat: Heartbeat,
    cleanup: Cleanup,
    max_age: MaxAge,
    call_timeout: Duration,
    heartbeat_interval: Duration,
    /// The keys of the jobs that run in this process at the moment.
    running: watch::Sender<HashSet<LockKey>>,
    contested: Arc<Contested>,
    closed: AtomicBool,
}

impl SyncLock {
    /// A handle with these settings.
    ///
    /// # Errors
    ///
    /// [`InvalidMaxAge::TooShortForLease`] for a maximum age below 500 ms. The functions in [`blocking`](crate::blocking) take any.
    pub fn new(settings: &Settings) -> Result<Self, InvalidMaxAge> {
        settings.max_age.for_lease()?;
        Ok(Self {
            inner: Arc::new(Inner {
                pool: Arc::new(Pool::new(settings)),
                heartbeat: Heartbeat::new(settings.clone()),
                cleanup: Cleanup::new(settings.clone()),
                max_age: settings.max_age,
                call_timeout: settings.call_timeout,
                heartbeat_interval: settings.heartbeat_interval,
                running: watch::Sender::default(),
                contested: Arc::default(),
                closed: AtomicBool::new(false),
            }),
        })
    }

    /// Claims the key of a sync type, or of a [`LockKey`] or [`Job`] of the caller's own.
    ///
    /// One statement in one round trip, after a look where this handle met a holder of the key within the last second, as
    /// one does who asks again and again. The claim wins over no row, a row without a holder, and a row older than the
    /// maximum age, by the database's clock. What is won is held until [`SyncLock::release_lock`] or until it expires:
    /// nobody renews it. [`SyncLock::lease`] and [`SyncLock::run`] do.
    ///
    /// # Errors
    ///
    /// [`LockError`]: what kept the claim from being decided. Whatever it may have won is released in the background.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: a claim that was under way is undone in the background, and its run
    /// record closed as failed.
    pub async fn acquire_lock(&self, job: impl Into<Job>) -> Result<Acquisition, LockError> {
        let (acquisition, _, unanswered) = self.claim(job.into()).await?;
        settle(unanswered);
        Ok(acquisition)
    }

    /// Claims as [`SyncLock::acquire_lock`] does, and again while the answer is a conflict or a passing failure, until
    /// this time is over. The last attempt is made at its end, and bounded like every call. Between two attempts it
    /// holds neither a connection nor a thread. Whoever waits longest has no precedence.
    ///
    /// # Cancel safety
    ///
    /// As for [`SyncLock::acquire_lock`].
    pub async fn acquire_within(&self, job: impl Into<Job>, wait: Duration) -> Result<Acquisition, LockError> {
        let job = job.into();
        let is_conflict = |answer: &Acquisition| matches!(answer, Acquisition::Conflict { .. });
        retry_within(wait, || self.acquire_lock(job.clone()), is_conflict).await
    }

    /// Claims as [`SyncLock::acquire_lock`] does, and hands out a [`Lease`] that is renewed until it ends.
    ///
    /// # Errors
    ///
    /// As for [`SyncLock::acquire_lock`]; [`LockError::MaxAge`] for a job whose own maximum age is below 500 ms, and
    /// [`LockError::ShutDown`] after [`SyncLock::shutdown`].
    ///
    /// # Cancel safety
    ///
    /// As for [`SyncLock::acquire_lock`].
    pub async fn lease(&self, job: impl Into<Job>) -> Result<LeaseAttempt, LockError> {
        let job = job.into();
        let max_age = self.max_age_of(&job);
        max_age.for_lease()?;
        self.refuse_if_closed()?;
        let (acquisition, sent, unanswered) = self.claim(job.clone()).await?;
        let attempt = match acquisition {
            Acquisition::Conflict { holder } => LeaseAttempt::Conflict { holder },
            Acquisition::Locked { run_id, acquired_at, displaced } => {
                let lease = Lease::new(self.clone(), &job, run_id, max_age, sent, acquired_at, displaced);
                self.inner.heartbeat.watch(lease.trust())?;
                // A shutdown that came in between has not seen this lease. It is handed over before its claim is settled, so
                // that the shutdown waits for one or the other.
                let lease = self.refuse_if_closed().map(|()| lease);
                settle(unanswered);
                return lease.map(LeaseAttempt::Leased);
            }
        };
        settle(unanswered);
        Ok(attempt)
    }

    /// Leases as [`SyncLock::lease`] does, and waits as [`SyncLock::acquire_within`] does.
    ///
    /// # Cancel safety
    ///
    /// As for [`SyncLock::acquire_lock`].
    pub async fn lease_within(&self, job: impl Into<Job>, wait: Duration) -> Result<LeaseAttempt, LockError> {
        let job = job.into();
        let is_conflict = |attempt: &LeaseAttempt| matches!(attempt, LeaseAttempt::Conflict { .. });
        retry_within(wait, || self.lease(job.clone()), is_conflict).await
    }

    /// Frees what the run holds and says whether that was anything.
    ///
    /// Deletes by run id alone: after a takeover it frees nothing, and it may be repeated any number of times.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the release goes on when the future is dropped.
    pub async fn release_lock(&self, run_id: &RunId) -> Result<bool, LockError> {
        let run_id = run_id.clone();
        self.call(move |pool, deadline| pool.run(deadline, |conn| pool.store().release_lock(conn, &run_id))).await
    }

    /// Marks a run as completed and says whether its record was still `running`. A finished record is never changed.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the record is written even when the future is dropped.
    pub async fn complete_run(&self, run_id: &RunId, report: &RunReport) -> Result<bool, LockError> {
        let (run_id, ending) = (run_id.clone(), Ending::Completed(report.clone()));
        self.call(move |pool, deadline| pool.run(deadline, |conn| pool.store().end_run(conn, &run_id, &ending))).await
    }

    /// Marks a run as failed and says whether its record was still `running`. A finished record is never changed.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the record is written even when the future is dropped.
    pub async fn fail_run(&self, run_id: &RunId, error_message: &str) -> Result<bool, LockError> {
        let (run_id, ending) = (run_id.clone(), Ending::Failed(error_message.to_owned()));
        self.call(move |pool, deadline| pool.run(deadline, |conn| pool.store().end_run(conn, &run_id, &ending))).await
    }

    /// Lists the rows of the lock table by key. It locks nothing and changes nothing.
    pub async fn inspect(&self) -> Result<Vec<LockRow>, LockError> {
        let max_age = self.inner.max_age;
        self.call(move |pool, deadline| pool.run(deadline, |conn| pool.store().inspect(conn, max_age))).await
    }

    /// Gives up every lease of this handle and waits until their rows are free and their records closed, for
    /// applications that handle signals. No lease can be had afterwards.
    ///
    /// Claims that are under way are waited for, and undone if their callers are gone. Jobs that [`SyncLock::run`] started
    /// are cancelled first and get ten seconds to end; a row whose job goes on is renewed and not freed. The row of a lease
    /// that the caller holds itself is freed whether or not its work has ended; what [`SyncLock::acquire_lock`] won is left
    /// alone. Then the wait is bounded by the call timeout: an unreachable database leaves rows that expire.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops the wait. Every lease stays lost and jobs are cancelled all the same, but leases
    /// outside of [`SyncLock::run`] may then keep their rows until they are dropped.
    pub async fn shutdown(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
        let leases = self.inner.heartbeat.watched();
        for trust in &leases {
            trust.lose(&Loss::ShutDown);
        }
        let mut running = self.inner.running.subscribe();
        let ended = tokio::time::timeout(SHUTDOWN_GRACE, running.wait_for(HashSet::is_empty)).await.is_ok();
        for trust in &leases {
            let goes_on = !ended && self.inner.running.borrow().contains(&trust.key);
            if goes_on {
                tracing::error!(key = %trust.key, run_id = %trust.run_id, "the job does not end: its row is renewed until this process ends, and then left to expire");
            } else if trust.end() {
                self.end_in_background(trust, Ending::Failed(Loss::ShutDown.to_string()));
            }
        }
        if tokio::time::timeout(self.inner.call_timeout, self.inner.cleanup.settled()).await.is_err() {
            tracing::error!("not everything could be released in time: it is left to expire");
        }
    }

    pub(crate) fn max_age_of(&self, job: &Job) -> MaxAge {
        job.max_age().unwrap_or(self.inner.max_age)
    }

    pub(crate) fn heartbeat_interval(&self) -> Duration {
        self.inner.heartbeat_interval
    }

    pub(crate) fn running(&self) -> &watch::Sender<HashSet<LockKey>> {
        &self.inner.running
    }

    /// Stops renewing a lease.
    pub(crate) fn forget(&self, run_id: &RunId) {
        self.inner.heartbeat.forget(run_id);
    }

    /// Frees a run's row and closes its record on a thread of its own, trying again until that has worked.
    pub(crate) fn end_in_background(&self, trust: &Trust, ending: Ending) {
        self.forget(&trust.run_id);
        self.inner.cleanup.hand_over(leftover(&trust.key, &trust.run_id, ending, trust.max_age, 0));
    }

    /// Frees a run's row and writes its end, and says whether the row was still there. What cannot be done now is done in
    /// the background.
    pub(crate) async fn end(&self, trust: &Arc<Trust>, ending: Ending) -> Result<bool, LockError> {
        let undone = leftover(&trust.key, &trust.run_id, ending.clone(), trust.max_age, 0);
        let owed = OnDrop::new(self.inner.cleanup.expect(), undone);
        let ended = Arc::clone(trust);
        let outcome = self
            .call(move |pool, deadline| {
                let mut uncertain = false;
                let end = pool.run(deadline, |conn| {
                    let end = pool.store().end_and_release(conn, &ended.key, &ended.run_id, &ending);
                    uncertain |= matches!(end, Err(LockError::ConnectionLost(_)));
                    end
                })?;
                owed.settled();
                // Where an answer was lost, the statement may have found what the one before it had done. The record tells;
                // a job without one was ours to end while its lease could be relied on.
                Ok(end.freed || uncertain && (end.before || ended.sync_type.is_none() && !ended.has_run_out()))
            })
            .await;
        self.forget(&trust.run_id);
        outcome
    }

    /// Runs a body on a connection of the pool for as long as it takes, on a thread that may block.
    pub(crate) async fn with_connection<T: Send + 'static>(
        &self,
        body: impl FnOnce(&Pool, Instant) -> T + Send + 'static,
    ) -> Result<T, LockError> {
        let (pool, bound) = (Arc::clone(&self.inner.pool), self.inner.call_timeout);
        match tokio::task::spawn_blocking(move || body(&pool, Instant::now() + bound)).await {
            Ok(outcome) => Ok(outcome),
            // A panic of the caller's own code goes on in the caller's own task.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(LockError::CutOff),
            },
        }
    }

    fn refuse_if_closed(&self) -> Result<(), LockError> {
        if self.inner.closed.load(Ordering::SeqCst) { Err(LockError::ShutDown) } else { Ok(()) }
    }

    /// Claims; says when the first statement was sent, and hands out the guard that undoes the claim unless it is settled.
    async fn claim(&self, job: Job) -> Result<(Acquisition, Duration, Option<OnDrop>), LockError> {
        let max_age = self.max_age_of(&job);
        // From here on a shutdown waits for what becomes of the claim.
        let expected = self.inner.cleanup.expect();
        let asked = Asked::default();
        let still_asked = Arc::clone(&asked.0);
        let contested = Arc::clone(&self.inner.contested);
        self.call(move |pool, deadline| {
            let begun = Instant::now();
            let look_first = contested.contains(job.key(), begun);
            let (mut sent, mut uncertain) = (None, false);
            let outcome = pool.run(deadline, |conn| {
                if sent.is_none() {
                    if !still_asked.load(Ordering::SeqCst) {
                        return Err(LockError::CutOff);
                    }
                    if look_first && let Some(conflict) = pool.store().look_for_conflict(conn, &job, max_age)? {
                        return Ok(conflict);
                    }
                }
                let (run_id, ..) = sent.get_or_insert_with(|| {
                    let run_id = RunId::new();
                    let ending = Ending::Failed("the claim was abandoned before it was answered".to_owned());
                    let undo = leftover(job.key(), &run_id, ending, max_age, LOST_CLAIM_LOOKS);
                    (run_id, boottime::now(), OnDrop::new(expected.clone(), undo))
                });
                let outcome = pool.store().acquire(conn, &job, run_id, max_age);
                uncertain |= matches!(outcome, Err(LockError::ConnectionLost(_)));
                outcome
            });
            let (sent, mut unanswered) = sent.map(|(_, sent, undo)| (sent, undo)).unzip();
            let won = matches!(outcome, Ok(Acquisition::Locked { .. }));
            // A statement whose answer was lost may win even after the one that was sent in its place has lost.
            if !won && !uncertain {
                settle(unanswered.take());
            }
            let acquisition = outcome?;
            contested.learn(job.key(), &acquisition, begun);
            // What is kept from the caller is undone here.
            Ok((acquisition, sent.unwrap_or_else(boottime::now), unanswered.filter(|_| won)))
        })
        .await
    }

    /// Runs a call on a thread that may block, and gives up waiting for it after the call timeout.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Pool, Instant) -> Result<T, LockError> + Send + 'static,
    ) -> Result<T, LockError> {
        let (pool, bound) = (Arc::clone(&self.inner.pool), self.inner.call_timeout);
        let deadline = Instant::now() + bound;
        let answer = tokio::task::spawn_blocking(move || {
            // The thread may have come free long after the caller was gone.
            if Instant::now() >= deadline { Err(LockError::TimedOut(bound)) } else { call(&pool, deadline) }
        });
        match tokio::time::timeout(bound, answer).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(LockError::CutOff),
            Err(_) => Err(LockError::TimedOut(bound)),
        }
    }
}

impl fmt::Debug for SyncLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { pool, max_age, call_timeout, .. } = &*self.inner;
        f.debug_struct("SyncLock")
            .field("pool", pool)
            .field("max_age", max_age)
            .field("call_timeout", call_timeout)
            .finish_non_exhaustive()
    }
}

/// The keys of which a claim of this handle met a holder not longer than [`CONTESTED_FOR`] ago.
#[derive(Default)]
struct Contested(Mutex<HashMap<LockKey, Instant>>);

impl Contested {
    /// How many keys are kept before those are dropped that do not count any more.
    const MANY: usize = 64;

    fn keys(&self) -> MutexGuard<'_, HashMap<LockKey, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn contains(&self, key: &LockKey, now: Instant) -> bool {
        self.keys().get(key).is_some_and(|met| Self::counts(*met, now))
    }

    fn learn(&self, key: &LockKey, acquisition: &Acquisition, now: Instant) {
        let mut keys = self.keys();
        match acquisition {
            Acquisition::Locked { .. } => {
                keys.remove(key);
            }
            Acquisition::Conflict { holder: Some(_) } => {
                if let Some(met) = keys.get_mut(key) {
                    *met = now;
                    return;
                }
                if keys.len() >= Self::MANY {
                    keys.retain(|_, met| Self::counts(*met, now));
                }
                keys.insert(key.clone(), now);
            }
            Acquisition::Conflict { holder: None } => {}
        }
    }

    fn counts(met: Instant, now: Instant) -> bool {
        now.saturating_duration_since(met) < CONTESTED_FOR
    }
}

/// Tells a claim that waits for a connection whether anybody still wants it.
struct Asked(Arc<AtomicBool>);

impl Default for Asked {
    fn default() -> Self {
        Self(Arc::new(AtomicBool::new(true)))
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

fn leftover(key: &LockKey, run_id: &RunId, ending: Ending, max_age: MaxAge, looks: u32) -> Leftover {
    Leftover { key: key.clone(), run_id: run_id.clone(), ending, max_age: max_age.duration(), looks }
}

fn settle(unanswered: Option<OnDrop>) {
    if let Some(unanswered) = unanswered {
        unanswered.settled();
    }
}

/// Tries again after a conflict or a passing failure, until the time is over.
async fn retry_within<T, Attempt: Future<Output = Result<T, LockError>>>(
    wait: Duration,
    mut attempt: impl FnMut() -> Attempt,
    is_conflict: impl Fn(&T) -> bool,
) -> Result<T, LockError> {
    let started = Instant::now();
    let mut pause = RETRY_PAUSES.0;
    loop {
        let outcome = attempt().await;
        let again = match &outcome {
            Ok(answer) => is_conflict(answer),
            Err(error) => error.is_transient(),
        };
        let left = wait.saturating_sub(started.elapsed());
        if !again || left.is_zero() {
            return outcome;
        }
        tokio::time::sleep(crate::heartbeat::jittered(pause).min(left)).await;
        pause = (pause * 2).min(RETRY_PAUSES.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_counts_as_contested_for_a_second_or_until_it_is_won_and_none_is_kept_for_ever() {
        let held = Acquisition::Conflict {
            holder: Some(crate::blocking::Holder { run_id: RunId::new(), age: Duration::ZERO }),
        };
        let won = Acquisition::Locked { run_id: RunId::new(), acquired_at: chrono::Utc::now(), displaced: None };
        let (contested, met) = (Contested::default(), Instant::now());
        let after = |millis| met + Duration::from_millis(millis);
        contested.learn(&LockKey::GROOMER, &held, met);
        assert!(contested.contains(&LockKey::GROOMER, after(999)));
        assert!(!contested.contains(&LockKey::GROOMER, after(1000)));
        contested.learn(&LockKey::GROOMER, &Acquisition::Conflict { holder: None }, after(900));
        assert!(!contested.contains(&LockKey::GROOMER, after(1000)), "a race says nothing about a holder");
        contested.learn(&LockKey::GROOMER, &held, after(900));
        assert!(contested.contains(&LockKey::GROOMER, after(1000)));
        contested.learn(&LockKey::GROOMER, &won, after(1000));
        assert!(!contested.contains(&LockKey::GROOMER, after(1000)));
        for number in 0..1000 {
            let key = LockKey::custom(format!("key-{number}")).expect("a key");
            contested.learn(&key, &held, after(number * 100));
        }
        assert!(contested.keys().len() <= Contested::MANY);
    }
}
