//! The tables in a schema of their own.

use sync_lock::{LeaseAttempt, RunReport, Settings, SyncLock, SyncType};

use crate::peer::{Peer, PeerJob};
use crate::support::{TestDatabase, expect_exit, is_win, sync_lock, won};

/// A database with the tables both in `public` and in the schema `dispatch`, and the URL of the latter.
fn with_a_schema() -> (TestDatabase, String) {
    let database = TestDatabase::new();
    database.execute("CREATE SCHEMA dispatch");
    let url = format!("{}&schema=dispatch", database.url());
    expect_exit(&mut sync_lock(&url, &["migrate", "--bootstrap"]), 0);
    (database, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn both_find_the_tables_in_the_schema_that_each_was_told_of() {
    let (database, url) = with_a_schema();
    let Some(mut peer) = Peer::in_schema(&url, "dispatch") else { return };
    let locks = SyncLock::new(&Settings::new(&url).unwrap()).unwrap();
    let job = PeerJob::of(SyncType::Reconcile);
    let theirs = peer.acquire(&job).unwrap();
    assert!(!is_win(&locks.acquire_lock(SyncType::Reconcile).await.unwrap()));
    database.execute(r#"UPDATE dispatch."sync_lock" SET "acquiredAt" = now() - interval '1 h'"#);
    let LeaseAttempt::Leased(lease) = locks.lease(SyncType::Reconcile).await.unwrap() else { panic!("expired") };
    assert_eq!(lease.displaced().unwrap().run_id, Some(theirs.clone()));
    assert!(!peer.release(&theirs));
    assert_eq!(peer.acquire(&job), None);
    assert!(lease.complete(&RunReport::default()).await.unwrap());
    assert!(peer.acquire(&job).is_some());
    assert_eq!(database.keys_held(), Vec::<String>::new(), "nothing in public");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_has_the_schema_in_its_url_alone_locks_in_public_and_excludes_nobody() {
    let (database, url) = with_a_schema();
    let Some(mut peer) = Peer::with(&url, 0) else { return };
    assert!(peer.acquire(&PeerJob::of(SyncType::Reconcile)).is_some());
    assert_eq!(database.keys_held(), ["reconcile"], "in public");
    let locks = SyncLock::new(&Settings::new(&url).unwrap()).unwrap();
    let _ours = won(locks.acquire_lock(SyncType::Reconcile).await.unwrap());
}
