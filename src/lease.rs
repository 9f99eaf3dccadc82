//! [`Lease`]: a lock that is renewed while it is held, says when it is lost, and fences the writes made under it.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use crate::blocking::{Displaced, Holder, lock_timeout_or_else};
use crate::config::MaxAge;
use crate::error::LockError;
use crate::heartbeat::{Loss, Trust};
use crate::key::{Job, LockKey};
use crate::lock::SyncLock;
use crate::run::{Ending, RunId, RunReport, owner_id};
use crate::store;

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
    locks: SyncLock,
    trust: Arc<Trust>,
    max_age: MaxAge,
    acquired_at: DateTime<Utc>,
    displaced: Option<Displaced>,
    leased: Instant,
    /// What the record will say if nobody says how the run ended.
    unsaid: Mutex<String>,
    /// Whether the row was still ours when the run ended.
    freed: OnceLock<bool>,
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
        let unsaid = Mutex::new("the lease was dropped before the run said how it ended".to_owned());
        Self { locks, trust, max_age, acquired_at, displaced, leased: Instant::now(), unsaid, freed: OnceLock::new() }
    }

    pub(crate) fn trust(&self) -> &Arc<Trust> {
        &self.trust
    }

    /// The key that is held.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.trust.key
    }

    /// The run that holds it, which is also the id of its `IssueSyncRun` row if it has one.
    #[must_use]
    pub fn run_id(&self) -> &RunId {
        &self.trust.run_id
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
        self.trust.loss()
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
        self.trust.lost().await
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
        let fence = |conn: &mut PgConnection, trust: &Trust| store::fence(conn, &trust.key, &trust.run_id);
        self.fenced(body, fence, |_| false).await
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
        let end = move |conn: &mut PgConnection, trust: &Trust| {
            trust.leave(true);
            Ok(store::fence(conn, &trust.key, &trust.run_id)?
                && store::finish_and_release(conn, &trust.key, &trust.run_id, &ending)?.1)
        };
        let trust = Arc::clone(&self.trust);
        let outcome = self
            .fenced(body, end, move |committed| {
                trust.leave(false);
                committed && trust.end()
            })
            .await;
        if outcome.is_ok() {
            let _ = self.freed.set(true);
            self.locks.forget(self.run_id());
            self.told("succeeded", true);
        }
        outcome
    }

    /// Completes the run, frees its row, and says whether the row was still this lease's. If not, the run is recorded
    /// as failed. Any further end is ignored and answered with `false`. So is an end that had to be sent again because
    /// its answer was lost: the record then says how the run ended.
    ///
    /// # Errors
    ///
    /// [`LockError`]; the end is then written in the background as soon as the database allows it.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the end is written even when the future is dropped.
    pub async fn complete(&self, report: &RunReport) -> Result<bool, LockError> {
        let freed = self.end(Ending::Completed(report.clone())).await?;
        self.told("succeeded", freed);
        Ok(freed)
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
        let freed = self.end(Ending::Failed(error_message.to_owned())).await?;
        self.told("failed", freed);
        Ok(freed)
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
        let freed =
            self.end(Ending::Failed("the lease was released before the run said how it ended".to_owned())).await?;
        self.told("released", freed);
        Ok(freed)
    }

    /// What the record will say if the lease is dropped.
    pub(crate) fn say_if_dropped(&self, message: String) {
        *self.unsaid.lock().unwrap_or_else(PoisonError::into_inner) = message;
    }

    async fn end(&self, ending: Ending) -> Result<bool, LockError> {
        if !self.trust.end() {
            return Ok(false);
        }
        let freed = self.locks.end(self.key(), self.run_id(), ending, self.max_age).await?;
        let _ = self.freed.set(freed);
        Ok(freed)
    }

    /// Whether the row was still ours when the run ended.
    pub(crate) fn was_freed(&self) -> bool {
        self.freed.get().copied().unwrap_or_default()
    }

    fn told(&self, event: &'static str, freed: bool) {
        let Trust { key, sync_type, run_id, .. } = &*self.trust;
        let elapsed = self.leased.elapsed();
        tracing::info!(%key, sync_type, %run_id, owner = owner_id(), ?elapsed, freed, "{event}");
    }

    async fn fenced<T, E>(
        &self,
        body: impl FnOnce(&mut PgConnection) -> Result<T, E> + Send + 'static,
        fence: impl Fn(&mut PgConnection, &Trust) -> QueryResult<bool> + Send + 'static,
        afterwards: impl FnOnce(bool) -> bool + Send + 'static,
    ) -> Result<T, FencedError<E>>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        if let Some(loss) = self.loss() {
            return Err(FencedError::Lost(loss));
        }
        let trust = Arc::clone(&self.trust);
        self.locks
            .with_connection(move |pool, deadline| {
                let mut body = Some(body);
                let outcome = pool.run(deadline, |conn| {
                    match conn.build_transaction().read_committed().run(|conn| steps(conn, &trust, &mut body, &fence)) {
                        // Nothing has happened yet: another connection may do better.
                        Err(FencedError::Lock(error @ LockError::ConnectionLost(_))) if body.is_some() => Err(error),
                        outcome => Ok(outcome),
                    }
                });
                let outcome = outcome.unwrap_or_else(|error| Err(FencedError::Lock(error)));
                afterwards(outcome.is_ok());
                outcome
            })
            .await?
    }
}

/// A check, the body, and the check that locks.
fn steps<T, E, Body: FnOnce(&mut PgConnection) -> Result<T, E>>(
    conn: &mut PgConnection,
    trust: &Trust,
    body: &mut Option<Body>,
    fence: &impl Fn(&mut PgConnection, &Trust) -> QueryResult<bool>,
) -> Result<T, FencedError<E>> {
    let lost = || FencedError::Lost(trust.loss().unwrap_or(Loss::Removed));
    if !store::holds(conn, &trust.key, &trust.run_id)? {
        return Err(lost());
    }
    let Some(body) = body.take() else { return Err(FencedError::Lock(LockError::CutOff)) };
    let value = body(conn).map_err(FencedError::Body)?;
    let sent = Instant::now();
    match fence(conn, trust) {
        Ok(true) => Ok(value),
        Ok(false) => Err(lost()),
        Err(error) => Err(FencedError::Lock(lock_timeout_or_else(conn, error, sent.elapsed()))),
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.trust.end() {
            let unsaid = std::mem::take(&mut *self.unsaid.lock().unwrap_or_else(PoisonError::into_inner));
            tracing::warn!(key = %self.key(), run_id = %self.run_id(), owner = owner_id(), unsaid, "released in the background");
            self.locks.end_in_background(self.key(), self.run_id(), Ending::Failed(unsaid), self.max_age);
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
