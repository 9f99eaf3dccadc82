//! Run records tell what happened.

use diesel::connection::SimpleConnection;
use sync_lock::blocking::{acquire_lock, complete_run, fail_run};
use sync_lock::{MaxAge, RunId, RunReport, SyncType};

use crate::support::{TestDatabase, is_win, key, poll, race, seconds, won};

#[test]
fn a_win_records_a_running_run_with_its_sync_type() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    for sync_type in [SyncType::Manual, SyncType::Automation, SyncType::PrFollowup] {
        let run = database.run(&won(acquire_lock(&mut conn, sync_type, MaxAge::DEFAULT).unwrap()));
        assert_eq!((run.status.as_str(), run.sync_type.as_str()), ("running", sync_type.as_str()));
        assert_eq!((run.error_message, run.completed), (None, false));
    }
    let job = key("ci-failures").recorded_as("ci-failures").unwrap();
    assert_eq!(database.run(&won(acquire_lock(&mut conn, job, MaxAge::DEFAULT).unwrap())).sync_type, "ci-failures");
    assert!(database.holds(
        r#"SELECT bool_and("startedAt" = "acquiredAt") AS holds
        FROM "IssueSyncRun" r JOIN "sync_lock" l ON l."syncRunId" = r."id""#
    ));
}

#[test]
fn every_win_has_one_run_record_and_a_loser_has_none() {
    let database = TestDatabase::new();
    let mut wins = 0;
    for round in 0..40 {
        match round % 3 {
            0 => database.execute(r#"TRUNCATE "sync_lock""#),
            1 => database.plant("issue-sync", None, 1.0),
            _ => database.plant("issue-sync", Some("crashed"), 7200.0),
        }
        let answers = race(&database, 8, |index, conn| {
            let sync_type = [SyncType::Scheduled, SyncType::Manual][index % 2];
            acquire_lock(conn, sync_type, MaxAge::DEFAULT).unwrap()
        });
        wins += answers.into_iter().filter(is_win).count();
        assert_eq!(database.runs().len(), wins, "round {round}");
    }
    assert_eq!(wins, 40);
}

#[test]
fn a_run_is_completed_with_its_counts_and_only_while_it_is_running() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    let report = RunReport { repos_fetched: 7, synced_count: 42, notes: Some("all\0good".to_owned()) };
    assert!(complete_run(&mut conn, &run, &report).unwrap());
    let completed = database.run(&run);
    assert_eq!((completed.status.as_str(), completed.repos_fetched, completed.synced_count), ("completed", 7, 42));
    assert_eq!(completed.notes.as_deref(), Some("all\u{fffd}good"), "a NUL must not cost the record");
    assert!(completed.completed);
    assert!(!fail_run(&mut conn, &run, "too late").unwrap());
    assert!(!complete_run(&mut conn, &run, &RunReport::default()).unwrap());
    assert_eq!(database.run(&run), completed);
}

#[test]
fn a_run_is_failed_with_its_message_and_only_while_it_is_running() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    assert!(fail_run(&mut conn, &run, "GitHub said 502").unwrap());
    let failed = database.run(&run);
    assert_eq!((failed.status.as_str(), failed.error_message.as_deref()), ("failed", Some("GitHub said 502")));
    assert!(failed.completed);
    assert!(!complete_run(&mut conn, &run, &RunReport::default()).unwrap());
    assert_eq!(database.run(&run), failed);
    assert!(!fail_run(&mut conn, &RunId::new(), "nobody").unwrap());
}

#[test]
fn a_takeover_closes_the_displaced_runs_record_and_names_the_new_run() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let crashed = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    database.back_date(3600.0);
    let next = won(acquire_lock(&mut conn, SyncType::Manual, MaxAge::DEFAULT).unwrap());
    let closed = database.run(&crashed);
    assert_eq!((closed.status.as_str(), closed.completed), ("failed", true));
    assert_eq!(closed.error_message, Some(format!("lock taken over by run {next}")));
    assert_eq!(database.run(&next).status, "running");
}

#[test]
fn a_takeover_leaves_a_finished_record_alone() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let finished = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    complete_run(&mut conn, &finished, &RunReport::default()).unwrap();
    let before = database.run(&finished);
    database.back_date(3600.0);
    assert!(is_win(&acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
    assert_eq!(database.run(&finished), before);
}

#[test]
fn a_takeover_does_not_wait_for_a_record_that_somebody_is_changing() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let crashed = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    database.back_date(3600.0);
    let mut other = database.connect();
    other.batch_execute(r#"BEGIN; UPDATE "IssueSyncRun" SET "notes" = 'still here'"#).unwrap();
    assert!(is_win(&acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
    other.batch_execute("COMMIT").unwrap();
    assert_eq!(database.run(&crashed).notes.as_deref(), Some("still here"));
    database.assert_no_server_errors();
}

#[test]
fn a_takeover_of_a_key_without_records_needs_none() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    for _ in 0..3 {
        assert!(is_win(&acquire_lock(&mut conn, key("contest-sync"), seconds(600.0)).unwrap()));
        database.back_date(601.0);
    }
    assert_eq!(database.runs(), []);
}

#[test]
fn a_takeover_closes_a_record_that_was_written_after_the_claim_had_begun() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("crashed"), 7200.0);
    // The late contender stops where it looks at the age of the row, until the gate opens.
    database.execute(
        "CREATE SCHEMA gated;
         CREATE FUNCTION gated.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS
           $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN pg_catalog.clock_timestamp(); END $$",
    );
    let (mut gate, mut late) = (database.connect(), database.connect());
    gate.batch_execute("SELECT pg_advisory_lock(1)").unwrap();
    late.batch_execute("SET search_path = gated, pg_catalog, public").unwrap();
    let (between, next) = std::thread::scope(|scope| {
        let claim = scope.spawn(|| acquire_lock(&mut late, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
        poll("a claim that waits at the gate", || database.waiting() > 0);
        let between = won(acquire_lock(&mut database.connect(), SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
        database.back_date(3600.0);
        gate.batch_execute("SELECT pg_advisory_unlock(1)").unwrap();
        (between, won(claim.join().unwrap()))
    });
    let closed = database.run(&between);
    assert_eq!(closed.error_message, Some(format!("lock taken over by run {next}")), "{closed:?}");
    assert_eq!((closed.status.as_str(), closed.completed), ("failed", true));
}
