//! The tables in a schema of their own.

use diesel::prelude::*;
use sync_lock::blocking::acquire_lock;
use sync_lock::{Acquisition, LeaseAttempt, LockError, MaxAge, RunReport, Settings, SyncLock, SyncType};

use crate::support::{TestDatabase, expect_exit, is_win, sync_lock, won};

const SCHEMA: &str = r#"Jobs "of" Dispatch"#;

fn in_a_schema() -> (TestDatabase, String) {
    let database = TestDatabase::empty();
    database.execute(r#"CREATE SCHEMA "Jobs ""of"" Dispatch""#);
    let mut url = url::Url::parse(&database.url()).unwrap();
    url.query_pairs_mut().append_pair("schema", SCHEMA);
    expect_exit(&mut sync_lock(url.as_str(), &["migrate", "--bootstrap"]), 0);
    (database, url.to_string())
}

#[tokio::test]
async fn every_statement_finds_its_table_in_the_schema() {
    let (database, url) = in_a_schema();
    let locks = SyncLock::new(&Settings::new(&url).unwrap()).unwrap();
    let crashed = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
    assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
    database.execute(r#"UPDATE "Jobs ""of"" Dispatch"."sync_lock" SET "acquiredAt" = now() - interval '1 h'"#);
    let LeaseAttempt::Leased(lease) = locks.lease(SyncType::Reconcile).await.unwrap() else { panic!("expired") };
    assert_eq!(lease.displaced().unwrap().run_id.as_ref(), Some(&crashed));
    lease.transaction(|conn| diesel::sql_query("SELECT 1").execute(conn)).await.unwrap();
    assert!(lease.complete(&RunReport::default()).await.unwrap());
    let run = won(locks.acquire_lock(SyncType::Manual).await.unwrap());
    assert_eq!(locks.inspect().await.unwrap()[0].holder.as_ref(), Some(&run));
    assert!(locks.fail_run(&run, "a test").await.unwrap());
    assert!(locks.release_lock(&run).await.unwrap());
    let statuses = r#"SELECT array_agg("status" ORDER BY "status") = '{completed,failed,failed}' AS holds
        FROM "Jobs ""of"" Dispatch"."IssueSyncRun""#;
    assert!(database.holds(statuses));
    assert!(database.holds("SELECT count(*) = 0 AS holds FROM pg_class WHERE relnamespace = 'public'::regnamespace"));
}

#[test]
fn the_bookkeeping_of_the_migration_is_in_the_schema_too() {
    let (database, url) = in_a_schema();
    let here = r#"SELECT to_regclass('"Jobs ""of"" Dispatch".__diesel_schema_migrations') IS NOT NULL AS holds"#;
    assert!(database.holds(here));
    let plant = r#"INSERT INTO "Jobs ""of"" Dispatch"."sync_lock" VALUES ('global', NULL, now())"#;
    database.execute(plant);
    let (stdout, _) = expect_exit(&mut sync_lock(&url, &["migrate"]), 0);
    assert!(stdout.contains("removed the row \"global\""), "{stdout}");
}

#[test]
fn blocking_functions_find_the_schema_in_a_transaction_of_the_settings() {
    let (_database, url) = in_a_schema();
    let settings = Settings::new(&url).unwrap();
    let mut conn = settings.connect().unwrap();
    assert!(matches!(acquire_lock(&mut conn, SyncType::Manual, MaxAge::DEFAULT), Err(LockError::MissingTable(_))));
    let answer = settings.transaction(&mut conn, |conn| acquire_lock(conn, SyncType::Manual, MaxAge::DEFAULT)).unwrap();
    assert!(matches!(answer, Acquisition::Locked { .. }), "{answer:?}");
    let (stdout, _) = expect_exit(&mut sync_lock(&url, &["status"]), 0);
    assert!(stdout.contains("issue-sync"), "{stdout}");
}

#[test]
fn a_schema_that_is_not_there_is_a_missing_table() {
    let database = TestDatabase::new();
    let mut url = url::Url::parse(&database.url()).unwrap();
    url.query_pairs_mut().append_pair("schema", "elsewhere");
    for command in [&["status"][..], &["migrate"]] {
        let (_, stderr) = expect_exit(&mut sync_lock(url.as_str(), command), 78);
        assert!(stderr.contains("does not exist"), "{stderr}");
    }
}
