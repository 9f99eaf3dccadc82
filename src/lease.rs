//! [`Lease`]: a lock that is renewed while it is held, says when it is lost, and fences the writes made under it.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use crate::blocking::{Displaced, Holder};
use crate::boottime;
use crate::config::MaxAge;
use crate::error::LockError;
use crate::heartbeat::{Loss, Trust};
use crate::key::{Job, LockKey};
use crate::lock::SyncLock;
use crate::pool::Pool;
use crate::run::{Ending, RunId, RunReport, owner_id};
use crate::runner::Turn;
use crate::store::Store;

/// The answer to [`SyncLock::lease`].
#[must_use = "a lease that is dropped is released"]
#[derive(Debug)]
pub enum LeaseAttempt {
    /// The key is ours, and stays so while the lease lives.
    Leased(Lease),
    /// Somebody else has the key. The claim left no trace.
    #[non_exhaustive]
    Conflict {
        /// Who holds it, where that could be known in the same round trip.
        holder: Option<Holder>,
    },
}

/// A lock that this process holds and renews.
///
/// A thread of its own, with a connection of its own, renews it often enough that no peer with a right clock ever sees the
/// row as stale; neither a job that uses up the pool nor one that blocks the runtime keeps it from that. The lease ends
/// by [`Lease::complete`], [`Lease::fail`] or [`Lease::release`]. Dropped without one of them, in whatever code, it is
/// released in the background and its run record closed as failed.
///
/// It can be lost: taken over after a pause, removed by an operator, or without an acknowledged renewal for too long.
/// [`Lease::lost`] and [`Lease::is_lost`] tell; [`Lease::transaction`] keeps a holder who does not know it yet from writing.
#[must_use = "a lease that is dropped is released"]
pub struct Lease {
    held: Arc<Held>,
    acquired_at: DateTime<Utc>,
    displaced: Option<Displaced>,
}

/// What is freed when nobody uses the lease any more: neither its owner nor the body of a fenced transaction, which goes on
/// when its future is dropped.
struct Held {
    locks: SyncLock,
    trust: Arc<Trust>,
    leased: Instant,
    /// What the record will say if nobody says how the run ended.
    unsaid: Mutex<String>,
    end: OnceLock<End>,
    /// The runner's turn, which ends after the row is handed over.
    turn: OnceLock<Turn>,
}

/// How a run ended.
#[derive(Clone, Debug)]
pub(crate) struct End {
    /// Why it failed, or `None` if it was completed.
    pub(crate) failure: Option<String>,
    /// The row was still ours.
    pub(crate) ours: bool,
}

impl Lease {
    pub(crate) fn new(
        locks: SyncLock,
        job: &Job,
        run_id: RunId,
        max_age: MaxAge,
        sent: Duration,
        acquired_at: DateTime<Utc>,
        displaced: Option<Displaced>,
    ) -> Self {
        let trust = Arc::new(Trust::new(job, run_id, max_age, sent, locks.heartbeat_interval()));
        let held = Held {
            locks,
            trust,
            leased: Instant::now(),
            unsaid: Mutex::new("the lease was dropped before the run said how it ended".to_owned()),
            end: OnceLock::new(),
            turn: OnceLock::new(),
        };
        Self { held: Arc::new(held), acquired_at, displaced }
    }

    pub(crate) fn trust(&self) -> &Arc<Trust> {
        &self.held.trust
    }

    /// Keeps the turn until nobody uses the lease any more.
    pub(crate) fn take_turn(&self, turn: Turn) {
        let _ = self.held.turn.set(turn);
    }

    /// How the run ended, if it has.
    pub(crate) fn end(&self) -> Option<&End> {
        self.held.end.get()
    }

    /// The key that is held.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.held.trust.key
    }

    /// The run that holds it, which is also the id of its `IssueSyncRun` row if it has one.
    #[must_use]
    pub fn run_id(&self) -> &RunId {
        &self.held.trust.run_id
    }

    /// When the key was claimed, by the database's clock.
    #[must_use]
    pub fn acquired_at(&self) -> DateTime<Utc> {
        self.acquired_at
    }

    /// Whom the claim displaced, if it took over an expired or orphaned row.
    #[must_use]
    pub fn displaced(&self) -> Option<&Displaced> {
        self.displaced.as_ref()
    }

    /// Why the lease is lost, or `None` while it may be relied on. It looks at the clock itself, so the answer is right even
    /// where nothing else gets to run. A lease that is lost once stays lost.
    #[must_use]
    pub fn loss(&self) -> Option<Loss> {
        self.held.trust.loss()
    }

    /// Whether the lease is lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.loss().is_some()
    }

    /// Waits until the lease is lost, and says why. Never returns for a lease that has ended.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses nothing.
    pub async fn lost(&self) -> Loss {
        self.held.trust.lost().await
    }

    /// Runs a READ COMMITTED transaction whose writes are committed only if the row is still this lease's at the commit.
    ///
    /// The row is looked at before the body runs, and locked and looked at again right before the commit; between that
    /// look and the commit nobody can take it over. So after a takeover nothing of the body is ever committed. A lease whose
    /// row has expired but was taken over by nobody still commits, and is renewed by it. What is not guaranteed: the body
    /// may run beside a new holder until its check fails, and until then rows that it wrote block the new holder. Where
    /// even that matters, begin the body with `SELECT … FOR SHARE` on rows that both sides lock.
    ///
    /// The body gets a connection of the pool and runs on a thread that may block. It must not end the transaction
    /// itself. The call timeout bounds the wait for the connection; the body takes as long as it takes. From the check
    /// on, the transaction waits 500 ms at most for any one row lock, and the server ends it after 5 s without a
    /// statement.
    ///
    /// # Errors
    ///
    /// [`FencedError::Body`] with the body's own error, [`FencedError::Lost`] if the lease was lost, both rolled back, and
    /// [`FencedError::Lock`] otherwise. Only after [`LockError::ConnectionLost`] it is unknown whether the commit came through.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the transaction goes on when the future is dropped, fenced as ever.
    ///
    /// # Panics
    ///
    /// A panic of the body rolls the transaction back and goes on in the caller.
    pub async fn transaction<T, E>(
        &self,
        body: impl FnOnce(&mut PgConnection) -> Result<T, E> + Send + 'static,
    ) -> Result<T, FencedError<E>>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        let fence =
            |store: &Store, conn: &mut PgConnection, trust: &Trust| store.fence(conn, &trust.key, &trust.run_id);
        self.fenced(body, fence, |_, _| {}).await
    }

    /// Runs a last transaction as [`Lease::transaction`] does, and completes the run and frees its row in it: all are
    /// committed, or none. Afterwards the lease has ended. After an error it is held as before, unless it was lost.
    ///
    /// # Errors
    ///
    /// As for [`Lease::transaction`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lease::transaction`].
    pub async fn complete_in_transaction<T, E>(
        &self,
        report: RunReport,
        body: impl FnOnce(&mut PgConnection) -> Result<T, E> + Send + 'static,
    ) -> Result<T, FencedError<E>>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        let ending = Ending::Completed(report);
        let end = move |store: &Store, conn: &mut PgConnection, trust: &Trust| {
            trust.leave(true);
            Ok(store.fence(conn, &trust.key, &trust.run_id)?
                && store.finish_and_release(conn, &trust.key, &trust.run_id, &ending)?.freed)
        };
        self.fenced(body, end, |held, committed| {
            if committed && held.trust.end() {
                held.locks.forget(&held.trust.run_id);
                held.ended(None, true);
            }
            held.trust.leave(false);
        })
        .await
    }

    /// Completes the run, frees its row, and says whether the row was still this lease's. If not, or if the lease is
    /// lost, the run is recorded as failed. Any further end is ignored and answered with `false`. An end that had to be
    /// sent again because its answer was lost is answered by what the record says; of a job without a record, by whether
    /// the lease could still be relied on.
    ///
    /// # Errors
    ///
    /// [`LockError`]; the end is then written in the background as soon as the database allows it.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the end is written even when the future is dropped.
    pub async fn complete(&self, report: &RunReport) -> Result<bool, LockError> {
        match self.loss() {
            // Whatever the job has done, it has done it without a lock.
            Some(loss) => self.held.end(Ending::Failed(loss.to_string())).await.map(|_| false),
            None => self.held.end(Ending::Completed(report.clone())).await,
        }
    }

    /// Records the run as failed, frees its row, and says whether the row was still this lease's.
    ///
    /// # Errors
    ///
    /// As for [`Lease::complete`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lease::complete`].
    pub async fn fail(&self, error_message: &str) -> Result<bool, LockError> {
        self.held.end(Ending::Failed(error_message.to_owned())).await
    }

    /// Frees the row of a run that says nothing of its end, and says whether it was still this lease's. A record that is
    /// still `running` is closed as failed; complete it first with [`SyncLock::complete_run`], or use [`Lease::complete`].
    ///
    /// # Errors
    ///
    /// As for [`Lease::complete`].
    ///
    /// # Cancel safety
    ///
    /// As for [`Lease::complete`].
    pub async fn release(&self) -> Result<bool, LockError> {
        self.held.end(Ending::Failed("the lease was released before the run said how it ended".to_owned())).await
    }

    /// What the record will say if the lease is dropped.
    pub(crate) fn say_if_dropped(&self, message: String) {
        *self.held.unsaid.lock().unwrap_or_else(PoisonError::into_inner) = message;
    }

    async fn fenced<T, E>(
        &self,
        body: impl FnOnce(&mut PgConnection) -> Result<T, E> + Send + 'static,
        fence: impl Fn(&Store, &mut PgConnection, &Trust) -> QueryResult<bool> + Send + 'static,
        afterwards: impl FnOnce(&Held, bool) + Send + 'static,
    ) -> Result<T, FencedError<E>>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        if let Some(loss) = self.loss() {
            return Err(FencedError::Lost(loss));
        }
        let held = Arc::clone(&self.held);
        self.held
            .locks
            .with_connection(move |pool, deadline| {
                let (mut body, mut renewed) = (Some(body), None);
                let outcome = pool.run(deadline, |conn| {
                    let outcome = conn.build_transaction().read_committed().run(|conn| {
                        let value = steps(pool.store(), conn, &held.trust, &mut body, &fence)?;
                        renewed = Some(value.1);
                        Ok(value.0)
                    });
                    match outcome {
                        // Nothing has happened yet: another connection may do better.
                        Err(FencedError::Lock(error @ LockError::ConnectionLost(_))) if body.is_some() => Err(error),
                        outcome => {
                            if let Err(FencedError::Lock(error)) = &outcome {
                                Pool::give_up_after(error, conn);
                            }
                            Ok(outcome)
                        }
                    }
                });
                let outcome = outcome.unwrap_or_else(|error| Err(FencedError::Lock(error)));
                if let (Ok(_), Some(sent)) = (&outcome, renewed) {
                    held.trust.renewed(sent);
                }
                afterwards(&held, outcome.is_ok());
                outcome
            })
            .await?
    }
}

impl Held {
    async fn end(&self, ending: Ending) -> Result<bool, LockError> {
        if !self.trust.end() {
            return Ok(false);
        }
        let failure = match &ending {
            Ending::Completed(_) => None,
            Ending::Failed(message) => Some(message.clone()),
        };
        let ours = self.locks.end(&self.trust, ending).await?;
        self.ended(failure, ours);
        Ok(ours)
    }

    /// Remembers and tells how the run ended.
    fn ended(&self, failure: Option<String>, ours: bool) {
        let Trust { key, sync_type, run_id, .. } = &*self.trust;
        let (owner, elapsed) = (owner_id(), self.leased.elapsed());
        match &failure {
            _ if !ours => tracing::error!(%key, sync_type, %run_id, owner, ?elapsed, "ended without its lock"),
            None => tracing::info!(%key, sync_type, %run_id, owner, ?elapsed, "succeeded"),
            Some(error_message) => tracing::info!(%key, sync_type, %run_id, owner, ?elapsed, error_message, "failed"),
        }
        let _ = self.end.set(End { failure, ours });
    }
}

/// A check, the body, and the check that locks.
fn steps<T, E, Body: FnOnce(&mut PgConnection) -> Result<T, E>>(
    store: &Store,
    conn: &mut PgConnection,
    trust: &Trust,
    body: &mut Option<Body>,
    fence: &impl Fn(&Store, &mut PgConnection, &Trust) -> QueryResult<bool>,
) -> Result<(T, Duration), FencedError<E>> {
    check(store, conn, trust)?;
    let Some(body) = body.take() else { return Err(FencedError::Lock(LockError::CutOff)) };
    let value = body(conn).map_err(FencedError::Body)?;
    let (sent, started) = (boottime::now(), Instant::now());
    match fence(store, conn, trust) {
        Ok(true) => Ok((value, sent)),
        Ok(false) => {
            check(store, conn, trust)?;
            Err(FencedError::Lost(trust.loss().unwrap_or(Loss::Removed)))
        }
        Err(error) => Err(FencedError::Lock(store.explain(conn, error, started.elapsed()))),
    }
}

/// Loses the lease if the row is gone or in other hands.
fn check<E>(store: &Store, conn: &mut PgConnection, trust: &Trust) -> Result<(), FencedError<E>> {
    let loss = match store.holder(conn, &trust.key)? {
        Some(holder) if holder == trust.run_id.as_str() => return Ok(()),
        Some(holder) => Loss::TakenOver { by: RunId::from_row(holder) },
        None => Loss::Removed,
    };
    trust.lose(&loss);
    Err(FencedError::Lost(trust.loss().unwrap_or(loss)))
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.trust.end() {
            let unsaid = std::mem::take(&mut *self.unsaid.lock().unwrap_or_else(PoisonError::into_inner));
            let Trust { key, sync_type, run_id, .. } = &*self.trust;
            let elapsed = self.leased.elapsed();
            tracing::warn!(%key, sync_type, %run_id, owner = owner_id(), ?elapsed, unsaid, "released in the background");
            self.locks.end_in_background(&self.trust, Ending::Failed(unsaid));
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", self.key())
            .field("run_id", self.run_id())
            .field("acquired_at", &self.acquired_at)
            .field("loss", &self.loss())
            .finish_non_exhaustive()
    }
}

/// Why a fenced transaction was not committed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FencedError<E> {
    /// The body returned an error of its own.
    #[error("the body of the transaction failed")]
    Body(E),
    /// The lease was lost.
    #[error(transparent)]
    Lost(Loss),
    /// The database did not do what was asked.
    #[error(transparent)]
    Lock(#[from] LockError),
}

/// Of BEGIN, COMMIT and the checks.
impl<E> From<DieselError> for FencedError<E> {
    fn from(error: DieselError) -> Self {
        Self::Lock(LockError::of_statement(error))
    }
}
