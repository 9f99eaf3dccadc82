//! The async handle: cancelled, cut off, without a database, with a full pool.

use std::future::Future;
use std::task::Poll;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use sync_lock::{Acquisition, ConnectError, Job, LockError, LockState, RunId, RunReport, Settings, SyncLock, SyncType};

use crate::support::wire::Wire;
use crate::support::{PATIENCE, TestDatabase, is_win, key, poll, seconds, won};

#[tokio::test]
async fn a_lock_is_acquired_recorded_and_released() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let run = won(locks.acquire_lock(SyncType::Scheduled).await.unwrap());
    let answer = locks.acquire_lock(SyncType::Manual).await.unwrap();
    let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{answer:?}") };
    assert_eq!(holder.run_id, run);
    let row = locks.inspect().await.unwrap().remove(0);
    assert_eq!(
        (row.key.as_str(), row.holder, row.state, row.legacy),
        ("issue-sync", Some(run.clone()), LockState::Held, false)
    );
    assert!(locks.complete_run(&run, &RunReport { synced_count: 3, ..RunReport::default() }).await.unwrap());
    assert!(locks.release_lock(&run).await.unwrap());
    assert_eq!(database.run(&run).synced_count, 3);
    let failed = won(locks.acquire_lock(SyncType::Manual).await.unwrap());
    assert!(locks.fail_run(&failed, "no network").await.unwrap());
    assert!(locks.release_lock(&failed).await.unwrap());
    assert_eq!(database.run(&failed).error_message.as_deref(), Some("no network"));
}

#[tokio::test]
async fn the_settings_maximum_age_counts() {
    let database = TestDatabase::new();
    database.plant("contest-sync", Some("peer"), 60.0);
    let patient = SyncLock::new(&database.settings()).unwrap();
    let eager = SyncLock::new(&database.settings().with_max_age(seconds(59.0))).unwrap();
    assert!(!is_win(&patient.acquire_lock(key("contest-sync")).await.unwrap()));
    assert!(is_win(&eager.acquire_lock(key("contest-sync")).await.unwrap()));
}

/// Lets a claim run until it waits, and drops it there. On a busy machine its answer may be there at once; then the lock is
/// the test's own to free.
async fn poll_once_and_drop(locks: &SyncLock, job: Job) {
    let mut claim = Box::pin(locks.acquire_lock(job));
    let answer = std::future::poll_fn(|context| match claim.as_mut().poll(context) {
        Poll::Ready(answer) => Poll::Ready(Some(answer)),
        Poll::Pending => Poll::Ready(None),
    });
    if let Some(answer) = answer.await {
        let run = won(answer.unwrap());
        locks.fail_run(&run, "answered in time").await.unwrap();
        assert!(locks.release_lock(&run).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_dropped_in_flight_leaves_no_row_and_a_closed_record() {
    let database = TestDatabase::new();
    let locks = database.locks();
    // The row in the way makes sure that the claim is in flight when it is dropped: it waits on the server.
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; INSERT INTO "sync_lock" VALUES ('reconcile', 'peer', now())"#).unwrap();
    let claim = tokio::spawn({
        let locks = locks.clone();
        async move { locks.acquire_lock(SyncType::Reconcile).await }
    });
    poll("a claim that waits", || database.waiting() > 0);
    claim.abort();
    assert!(claim.await.unwrap_err().is_cancelled());
    rival.batch_execute("ROLLBACK").unwrap();
    // Whether the claim won or not depends on when its wait ended; it must be gone in both cases.
    assert_nothing_left(&database);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_dropped_at_any_moment_leave_no_row_and_no_running_record() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&database.settings().with_pool_size(4)).unwrap();
    for index in 0..100 {
        let job = key(&format!("job-{index}")).recorded_as("cancelled").unwrap();
        if index % 2 == 0 {
            poll_once_and_drop(&locks, job).await;
        } else {
            let soon = Duration::from_micros(fastrand::u64(..8000));
            if let Ok(answer) = tokio::time::timeout(soon, locks.acquire_lock(job)).await {
                let run = won(answer.unwrap());
                locks.fail_run(&run, "answered in time").await.unwrap();
                assert!(locks.release_lock(&run).await.unwrap());
            }
        }
    }
    assert_nothing_left(&database);
    let runs = database.runs();
    let abandoned = runs.iter().filter(|run| run.error_message.as_deref() != Some("answered in time")).count();
    assert!(abandoned > 0, "{abandoned} of {} claims were dropped after they had won", runs.len());
}

#[test]
fn a_runtime_that_ends_under_a_claim_leaves_nothing() {
    let database = TestDatabase::new();
    for _ in 0..10 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(poll_once_and_drop(&database.locks(), SyncType::Reconcile.into()));
        runtime.shutdown_background();
    }
    assert_nothing_left(&database);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_claim_is_undone_although_the_first_attempts_fail() {
    let database = TestDatabase::new();
    database.execute(
        r#"CREATE TABLE refusing (); CREATE SEQUENCE refused;
           CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF to_regclass('refusing') IS NULL THEN RETURN OLD; END IF;
             PERFORM nextval('refused');
             RAISE EXCEPTION 'not yet';
           END $$;
           CREATE TRIGGER refuse BEFORE DELETE ON "sync_lock" FOR EACH ROW EXECUTE FUNCTION refuse()"#,
    );
    let locks = database.locks();
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; LOCK TABLE "sync_lock" IN ACCESS EXCLUSIVE MODE"#).unwrap();
    let claim = tokio::spawn({
        let locks = locks.clone();
        async move { locks.acquire_lock(SyncType::Reconcile).await }
    });
    // It is dropped while it waits, wins when the table is free again, and is refused the undoing.
    poll("a claim that waits", || database.waiting() > 0);
    claim.abort();
    assert!(claim.await.unwrap_err().is_cancelled());
    rival.batch_execute("ROLLBACK").unwrap();
    poll("an attempt that fails", || database.count("SELECT count(*) FROM refused WHERE is_called") == 1);
    assert_eq!(database.keys_held(), ["reconcile"]);
    database.execute("DROP TABLE refusing");
    assert_nothing_left(&database);
    assert_eq!(database.runs()[0].status, "failed");
}

/// Waits until nobody works on the database any more and nothing of an abandoned claim is left.
fn assert_nothing_left(database: &TestDatabase) {
    let busy = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'
          AND backend_type = 'client backend'";
    // Twice in a row, because a claim that is not sent yet is not seen either.
    let mut quiet = 0;
    poll("no row and no running record", || {
        let running = database.runs().iter().any(|run| run.status == "running");
        quiet = if database.count(busy) == 0 && database.locks_held().is_empty() && !running { quiet + 1 } else { 0 };
        quiet > 20
    });
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_finds_its_own_row() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let locks = SyncLock::new(&Settings::new(wire.url()).unwrap().with_pool_size(1)).unwrap();
    let warm = won(locks.acquire_lock(SyncType::Automation).await.unwrap());
    wire.lose_next_answer();
    let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    assert_eq!(wire.lost(), 1);
    assert_eq!(database.locks_held()[1], ("reconcile".to_owned(), Some(run.to_string())));
    assert_eq!(database.runs().len(), 2, "claimed once");
    // The new connection has to prepare the release first; the answer to that is not the one to lose.
    assert!(!locks.release_lock(&RunId::new()).await.unwrap());
    wire.lose_next_answer();
    assert!(
        !locks.release_lock(&run).await.unwrap(),
        "the repeated release finds nothing, because the first one worked"
    );
    assert_eq!(wire.lost(), 2);
    assert!(locks.release_lock(&warm).await.unwrap());
    assert_eq!(database.locks_held(), []);
}

#[tokio::test]
async fn a_claim_behind_a_look_whose_answer_was_lost_finds_its_own_row_too() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let locks = SyncLock::new(&Settings::new(wire.url()).unwrap().with_pool_size(1)).unwrap();
    database.plant("reconcile", Some("peer"), 1.0);
    // The second of them looks first. Both statements are prepared from now on.
    for _ in 0..2 {
        assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
    }
    assert!(locks.release_lock(&"peer".parse().unwrap()).await.unwrap());
    wire.lose_answer(2);
    let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    assert_eq!(wire.lost(), 1);
    assert_eq!(database.locks_held(), [("reconcile".to_owned(), Some(run.to_string()))]);
    assert_eq!(database.runs().len(), 1, "claimed once");
}

#[tokio::test]
async fn a_key_that_came_free_just_after_a_loss_is_won_by_the_claim_behind_the_look() {
    let database = TestDatabase::new();
    let locks = database.locks();
    for free in [
        r#"UPDATE "sync_lock" SET "acquiredAt" = "acquiredAt" - interval '1 hour'"#,
        r#"UPDATE "sync_lock" SET "syncRunId" = NULL"#,
        r#"DELETE FROM "sync_lock""#,
    ] {
        database.plant("reconcile", Some("peer"), 1.0);
        assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
        database.execute(free);
        let run =
            won(locks.acquire_lock(SyncType::Reconcile).await.unwrap_or_else(|error| panic!("{free}: {error:?}")));
        assert_eq!(database.locks_held(), [("reconcile".to_owned(), Some(run.to_string()))], "{free}");
        assert!(locks.release_lock(&run).await.unwrap());
    }
}

#[tokio::test]
async fn dead_connections_in_the_pool_are_replaced_without_an_error() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&database.settings().with_pool_size(3)).unwrap();
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
    for round in 0..5 {
        let jobs = (0..3).map(|index| key(&format!("job-{index}")));
        let claims: Vec<_> = jobs
            .map(|job| {
                tokio::spawn({
                    let locks = locks.clone();
                    async move { locks.acquire_lock(job).await }
                })
            })
            .collect();
        let mut runs = Vec::new();
        for claim in claims {
            runs.push(won(claim.await.unwrap().unwrap_or_else(|error| panic!("round {round}: {error:?}"))));
        }
        // The pool may still be opening one that it asked for earlier.
        poll("the end of every connection", || database.count(kill) == 0);
        for run in &runs {
            assert!(locks.release_lock(run).await.unwrap_or_else(|error| panic!("round {round}: {error:?}")));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_is_reported_within_its_bound() {
    let database = TestDatabase::new();
    let settings = database.settings().with_pool_size(1).with_pool_timeout(Duration::from_millis(300));
    let locks = SyncLock::new(&settings).unwrap();
    // One call keeps the only connection busy: it waits for a table that stays locked.
    let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; LOCK TABLE "sync_lock" IN ACCESS EXCLUSIVE MODE"#).unwrap();
    let release = tokio::spawn({
        let (locks, run) = (locks.clone(), run.clone());
        async move { locks.release_lock(&run).await }
    });
    poll("a release that waits", || database.waiting() > 0);
    let started = Instant::now();
    let outcome = locks.acquire_lock(SyncType::Automation).await;
    assert!(started.elapsed() < PATIENCE);
    assert!(matches!(outcome, Err(LockError::PoolExhausted(_))), "{outcome:?}");
    rival.batch_execute("ROLLBACK").unwrap();
    assert!(release.await.unwrap().unwrap());
    assert_eq!(database.locks_held(), []);
}

#[tokio::test]
async fn a_call_that_gets_no_answer_ends_within_its_bound() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&database.settings().with_call_timeout(Duration::from_millis(300))).unwrap();
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; LOCK TABLE "sync_lock" IN ACCESS EXCLUSIVE MODE"#).unwrap();
    let outcome = locks.acquire_lock(SyncType::Reconcile).await;
    assert!(matches!(outcome, Err(LockError::TimedOut(_))), "{outcome:?}");
    rival.batch_execute("ROLLBACK").unwrap();
    assert_nothing_left(&database);
}

#[tokio::test]
async fn a_database_that_is_not_there_is_unreachable_within_the_bound() {
    let nowhere = Settings::new("postgresql://nobody:hunter2@127.0.0.1:1/nowhere").unwrap();
    let locks = SyncLock::new(&nowhere.with_pool_timeout(Duration::from_millis(500))).unwrap();
    let error = locks.acquire_lock(SyncType::Reconcile).await.unwrap_err();
    assert!(matches!(error, LockError::Unreachable(ConnectError::Unavailable(_))), "{error:?}");
    assert!(error.is_transient());
    assert!(!format!("{error:?} {error} {locks:?}").contains("hunter2"));
}

#[tokio::test]
async fn a_handle_made_while_the_database_is_down_works_when_it_is_back() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    wire.silence(true);
    let settings = Settings::new(&format!("{}&connect_timeout=1", wire.url())).unwrap();
    let locks = SyncLock::new(&settings.with_pool_timeout(Duration::from_millis(300))).unwrap();
    let error = locks.acquire_lock(SyncType::Reconcile).await.unwrap_err();
    assert!(matches!(error, LockError::Unreachable(_) | LockError::PoolExhausted(_)), "{error:?}");
    wire.silence(false);
    let answer = locks.acquire_within(SyncType::Reconcile, PATIENCE).await.unwrap();
    assert!(is_win(&answer));
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_with_the_database_is_undone_when_it_is_back() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let settings = Settings::new(&format!("{}&connect_timeout=1", wire.url())).unwrap().with_pool_size(1);
    let locks = SyncLock::new(&settings.with_pool_timeout(Duration::from_millis(500))).unwrap();
    let warm = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    locks.fail_run(&warm, "only to warm up").await.unwrap();
    locks.release_lock(&warm).await.unwrap();
    wire.lose_the_next_answer_and_fall_silent();
    let error = locks.acquire_lock(SyncType::Reconcile).await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
    assert_eq!(database.keys_held(), ["reconcile"], "it was committed");
    wire.silence(false);
    assert_nothing_left(&database);
}

#[tokio::test]
async fn a_pool_timeout_of_zero_is_no_limit() {
    let database = TestDatabase::new();
    let mut url = url::Url::parse(&database.url()).unwrap();
    url.query_pairs_mut().append_pair("pool_timeout", "0");
    let locks = SyncLock::new(&Settings::new(url.as_str()).unwrap()).unwrap();
    assert!(is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
}

#[tokio::test]
async fn a_database_that_does_not_exist_is_refused_at_once() {
    let database = TestDatabase::new();
    let url = database.url().replace(database.name(), "sync_lock_nowhere");
    let started = Instant::now();
    let error =
        SyncLock::new(&Settings::new(&url).unwrap()).unwrap().acquire_lock(SyncType::Reconcile).await.unwrap_err();
    assert!(matches!(error, LockError::Unreachable(ConnectError::Refused(_))), "{error:?}");
    assert!(!error.is_transient());
    assert!(started.elapsed() < Duration::from_secs(9), "before the pool's timeout of 10 s");
}

#[test]
fn no_thread_of_the_runtime_is_blocked() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; INSERT INTO "sync_lock" VALUES ('reconcile', 'peer', now())"#).unwrap();
    // One thread only: if the claim blocked it, nothing else would run until the claim's wait had ended.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime.block_on(async {
        let claim = tokio::spawn(async move { locks.acquire_lock(SyncType::Reconcile).await });
        tokio::task::yield_now().await;
        poll("a claim that waits", || database.waiting() > 0 || claim.is_finished());
        assert!(!claim.is_finished(), "the runtime went on while the claim waits");
        claim.await.unwrap().unwrap()
    });
    assert!(!is_win(&answer));
}

#[test]
fn a_handle_and_its_futures_may_move_between_threads() {
    fn assert_send<T: Send>(_: &T) {}
    fn assert_send_sync<T: Send + Sync + Clone>(_: &T) {}
    let locks = SyncLock::new(&Settings::new("postgresql://127.0.0.1:1/nowhere").unwrap()).unwrap();
    assert_send_sync(&locks);
    assert_send(&locks.acquire_lock(SyncType::Reconcile));
    assert_send(&locks.inspect());
}
