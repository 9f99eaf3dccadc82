//! What production does to databases.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use sync_lock::{FencedError, LeaseAttempt, LockError, RunReport, Settings, SyncLock, SyncType};

use crate::support::wire::Wire;
use crate::support::{PATIENCE, TestDatabase, expect_exit, is_win, key, poll, seconds, sync_lock, won};

fn set(database: &TestDatabase, setting: &str) {
    database.execute(&format!(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {}', current_database()); END $$",
        setting.replace('\'', "''")
    ));
}

fn end_every_connection(database: &TestDatabase) {
    let kill = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'";
    poll("the end of every connection", || database.count(kill) == 0);
}

#[tokio::test]
async fn a_node_that_became_read_only_is_told_and_left_behind_when_it_takes_writes_again() {
    let database = TestDatabase::new();
    let locks = SyncLock::new(&database.settings().with_pool_size(1)).unwrap();
    let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    let LeaseAttempt::Leased(lease) = locks.lease(SyncType::StaleWork).await.unwrap() else { panic!("a free key") };
    set(&database, "default_transaction_read_only = on");
    end_every_connection(&database);
    let fenced = lease.transaction(|conn| diesel::sql_query("SELECT 1").execute(conn)).await;
    assert!(matches!(fenced, Err(FencedError::Lock(LockError::ReadOnly(_)))), "{fenced:?}");
    let error = locks.acquire_lock(SyncType::Automation).await.unwrap_err();
    assert!(matches!(error, LockError::ReadOnly(_)) && error.is_transient(), "{error:?}");
    let (_, stderr) = expect_exit(&mut sync_lock(&database.url(), &["migrate"]), 69);
    assert!(stderr.contains("read-only"), "{stderr}");
    // The setting counts for new connections only, as a failover does: the pool must not keep the old one.
    let mut admin = database.connect();
    admin.batch_execute("SET default_transaction_read_only = off").unwrap();
    admin
        .batch_execute("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = off', current_database()); END $$")
        .unwrap();
    lease
        .transaction(|conn| diesel::sql_query("SELECT 1").execute(conn))
        .await
        .unwrap_or_else(|_| panic!("the pool has left the read-only connection behind"));
    assert!(is_win(&locks.acquire_lock(SyncType::Automation).await.unwrap()), "no restart of the process was needed");
    assert!(locks.release_lock(&run).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn low_timeouts_of_the_role_change_no_answer() {
    let database = TestDatabase::new();
    database.execute("CREATE TABLE written (n int)");
    set(&database, "lock_timeout = '1ms'");
    set(&database, "statement_timeout = '2s'");
    set(&database, "idle_in_transaction_session_timeout = '300ms'");
    let locks = SyncLock::new(&database.settings().with_heartbeat_interval(Duration::from_millis(10))).unwrap();
    for _ in 0..20 {
        let LeaseAttempt::Leased(lease) = locks.lease(SyncType::Reconcile).await.unwrap() else { panic!("a free key") };
        assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
        lease.transaction(|conn| diesel::sql_query("INSERT INTO written VALUES (1)").execute(conn)).await.unwrap();
        assert!(lease.complete(&RunReport::default()).await.unwrap());
    }
    assert_eq!(database.count("SELECT count(*) FROM written"), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stricter_isolation_defaults_cost_no_renewal_and_no_false_conflict() {
    for level in ["'repeatable read'", "serializable"] {
        let database = TestDatabase::new();
        set(&database, &format!("default_transaction_isolation = {level}"));
        let settings = database.settings().with_heartbeat_interval(Duration::from_millis(5)).with_max_age(seconds(5.0));
        let locks = SyncLock::new(&settings).unwrap();
        let LeaseAttempt::Leased(lease) = locks.lease(SyncType::Reconcile).await.unwrap() else { panic!("a free key") };
        let workers = (0..4).map(|worker| {
            let locks = locks.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    let run = won(locks.acquire_lock(key(&format!("job-{worker}"))).await.unwrap());
                    assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
                    assert!(locks.release_lock(&run).await.unwrap());
                }
            })
        });
        for worker in workers.collect::<Vec<_>>() {
            worker.await.unwrap();
        }
        assert!(!lease.is_lost(), "{level}: {:?}", lease.loss());
        assert!(lease.complete(&RunReport::default()).await.unwrap());
    }
}

#[tokio::test]
async fn a_server_that_accepts_and_never_answers_ends_every_call_within_its_bound() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let bound = Duration::from_millis(700);
    let url = format!("{}&connect_timeout=2", wire.url());
    let locks = SyncLock::new(&Settings::new(&url).unwrap().with_call_timeout(bound)).unwrap();
    let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    wire.silence(true);
    for _ in 0..3 {
        let started = Instant::now();
        let outcome = locks.release_lock(&run).await;
        assert!(started.elapsed() < PATIENCE / 3);
        assert!(outcome.is_err_and(|error| error.is_transient()));
    }
    wire.silence(false);
    // The connections that hang are given up by and by; the process needs no restart.
    let mut freed = false;
    let deadline = Instant::now() + PATIENCE;
    while !freed && Instant::now() < deadline {
        freed = locks.release_lock(&run).await.unwrap_or(false) || database.locks_held().is_empty();
    }
    assert_eq!(database.locks_held(), []);
}
