//! The peer stamps by its own clock, in milliseconds and without a zone: what becomes of that, and the remedy.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use sync_lock::blocking::{acquire_lock, inspect};
use sync_lock::{Acquisition, LockState, MaxAge, SyncType};
use tracing::Level;

use crate::peer::{Peer, PeerJob};
use crate::support::{Role, TestDatabase, is_win};

const MINUTE_MS: i64 = 60_000;

/// A database whose sessions start in a time zone that is so many hours ahead of UTC.
fn database_in_zone(hours_ahead: i32) -> TestDatabase {
    let database = TestDatabase::new();
    // The names of these zones have their signs the wrong way round.
    let zone = format!("Etc/GMT{:+}", -hours_ahead);
    database.execute(&format!(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = ''{zone}''', current_database()); END $$"
    ));
    database
}

/// The remedy of `docs/compatibility.md`.
fn in_utc(url: &str) -> String {
    format!("{url}&options=-c%20TimeZone%3DUTC")
}

fn job() -> PeerJob {
    PeerJob::of(SyncType::Reconcile)
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What we make of the row that the peer wrote: its state, the claim's answer, and what the claim logged.
fn judged(database: &TestDatabase) -> (LockState, Acquisition, String) {
    let mut conn = database.connect();
    let state = inspect(&mut conn, MaxAge::DEFAULT).unwrap().remove(0).state;
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_max_level(Level::INFO).without_time().with_ansi(false);
    let subscriber = subscriber.with_writer(move || writer.clone()).finish();
    let claim = || acquire_lock(&mut conn, job().ours, MaxAge::DEFAULT).unwrap();
    let answer = tracing::subscriber::with_default(subscriber, claim);
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    (state, answer, text)
}

/// Asserts a takeover of a row that looks that old, logged with the previous holder and the age.
#[track_caller]
fn assert_taken_over(database: &TestDatabase, holder: &sync_lock::RunId, age_seconds: u64) {
    let (state, answer, log) = judged(database);
    assert_eq!(state, LockState::Expired);
    let Acquisition::Locked { displaced: Some(displaced), .. } = answer else { panic!("{answer:?}") };
    assert_eq!(displaced.run_id.as_ref(), Some(holder));
    let age = displaced.age.as_secs();
    assert!((age_seconds..age_seconds + 60).contains(&age), "{age} s");
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains("WARN") && log.contains("taken over"), "{log}");
    assert!(log.contains(&format!("previous=\"{holder}\"")) && log.contains(&format!("age={age}.")), "{log}");
}

#[track_caller]
fn assert_held_from_the_future(database: &TestDatabase) {
    let (state, answer, log) = judged(database);
    assert_eq!(state, LockState::Future);
    assert!(!is_win(&answer) && log.contains("skipped"), "{answer:?} {log}");
}

#[test]
fn stamps_of_the_peer_are_whole_milliseconds_and_are_judged_like_any_other() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    peer.acquire(&job()).unwrap();
    let whole = r#"SELECT extract(microseconds FROM "acquiredAt")::bigint % 1000 = 0 AS holds FROM "sync_lock""#;
    assert!(database.holds(whole));
    let (state, answer, _) = judged(&database);
    assert!(state == LockState::Held && !is_win(&answer), "{state:?} {answer:?}");
}

#[test]
fn west_of_utc_the_rows_of_a_peer_are_from_the_future_and_it_steals_ours() {
    let database = database_in_zone(-5);
    let Some(mut peer) = Peer::beside(&database) else { return };
    let theirs = peer.acquire(&job()).unwrap();
    assert_held_from_the_future(&database);
    assert!(peer.release(&theirs));
    assert!(is_win(&acquire_lock(&mut database.connect(), job().ours, MaxAge::DEFAULT).unwrap()));
    assert!(peer.acquire(&job()).is_some(), "a live lock of ours is five hours old to the peer");
}

#[test]
fn east_of_utc_the_rows_of_a_peer_have_expired_and_it_never_takes_ours_over() {
    let database = database_in_zone(5);
    let Some(mut peer) = Peer::beside(&database) else { return };
    let theirs = peer.acquire(&job()).unwrap();
    assert_taken_over(&database, &theirs, 5 * 3600);
    database.back_date(3600.0);
    assert_eq!(peer.acquire(&job()), None, "an expired lock of ours is from the future to the peer");
}

#[test]
fn a_peer_whose_url_sets_the_time_zone_of_its_sessions_is_right_in_any_zone() {
    for hours in [-5, 5] {
        let database = database_in_zone(hours);
        let Some(mut peer) = Peer::with(&in_utc(&database.url()), 0) else { return };
        let theirs = peer.acquire(&job()).unwrap();
        let (state, answer, _) = judged(&database);
        assert!(state == LockState::Held && !is_win(&answer), "{hours}: {state:?} {answer:?}");
        assert!(peer.release(&theirs));
        assert!(is_win(&acquire_lock(&mut database.connect(), job().ours, MaxAge::DEFAULT).unwrap()));
        assert_eq!(peer.acquire(&job()), None, "{hours}: a live lock of ours");
        database.back_date(1801.0);
        assert!(peer.acquire(&job()).is_some(), "{hours}: an expired lock of ours");
    }
}

#[test]
fn a_peer_whose_role_has_its_sessions_in_utc_is_right_in_any_zone() {
    let database = database_in_zone(-5);
    let role = Role::new(&database);
    let name = &role.name;
    database.execute(&format!(
        r#"ALTER ROLE "{name}" SET TimeZone = 'UTC'; GRANT USAGE ON SCHEMA public TO "{name}";
           GRANT SELECT, INSERT, UPDATE, DELETE ON "sync_lock", "IssueSyncRun" TO "{name}""#
    ));
    let Some(mut peer) = Peer::with(&role.url(), 0) else { return };
    peer.acquire(&job()).unwrap();
    let (state, answer, _) = judged(&database);
    assert!(state == LockState::Held && !is_win(&answer), "{state:?} {answer:?}");
}

#[test]
fn on_columns_without_a_time_zone_both_are_right_in_any_zone() {
    for hours in [-5, 5] {
        let database = database_in_zone(hours);
        // As `prisma db push` makes them from a schema that says no more than DateTime.
        database.execute(
            r#"ALTER TABLE "sync_lock" ALTER "acquiredAt" TYPE TIMESTAMP(3);
               ALTER TABLE "IssueSyncRun" ALTER "startedAt" TYPE TIMESTAMP(3), ALTER "completedAt" TYPE TIMESTAMP(3)"#,
        );
        let Some(mut peer) = Peer::beside(&database) else { return };
        let theirs = peer.acquire(&job()).unwrap();
        let (state, answer, _) = judged(&database);
        assert!(state == LockState::Held && !is_win(&answer), "{hours}: {state:?} {answer:?}");
        database.back_date(1801.0);
        assert_taken_over(&database, &theirs, 1801);
        assert_eq!(peer.acquire(&job()), None, "{hours}: a live lock of ours");
        database.back_date(1801.0);
        assert!(peer.acquire(&job()).is_some(), "{hours}: an expired lock of ours");
    }
}

#[test]
fn our_own_url_may_carry_the_remedy_too_and_needs_none() {
    for url in [|url: &str| url.to_owned(), in_utc] {
        let database = database_in_zone(-5);
        let settings = sync_lock::Settings::new(&url(&database.url())).unwrap();
        let mut conn = settings.connect().unwrap();
        assert!(is_win(&acquire_lock(&mut conn, job().ours, MaxAge::DEFAULT).unwrap()));
        let (state, answer, _) = judged(&database);
        assert!(state == LockState::Held && !is_win(&answer), "{state:?} {answer:?}");
    }
}

#[test]
fn a_peer_whose_clock_is_behind_stamps_rows_that_have_expired_and_they_are_taken_over() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::with(&database.url(), -45 * MINUTE_MS) else { return };
    let theirs = peer.acquire(&job()).unwrap();
    assert_taken_over(&database, &theirs, 45 * 60);
    assert!(!peer.release(&theirs), "its late release frees nothing");
    database.back_date(1801.0);
    assert_eq!(peer.acquire(&job()), None, "an expired lock of ours is young to it");
}

#[test]
fn a_peer_whose_clock_is_ahead_holds_for_longer_and_steals_ours() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::with(&database.url(), 45 * MINUTE_MS) else { return };
    let theirs = peer.acquire(&job()).unwrap();
    assert_held_from_the_future(&database);
    database.back_date(2700.0 + 1801.0);
    assert!(is_win(&acquire_lock(&mut database.connect(), job().ours, MaxAge::DEFAULT).unwrap()), "75 minutes later");
    assert!(peer.acquire(&job()).is_some(), "a live lock of ours is 45 minutes old to the peer");
    assert!(!peer.release(&theirs), "its first run was displaced");
}
