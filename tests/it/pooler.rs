//! Through `PgBouncer` in transaction mode: no session state, no prepared statement that outlives a transaction.

use diesel::prelude::*;
use sync_lock::{Acquisition, FencedError, LeaseAttempt, Loss, RunReport, Settings, SyncLock, SyncType};

use crate::support::pgbouncer::PgBouncer;
use crate::support::{TestDatabase, expect_exit, is_win, key, poll, sync_lock, won};

fn handle(bouncer: &PgBouncer, database: &TestDatabase, connections: u32) -> SyncLock {
    let url = bouncer.url(database, &format!("pgbouncer=true&connection_limit={connections}"));
    SyncLock::new(&Settings::new(&url).unwrap().with_heartbeat_interval(std::time::Duration::from_millis(20))).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_clients_on_a_pool_of_two_go_through_five_hundred_cycles_without_an_error() {
    let database = TestDatabase::new();
    let Some(bouncer) = PgBouncer::start(&database, 2) else { return };
    let locks = handle(&bouncer, &database, 8);
    let clients = (0..8).map(|client| {
        let locks = locks.clone();
        tokio::spawn(async move {
            let job = || key(&format!("job-{client}")).recorded_as("pooled").unwrap();
            for _ in 0..63 {
                let run = won(locks.acquire_lock(job()).await.unwrap());
                assert!(!is_win(&locks.acquire_lock(job()).await.unwrap()));
                assert!(locks.complete_run(&run, &RunReport::default()).await.unwrap());
                assert!(locks.release_lock(&run).await.unwrap());
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    assert_eq!((database.locks_held(), database.runs().len()), (vec![], 8 * 63));
    database.assert_no_server_errors();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_renewed_fenced_and_lost_through_the_pooler() {
    let database = TestDatabase::new();
    database.execute("CREATE TABLE written (n int)");
    let Some(bouncer) = PgBouncer::start(&database, 2) else { return };
    let locks = handle(&bouncer, &database, 4);
    let LeaseAttempt::Leased(lease) = locks.lease(SyncType::Reconcile).await.unwrap() else { panic!("a free key") };
    let stamp = r#"SELECT (extract(epoch FROM "acquiredAt") * 1000)::bigint AS count FROM "sync_lock""#;
    for _ in 0..5 {
        let stamped = database.count(stamp);
        poll("a renewal", || database.count(stamp) > stamped);
        lease.transaction(|conn| diesel::sql_query("INSERT INTO written VALUES (1)").execute(conn)).await.unwrap();
    }
    database.execute(r#"UPDATE "sync_lock" SET "syncRunId" = 'somebody else'"#);
    let fenced = lease.transaction(|conn| diesel::sql_query("INSERT INTO written VALUES (2)").execute(conn)).await;
    assert!(matches!(fenced, Err(FencedError::Lost(_))), "{fenced:?}");
    assert!(matches!(lease.lost().await, Loss::TakenOver { by } if by.as_str() == "somebody else"));
    assert_eq!(database.count("SELECT count(*) FROM written"), 5);
    let LeaseAttempt::Leased(lease) = locks.lease(SyncType::Manual).await.unwrap() else { panic!("a free key") };
    assert!(lease.complete(&RunReport::default()).await.unwrap());
}

#[tokio::test]
async fn a_schema_of_its_own_is_found_through_the_pooler_and_nothing_leaks_to_other_clients() {
    let database = TestDatabase::empty();
    database.execute("CREATE SCHEMA jobs");
    let Some(bouncer) = PgBouncer::start(&database, 1) else { return };
    let url = bouncer.url(&database, "pgbouncer=true&schema=jobs");
    expect_exit(&mut sync_lock(&url, &["migrate", "--bootstrap"]), 0);
    expect_exit(&mut sync_lock(&url, &["migrate"]), 0);
    let locks = SyncLock::new(&Settings::new(&url).unwrap()).unwrap();
    let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    let (stdout, _) = expect_exit(&mut sync_lock(&url, &["status"]), 0);
    assert!(stdout.contains(run.as_str()), "{stdout}");
    assert!(matches!(locks.acquire_lock(SyncType::Reconcile).await.unwrap(), Acquisition::Conflict { .. }));
    assert!(locks.release_lock(&run).await.unwrap());
    // The one connection of the pool was everybody's: it must be as it was.
    let mut other = PgConnection::establish(&bouncer.url(&database, "")).unwrap();
    assert!(crate::support::holds(
        &mut other,
        "SELECT current_setting('search_path') = '\"$user\", public' AND current_setting('lock_timeout') = '0'
           AND current_setting('sync_lock.max_age_seconds', true) IS NOT DISTINCT FROM '' AS holds"
    ));
}

#[test]
fn doctor_sees_what_is_in_between() {
    let database = TestDatabase::new();
    let Some(bouncer) = PgBouncer::start(&database, 2) else { return };
    let (stdout, _) = expect_exit(&mut sync_lock(&bouncer.url(&database, ""), &["doctor"]), 1);
    assert!(stdout.contains("add pgbouncer=true"), "{stdout}");
    let (stdout, _) = expect_exit(&mut sync_lock(&bouncer.url(&database, "pgbouncer=true"), &["doctor"]), 0);
    assert!(stdout.contains("something is between"), "{stdout}");
}
