//! Jobs with different keys do not shut each other out.

use sync_lock::SyncType;
use sync_lock::blocking::{acquire_lock, release_lock};
use sync_lock::{LockKey, MaxAge};

use crate::support::{TestDatabase, is_win, key, race, won};

const FIVE: [SyncType; 5] =
    [SyncType::Scheduled, SyncType::Automation, SyncType::PrFollowup, SyncType::Reconcile, SyncType::StaleWork];

#[test]
fn five_jobs_at_the_same_moment_all_win() {
    let database = TestDatabase::new();
    for round in 0..20 {
        let answers = race(&database, FIVE.len(), |index, conn| {
            acquire_lock(conn, FIVE[index], MaxAge::DEFAULT).expect("an answer")
        });
        let winners = answers.iter().filter(|answer| is_win(answer)).count();
        assert_eq!(winners, 5, "round {round}: one winner and four starved jobs is the old fault: {answers:?}");
        assert_eq!(database.keys_held(), ["automation", "issue-sync", "pr-followup", "reconcile", "stale-work"]);
        let mut conn = database.connect();
        for answer in answers {
            assert!(release_lock(&mut conn, &won(answer)).unwrap());
        }
        assert_eq!(database.keys_held(), Vec::<String>::new());
    }
    database.assert_no_server_errors();
}

#[test]
fn releasing_one_key_does_not_free_another() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    // Only the first must win: where all jobs share a key, this fails because a release frees too much, and not sooner.
    let answers = FIVE.map(|sync_type| acquire_lock(&mut conn, sync_type, MaxAge::DEFAULT).unwrap());
    let [released, others @ ..] = FIVE;
    assert!(release_lock(&mut conn, &won(answers[0].clone())).unwrap());
    for other in others {
        let answer = acquire_lock(&mut conn, other, MaxAge::DEFAULT).unwrap();
        assert!(!is_win(&answer), "releasing {released} freed {other}: {answer:?}");
    }
    assert_eq!(database.keys_held(), ["automation", "pr-followup", "reconcile", "stale-work"]);
}

#[test]
fn a_scheduled_and_a_manual_sync_exclude_each_other() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    for (first, second) in [(SyncType::Scheduled, SyncType::Manual), (SyncType::Manual, SyncType::Scheduled)] {
        let run = won(acquire_lock(&mut conn, first, MaxAge::DEFAULT).unwrap());
        assert!(!is_win(&acquire_lock(&mut conn, second, MaxAge::DEFAULT).unwrap()));
        assert_eq!(database.run(&run).sync_type, first.as_str());
        release_lock(&mut conn, &run).unwrap();
    }
}

#[test]
fn the_groomer_and_custom_keys_are_locks_of_their_own() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    for job in [LockKey::GROOMER, key("contest-sync"), key("Ünïcode 'quoted\" key; --"), key(&"k".repeat(255))] {
        let _run = won(acquire_lock(&mut conn, job.clone(), MaxAge::DEFAULT).unwrap());
        assert!(!is_win(&acquire_lock(&mut conn, job, MaxAge::DEFAULT).unwrap()));
    }
    assert_eq!(database.keys_held().len(), 4);
    assert_eq!(database.runs(), [], "only a job with a sync type keeps a record");
}
