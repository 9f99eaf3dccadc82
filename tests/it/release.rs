//! A run frees its own rows and nothing else.

use sync_lock::blocking::{acquire_lock, release_lock};
use sync_lock::{MaxAge, RunId, SyncType};

use crate::support::{TestDatabase, won};

#[test]
fn a_late_release_after_a_takeover_frees_nothing() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let slow = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    database.back_date(3600.0);
    let next = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    assert!(!release_lock(&mut conn, &slow).unwrap());
    assert_eq!(database.locks_held(), [("issue-sync".to_owned(), Some(next.to_string()))]);
}

#[test]
fn a_release_deletes_the_row_and_may_be_repeated() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = won(acquire_lock(&mut conn, SyncType::Automation, MaxAge::DEFAULT).unwrap());
    assert!(release_lock(&mut conn, &run).unwrap());
    assert_eq!(database.locks_held(), [], "a row without a holder would shut out a peer for ever");
    assert!(!release_lock(&mut conn, &run).unwrap());
}

#[test]
fn a_release_by_a_run_that_holds_nothing_touches_no_row() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("peer"), 5.0);
    database.plant("groomer", None, 5.0);
    assert!(!release_lock(&mut database.connect(), &RunId::new()).unwrap());
    assert_eq!(database.keys_held(), ["groomer", "reconcile"]);
}

#[test]
fn a_release_frees_a_row_that_a_peer_wrote_for_the_same_run() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("cmb1 'x'"), 5.0);
    assert!(release_lock(&mut database.connect(), &"cmb1 'x'".parse().unwrap()).unwrap());
    assert_eq!(database.locks_held(), []);
}
