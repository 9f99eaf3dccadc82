//! Logs tell who had the key.

use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::Once;

use diesel::connection::SimpleConnection;
use sync_lock::blocking::{acquire_lock, complete_run, fail_run, release_lock};
use sync_lock::{MaxAge, RunReport, SyncType};
use tracing::Level;

use crate::support::{TestDatabase, is_win, won};

thread_local! {
    static LISTENER: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

/// Writes to whoever listens on this thread.
struct ToListener;

impl Write for ToListener {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LISTENER.with_borrow_mut(|listener| listener.iter_mut().for_each(|log| log.extend_from_slice(bytes)));
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines that an action on this thread logs, one an event.
fn logged<T>(action: impl FnOnce() -> T) -> (T, Vec<String>) {
    // For all threads: an event that some other test meets first, on a thread without a subscriber, is off for ever.
    static SUBSCRIBER: Once = Once::new();
    SUBSCRIBER.call_once(|| {
        let subscriber = tracing_subscriber::fmt().with_max_level(Level::DEBUG).without_time().with_target(false);
        tracing::subscriber::set_global_default(subscriber.with_writer(|| ToListener).finish()).unwrap();
    });
    tracing::callsite::rebuild_interest_cache();
    LISTENER.set(Some(Vec::new()));
    let outcome = action();
    let text = String::from_utf8(LISTENER.take().unwrap()).unwrap();
    (outcome, text.lines().map(|line| without_owner(line.trim())).collect())
}

/// Every line of an event names this process: host, process id and a random part. The rest differs from line to line.
fn without_owner(line: &str) -> String {
    let Some((before, owner)) = line.split_once(" owner=\"") else { return line.to_owned() };
    let (owner, after) = owner.split_once('"').unwrap();
    let (host_and_process, random) = owner.rsplit_once('-').unwrap();
    assert!(host_and_process.ends_with(&format!("-{}", std::process::id())) && random.len() == 8, "{owner}");
    format!("{before}{after}")
}

#[test]
fn a_claim_a_conflict_and_a_takeover_are_each_logged_once_with_key_type_run_and_holder() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let mut claim = |sync_type| logged(|| acquire_lock(&mut conn, sync_type, MaxAge::DEFAULT).unwrap());
    let (answer, lines) = claim(SyncType::Manual);
    let first = won(answer);
    assert_eq!(lines, [format!(r#"INFO acquired key=issue-sync sync_type="manual" run_id={first}"#)]);

    let (answer, lines) = claim(SyncType::Scheduled);
    assert!(!is_win(&answer));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    let expected = format!(r#"INFO skipped key=issue-sync sync_type="scheduled" holder="{first}" age="#);
    assert!(line.starts_with(&expected), "{line}");

    database.back_date(3600.0);
    let (answer, lines) = claim(SyncType::Scheduled);
    let next = won(answer);
    let [line] = &lines[..] else { panic!("{lines:?}") };
    let expected =
        format!(r#"WARN taken over key=issue-sync sync_type="scheduled" run_id={next} previous="{first}" age=36"#);
    assert!(line.starts_with(&expected), "{line}");
}

#[test]
fn the_end_of_a_run_and_a_release_are_logged_with_what_they_changed() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    let ((), lines) = logged(|| {
        complete_run(&mut conn, &run, &RunReport::default()).unwrap();
        fail_run(&mut conn, &run, "too late").unwrap();
        release_lock(&mut conn, &run).unwrap();
    });
    assert_eq!(
        lines,
        [
            format!("INFO succeeded run_id={run} changed=true"),
            format!(r#"INFO failed run_id={run} changed=false error_message="too late""#),
            format!("INFO released run_id={run} freed=true"),
        ]
    );
}

#[test]
fn a_displaced_record_that_is_left_open_is_mentioned_for_whoever_looks_closely() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let crashed = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    database.back_date(3600.0);
    let mut other = database.connect();
    other.batch_execute(r#"BEGIN; SELECT 1 FROM "IssueSyncRun" FOR UPDATE"#).unwrap();
    let (answer, lines) = logged(|| acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    let next = won(answer);
    assert_eq!(
        lines[0],
        format!(
            r#"DEBUG the displaced run's record is finished, gone or locked: left as it is run_id={next} displaced="{crashed}""#
        )
    );
    assert_eq!(lines.len(), 2, "{lines:?}");
}
