//! No wait without an end; one round trip; a loser writes nothing.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use sync_lock::blocking::{acquire_lock, complete_run, release_lock};
use sync_lock::{Acquisition, LockError, MaxAge, RunReport, Settings, SyncLock, SyncType};

use crate::support::wire::Wire;
use crate::support::{TestDatabase, holds, is_win, poll, won};

/// Well above the wait of 200 ms, twice, and well below anybody's patience.
const BOUND: Duration = Duration::from_secs(5);

#[test]
fn a_claim_a_loss_and_a_release_cost_one_round_trip_each() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let mut conn = PgConnection::establish(wire.url()).unwrap();
    let mut other = PgConnection::establish(wire.url()).unwrap();
    for warm in [false, true] {
        wire.round_trips();
        let run = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
        let claim = wire.round_trips();
        assert!(!is_win(&acquire_lock(&mut other, SyncType::Manual, MaxAge::DEFAULT).unwrap()));
        let loss = wire.round_trips();
        release_lock(&mut conn, &run).unwrap();
        let release = wire.round_trips();
        if warm {
            assert_eq!((claim, loss, release), (1, 1, 1));
        }
    }
}

#[test]
fn a_takeover_costs_one_round_trip() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let mut conn = PgConnection::establish(wire.url()).unwrap();
    for warm in [false, true] {
        database.plant("reconcile", None, 1.0);
        wire.round_trips();
        assert!(is_win(&acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        let orphan = wire.round_trips();
        database.back_date(3600.0);
        assert!(is_win(&acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        let expired = wire.round_trips();
        if warm {
            assert_eq!((orphan, expired), (1, 1));
        }
    }
}

#[tokio::test]
async fn the_async_handle_adds_no_round_trip() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let handle = || SyncLock::new(&Settings::new(wire.url()).unwrap().with_pool_size(1)).unwrap();
    let (locks, other) = (handle(), handle());
    for warm in [false, false, true] {
        wire.round_trips();
        let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
        let claim = wire.round_trips();
        assert!(!is_win(&other.acquire_lock(SyncType::Reconcile).await.unwrap()));
        let loss = wire.round_trips();
        locks.release_lock(&run).await.unwrap();
        let release = wire.round_trips();
        if warm {
            assert_eq!((claim, loss, release), (1, 1, 1));
        }
    }
}

#[tokio::test]
async fn a_handle_that_has_lost_looks_first_which_costs_a_round_trip_only_if_it_wins() {
    let database = TestDatabase::new();
    let wire = Wire::to(&database);
    let locks = SyncLock::new(&Settings::new(wire.url()).unwrap().with_pool_size(1)).unwrap();
    for warm in [false, true] {
        let held = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
        assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
        // The statement of the look is prepared when it is sent for the first time.
        assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
        wire.round_trips();
        match locks.acquire_lock(SyncType::Reconcile).await.unwrap() {
            Acquisition::Conflict { holder: Some(holder), .. } => assert_eq!(holder.run_id, held),
            other => panic!("{other:?}"),
        }
        let loss = wire.round_trips();
        locks.release_lock(&held).await.unwrap();
        wire.round_trips();
        let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
        let win = wire.round_trips();
        locks.release_lock(&run).await.unwrap();
        wire.round_trips();
        let run = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
        let next = wire.round_trips();
        locks.release_lock(&run).await.unwrap();
        if warm {
            assert_eq!((loss, win, next), (1, 2, 1));
        }
    }
}

#[test]
fn a_loser_against_a_live_row_writes_nothing_and_raises_nothing() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let _held = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    let written = |conn: &mut PgConnection| !holds(conn, "SELECT pg_current_xact_id_if_assigned() IS NULL AS holds");
    conn.transaction::<_, diesel::result::Error, _>(|conn| {
        for _ in 0..100 {
            assert!(!is_win(&acquire_lock(conn, SyncType::Manual, MaxAge::DEFAULT).unwrap()));
        }
        assert!(!written(conn), "a transaction that wrote has an id");
        assert!(is_win(&acquire_lock(conn, SyncType::Automation, MaxAge::DEFAULT).unwrap()));
        assert!(written(conn), "and a winner's has one");
        Ok(())
    })
    .unwrap();
    assert_eq!(database.runs().len(), 2);
    database.assert_no_server_errors();
}

#[test]
fn a_contender_that_meets_a_locked_row_gets_a_conflict_and_not_a_wait() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("crashed"), 7200.0);
    let mut other = database.connect();
    other.batch_execute(r#"BEGIN; SELECT 1 FROM "sync_lock" FOR UPDATE"#).unwrap();
    let started = Instant::now();
    let answer = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
    assert!(started.elapsed() < BOUND);
    let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{answer:?}") };
    assert_eq!(holder.run_id.as_str(), "crashed");
    other.batch_execute("ROLLBACK").unwrap();
    assert!(is_win(&acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
    database.assert_no_server_errors();
}

#[test]
fn a_contender_that_meets_an_uncommitted_row_gets_a_conflict_within_its_bound() {
    let database = TestDatabase::new();
    let mut other = database.connect();
    other.batch_execute(r#"BEGIN; INSERT INTO "sync_lock" VALUES ('reconcile', 'peer', now())"#).unwrap();
    let started = Instant::now();
    let answer = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
    assert!(started.elapsed() < BOUND);
    assert!(matches!(answer, Acquisition::Conflict { holder: None, .. }), "{answer:?}");
    assert_eq!(database.runs(), [], "a conflict leaves no record");
    other.batch_execute("COMMIT").unwrap();
    let answer = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
    let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{answer:?}") };
    assert_eq!(holder.run_id.as_str(), "peer");
}

#[test]
fn a_contender_whose_rival_rolls_back_wins() {
    let database = TestDatabase::new();
    let mut rival = database.connect();
    // On a busy machine the wait may be over before it is seen; then the next round shows it.
    poll("a contender that outwaits its rival", || {
        rival.batch_execute(r#"BEGIN; INSERT INTO "sync_lock" VALUES ('reconcile', 'peer', now())"#).unwrap();
        let answer = std::thread::scope(|scope| {
            let contender = scope.spawn(|| acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT));
            poll("the end of the claim, or its wait", || contender.is_finished() || database.waiting() > 0);
            rival.batch_execute("ROLLBACK").unwrap();
            contender.join().unwrap().unwrap()
        });
        assert_eq!(database.runs().len(), usize::from(is_win(&answer)));
        is_win(&answer)
    });
}

#[test]
fn a_release_that_meets_a_locked_row_ends_within_its_bound_and_may_be_repeated() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    let mut other = database.connect();
    other
        .batch_execute(r#"BEGIN; SELECT 1 FROM "sync_lock" FOR UPDATE; SELECT 1 FROM "IssueSyncRun" FOR UPDATE"#)
        .unwrap();
    let started = Instant::now();
    assert!(matches!(release_lock(&mut conn, &run), Err(LockError::RowLocked(_))));
    assert!(matches!(complete_run(&mut conn, &run, &RunReport::default()), Err(LockError::RowLocked(_))));
    assert!(started.elapsed() < BOUND);
    other.batch_execute("ROLLBACK").unwrap();
    assert!(complete_run(&mut conn, &run, &RunReport::default()).unwrap());
    assert!(release_lock(&mut conn, &run).unwrap());
}

/// Lets every claim of a free key end in an error of the server, after a wait, and counts them.
fn refuse_claims(database: &TestDatabase, wait: &str, message: &str, condition: &str) {
    database.execute(&format!(
        r#"CREATE SEQUENCE refused;
           CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             PERFORM nextval('refused'), pg_sleep({wait});
             RAISE EXCEPTION '{message}' USING ERRCODE = '{condition}';
           END $$;
           CREATE TRIGGER refuse BEFORE INSERT ON "sync_lock" FOR EACH ROW EXECUTE FUNCTION refuse()"#
    ));
}

#[test]
fn a_wait_that_ran_out_is_a_conflict_in_any_language_of_the_server() {
    let database = TestDatabase::new();
    let german = "breche Anfrage ab wegen Zeitüberschreitung für Sperre";
    refuse_claims(&database, "0.25", german, "lock_not_available");
    let answer = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
    assert!(matches!(answer, Acquisition::Conflict { holder: None, .. }), "{answer:?}");
}

#[test]
fn an_error_of_the_server_that_is_no_wait_is_an_error() {
    let database = TestDatabase::new();
    refuse_claims(&database, "0", "a trigger says no", "raise_exception");
    let outcome = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT);
    assert!(matches!(outcome, Err(LockError::Database(_))), "{outcome:?}");
    assert_eq!(database.count("SELECT last_value AS count FROM refused"), 1, "and is not tried again");
}

#[test]
fn a_statement_timeout_of_the_callers_own_is_an_error_and_no_conflict() {
    let database = TestDatabase::new();
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; INSERT INTO "sync_lock" VALUES ('reconcile', 'peer', now())"#).unwrap();
    let mut conn = database.connect();
    conn.batch_execute("SET statement_timeout = '50ms'").unwrap();
    let outcome = acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT);
    assert!(matches!(outcome, Err(LockError::Cancelled(_))), "{outcome:?}");
}

#[test]
fn a_serialization_failure_is_tried_again_and_not_for_ever() {
    let database = TestDatabase::new();
    refuse_claims(&database, "0", "could not serialize access", "serialization_failure");
    let outcome = acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT);
    assert!(matches!(outcome, Err(LockError::Serialization(_))), "{outcome:?}");
    assert_eq!(database.count("SELECT last_value AS count FROM refused"), 4, "three times, and once READ COMMITTED");
}

#[test]
fn a_free_row_that_is_locked_is_looked_at_twice() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("crashed"), 7200.0);
    let wire = Wire::to(&database);
    let mut conn = PgConnection::establish(wire.url()).unwrap();
    let mut other = database.connect();
    other.batch_execute(r#"BEGIN; SELECT 1 FROM "sync_lock" FOR UPDATE"#).unwrap();
    let mut looks = 0;
    for _warm in [false, true] {
        wire.round_trips();
        assert!(!is_win(&acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
        looks = wire.round_trips();
    }
    assert_eq!(looks, 2);
}
