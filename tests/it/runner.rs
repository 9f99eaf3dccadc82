//! One run of a job: every end has its outcome, its record and a free row.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use diesel::prelude::*;
use sync_lock::blocking::{acquire_lock, release_lock};
use sync_lock::{Job, JobFailure, LockKey, Loss, MaxAge, RunOutcome, RunReport, Settings, SyncLock, SyncType};
use tokio::sync::oneshot;

use crate::support::{PATIENCE, TestDatabase, key, poll, seconds, won};

fn brisk(database: &TestDatabase) -> SyncLock {
    SyncLock::new(&database.settings().with_heartbeat_interval(Duration::from_millis(20))).unwrap()
}

/// A job that starts, says so and never ends by itself.
fn endless(started: oneshot::Sender<()>, dropped: Arc<AtomicBool>) -> impl Future<Output = Result<(), String>> + Send {
    struct Dropped(Arc<AtomicBool>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let dropped = Dropped(dropped);
    async move {
        let _dropped = dropped;
        started.send(()).unwrap();
        std::future::pending().await
    }
}

#[tokio::test]
async fn a_job_that_succeeds_is_completed_and_its_row_is_free() {
    let database = TestDatabase::new();
    let report = RunReport { repos_fetched: 1, synced_count: 2, notes: Some("fine".to_owned()) };
    let expected = report.clone();
    let outcome = database
        .locks()
        .run(SyncType::Scheduled, |lease| async move {
            assert!(!lease.is_lost());
            Ok::<_, String>(report)
        })
        .await;
    assert!(matches!(&outcome, RunOutcome::Completed(report) if *report == expected), "{outcome:?}");
    let run = database.runs().remove(0);
    assert_eq!((run.status.as_str(), run.synced_count, run.notes.as_deref()), ("completed", 2, Some("fine")));
    assert_eq!(database.locks_held(), []);
}

#[tokio::test]
async fn a_job_that_fails_or_panics_is_failed_once_and_its_row_is_free() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let failed = locks.run(SyncType::Scheduled, |_| async { Err::<(), _>("no network".to_owned()) }).await;
    assert!(matches!(&failed, RunOutcome::Failed(JobFailure::Error(error)) if error == "no network"), "{failed:?}");
    let panicked = locks.run::<_, _, (), String>(SyncType::Manual, |_| async { panic!("at the {}", "disco") }).await;
    assert!(
        matches!(&panicked, RunOutcome::Failed(JobFailure::Panicked(text)) if text == "at the disco"),
        "{panicked:?}"
    );
    let early =
        locks.run::<_, std::future::Ready<Result<(), String>>, _, _>(SyncType::Manual, |_| panic!("early")).await;
    assert!(matches!(&early, RunOutcome::Failed(JobFailure::Panicked(text)) if text == "early"), "{early:?}");
    let messages: Vec<_> = database.runs().into_iter().map(|run| (run.status, run.error_message.unwrap())).collect();
    let failed = |text: &str| ("failed".to_owned(), text.to_owned());
    assert_eq!(
        messages,
        [failed("no network"), failed("the job panicked: at the disco"), failed("the job panicked: early")]
    );
    assert_eq!(database.locks_held(), []);
}

#[tokio::test]
async fn a_job_whose_key_is_held_elsewhere_is_skipped_and_the_holder_named() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("peer"), 42.0);
    let outcome = database.locks().run(SyncType::Reconcile, |_| async { panic!("never") as Result<(), String> }).await;
    let RunOutcome::Held { holder: Some(holder), .. } = outcome else { panic!("{outcome:?}") };
    assert_eq!(holder.run_id.as_str(), "peer");
    assert!((42..100).contains(&holder.age.as_secs()));
    assert_eq!(database.runs(), []);
}

#[tokio::test]
async fn a_job_that_still_runs_here_is_skipped_without_asking_the_database() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let (started, running) = oneshot::channel();
    let dropped = Arc::new(AtomicBool::new(false));
    let first = tokio::spawn({
        let (locks, dropped) = (locks.clone(), Arc::clone(&dropped));
        async move { locks.run(SyncType::Scheduled, |_| endless(started, dropped)).await }
    });
    running.await.unwrap();
    // The row is gone, so the database would let it in; the process knows better. `manual` is the same work.
    database.execute(r#"ALTER TABLE "sync_lock" RENAME TO elsewhere"#);
    let again = locks.run(SyncType::Manual, |_| async { Ok::<_, String>(()) }).await;
    assert!(matches!(again, RunOutcome::StillRunning), "{again:?}");
    database.execute(r#"ALTER TABLE elsewhere RENAME TO "sync_lock""#);
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    poll("the cancelled job and its row", || dropped.load(Ordering::SeqCst) && database.locks_held().is_empty());
    poll("a turn", || database.runs().iter().all(|run| run.status == "failed"));
    let next = locks.run(SyncType::Manual, |_| async { Ok::<_, String>(()) }).await;
    assert!(matches!(next, RunOutcome::Completed(_)), "{next:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_job_that_blocks_keeps_its_turn_and_its_row_until_it_has_really_ended() {
    let database = TestDatabase::new();
    let locks = brisk(&database);
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    let job = Job::from(SyncType::Reconcile).with_deadline(Duration::from_millis(50));
    let outcome = locks
        .run(job.clone(), move |_| async move {
            wait.recv().unwrap();
            Ok::<_, String>(())
        })
        .await;
    assert!(matches!(outcome, RunOutcome::Failed(JobFailure::DeadlineExceeded(_))), "{outcome:?}");
    assert_eq!(database.keys_held(), ["reconcile"], "its thread goes on");
    let again = locks.run(job.clone(), |_| async { Ok::<_, String>(()) }).await;
    assert!(matches!(again, RunOutcome::StillRunning), "{again:?}");
    go_on.send(()).unwrap();
    poll("the end of the job", || database.locks_held().is_empty());
    poll("its record", || database.runs()[0].status == "failed");
    assert_eq!(database.runs()[0].error_message.as_deref(), Some("the job did not end within 50ms"));
}

#[tokio::test]
async fn a_job_that_loses_its_lease_is_cancelled_and_never_a_success() {
    let database = TestDatabase::new();
    let locks = brisk(&database);
    let (started, running) = oneshot::channel();
    let dropped = Arc::new(AtomicBool::new(false));
    let run = tokio::spawn({
        let (locks, dropped) = (locks.clone(), Arc::clone(&dropped));
        async move { locks.run(SyncType::Reconcile, |_| endless(started, dropped)).await }
    });
    running.await.unwrap();
    let next = database.take_over(SyncType::Reconcile);
    let outcome = tokio::time::timeout(PATIENCE, run).await.unwrap().unwrap();
    assert!(matches!(&outcome, RunOutcome::Lost(Loss::TakenOver { by }) if *by == next), "{outcome:?}");
    poll("the cancelled job", || dropped.load(Ordering::SeqCst));
    assert_eq!(database.locks_held(), [("reconcile".to_owned(), Some(next.to_string()))]);
}

#[tokio::test]
async fn a_job_that_ends_after_its_row_is_gone_is_lost_and_not_completed() {
    let database = TestDatabase::new();
    let url = database.url();
    let outcome = database
        .locks()
        .run(SyncType::Reconcile, move |_| async move {
            diesel::sql_query(r#"DELETE FROM "sync_lock""#)
                .execute(&mut PgConnection::establish(&url).unwrap())
                .unwrap();
            Ok::<_, String>(())
        })
        .await;
    assert!(matches!(outcome, RunOutcome::Lost(Loss::Removed)), "{outcome:?}");
    assert_eq!(database.runs()[0].status, "failed");
}

#[tokio::test]
async fn a_job_whose_database_is_not_there_is_skipped_and_never_run_unlocked() {
    let nowhere =
        Settings::new("postgresql://127.0.0.1:1/nowhere").unwrap().with_pool_timeout(Duration::from_millis(300));
    let ran = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&ran);
    let outcome = SyncLock::new(&nowhere)
        .unwrap()
        .run(SyncType::Reconcile, |_| async move {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok::<_, String>(())
        })
        .await;
    assert!(matches!(&outcome, RunOutcome::Unavailable(error) if error.is_transient()), "{outcome:?}");
    assert_eq!(ran.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_job_may_end_its_lease_in_its_own_last_transaction() {
    let database = TestDatabase::new();
    let outcome = database
        .locks()
        .run(SyncType::Scheduled, |lease| async move {
            let report = RunReport { synced_count: 5, ..RunReport::default() };
            lease
                .complete_in_transaction(report.clone(), |conn| diesel::sql_query("SELECT 1").execute(conn))
                .await
                .map_err(|error| error.to_string())?;
            Ok::<_, String>(report)
        })
        .await;
    assert!(matches!(&outcome, RunOutcome::Completed(report) if report.synced_count == 5), "{outcome:?}");
    assert_eq!(database.runs()[0].synced_count, 5);
}

#[tokio::test]
async fn the_groomer_and_a_custom_key_run_without_a_record() {
    let database = TestDatabase::new();
    let locks = database.locks();
    for job in [Job::from(LockKey::GROOMER), Job::from(key("contest-sync")).with_max_age(seconds(600.0))] {
        let outcome = locks.run(job, |_| async { Ok::<_, String>(()) }).await;
        assert!(matches!(outcome, RunOutcome::Completed(_)), "{outcome:?}");
    }
    assert_eq!((database.runs(), database.locks_held()), (vec![], vec![]));
}

#[tokio::test]
async fn a_shutdown_cancels_the_jobs_and_frees_their_rows() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let (started, running) = oneshot::channel();
    let run = tokio::spawn({
        let locks = locks.clone();
        async move { locks.run(SyncType::Reconcile, |_| endless(started, Arc::default())).await }
    });
    running.await.unwrap();
    locks.shutdown().await;
    assert_eq!(database.locks_held(), []);
    assert_eq!(database.runs()[0].status, "failed");
    assert!(matches!(run.await.unwrap(), RunOutcome::Lost(Loss::ShutDown)));
}

#[tokio::test]
async fn the_automation_pass_inside_a_scheduled_sync_takes_its_own_key() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let report = RunReport { repos_fetched: 4, synced_count: 8, notes: None };
    let sync = || {
        let report = report.clone();
        move |_| async move { Ok::<_, String>(report) }
    };
    let pass = || {
        Some(|lease: Arc<sync_lock::Lease>| async move {
            assert_eq!(lease.key().as_str(), "automation");
            Ok::<_, String>(RunReport::default())
        })
    };
    let (outcome, scheduled) = locks.run_scheduled(sync(), pass()).await;
    assert!(matches!(outcome, RunOutcome::Completed(_)), "{outcome:?}");
    let json = serde_json::to_value(&scheduled).unwrap();
    assert_eq!(json, serde_json::json!({ "reposFetched": 4, "syncedCount": 8, "automationSkipped": false }));
    assert_eq!(database.runs().len(), 2);

    let held = won(acquire_lock(&mut database.connect(), SyncType::Automation, MaxAge::DEFAULT).unwrap());
    let (outcome, scheduled) = locks.run_scheduled(sync(), pass()).await;
    assert!(matches!(outcome, RunOutcome::Completed(_)), "the sync still succeeds: {outcome:?}");
    let json = serde_json::to_value(&scheduled).unwrap();
    assert_eq!(json["automationSkipped"], true);
    assert!(json["automationSkippedReason"].as_str().unwrap().contains(held.as_str()), "{json}");
    release_lock(&mut database.connect(), &held).unwrap();

    let failing = Some(|_| async { Err::<RunReport, _>("no rules".to_owned()) });
    let (outcome, scheduled) = locks.run_scheduled(sync(), failing).await;
    assert!(matches!(outcome, RunOutcome::Completed(_)), "{outcome:?}");
    assert!(scheduled.automation_skipped_reason.unwrap().contains("no rules"));
    assert_eq!(database.locks_held(), [], "the automation key is free on every path");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_body_of_a_fenced_transaction_keeps_turn_and_row_of_a_run_that_was_cancelled() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let (started, running) = oneshot::channel();
    let (go_on, wait) = std::sync::mpsc::channel::<()>();
    let run = tokio::spawn({
        let locks = locks.clone();
        async move {
            locks
                .run(SyncType::Reconcile, |lease| async move {
                    let body = move |_: &mut PgConnection| {
                        started.send(()).unwrap();
                        wait.recv().unwrap();
                        Ok::<_, diesel::result::Error>(())
                    };
                    lease.transaction(body).await.map_err(|error| error.to_string())
                })
                .await
        }
    });
    running.await.unwrap();
    run.abort();
    assert!(run.await.unwrap_err().is_cancelled());
    let again = locks.run(SyncType::Reconcile, |_| async { Ok::<_, String>(()) }).await;
    assert!(matches!(again, RunOutcome::StillRunning), "{again:?}");
    assert_eq!(database.keys_held(), ["reconcile"]);
    go_on.send(()).unwrap();
    poll("the end of the body", || database.locks_held().is_empty());
    poll("the end of the turn", || locks_again(&locks));
}

/// Whether the key's turn is over.
fn locks_again(locks: &SyncLock) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let locks = locks.clone();
    let outcome =
        std::thread::spawn(move || runtime.block_on(locks.run(SyncType::Reconcile, |_| async { Ok::<_, String>(()) })));
    matches!(outcome.join().unwrap(), RunOutcome::Completed(_))
}

#[tokio::test]
async fn a_job_that_ends_its_lease_as_failed_is_not_completed() {
    let database = TestDatabase::new();
    let outcome = database
        .locks()
        .run(SyncType::Reconcile, |lease| async move {
            lease.fail("it gave up").await.map_err(|error| error.to_string())?;
            Ok::<_, String>(())
        })
        .await;
    assert!(
        matches!(&outcome, RunOutcome::Failed(JobFailure::EndedAsFailed(text)) if text == "it gave up"),
        "{outcome:?}"
    );
    assert_eq!(database.runs()[0].error_message.as_deref(), Some("it gave up"));
}
