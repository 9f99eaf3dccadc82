//! The claim inside the caller's own transaction.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;
use sync_lock::blocking::{acquire_lock, release_lock};
use sync_lock::{Acquisition, LockError, MaxAge, SyncType};

use crate::support::{TestDatabase, holds, is_win, won};

#[test]
fn a_claim_is_committed_with_the_callers_transaction() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = conn
        .transaction::<_, DieselError, _>(|conn| {
            Ok(won(acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()))
        })
        .unwrap();
    assert_eq!(database.locks_held(), [("reconcile".to_owned(), Some(run.to_string()))]);
    conn.transaction::<_, DieselError, _>(|conn| Ok(release_lock(conn, &run).unwrap())).unwrap();
    assert_eq!(database.locks_held(), []);
}

#[test]
fn a_claim_is_undone_with_the_callers_transaction() {
    let database = TestDatabase::new();
    let outcome = database.connect().transaction::<(), DieselError, _>(|conn| {
        assert!(is_win(&acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        Err(DieselError::RollbackTransaction)
    });
    assert_eq!(outcome, Err(DieselError::RollbackTransaction));
    assert_eq!((database.locks_held(), database.runs()), (vec![], vec![]));
}

#[test]
fn a_bounded_wait_that_runs_out_leaves_the_callers_transaction_usable() {
    let database = TestDatabase::new();
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; INSERT INTO "sync_lock" VALUES ('reconcile', 'peer', now())"#).unwrap();
    let mut conn = database.connect();
    conn.transaction::<_, DieselError, _>(|conn| {
        let answer = acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
        assert!(matches!(answer, Acquisition::Conflict { holder: None, .. }), "{answer:?}");
        assert!(is_win(&acquire_lock(conn, SyncType::Automation, MaxAge::DEFAULT).unwrap()));
        Ok(())
    })
    .expect("the transaction commits");
    rival.batch_execute("ROLLBACK").unwrap();
    assert_eq!(database.keys_held(), ["automation"]);
}

#[test]
fn the_callers_lock_timeout_is_what_it_was() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    conn.transaction::<_, DieselError, _>(|conn| {
        conn.batch_execute("SET LOCAL lock_timeout = '7s'")?;
        let unchanged = |conn: &mut PgConnection| holds(conn, "SELECT current_setting('lock_timeout') = '7s' AS holds");
        let run = won(acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
        assert!(unchanged(conn), "after a claim");
        assert!(!is_win(&acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        assert!(unchanged(conn), "after a conflict");
        sync_lock::blocking::fail_run(conn, &run, "a test").unwrap();
        assert!(unchanged(conn), "after the end of a run");
        release_lock(conn, &run).unwrap();
        assert!(unchanged(conn), "after a release");
        Ok(())
    })
    .unwrap();
    assert!(holds(&mut conn, "SELECT current_setting('lock_timeout') = '0' AS holds"), "after the transaction");
}

#[test]
fn a_contender_meets_an_uncommitted_claim_as_a_conflict() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    conn.transaction::<_, DieselError, _>(|conn| {
        assert!(is_win(&acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        let contender = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
        assert!(!is_win(&contender));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_lost_race_under_a_stricter_level_is_a_serialization_error_of_the_transaction() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("crashed"), 7200.0);
    let mut conn = database.connect();
    let outcome = conn.build_transaction().repeatable_read().run::<_, DieselError, _>(|conn| {
        diesel::sql_query("SELECT 1").execute(conn)?;
        assert!(is_win(&acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        Ok(acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT))
    });
    assert!(matches!(outcome, Ok(Err(LockError::Serialization(_)))), "{outcome:?}");
}
