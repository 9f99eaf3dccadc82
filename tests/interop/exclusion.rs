//! Each respects the other's lock, takes over the other's stale row and never frees the other's.

use std::time::{Duration, Instant};

use serde_json::json;
use sync_lock::blocking::{acquire_lock, complete_run, fail_run, release_lock};
use sync_lock::{Acquisition, LeaseAttempt, Loss, MaxAge, RunId, RunReport, SyncLock, SyncType};

use crate::peer::{Peer, PeerJob, run_id_of};
use crate::support::{TestDatabase, poll, seconds, won};

/// The run id of a win, and the previous holder.
#[track_caller]
fn taken_over(acquisition: Acquisition) -> (RunId, Option<RunId>) {
    match acquisition {
        Acquisition::Locked { run_id, displaced: Some(displaced), .. } => (run_id, displaced.run_id),
        other => panic!("expected a takeover: {other:?}"),
    }
}

#[test]
fn what_the_peer_holds_is_a_conflict_here_until_it_releases() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    for job in PeerJob::all() {
        let theirs = peer.acquire(&job).unwrap_or_else(|| panic!("{}: the key is free", job.name));
        let answer = acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap();
        let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{}: {answer:?}", job.name) };
        assert_eq!(holder.run_id, theirs, "{}", job.name);
        assert!(holder.age < Duration::from_mins(1), "{}: {:?}", job.name, holder.age);
        assert!(peer.release(&theirs), "{}", job.name);
        let ours = won(acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap());
        assert!(release_lock(&mut conn, &ours).unwrap(), "{}", job.name);
    }
    assert_eq!(database.keys_held(), Vec::<String>::new());
    database.assert_no_server_errors();
}

#[test]
fn what_we_hold_is_a_conflict_at_the_peer_until_we_release() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    for job in PeerJob::all() {
        let ours = won(acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap());
        let records = database.runs().len();
        assert_eq!(peer.acquire(&job), None, "{}", job.name);
        assert_eq!(database.runs().len(), records, "{}: a conflict leaves no record", job.name);
        assert!(release_lock(&mut conn, &ours).unwrap(), "{}", job.name);
        let theirs = peer.acquire(&job).unwrap_or_else(|| panic!("{}: the key is free", job.name));
        assert!(peer.release(&theirs), "{}", job.name);
    }
    assert_eq!(database.keys_held(), Vec::<String>::new());
    database.assert_no_server_errors();
}

#[test]
fn all_jobs_but_the_two_that_share_a_key_run_at_once_on_either_side() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    for (index, job) in PeerJob::all().iter().filter(|job| job.name != "manual").enumerate() {
        if index % 2 == 0 {
            won(acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap());
        } else {
            assert!(peer.acquire(job).is_some(), "{}", job.name);
        }
    }
    assert_eq!(database.keys_held().len(), 7);
    assert_eq!(peer.acquire(&PeerJob::of(SyncType::Manual)), None, "the scheduled sync is the same sync");
}

#[test]
fn a_row_of_the_peer_that_has_expired_is_taken_over_and_its_late_release_frees_nothing() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    for job in PeerJob::all() {
        let theirs = peer.acquire(&job).unwrap();
        database.back_date(1801.0);
        let (ours, displaced) = taken_over(acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap());
        assert_eq!(displaced, Some(theirs.clone()), "{}", job.name);
        assert!(!peer.release(&theirs), "{}", job.name);
        let row = (job.key().to_string(), Some(ours.to_string()));
        assert_eq!(database.locks_held(), [row], "{}", job.name);
        if job.is_recorded() {
            assert_eq!(database.run(&theirs).status, "failed", "{}", job.name);
            let finished = peer.ask(&json!({ "do": "complete", "runId": theirs.as_str(), "syncedCount": 3 }));
            assert_eq!(finished, json!(false), "{}: its record tells of the takeover", job.name);
        }
        assert!(release_lock(&mut conn, &ours).unwrap(), "{}", job.name);
    }
    database.assert_no_server_errors();
}

#[test]
fn a_row_of_ours_that_has_expired_is_taken_over_by_the_peer_and_our_late_release_frees_nothing() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    for job in PeerJob::all() {
        let ours = won(acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap());
        database.back_date(1801.0);
        let theirs = peer.acquire(&job).unwrap_or_else(|| panic!("{}: an expired row is free", job.name));
        assert!(!release_lock(&mut conn, &ours).unwrap(), "{}", job.name);
        let row = (job.key().to_string(), Some(theirs.to_string()));
        assert_eq!(database.locks_held(), [row], "{}", job.name);
        assert!(peer.release(&theirs), "{}", job.name);
    }
    database.assert_no_server_errors();
}

#[test]
fn an_orphaned_row_is_taken_over_by_either_side_whoever_left_it() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    let orphan = || database.execute(r#"UPDATE "sync_lock" SET "syncRunId" = NULL"#);
    for job in PeerJob::all() {
        peer.acquire(&job).unwrap();
        orphan();
        let (ours, displaced) = taken_over(acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap());
        assert_eq!(displaced, None, "{}", job.name);
        if job.name == "groomer" {
            assert!(release_lock(&mut conn, &ours).unwrap());
        } else {
            orphan();
            let theirs = peer.acquire(&job).unwrap_or_else(|| panic!("{}: an orphaned row is free", job.name));
            assert!(!release_lock(&mut conn, &ours).unwrap(), "{}", job.name);
            assert!(peer.release(&theirs), "{}", job.name);
        }
    }
    assert_eq!(database.keys_held(), Vec::<String>::new());
}

#[test]
fn the_groomer_of_the_peer_stumbles_over_an_orphan_for_ever_and_we_do_not() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    for age in [5.0, 7200.0] {
        database.plant("groomer", None, age);
        assert_eq!(peer.try_ask(&PeerJob::groomer().acquire), Err("P2002".to_owned()), "{age} s old");
    }
    let mut conn = database.connect();
    let ours = won(acquire_lock(&mut conn, PeerJob::groomer().ours, MaxAge::DEFAULT).unwrap());
    assert!(release_lock(&mut conn, &ours).unwrap());
    assert!(peer.acquire(&PeerJob::groomer()).is_some(), "a release leaves no row behind");
}

#[test]
fn of_both_sides_at_the_same_moment_one_wins_in_each_of_50_rounds() {
    const ROUNDS: usize = 50;
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    let jobs = [PeerJob::of(SyncType::Reconcile), PeerJob::custom(), PeerJob::of(SyncType::Manual)];
    // How long we let the peer go ahead, so that both meet: longer where we won, shorter where it did.
    let mut lead = Duration::from_millis(2);
    let mut won_by_us = 0;
    for round in 0..ROUNDS {
        let job = &jobs[round % jobs.len()];
        // No row, an expired one, an orphan.
        match round % 4 {
            0 | 1 => {}
            2 => database.plant(job.key().as_str(), Some("crashed"), 1801.0),
            _ => database.plant(job.key().as_str(), None, 5.0),
        }
        peer.send(&job.acquire);
        std::thread::sleep(lead);
        let ours = acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap();
        let answer = peer.hear();
        let theirs = run_id_of(answer.get("ok").unwrap_or_else(|| panic!("round {round}: {answer}")));
        match (ours, theirs) {
            (Acquisition::Locked { run_id, .. }, None) => {
                won_by_us += 1;
                lead = lead.mul_f64(1.4);
                assert!(release_lock(&mut conn, &run_id).unwrap(), "round {round}");
            }
            (Acquisition::Conflict { .. }, Some(run_id)) => {
                lead = lead.div_f64(1.4);
                assert!(peer.release(&run_id), "round {round}");
            }
            both => panic!("round {round}: {both:?}"),
        }
    }
    assert_eq!(database.keys_held(), Vec::<String>::new());
    assert!((1..ROUNDS).contains(&won_by_us), "one side was always first: {won_by_us} of {ROUNDS}");
    database.assert_no_server_errors();
}

#[test]
fn records_of_both_sides_look_alike() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    let job = PeerJob::of(SyncType::PrFollowup);
    let mut records = Vec::new();
    for fails in [false, true] {
        let theirs = peer.acquire(&job).unwrap();
        if fails {
            peer.ask(&json!({ "do": "fail", "runId": theirs.as_str(), "errorMessage": "boom" }));
        } else {
            let report = json!({ "do": "complete", "runId": theirs.as_str(), "reposFetched": 2, "syncedCount": 7, "notes": "n" });
            peer.ask(&report);
        }
        assert!(peer.release(&theirs));
        let ours = won(acquire_lock(&mut conn, job.ours.clone(), MaxAge::DEFAULT).unwrap());
        if fails {
            fail_run(&mut conn, &ours, "boom").unwrap();
        } else {
            let report = RunReport { repos_fetched: 2, synced_count: 7, notes: Some("n".to_owned()) };
            complete_run(&mut conn, &ours, &report).unwrap();
        }
        assert!(release_lock(&mut conn, &ours).unwrap());
        let mut pair = [database.run(&theirs), database.run(&ours)];
        for run in &mut pair {
            run.id.clear();
        }
        assert_eq!(pair[0], pair[1]);
        records.push(pair[0].status.clone());
    }
    assert_eq!(records, ["completed", "failed"]);
}

/// A lease on a short maximum age.
async fn lease(database: &TestDatabase, job: &PeerJob, max_age: f64) -> (SyncLock, sync_lock::Lease) {
    let locks = SyncLock::new(&database.settings().with_max_age(seconds(max_age))).unwrap();
    match locks.lease(job.ours.clone()).await.unwrap() {
        LeaseAttempt::Leased(lease) => (locks, lease),
        conflict @ LeaseAttempt::Conflict { .. } => panic!("{conflict:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_renewed_so_that_the_peer_never_sees_it_as_stale() {
    const MAX_AGE: f64 = 3.0;
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let jobs = [PeerJob::of(SyncType::Automation), PeerJob::groomer()];
    let mut leases = Vec::new();
    for job in &jobs {
        leases.push(lease(&database, job, MAX_AGE).await);
    }
    let end = Instant::now() + Duration::from_secs_f64(2.5 * MAX_AGE);
    let mut claims = 0;
    while Instant::now() < end {
        for job in &jobs {
            let mut claim = job.acquire.clone();
            (claim["maxAgeMs"], claim["staleMs"]) = (json!(3000), json!(3000));
            assert_eq!(run_id_of(&peer.ask(&claim)), None, "{}", job.name);
            claims += 1;
        }
    }
    assert!(claims > 20, "{claims} claims");
    for (_, lease) in &leases {
        assert_eq!(lease.loss(), None);
        assert!(lease.complete(&RunReport::default()).await.unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_that_the_peer_took_over_is_lost_to_the_peers_run() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let job = PeerJob::of(SyncType::StaleWork);
    let (_locks, lease) = lease(&database, &job, 6.0).await;
    // A renewal may come in between; then the row is young again.
    let mut taken = None;
    poll("a takeover between two renewals", || {
        database.back_date(1801.0);
        taken = peer.acquire(&job);
        taken.is_some()
    });
    let theirs = taken.unwrap();
    assert_eq!(lease.lost().await, Loss::TakenOver { by: theirs.clone() });
    assert!(!lease.complete(&RunReport::default()).await.unwrap());
    assert_eq!(database.run(lease.run_id()).status, "failed");
    assert!(peer.release(&theirs), "the end of a lost lease frees nothing");
}

#[test]
fn a_groomer_of_the_peer_that_renews_keeps_us_out() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let mut conn = database.connect();
    let claim = json!({ "do": "acquireGroomer", "renewMs": 300 });
    let theirs = run_id_of(&peer.ask(&claim)).unwrap();
    let end = Instant::now() + Duration::from_secs(5);
    while Instant::now() < end {
        let answer = acquire_lock(&mut conn, PeerJob::groomer().ours, seconds(2.5)).unwrap();
        assert!(matches!(answer, Acquisition::Conflict { .. }), "{answer:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(peer.release(&theirs));
}
