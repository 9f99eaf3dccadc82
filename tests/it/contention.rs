//! Exactly one winner, whoever meets whom.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use sync_lock::blocking::{acquire_lock, release_lock};
use sync_lock::{Acquisition, MaxAge, RunId, SyncType};

use crate::support::{TestDatabase, is_win, race, seconds, sync_lock, won};

/// The job whose key is contended for. What its key is called is not these tests' affair.
const JOB: SyncType = SyncType::Reconcile;

/// Two contenders for one key, in many rounds. Each round starts from the same row, and the winner's answer is shown.
fn two_contenders(prepare: impl Fn(&TestDatabase), judge: impl Fn(&Acquisition)) {
    let database = TestDatabase::new();
    for round in 0..50 {
        database.execute(r#"TRUNCATE "sync_lock""#);
        prepare(&database);
        let answers = race(&database, 2, |_, conn| acquire_lock(conn, JOB, MaxAge::DEFAULT).unwrap());
        let winners: Vec<_> = answers.iter().filter(|answer| is_win(answer)).collect();
        assert_eq!(winners.len(), 1, "round {round}: {answers:?}");
        judge(winners[0]);
        let held = database.locks_held();
        assert_eq!(held, [(JOB.key().to_string(), Some(won(winners[0].clone()).to_string()))]);
    }
    database.assert_no_server_errors();
}

fn displaced(acquisition: &Acquisition) -> Option<(Option<String>, f64)> {
    match acquisition {
        Acquisition::Locked { displaced, .. } => displaced
            .as_ref()
            .map(|displaced| (displaced.run_id.as_ref().map(RunId::to_string), displaced.age.as_secs_f64())),
        Acquisition::Conflict { .. } => panic!("a conflict displaces nobody"),
    }
}

#[test]
fn of_two_contenders_for_a_free_key_one_wins() {
    two_contenders(|_| {}, |winner| assert_eq!(displaced(winner), None));
}

#[test]
fn of_two_contenders_for_an_orphaned_row_one_wins_and_says_that_nobody_held_it() {
    two_contenders(
        |database| database.plant(JOB.key().as_str(), None, 5.0),
        |winner| {
            let (holder, age) = displaced(winner).expect("a takeover");
            assert_eq!(holder, None);
            assert!((5.0..60.0).contains(&age), "{age}");
        },
    );
}

#[test]
fn of_two_contenders_for_an_expired_row_one_wins_and_names_whom_it_displaced() {
    two_contenders(
        |database| database.plant(JOB.key().as_str(), Some("crashed"), 1801.0),
        |winner| {
            let (holder, age) = displaced(winner).expect("a takeover");
            assert_eq!(holder.as_deref(), Some("crashed"));
            assert!((1801.0..1860.0).contains(&age), "{age}");
        },
    );
}

#[test]
fn fifty_contenders_for_one_expired_row_have_exactly_one_winner_in_each_of_200_rounds() {
    const ROUNDS: usize = 200;
    let (database, key) = (TestDatabase::new(), JOB.key());
    // The row is made to expire again by one of the fifty between two rounds, while the others wait.
    let barrier = std::sync::Barrier::new(50);
    let wins = race(&database, 50, |index, conn| {
        let mut wins = Vec::new();
        for round in 0..ROUNDS {
            if index == 0 {
                conn.batch_execute(&format!(
                    r#"INSERT INTO "sync_lock" VALUES ('{key}', 'crashed-{round}', clock_timestamp() - interval '2 hours')
                       ON CONFLICT ("id") DO UPDATE SET "syncRunId" = excluded."syncRunId", "acquiredAt" = excluded."acquiredAt""#
                ))
                .unwrap();
            }
            barrier.wait();
            let answer = acquire_lock(conn, JOB, MaxAge::DEFAULT).unwrap();
            if is_win(&answer) {
                let (holder, age) = displaced(&answer).expect("a takeover");
                assert_eq!(holder, Some(format!("crashed-{round}")));
                assert!((7200.0..7260.0).contains(&age), "{age}");
                wins.push(round);
            }
            barrier.wait();
        }
        wins
    });
    let mut won_rounds = wins.concat();
    won_rounds.sort_unstable();
    assert_eq!(won_rounds, (0..ROUNDS).collect::<Vec<_>>());
    assert_eq!(database.runs().len(), ROUNDS, "one run record a win");
    database.assert_no_server_errors();
}

#[test]
fn a_live_lock_is_not_stolen_and_its_release_lets_the_next_in() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = won(acquire_lock(&mut conn, SyncType::StaleWork, MaxAge::DEFAULT).unwrap());
    database.back_date(1790.0);
    let answers = race(&database, 16, |_, conn| acquire_lock(conn, SyncType::StaleWork, MaxAge::DEFAULT).unwrap());
    for answer in answers {
        let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("stolen: {answer:?}") };
        assert_eq!(holder.run_id, run);
        assert!((1790..1800).contains(&holder.age.as_secs()), "{:?}", holder.age);
    }
    assert!(release_lock(&mut conn, &run).unwrap());
    let next = acquire_lock(&mut conn, SyncType::StaleWork, MaxAge::DEFAULT).unwrap();
    assert_eq!(displaced(&next), None, "a released key is free, not taken over");
}

#[test]
fn the_contenders_maximum_age_decides() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("peer"), 10.0);
    let mut conn = database.connect();
    assert!(!is_win(&acquire_lock(&mut conn, SyncType::Reconcile, seconds(20.0)).unwrap()));
    assert!(is_win(&acquire_lock(&mut conn, SyncType::Reconcile, seconds(9.9)).unwrap()));
}

#[test]
fn holders_with_odd_texts_are_named_and_displaced_like_any_other() {
    let database = TestDatabase::new();
    let long = "x".repeat(5_000);
    for odd in ["", " ", "cmb1x2y3z", "'; DROP TABLE \"sync_lock\"; --", "läuft ✓\n\t\u{1b}[2J", "%s %n \\", &long] {
        database.plant("reconcile", Some(odd), 60.0);
        let mut conn = database.connect();
        let answer = acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
        let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{answer:?}") };
        assert_eq!(holder.run_id.as_str(), odd);
        let winner = acquire_lock(&mut conn, SyncType::Reconcile, seconds(30.0)).unwrap();
        assert_eq!(displaced(&winner).expect("a takeover").0.as_deref(), Some(odd));
    }
}

#[test]
fn serializable_and_repeatable_read_defaults_change_no_answer() {
    for level in ["repeatable read", "serializable"] {
        let database = TestDatabase::new();
        database.execute(&format!(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = {level:?}', current_database()); END $$"
        ).replace('"', "''"));
        for round in 0..30 {
            if round % 2 == 0 {
                database.execute(r#"TRUNCATE "sync_lock""#);
            } else {
                database.plant("reconcile", Some("crashed"), 3600.0);
            }
            let answers = race(&database, 16, |_, conn| acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT));
            let wins = answers.iter().filter(|answer| matches!(answer, Ok(Acquisition::Locked { .. }))).count();
            let errors: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
            assert_eq!((wins, errors.len()), (1, 0), "{level}, round {round}: {errors:?}");
        }
        assert_eq!(database.runs().len(), 30);
    }
}

#[test]
fn two_processes_see_each_others_locks() {
    let database = TestDatabase::new();
    let run = won(acquire_lock(&mut database.connect(), SyncType::Manual, MaxAge::DEFAULT).unwrap());
    let output = sync_lock(&database.url(), &["status", "--json"]).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["locks"][0]["key"], "issue-sync");
    assert_eq!(report["locks"][0]["holder"], run.as_str());
    assert_eq!(report["locks"][0]["state"], "held");
}

#[test]
fn a_row_from_the_future_is_held_and_one_without_a_finite_age_is_judged_by_its_sign() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    database.plant("reconcile", Some("ahead"), -3600.0);
    let answer = acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
    let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{answer:?}") };
    assert_eq!(holder.age, Duration::ZERO);
    database.execute(r#"UPDATE "sync_lock" SET "acquiredAt" = 'infinity'"#);
    assert!(!is_win(&acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap()));
    database.execute(r#"UPDATE "sync_lock" SET "acquiredAt" = '-infinity'"#);
    let winner = acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap();
    assert_eq!(displaced(&winner).expect("a takeover").0.as_deref(), Some("ahead"));
    database.assert_no_server_errors();
}
