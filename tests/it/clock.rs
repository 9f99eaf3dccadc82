//! Age is the database's affair, in any time zone.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use sync_lock::blocking::{acquire_lock, complete_run, inspect, release_lock};
use sync_lock::migrate::{Migration, migrate};
use sync_lock::{Acquisition, LeaseAttempt, LockState, MaxAge, RunReport, SyncLock, SyncType};

use crate::support::{TestDatabase, is_win, poll, seconds, won};

/// Puts a clock in front of the server's own that is ahead by this much, for new connections to the database.
fn set_clock_ahead(database: &TestDatabase, interval: &str) {
    database.execute(&format!(
        "CREATE SCHEMA shifted;
         CREATE FUNCTION shifted.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
           AS $$ SELECT pg_catalog.clock_timestamp() + interval '{interval}' $$;
         DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = shifted, pg_catalog, public', current_database()); END $$"
    ));
}

#[test]
fn age_is_judged_by_the_clock_of_the_database_and_not_by_the_clients() {
    for (ahead, expired_by_database) in [("45 minutes", true), ("-45 minutes", false)] {
        let database = TestDatabase::new();
        // By the client's clock this row is one minute old.
        database.plant("reconcile", Some("peer"), 60.0);
        set_clock_ahead(&database, ahead);
        let answer = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
        assert_eq!(is_win(&answer), expired_by_database, "clock ahead by {ahead}: {answer:?}");
    }
}

#[test]
fn a_row_is_stamped_by_the_clock_of_the_database() {
    let database = TestDatabase::new();
    set_clock_ahead(&database, "45 minutes");
    let mut conn = database.connect();
    let answer = acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
    let Acquisition::Locked { acquired_at, .. } = answer else { panic!("{answer:?}") };
    let ahead = acquired_at - chrono::Utc::now();
    assert!((2_600..2_760).contains(&ahead.num_seconds()), "{ahead}");
    let row = inspect(&mut conn, MaxAge::DEFAULT).unwrap().remove(0);
    assert_eq!((row.state, row.acquired_at), (LockState::Held, Some(acquired_at)));
    assert!(!is_win(&acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
}

#[test]
fn the_clients_time_zone_changes_nothing() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("peer"), 1700.0);
    let mut conn = database.connect();
    for zone in ["America/New_York", "Asia/Kolkata", "UTC"] {
        conn.batch_execute(&format!("SET TimeZone = '{zone}'")).unwrap();
        let answer = acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
        let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{zone}: {answer:?}") };
        assert!((1700..1790).contains(&holder.age.as_secs()), "{zone}: {:?}", holder.age);
        assert!(is_win(&acquire_lock(&mut conn, SyncType::Reconcile, seconds(1699.0)).unwrap()), "{zone}");
        database.back_date(1700.0);
    }
}

#[test]
fn every_statement_is_right_on_columns_without_a_time_zone_too() {
    let database = TestDatabase::new();
    database.execute(
        r#"ALTER TABLE "sync_lock" ALTER "acquiredAt" TYPE TIMESTAMP(3);
           ALTER TABLE "IssueSyncRun" ALTER "startedAt" TYPE TIMESTAMP(3), ALTER "completedAt" TYPE TIMESTAMP(3)"#,
    );
    let mut conn = database.connect();
    // diesel sets its sessions to UTC, but this need not be one that diesel left alone.
    conn.batch_execute("SET TimeZone = 'America/New_York'").unwrap();
    let run = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    let near_now = |column: &str, table: &str| {
        database.holds(&format!(
            r"SELECT bool_and(abs(extract(epoch FROM {column}) - extract(epoch FROM now())) < 60) AS holds FROM {table}"
        ))
    };
    assert!(near_now(r#""acquiredAt""#, r#""sync_lock""#));
    assert!(near_now(r#""startedAt""#, r#""IssueSyncRun""#));
    assert!(!is_win(&acquire_lock(&mut conn, SyncType::Manual, MaxAge::DEFAULT).unwrap()), "not stolen by five hours");
    assert_eq!(inspect(&mut conn, MaxAge::DEFAULT).unwrap()[0].state, LockState::Held);
    complete_run(&mut conn, &run, &RunReport::default()).unwrap();
    assert!(near_now(r#""completedAt""#, r#""IssueSyncRun""#));
    database.execute(r#"UPDATE "sync_lock" SET "acquiredAt" = "acquiredAt" - interval '31 minutes'"#);
    let next = won(acquire_lock(&mut conn, SyncType::Manual, MaxAge::DEFAULT).unwrap());
    assert!(near_now(r#""acquiredAt""#, r#""sync_lock""#));
    assert!(release_lock(&mut conn, &next).unwrap());
}

#[test]
fn the_migration_is_right_on_columns_without_a_time_zone_too() {
    let database = TestDatabase::new();
    database.execute(r#"ALTER TABLE "sync_lock" ALTER "acquiredAt" TYPE TIMESTAMP(3)"#);
    let mut conn = database.connect();
    conn.batch_execute("SET TimeZone = 'America/New_York'").unwrap();
    for (minutes, goes) in [(29, false), (31, true)] {
        database.execute(&format!(
            r#"INSERT INTO "sync_lock" VALUES ('global', 'peer', (now() AT TIME ZONE 'UTC') - interval '{minutes} min')
               ON CONFLICT ("id") DO UPDATE SET "acquiredAt" = excluded."acquiredAt""#
        ));
        let outcome = migrate(&mut conn, &Migration::new(MaxAge::DEFAULT));
        assert_eq!(outcome.is_ok_and(|report| report.removed.is_some()), goes, "{minutes} minutes");
    }
}

#[test]
fn a_claim_inside_a_long_transaction_is_as_young_as_the_claim() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    conn.transaction::<_, diesel::result::Error, _>(|conn| {
        diesel::sql_query("SELECT 1").execute(conn)?;
        // The transaction ages while the row expires.
        diesel::sql_query("SELECT pg_sleep(0.3)").execute(conn)?;
        assert!(is_win(&acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        diesel::sql_query(r#"SELECT 1 / (("acquiredAt" > now() + interval '0.2 s')::int) FROM "sync_lock""#)
            .execute(conn)?;
        Ok(())
    })
    .expect("the stamp is of the claim, not of the start of the transaction");
}

#[tokio::test]
async fn a_lease_on_columns_without_a_time_zone_is_renewed_fenced_and_ended_by_utc() {
    let database = TestDatabase::new();
    database.execute(
        r#"ALTER TABLE "sync_lock" ALTER "acquiredAt" TYPE TIMESTAMP(3);
           ALTER TABLE "IssueSyncRun" ALTER "startedAt" TYPE TIMESTAMP(3), ALTER "completedAt" TYPE TIMESTAMP(3);
           DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = %L', current_database(), 'Asia/Kolkata'); END $$"#,
    );
    let settings = database.settings().with_heartbeat_interval(std::time::Duration::from_millis(20));
    let locks = SyncLock::new(&settings).unwrap();
    let LeaseAttempt::Leased(lease) = locks.lease(SyncType::Reconcile).await.unwrap() else { panic!("a free key") };
    // As UTC, whatever the session says.
    let young = r#"SELECT extract(epoch FROM clock_timestamp()) - extract(epoch FROM "acquiredAt") < 5 AS holds FROM "sync_lock""#;
    database.back_date(100.0);
    poll("a renewal", || database.holds(young));
    database.back_date(100.0);
    lease.transaction(|conn| diesel::sql_query("SELECT 1").execute(conn)).await.unwrap();
    assert!(database.holds(young), "a fence renews");
    assert!(lease.complete(&RunReport::default()).await.unwrap());
    assert!(database.holds(
        r#"SELECT "completedAt" >= "startedAt" AND abs(extract(epoch FROM clock_timestamp()) - extract(epoch FROM "completedAt")) < 60
             AS holds FROM "IssueSyncRun""#
    ));
}
