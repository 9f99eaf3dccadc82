//! One run of a job under its lease: the overlap guard in front, cancellation on loss, and an outcome for every end.

use std::any::Any;
use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinHandle};

use crate::blocking::Holder;
use crate::error::LockError;
use crate::heartbeat::Loss;
use crate::key::{Job, LockKey};
use crate::lease::{End, Lease, LeaseAttempt};
use crate::lock::SyncLock;
use crate::run::{RunReport, owner_id};

/// How one run of a job ended. Only [`RunOutcome::Completed`] is a success.
#[must_use = "a run may have been skipped"]
#[derive(Debug)]
pub enum RunOutcome<E> {
    /// The job did its work under the lock. The row is free and the record says so; where the database could not be
    /// reached at the end, both follow in the background.
    Completed(RunReport),
    /// The job failed. The row is free and the record says why.
    Failed(JobFailure<E>),
    /// Skipped: another holder has the key.
    #[non_exhaustive]
    Held {
        /// Who, and how long since its claim or last renewal; `None` where that could not be known in the same round trip.
        holder: Option<Holder>,
    },
    /// Skipped without asking the database: this process is still running the job.
    StillRunning,
    /// Skipped: the database could not be asked, or could not answer.
    Unavailable(LockError),
    /// The lease was lost while the job ran. The job was cancelled; what it did after the loss may have met the work of
    /// the next holder. Also said of a job that had ended, where its row was gone by then. That includes a last
    /// transaction of its own that came through although its commit was not answered.
    Lost(Loss),
}

/// Why a job failed.
#[derive(Debug)]
pub enum JobFailure<E> {
    /// It returned an error.
    Error(E),
    /// It returned no error, but had ended its lease as failed itself, with this message.
    EndedAsFailed(String),
    /// It panicked, with this message.
    Panicked(String),
    /// It did not end within its deadline and was cancelled.
    DeadlineExceeded(Duration),
    /// The runtime shut down under it.
    Cancelled,
}

impl<E: fmt::Display> fmt::Display for JobFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(error) => error.fmt(f),
            Self::EndedAsFailed(message) => f.write_str(message),
            Self::Panicked(message) => write!(f, "the job panicked: {message}"),
            Self::DeadlineExceeded(deadline) => write!(f, "the job did not end within {deadline:?}"),
            Self::Cancelled => f.write_str("the job was cut off by the end of the runtime"),
        }
    }
}

impl SyncLock {
    /// Runs a job once under the lock of its key, or says why not.
    ///
    /// The job runs as a task of its own. It gets the lease, for [`Lease::transaction`] and [`Lease::is_lost`], and is
    /// cancelled (its future dropped at the next await) when the lease is lost, its deadline is over
    /// ([`Job::with_deadline`]), or this future is dropped. The key counts as running in this process until the job's
    /// future has really ended and nobody uses the lease any more, and only then the row of a cancelled job is freed: a
    /// job that blocks its thread, or the body of a fenced transaction that goes on, keeps the next run out.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future cancels the job, frees its row in the background, and records the run as failed.
    pub async fn run<Work, Running, Report, E>(&self, job: impl Into<Job>, work: Work) -> RunOutcome<E>
    where
        Work: FnOnce(Arc<Lease>) -> Running + Send + 'static,
        Running: Future<Output = Result<Report, E>> + Send + 'static,
        Report: Into<RunReport> + Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        let job = job.into();
        let Some(turn) = Turn::take(self, job.key()) else {
            let reason = "still running here";
            tracing::info!(key = %job.key(), sync_type = job.sync_type(), owner = owner_id(), reason, "skipped");
            return RunOutcome::StillRunning;
        };
        let lease = match self.lease(job.clone()).await {
            Ok(LeaseAttempt::Leased(lease)) => Arc::new(lease),
            Ok(LeaseAttempt::Conflict { holder }) => return RunOutcome::Held { holder },
            Err(error) => {
                tracing::warn!(key = %job.key(), sync_type = job.sync_type(), owner = owner_id(), %error, "skipped");
                return RunOutcome::Unavailable(error);
            }
        };
        // It ends when nobody uses the lease any more: the job's future, and what it left on other threads.
        lease.take_turn(turn);
        let held = Arc::clone(&lease);
        let mut task = AbortOnDrop(tokio::spawn(async move {
            let report = work(Arc::clone(&held)).await;
            // Until here, whatever the job does with its own.
            drop(held);
            report
        }));
        let deadline = async {
            match job.deadline() {
                Some(deadline) => {
                    tokio::time::sleep(deadline).await;
                    deadline
                }
                None => pending().await,
            }
        };
        let failure = tokio::select! {
            biased;
            loss = lease.lost() => {
                lease.say_if_dropped(loss.to_string());
                return RunOutcome::Lost(loss);
            }
            ended = &mut task.0 => match ended {
                Ok(Ok(report)) => return completed(&lease, report.into()).await,
                Ok(Err(error)) => JobFailure::Error(error),
                Err(error) => interrupted(error),
            },
            deadline = deadline => {
                let failure = JobFailure::DeadlineExceeded(deadline);
                lease.say_if_dropped(failure.to_string());
                // The row is freed and the record closed when the future has really ended.
                return RunOutcome::Failed(failure);
            }
        };
        match lease.fail(&failure.to_string()).await {
            Ok(false) if !lease.end().is_some_and(|end| end.ours) => {
                RunOutcome::Lost(lease.loss().unwrap_or(Loss::Removed))
            }
            _ => RunOutcome::Failed(failure),
        }
    }

    /// Runs the scheduled issue sync, and inside of it the opt-in automation pass under the automation key.
    ///
    /// The pass follows a sync that succeeded. Where its key is held it is skipped and reported, and the sync still
    /// succeeds; a pass that fails is reported the same way. The automation key is released on every path.
    ///
    /// # Cancel safety
    ///
    /// As for [`SyncLock::run`].
    pub async fn run_scheduled<Sync, Syncing, Pass, Passing, E>(
        &self,
        sync: Sync,
        automation: Option<Pass>,
    ) -> (RunOutcome<E>, ScheduledReport)
    where
        Sync: FnOnce(Arc<Lease>) -> Syncing + Send + 'static,
        Syncing: Future<Output = Result<RunReport, E>> + Send + 'static,
        Pass: FnOnce(Arc<Lease>) -> Passing + Send + 'static,
        Passing: Future<Output = Result<RunReport, E>> + Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        let (locks, (tell, mut told)) = (self.clone(), tokio::sync::oneshot::channel());
        let outcome = self
            .run(crate::SyncType::Scheduled, move |lease| async move {
                let report = sync(lease).await?;
                if let Some(pass) = automation {
                    let outcome = locks.run(crate::SyncType::Automation, pass).await;
                    // The caller may be gone; then nobody asks.
                    let _ = tell.send(skipped_reason(&outcome));
                }
                Ok(report)
            })
            .await;
        let mut report = ScheduledReport::default();
        if let RunOutcome::Completed(RunReport { repos_fetched, synced_count, .. }) = &outcome {
            (report.repos_fetched, report.synced_count) = (*repos_fetched, *synced_count);
        }
        // A job that was cancelled may still be ending; it has told nothing then.
        if let Ok(Some(reason)) = told.try_recv() {
            (report.automation_skipped, report.automation_skipped_reason) = (true, Some(reason));
        }
        (outcome, report)
    }
}

/// What a scheduled run reports. With the feature `serde` it serialises with the field names of the peers' response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "camelCase"))]
pub struct ScheduledReport {
    /// `reposFetched`: how many repositories were read.
    pub repos_fetched: i32,
    /// `syncedCount`: how many issues were written.
    pub synced_count: i32,
    /// `automationSkipped`: the automation pass was asked for and did not come to its end.
    pub automation_skipped: bool,
    /// `automationSkippedReason`: why.
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    pub automation_skipped_reason: Option<String>,
}

fn skipped_reason<E: fmt::Display>(outcome: &RunOutcome<E>) -> Option<String> {
    match outcome {
        RunOutcome::Completed(_) => None,
        RunOutcome::Failed(failure) => Some(format!("the automation pass failed: {failure}")),
        RunOutcome::Held { holder: Some(holder) } => Some(format!(
            "the automation lock is held by {}, claimed or renewed {} s ago",
            holder.run_id,
            holder.age.as_secs()
        )),
        RunOutcome::Held { holder: None } => Some("the automation lock is held".to_owned()),
        RunOutcome::StillRunning => Some("the automation pass is still running in this process".to_owned()),
        RunOutcome::Unavailable(error) => Some(format!("the automation lock could not be claimed: {error}")),
        RunOutcome::Lost(loss) => Some(loss.to_string()),
    }
}

async fn completed<E>(lease: &Lease, report: RunReport) -> RunOutcome<E> {
    let lost = || RunOutcome::Lost(lease.loss().unwrap_or(Loss::Removed));
    if let Some(loss) = lease.loss() {
        lease.say_if_dropped(loss.to_string());
        return RunOutcome::Lost(loss);
    }
    match lease.complete(&report).await {
        Ok(true) => RunOutcome::Completed(report),
        // The job may have ended its lease itself, in its last transaction for instance.
        Ok(false) => match lease.end() {
            Some(End { ours: true, failure: None }) => RunOutcome::Completed(report),
            Some(End { ours: true, failure: Some(failure) }) => {
                RunOutcome::Failed(JobFailure::EndedAsFailed(failure.clone()))
            }
            _ => lost(),
        },
        Err(error) => {
            tracing::warn!(key = %lease.key(), run_id = %lease.run_id(), %error, "the end of the run is written later");
            RunOutcome::Completed(report)
        }
    }
}

fn interrupted<E>(error: JoinError) -> JobFailure<E> {
    match error.try_into_panic() {
        Ok(panic) => JobFailure::Panicked(panic_message(&*panic)),
        Err(_) => JobFailure::Cancelled,
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Cancels a task whose starter is gone.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The overlap guard: at most one run of a key in this process.
pub(crate) struct Turn {
    locks: SyncLock,
    key: LockKey,
}

impl Turn {
    fn take(locks: &SyncLock, key: &LockKey) -> Option<Self> {
        let free = locks.running().send_if_modified(|running| running.insert(key.clone()));
        free.then(|| Self { locks: locks.clone(), key: key.clone() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.locks.running().send_modify(|running| {
            running.remove(&self.key);
        });
    }
}
