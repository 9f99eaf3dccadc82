//! A lease is renewed while it is held, says when it is lost, and fences what is written under it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sync_lock::blocking::acquire_lock;
use sync_lock::private_server::{Durability, Server};
use sync_lock::{
    FencedError, InvalidMaxAge, Lease, LeaseAttempt, LockError, LockKey, Loss, MaxAge, RunReport, Settings, SyncLock,
    SyncType,
};

use crate::support::wire::Wire;
use crate::support::{PATIENCE, TestDatabase, is_win, key, poll, seconds, won};

/// Short enough for a test, long enough for a busy machine.
const MAX_AGE: f64 = 1.2;

fn short(database: &TestDatabase) -> Settings {
    database.settings().with_max_age(seconds(MAX_AGE))
}

/// A handle whose way to the database the test can cut.
fn through_a_wire(database: &TestDatabase) -> (Wire, SyncLock) {
    let wire = Wire::to(database);
    let locks = SyncLock::new(&Settings::new(wire.url()).unwrap().with_max_age(seconds(MAX_AGE))).unwrap();
    (wire, locks)
}

async fn lease(locks: &SyncLock, sync_type: SyncType) -> Lease {
    match locks.lease(sync_type).await.expect("an answer") {
        LeaseAttempt::Leased(lease) => lease,
        conflict @ LeaseAttempt::Conflict { .. } => panic!("expected a lease: {conflict:?}"),
    }
}

async fn lost(lease: &Lease) -> Loss {
    tokio::time::timeout(PATIENCE, lease.lost()).await.expect("the loss is noticed")
}

fn insert_write(conn: &mut PgConnection) -> Result<(), DieselError> {
    diesel::sql_query("INSERT INTO written VALUES (1)").execute(conn).map(drop)
}

fn with_a_table_to_write() -> TestDatabase {
    let database = TestDatabase::new();
    database.execute("CREATE TABLE written (n int)");
    database
}

fn written(database: &TestDatabase) -> i64 {
    database.count("SELECT count(*) FROM written")
}

#[test]
fn a_lease_is_kept_for_ten_maximum_ages_with_the_pool_full_and_the_runtime_blocked() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&short(&database).with_pool_size(1)).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    let held_for = Duration::from_secs_f64(10.0 * MAX_AGE);
    let over = AtomicBool::new(false);
    let run_id = thread::scope(|scope| {
        let (leased, start) = channel();
        let (over, database) = (&over, &database);
        let contender = scope.spawn(move || {
            let mut conn = database.connect();
            start.recv().unwrap();
            let mut attempts = 0;
            while !over.load(Ordering::SeqCst) {
                let answer = acquire_lock(&mut conn, SyncType::Reconcile, seconds(MAX_AGE)).unwrap();
                assert!(!is_win(&answer), "stolen at attempt {attempts}: {answer:?}");
                attempts += 1;
            }
            attempts
        });
        runtime.block_on(async {
            let lease = lease(&locks, SyncType::Reconcile).await;
            leased.send(()).unwrap();
            // The only connection and the only thread that may block are taken by the job itself.
            let hog = locks.clone();
            let other = tokio::spawn(async move {
                let other = self::lease(&hog, SyncType::Automation).await;
                let nap = format!("SELECT pg_sleep({})", 10.0 * MAX_AGE);
                other.transaction(move |conn| diesel::sql_query(nap).execute(conn)).await.map_err(drop)
            });
            tokio::time::sleep(Duration::from_millis(200)).await;
            thread::sleep(held_for);
            assert!(!lease.is_lost(), "{:?}", lease.loss());
            other.await.unwrap().expect("the other lease was kept as well");
            // The contender has made its last attempt before the row goes.
            over.store(true, Ordering::SeqCst);
            assert!(contender.join().unwrap() > 100);
            assert!(lease.complete(&RunReport::default()).await.unwrap());
            lease.run_id().clone()
        })
    });
    assert_eq!(database.run(&run_id).status, "completed");
}

#[tokio::test]
async fn a_lease_whose_row_is_removed_is_lost_and_the_row_is_not_made_again() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&short(&database)).unwrap();
    let lease = lease(&locks, SyncType::Reconcile).await;
    assert!(!lease.is_lost());
    database.execute(r#"DELETE FROM "sync_lock""#);
    assert_eq!(lost(&lease).await, Loss::Removed);
    assert!(lease.is_lost());
    assert!(!lease.complete(&RunReport::default()).await.unwrap());
    assert_eq!(database.locks_held(), []);
    let run = database.run(lease.run_id());
    assert_eq!(
        (run.status.as_str(), run.error_message.as_deref()),
        ("failed", Some("the lease was lost: its row was removed"))
    );
}

#[tokio::test]
async fn a_lease_in_other_hands_is_lost_and_the_new_holder_is_named_and_left_alone() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&short(&database)).unwrap();
    let lease = lease(&locks, SyncType::Reconcile).await;
    database.back_date(3600.0);
    let next = won(acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    assert_eq!(lost(&lease).await, Loss::TakenOver { by: next.clone() });
    drop(lease);
    locks.shutdown().await;
    assert_eq!(database.locks_held(), [("reconcile".to_owned(), Some(next.to_string()))]);
    assert_eq!(database.run(&next).status, "running");
}

#[tokio::test]
async fn a_row_that_is_only_locked_is_not_lost() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(
        &database.settings().with_max_age(seconds(3.0)).with_heartbeat_interval(Duration::from_millis(50)),
    )
    .unwrap();
    let lease = lease(&locks, SyncType::Reconcile).await;
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; SELECT 1 FROM "sync_lock" FOR UPDATE"#).unwrap();
    let age =
        r#"SELECT (extract(epoch FROM clock_timestamp() - "acquiredAt") * 1000)::bigint AS count FROM "sync_lock""#;
    poll("many missed renewals", || database.count(age) > 1_000);
    assert!(!lease.is_lost());
    rival.batch_execute("ROLLBACK").unwrap();
    poll("a renewal", || database.count(age) < 500);
    assert!(lease.complete(&RunReport::default()).await.unwrap());
}

#[tokio::test]
async fn a_lease_that_hears_nothing_is_lost_before_its_row_can_be_taken_over() {
    let database = TestDatabase::new();
    let (wire, locks) = through_a_wire(&database);
    let lease = lease(&locks, SyncType::Reconcile).await;
    wire.silence(true);
    assert_eq!(lost(&lease).await, Loss::NotRenewed);
    assert!(!is_win(&acquire_lock(&mut database.connect(), SyncType::Reconcile, seconds(MAX_AGE)).unwrap()), "not yet");
    let outcome = lease.transaction(insert_write).await;
    assert!(matches!(outcome, Err(FencedError::Lost(Loss::NotRenewed))), "{outcome:?}");
    // Afterwards the row is free within seconds, not after the maximum age of a dead process.
    wire.silence(false);
    drop(lease);
    poll("a freed row", || database.locks_held().is_empty());
}

#[tokio::test]
async fn losing_the_lease_is_seen_where_no_task_gets_to_run() {
    let database = TestDatabase::new();
    let (wire, locks) = through_a_wire(&database);
    let lease = lease(&locks, SyncType::Reconcile).await;
    wire.silence(true);
    poll("the deadline, on a runtime that is blocked", || lease.is_lost());
    wire.silence(false);
}

#[tokio::test]
async fn one_failed_heartbeat_is_not_a_loss() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let settings = Settings::new(wire.url()).unwrap().with_max_age(seconds(6.0));
    let locks = SyncLock::new(&settings.with_heartbeat_interval(Duration::from_millis(100))).unwrap();
    let lease = lease(&locks, SyncType::Reconcile).await;
    for _ in 0..3 {
        wire.lose_next_answer();
        let before = wire.lost();
        poll("a lost answer", || wire.lost() > before);
        // A renewal after it: the row gets younger again.
        let stamp = r#"SELECT (extract(epoch FROM "acquiredAt") * 1000)::bigint AS count FROM "sync_lock""#;
        let stamped = database.count(stamp);
        poll("a renewal", || database.count(stamp) > stamped);
    }
    assert!(!lease.is_lost());
    assert!(lease.release().await.unwrap());
}

#[tokio::test]
async fn a_fenced_transaction_commits_while_the_lease_is_held_and_not_after_a_takeover() {
    let database = with_a_table_to_write();
    let locks = SyncLock::new(&database.settings()).unwrap();
    let lease = lease(&locks, SyncType::Reconcile).await;
    lease.transaction(insert_write).await.unwrap();
    assert_eq!(written(&database), 1);

    let failed = lease.transaction(|conn| insert_write(conn).and(Err::<(), _>(DieselError::NotFound))).await;
    assert!(matches!(failed, Err(FencedError::Body(DieselError::NotFound))), "{failed:?}");
    assert_eq!(written(&database), 1, "the body's own error rolls back");

    database.back_date(3600.0);
    lease.transaction(insert_write).await.expect("expired, and nobody took it over");
    assert_eq!(written(&database), 2);

    database.back_date(3600.0);
    let url = database.url();
    let overtaken = lease
        .transaction(move |conn| {
            insert_write(conn)?;
            let mut rival = PgConnection::establish(&url).unwrap();
            assert!(is_win(&acquire_lock(&mut rival, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
            Ok::<_, DieselError>(())
        })
        .await;
    assert!(matches!(overtaken, Err(FencedError::Lost(Loss::TakenOver { .. }))), "{overtaken:?}");
    assert!(lease.is_lost(), "what the fence has seen is known to the lease");
    assert_eq!(written(&database), 2, "taken over while the body ran");
    assert!(matches!(lease.transaction(insert_write).await, Err(FencedError::Lost(_))));
    assert_eq!(written(&database), 2);
}

#[tokio::test]
async fn a_fenced_transaction_is_read_committed_and_ends_with_a_vanished_holder() {
    let database = with_a_table_to_write();
    database.execute("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', current_database()); END $$");
    let locks = SyncLock::new(&database.settings().with_heartbeat_interval(Duration::from_millis(20))).unwrap();
    let lease = lease(&locks, SyncType::Reconcile).await;
    let stamp = r#"SELECT (extract(epoch FROM "acquiredAt") * 1000)::bigint AS count FROM "sync_lock""#;
    for _ in 0..5 {
        let (url, before) = (database.url(), database.count(stamp));
        lease
            .transaction(move |conn| {
                insert_write(conn)?;
                // A beat comes in between; under the database's own default the fence would fail with it.
                let mut other = PgConnection::establish(&url).unwrap();
                poll("a beat", || {
                    #[derive(QueryableByName)]
                    struct Row {
                        #[diesel(sql_type = diesel::sql_types::BigInt)]
                        count: i64,
                    }
                    diesel::sql_query(stamp).get_result::<Row>(&mut other).unwrap().count > before
                });
                Ok::<_, DieselError>(())
            })
            .await
            .unwrap();
    }
    assert_eq!(written(&database), 5);
    assert!(!lease.is_lost());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contender_and_heartbeat_get_along_with_a_fence_that_takes_long_to_commit() {
    let database = with_a_table_to_write();
    // A commit that waits: a deferred trigger of the test's own, until it may go on.
    database.execute(
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
         CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON written DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()",
    );
    let mut gate = database.connect();
    gate.batch_execute("SELECT pg_advisory_lock(7)").unwrap();
    let locks = SyncLock::new(&database.settings().with_heartbeat_interval(Duration::from_millis(20))).unwrap();
    let lease = std::sync::Arc::new(lease(&locks, SyncType::Reconcile).await);
    let fenced = tokio::spawn({
        let lease = std::sync::Arc::clone(&lease);
        async move { lease.transaction(insert_write).await }
    });
    poll("a commit that waits", || database.waiting() > 0);
    database.connect().batch_execute("SELECT 1").unwrap();
    let started = Instant::now();
    for max_age in [0.001, 1800.0] {
        let answer = acquire_lock(&mut database.connect(), SyncType::Reconcile, seconds(max_age)).unwrap();
        assert!(!is_win(&answer), "{answer:?}");
    }
    assert!(started.elapsed() < Duration::from_secs(5), "a conflict within a bound");
    assert!(!lease.is_lost());
    gate.batch_execute("SELECT pg_advisory_unlock(7)").unwrap();
    fenced.await.unwrap().unwrap();
    assert!(lease.complete(&RunReport::default()).await.unwrap());
}

#[tokio::test]
async fn a_last_transaction_commits_the_writes_the_record_and_the_release_or_none_of_them() {
    let database = with_a_table_to_write();
    let locks = SyncLock::new(&database.settings().with_heartbeat_interval(Duration::from_millis(5))).unwrap();
    let lease = lease(&locks, SyncType::Scheduled).await;
    let report = RunReport { repos_fetched: 2, synced_count: 3, notes: None };
    let failed = lease
        .complete_in_transaction(report.clone(), |conn| insert_write(conn).and(Err::<(), _>(DieselError::NotFound)))
        .await;
    assert!(matches!(failed, Err(FencedError::Body(_))), "{failed:?}");
    assert_eq!((written(&database), database.keys_held().len()), (0, 1));
    assert_eq!(database.run(lease.run_id()).status, "running");
    assert!(!lease.is_lost());

    lease.complete_in_transaction(report, insert_write).await.unwrap();
    let run = database.run(lease.run_id());
    assert_eq!((run.status.as_str(), run.repos_fetched, run.synced_count), ("completed", 2, 3));
    assert_eq!((written(&database), database.keys_held().len()), (1, 0));
    assert!(!lease.is_lost(), "a row that its own run freed is no loss");
    assert!(!lease.complete(&RunReport::default()).await.unwrap(), "ended once");
}

#[tokio::test]
async fn a_last_transaction_after_a_takeover_commits_nothing() {
    let database = with_a_table_to_write();
    let locks = SyncLock::new(&database.settings()).unwrap();
    let lease = lease(&locks, SyncType::Scheduled).await;
    database.back_date(3600.0);
    let next = won(acquire_lock(&mut database.connect(), SyncType::Manual, MaxAge::DEFAULT).unwrap());
    let outcome = lease.complete_in_transaction(RunReport::default(), insert_write).await;
    assert!(matches!(outcome, Err(FencedError::Lost(_))), "{outcome:?}");
    assert_eq!(written(&database), 0);
    assert_eq!(database.locks_held(), [("issue-sync".to_owned(), Some(next.to_string()))]);
}

#[tokio::test]
async fn a_panic_in_the_body_rolls_back_and_reaches_the_caller() {
    let database = with_a_table_to_write();
    let locks = database.locks();
    let lease = std::sync::Arc::new(lease(&locks, SyncType::Reconcile).await);
    let fenced = std::sync::Arc::clone(&lease);
    let outcome = tokio::spawn(async move {
        let body = |conn: &mut PgConnection| {
            insert_write(conn)?;
            panic!("of the body") as Result<(), DieselError>
        };
        fenced.transaction(body).await.map_err(drop)
    })
    .await;
    assert!(outcome.unwrap_err().is_panic());
    assert_eq!(written(&database), 0);
    lease.transaction(insert_write).await.expect("the pool is as good as before");
}

#[tokio::test]
async fn a_maximum_age_too_short_for_a_lease_is_refused_and_a_bare_claim_takes_any() {
    let database = TestDatabase::new();
    let settings = database.settings().with_max_age(seconds(0.499));
    assert_eq!(SyncLock::new(&settings).unwrap_err(), InvalidMaxAge::TooShortForLease(Duration::from_millis(499)));
    let job = sync_lock::Job::from(LockKey::GROOMER).with_max_age(seconds(0.4));
    assert!(matches!(database.locks().lease(job).await, Err(LockError::MaxAge(_))));
    assert!(is_win(&acquire_lock(&mut database.connect(), LockKey::GROOMER, seconds(0.001)).unwrap()));
}

#[tokio::test]
async fn a_jobs_own_maximum_age_decides_for_its_key_alone() {
    let database = TestDatabase::new();
    database.plant("contest-sync", Some("peer"), 700.0);
    database.plant("other", Some("peer"), 700.0);
    let locks = database.locks();
    let job = |text| sync_lock::Job::from(key(text));
    let LeaseAttempt::Leased(lease) = locks.lease(job("contest-sync").with_max_age(seconds(600.0))).await.unwrap()
    else {
        panic!("older than ten minutes");
    };
    assert_eq!(lease.displaced().unwrap().run_id.as_ref().unwrap().as_str(), "peer");
    assert!(matches!(locks.lease(job("other")).await.unwrap(), LeaseAttempt::Conflict { holder: Some(_), .. }));
}

#[tokio::test]
async fn a_lease_that_is_lost_cannot_be_completed_even_if_its_row_is_still_there() {
    let database = TestDatabase::new();
    let (wire, locks) = through_a_wire(&database);
    let lease = lease(&locks, SyncType::Reconcile).await;
    wire.silence(true);
    assert_eq!(lost(&lease).await, Loss::NotRenewed);
    wire.silence(false);
    let completed = lease.complete(&RunReport::default()).await;
    assert!(!completed.unwrap_or(false));
    assert_released(&database, "no renewal was acknowledged in time");
}

#[tokio::test]
async fn a_maximum_age_without_an_end_is_no_overflow() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&database.settings().with_max_age(MaxAge::new(Duration::MAX).unwrap())).unwrap();
    let lease = lease(&locks, SyncType::Reconcile).await;
    assert!(!lease.is_lost());
    assert!(lease.complete(&RunReport::default()).await.unwrap());
}

// Nothing is left behind.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_waits_for_claims_under_way_whose_callers_are_gone() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; LOCK TABLE "sync_lock" IN ACCESS EXCLUSIVE MODE"#).unwrap();
    let claim = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lease(SyncType::Reconcile).await.map(drop) }
    });
    poll("a claim that waits", || database.waiting() > 0);
    claim.abort();
    let _ = claim.await;
    let shutdown = tokio::spawn(async move { locks.shutdown().await });
    tokio::task::yield_now().await;
    assert!(!shutdown.is_finished());
    rival.batch_execute("ROLLBACK").unwrap();
    shutdown.await.unwrap();
    assert_eq!(database.locks_held(), []);
    assert!(database.runs().iter().all(|run| run.status == "failed"));
}

/// Waits until the row is free and the record closed as failed.
fn assert_released(database: &TestDatabase, reason: &str) {
    poll("a free row and a closed record", || {
        let runs = database.runs();
        let closed =
            runs.iter().all(|run| run.status == "failed" && run.error_message.as_deref().unwrap().contains(reason));
        database.locks_held().is_empty() && !runs.is_empty() && closed
    });
}

#[tokio::test]
async fn a_lease_dropped_in_async_code_is_released() {
    let database = TestDatabase::new();
    drop(lease(&database.locks(), SyncType::Reconcile).await);
    assert_released(&database, "dropped");
}

#[test]
fn a_lease_dropped_in_sync_code_or_after_its_runtime_is_gone_is_released() {
    let database = TestDatabase::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let held = runtime.block_on(lease(&database.locks(), SyncType::Reconcile));
    drop(held);
    assert_released(&database, "dropped");
    let held = runtime.block_on(lease(&database.locks(), SyncType::Reconcile));
    drop(runtime);
    drop(held);
    assert_released(&database, "dropped");
}

#[test]
fn a_lease_dropped_while_unwinding_is_released() {
    let database = TestDatabase::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let locks = database.locks();
    let outcome = runtime.block_on(async move {
        tokio::spawn(async move {
            let _lease = lease(&locks, SyncType::Reconcile).await;
            panic!("of the job");
        })
        .await
    });
    assert!(outcome.unwrap_err().is_panic());
    assert_released(&database, "dropped");
}

#[tokio::test]
async fn a_lease_that_cannot_be_released_at_once_is_released_when_the_database_is_back() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let locks = SyncLock::new(&Settings::new(wire.url()).unwrap()).unwrap();
    let held = lease(&locks, SyncType::Reconcile).await;
    wire.silence(true);
    drop(held);
    assert_eq!(database.keys_held(), ["reconcile"]);
    wire.silence(false);
    assert_released(&database, "dropped");
}

#[tokio::test]
async fn an_end_whose_answer_was_lost_is_written_once() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let locks = SyncLock::new(&Settings::new(wire.url()).unwrap().with_pool_size(1)).unwrap();
    for _ in 0..2 {
        let lease = lease(&locks, SyncType::Reconcile).await;
        wire.lose_next_answer();
        let report = RunReport { synced_count: 9, ..RunReport::default() };
        assert!(lease.complete(&report).await.unwrap(), "the first statement did it, and that was ours");
        let run = database.run(lease.run_id());
        assert_eq!((run.status.as_str(), run.synced_count), ("completed", 9));
        assert_eq!(database.locks_held(), []);
    }
    assert_eq!(wire.lost(), 2);
}

#[tokio::test]
async fn a_shutdown_releases_what_is_held_and_waits_for_it() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let first = lease(&locks, SyncType::Reconcile).await;
    let second = lease(&locks, SyncType::Automation).await;
    locks.shutdown().await;
    assert_eq!(database.locks_held(), []);
    assert!(database.runs().iter().all(|run| run.status == "failed"));
    assert_eq!(first.loss(), Some(Loss::ShutDown));
    assert!(!second.complete(&RunReport::default()).await.unwrap());
    assert!(matches!(locks.lease(SyncType::Manual).await, Err(LockError::ShutDown)));
}

#[tokio::test]
async fn waiting_for_a_key_ends_with_its_release_and_is_bounded() {
    let database = TestDatabase::new();
    let locks = database.locks();
    let held = lease(&locks, SyncType::Reconcile).await;
    let started = Instant::now();
    let attempt = locks.lease_within(SyncType::Reconcile, Duration::from_millis(400)).await.unwrap();
    assert!(matches!(attempt, LeaseAttempt::Conflict { holder: Some(_), .. }), "{attempt:?}");
    assert!(started.elapsed() >= Duration::from_millis(400));
    let waiting = tokio::spawn({
        let locks = locks.clone();
        async move { locks.acquire_within(SyncType::Reconcile, PATIENCE).await }
    });
    tokio::task::yield_now().await;
    held.release().await.unwrap();
    assert!(is_win(&waiting.await.unwrap().unwrap()));
}

// The server fails.

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_survives_a_restart_of_the_server_and_not_its_end() {
    let server = Server::private(Durability::Durable).unwrap();
    let database = server.create_database(None).unwrap();
    let mut conn = PgConnection::establish(&database.url()).unwrap();
    sync_lock::migrate::migrate(&mut conn, &sync_lock::migrate::Migration::new(MaxAge::DEFAULT).bootstrap(true))
        .unwrap();
    drop(conn);
    let settings = Settings::new(&database.url()).unwrap().with_heartbeat_interval(Duration::from_millis(100));
    let patient = SyncLock::new(&settings.clone().with_max_age(seconds(60.0))).unwrap();
    let hasty = SyncLock::new(&settings.with_max_age(seconds(2.0))).unwrap();
    let kept = lease(&patient, SyncType::Reconcile).await;
    let in_trouble = lease(&hasty, SyncType::Automation).await;
    server.restart().unwrap();
    let stamp = r#"SELECT (extract(epoch FROM "acquiredAt") * 1000)::bigint AS count FROM "sync_lock" WHERE "id" = 'reconcile'"#;
    let count = |sql: &str| {
        #[derive(QueryableByName)]
        struct Row {
            #[diesel(sql_type = diesel::sql_types::BigInt)]
            count: i64,
        }
        let row: Row =
            diesel::sql_query(sql).get_result(&mut PgConnection::establish(&database.url()).unwrap()).unwrap();
        row.count
    };
    let stamped = count(stamp);
    poll("a renewal after the restart", || count(stamp) > stamped);
    assert!(!kept.is_lost());
    assert!(kept.complete(&RunReport::default()).await.unwrap());
    server.stop().unwrap();
    assert_eq!(lost(&in_trouble).await, Loss::NotRenewed);
}

// A paused process.

/// A process of its own that holds a lease: this test binary, told by a variable what to do.
fn child(role: &str, database: &TestDatabase) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lease::the_child_of_another_test", "--nocapture", "--include-ignored"])
        .env("SYNC_LOCK_TEST_CHILD", role)
        .env("SYNC_LOCK_TEST_CHILD_URL", database.url())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn the_child_of_another_test() {
    let (Ok(role), Ok(url)) = (std::env::var("SYNC_LOCK_TEST_CHILD"), std::env::var("SYNC_LOCK_TEST_CHILD_URL")) else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let settings = Settings::new(&url).unwrap();
    match role.as_str() {
        "paused" => runtime.block_on(async {
            let locks = SyncLock::new(&settings.with_max_age(seconds(MAX_AGE))).unwrap();
            let lease = lease(&locks, SyncType::Reconcile).await;
            let outcome = lease
                .transaction(|conn| {
                    insert_write(conn)?;
                    println!("in the body");
                    std::io::stdin().read_line(&mut String::new()).expect("a line");
                    Ok::<_, DieselError>(())
                })
                .await;
            println!("fenced: {}", if matches!(outcome, Err(FencedError::Lost(_))) { "lost" } else { "not lost" });
            println!("completed: {:?}", lease.complete(&RunReport::default()).await.unwrap());
        }),
        "thousand" => runtime.block_on(async {
            let settings = settings.with_max_age(seconds(2.0)).with_heartbeat_interval(Duration::from_millis(2));
            let locks = SyncLock::new(&settings).unwrap();
            for _ in 0..1_000 {
                let outcome = locks
                    .run(SyncType::Reconcile, |_| async {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        Ok::<_, String>(())
                    })
                    .await;
                assert!(matches!(outcome, sync_lock::RunOutcome::Completed(_)), "{outcome:?}");
            }
            drop(locks);
            poll("the end of every thread of ours", || threads_of_ours().is_empty());
            println!("done");
        }),
        other => panic!("no such role: {other}"),
    }
}

fn threads_of_ours() -> Vec<String> {
    let names = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    let names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with("sync-lock")).collect()
}

fn wait_for_line(lines: &mut impl Iterator<Item = std::io::Result<String>>, wanted: &str) {
    assert!(lines.by_ref().any(|line| line.unwrap().contains(wanted)), "the child ended without saying {wanted:?}");
}

#[test]
fn a_holder_paused_past_its_maximum_age_commits_nothing_and_touches_nothing() {
    let database = with_a_table_to_write();
    let mut child = child("paused", &database);
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    wait_for_line(&mut lines, "in the body");
    kill(pid, Signal::SIGSTOP).unwrap();
    let mut conn = database.connect();
    let mut next = None;
    poll("a takeover from the paused holder", || {
        let answer = acquire_lock(&mut conn, SyncType::Reconcile, seconds(MAX_AGE)).unwrap();
        next = is_win(&answer).then(|| won(answer));
        next.is_some()
    });
    kill(pid, Signal::SIGCONT).unwrap();
    child.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    wait_for_line(&mut lines, "fenced: lost");
    wait_for_line(&mut lines, "completed: false");
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
    assert_eq!(written(&database), 0);
    assert_eq!(database.locks_held(), [("reconcile".to_owned(), next.map(|run| run.to_string()))]);
}

#[test]
fn a_thousand_short_runs_with_a_fast_heartbeat_lose_nothing_and_leave_nothing() {
    let database = TestDatabase::new();
    let mut child = child("thousand", &database);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    wait_for_line(&mut lines, "done");
    // To the end, so that its last words find a reader.
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
    assert_eq!(database.locks_held(), []);
    let runs = database.runs();
    assert_eq!((runs.len(), runs.iter().filter(|run| run.status == "completed").count()), (1_000, 1_000));
    database.assert_no_server_errors();
}
