//! [`SyncLock`]: the lock for async code, with the names of the TypeScript module.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::blocking::{self, Acquisition, LockRow};
use crate::config::{MaxAge, Settings};
use crate::error::LockError;
use crate::key::Job;
use crate::pool::Pool;
use crate::run::{RunId, RunReport};
use crate::store;

/// How long the first pause is between two attempts to undo an abandoned claim, and the longest one.
const UNDO_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// A handle on the locks of one database. Cheap to clone; all clones share one pool.
///
/// Making one connects to nothing: connections are opened when a call needs them, so an application starts while its
/// database is down. No call blocks a thread of the runtime, and every call ends within
/// [`Settings::with_call_timeout`].
///
/// # Panics
///
/// Like tokio itself, every async function here panics outside of a tokio runtime with its timer enabled.
#[derive(Clone, Debug)]
pub struct SyncLock {
    pool: Arc<Pool>,
    max_age: MaxAge,
    call_timeout: Duration,
}

impl SyncLock {
    /// A handle with these settings.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self { pool: Arc::new(Pool::new(settings)), max_age: settings.max_age, call_timeout: settings.call_timeout }
    }

    /// Claims the key of a sync type, or of a [`LockKey`](crate::LockKey) or [`Job`] of the caller's own.
    ///
    /// One statement in one round trip. The claim wins over no row, a row without a holder, and a row older than the
    /// maximum age, by the database's clock. What is won is held until [`SyncLock::release_lock`] or until it expires:
    /// nobody renews it.
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
        let (job, max_age) = (job.into(), self.max_age);
        let mut unanswered = Unanswered { pool: Arc::clone(&self.pool), run_id: RunId::new(), max_age, armed: false };
        let (acquisition, mut unanswered) = self
            .call(move |pool, deadline| {
                let outcome = pool.run(deadline, |conn| {
                    unanswered.armed = true;
                    blocking::claim(conn, &job, &unanswered.run_id, max_age)
                });
                // A clean refusal won nothing. A win stays armed until the caller has it.
                unanswered.armed &=
                    matches!(outcome, Ok(Acquisition::Locked { .. }) | Err(LockError::ConnectionLost(_)));
                outcome.map(|acquisition| (acquisition, unanswered))
            })
            .await?;
        unanswered.armed = false;
        Ok(acquisition)
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
        self.call(move |pool, deadline| pool.run(deadline, |conn| blocking::release_lock(conn, &run_id))).await
    }

    /// Marks a run as completed and says whether its record was still `running`. A finished record is never changed.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the record is written even when the future is dropped.
    pub async fn complete_run(&self, run_id: &RunId, report: &RunReport) -> Result<bool, LockError> {
        let (run_id, report) = (run_id.clone(), report.clone());
        self.call(move |pool, deadline| pool.run(deadline, |conn| blocking::complete_run(conn, &run_id, &report))).await
    }

    /// Marks a run as failed and says whether its record was still `running`. A finished record is never changed.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the record is written even when the future is dropped.
    pub async fn fail_run(&self, run_id: &RunId, error_message: &str) -> Result<bool, LockError> {
        let (run_id, message) = (run_id.clone(), error_message.to_owned());
        self.call(move |pool, deadline| pool.run(deadline, |conn| blocking::fail_run(conn, &run_id, &message))).await
    }

    /// Lists the rows of the lock table by key. It locks nothing and changes nothing.
    pub async fn inspect(&self) -> Result<Vec<LockRow>, LockError> {
        let max_age = self.max_age;
        self.call(move |pool, deadline| pool.run(deadline, |conn| blocking::inspect(conn, max_age))).await
    }

    /// Runs a call on a thread that may block, and gives up waiting for it after the call timeout.
    async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&Pool, Instant) -> Result<T, LockError> + Send + 'static,
    ) -> Result<T, LockError> {
        let (pool, bound) = (Arc::clone(&self.pool), self.call_timeout);
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

/// A claim that its caller may never hear of. It is made before the statement is sent, so that a future dropped at any
/// point, a lost answer and a runtime that shuts down all end in its `drop`, which undoes the claim.
struct Unanswered {
    pool: Arc<Pool>,
    run_id: RunId,
    max_age: MaxAge,
    armed: bool,
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        let (pool, run_id) = (Arc::clone(&self.pool), self.run_id.clone());
        // After the maximum age the row is free for everybody anyway.
        let give_up = Instant::now().checked_add(self.max_age.duration());
        let undo = move || undo_claim(&pool, &run_id, give_up);
        // Not a task: the runtime may be gone, and a drop must not block one of its threads.
        if let Err(error) = thread::Builder::new().name("sync-lock-undo".to_owned()).spawn(undo) {
            tracing::error!(run_id = %self.run_id, %error, "an abandoned claim stays until it expires");
        }
    }
}

fn undo_claim(pool: &Pool, run_id: &RunId, give_up: Option<Instant>) {
    let (mut pause, longest) = UNDO_PAUSE;
    loop {
        let deadline = Instant::now() + longest;
        match pool.run(deadline, |conn| blocking::bounded(conn, |conn| store::abandon(conn, run_id))) {
            Ok(freed) => return tracing::warn!(%run_id, freed, "undid an abandoned claim"),
            Err(error) if give_up.is_some_and(|give_up| Instant::now() >= give_up) => {
                return tracing::error!(%run_id, %error, "an abandoned claim stays until it expires");
            }
            Err(error) => tracing::debug!(%run_id, %error, "an abandoned claim is not undone yet"),
        }
        thread::sleep(pause);
        pause = (pause * 2).min(longest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undo_that_cannot_work_is_given_up_when_the_row_has_expired() {
        let (ended, end) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let settings = Settings::new("postgresql://127.0.0.1:1/nowhere").expect("a URL");
            let pool = Pool::new(&settings.with_pool_timeout(Duration::from_millis(50)));
            undo_claim(&pool, &RunId::new(), Some(Instant::now()));
            ended.send(()).expect("a test that waits");
        });
        end.recv_timeout(Duration::from_secs(30)).expect("the end of the undo");
    }
}
