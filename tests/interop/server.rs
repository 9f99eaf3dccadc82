//! The example `server`, by real HTTP requests: 200, 409, 500, and the lock released on every path.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sync_lock::blocking::{acquire_lock, release_lock};
use sync_lock::{LockKey, MaxAge, SyncType};

use crate::peer::{Peer, PeerJob};
use crate::support::{PATIENCE, TestDatabase, poll, won};

/// Every endpoint, with the key of its job.
const ENDPOINTS: [(&str, &str); 7] = [
    ("/sync", "issue-sync"),
    ("/sync/manual", "issue-sync"),
    ("/automation", "automation"),
    ("/pr-followup", "pr-followup"),
    ("/reconcile", "reconcile"),
    ("/stale-work", "stale-work"),
    ("/groomer", "groomer"),
];

struct Replica {
    child: Child,
    lines: Receiver<String>,
    address: String,
}

impl Replica {
    fn start(url: &str) -> Self {
        // Cargo builds the examples beside the program before it runs the tests.
        let program = PathBuf::from(env!("CARGO_BIN_EXE_sync-lock")).with_file_name("examples").join("server");
        let mut command = Command::new(program);
        command.args(["--listen", "127.0.0.1:0"]).env("DATABASE_URL", url).env_remove("DISPATCH_SYNC_LOCK_MAX_AGE_MS");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the example is built: `cargo test` builds it, `cargo test --test interop` does not");
        let output = BufReader::new(child.stdout.take().unwrap());
        let (tell, lines) = channel();
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let mut replica = Self { child, lines, address: String::new() };
        replica.address = replica.says("listening on ");
        replica
    }

    /// The rest of the next line that begins like this.
    fn says(&self, beginning: &str) -> String {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no line {beginning:?}"));
            if let Some(rest) = line.strip_prefix(beginning) {
                return rest.to_owned();
            }
        }
    }

    /// Sends a request; its answer is read later.
    fn send(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head =
            format!("POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    fn post(&self, path: &str) -> (u16, Value) {
        read(self.send(path))
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status and body.
fn read(mut stream: TcpStream) -> (u16, Value) {
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head: {text}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    (status.unwrap_or_else(|| panic!("no status: {head}")), serde_json::from_str(body).unwrap_or(Value::Null))
}

fn conflict() -> (u16, Value) {
    (409, json!({ "error": "sync already running" }))
}

#[test]
fn each_endpoint_answers_200_when_its_key_is_free_and_409_while_it_is_held() {
    let database = TestDatabase::new();
    let replica = Replica::start(&database.url());
    let mut conn = database.connect();
    for (path, key) in ENDPOINTS {
        let (status, body) = replica.post(path);
        assert_eq!(
            (status, &body["reposFetched"], &body["syncedCount"]),
            (200, &json!(2), &json!(7)),
            "{path}: {body}"
        );
        let held = won(acquire_lock(&mut conn, LockKey::custom(key).unwrap(), MaxAge::DEFAULT).unwrap());
        assert_eq!(replica.post(path), conflict(), "{path}");
        assert!(release_lock(&mut conn, &held).unwrap(), "{path}: nobody else freed it");
    }
    assert_eq!(database.keys_held(), Vec::<String>::new());
    // The groomer keeps no record, and a conflict leaves none.
    assert!(database.runs().iter().all(|run| run.status == "completed" && run.synced_count == 7));
    assert_eq!(database.runs().len(), ENDPOINTS.len() - 1);
}

#[test]
fn a_job_that_fails_or_panics_answers_500_and_its_lock_is_released() {
    let database = TestDatabase::new();
    let replica = Replica::start(&database.url());
    for (path, _) in ENDPOINTS {
        let (status, body) = replica.post(&format!("{path}?fails=true"));
        assert_eq!((status, body), (500, json!({ "error": "the issue tracker does not answer" })), "{path}");
        assert_eq!(database.keys_held(), Vec::<String>::new(), "{path}");
        let (status, body) = replica.post(&format!("{path}?panics=true"));
        let message = body["error"].as_str().unwrap_or_default();
        assert!(status == 500 && message.contains("asked to panic"), "{path}: {status} {body}");
        assert_eq!(database.keys_held(), Vec::<String>::new(), "{path}");
    }
    assert!(database.runs().iter().all(|run| run.status == "failed" && run.completed));
}

#[test]
fn the_scheduled_sync_succeeds_where_its_automation_pass_is_held_and_says_so() {
    let database = TestDatabase::new();
    let replica = Replica::start(&database.url());
    let done = json!({ "reposFetched": 2, "syncedCount": 7, "automationSkipped": false });
    assert_eq!(replica.post("/sync"), (200, done.clone()));
    assert_eq!(database.runs().len(), 1, "the pass is opt-in");
    assert_eq!(replica.post("/sync?automation=true"), (200, done));
    assert_eq!(database.runs().len(), 3);

    let mut conn = database.connect();
    let held = won(acquire_lock(&mut conn, SyncType::Automation, MaxAge::DEFAULT).unwrap());
    let (status, body) = replica.post("/sync?automation=true");
    assert_eq!((status, &body["automationSkipped"], &body["syncedCount"]), (200, &json!(true), &json!(7)), "{body}");
    assert!(body["automationSkippedReason"].as_str().unwrap().contains(held.as_str()), "{body}");
    assert_eq!(replica.post("/automation"), conflict(), "its own endpoint");
    assert!(release_lock(&mut conn, &held).unwrap());
    assert_eq!(database.keys_held(), Vec::<String>::new());
}

#[test]
fn two_replicas_and_one_process_twice_answer_409_while_a_job_runs() {
    let database = TestDatabase::new();
    let (first, second) = (Replica::start(&database.url()), Replica::start(&database.url()));
    let running = first.send("/reconcile?takes_ms=3600000");
    first.says("working on reconcile");
    assert_eq!(second.post("/reconcile"), conflict(), "another replica");
    assert_eq!(first.post("/reconcile"), conflict(), "the same process");
    assert_eq!(second.post("/stale-work").0, 200, "another job");
    // The caller hangs up; the job goes on, as it does at the peer.
    drop(running);
    assert_eq!(second.post("/reconcile"), conflict());
    // The replica is stopped: the job is cancelled and its row is freed.
    kill(Pid::from_raw(first.child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    first.says("stopped");
    assert_eq!(database.keys_held(), Vec::<String>::new());
    assert_eq!(second.post("/reconcile").0, 200);
}

#[test]
fn a_database_that_cannot_be_reached_answers_503_and_the_job_does_not_run() {
    let replica = Replica::start("postgresql://nobody@127.0.0.1:1/nowhere");
    let (status, body) = replica.post("/reconcile");
    assert_eq!((status, body), (503, json!({ "error": "the database cannot be reached" })));
}

#[test]
fn an_endpoint_answers_409_while_a_typescript_replica_holds_its_key() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    let replica = Replica::start(&database.url());
    for job in PeerJob::all().iter().filter(|job| job.name != "contest-sync") {
        let (path, _) = ENDPOINTS.into_iter().find(|(_, key)| *key == job.key().as_str()).unwrap();
        let theirs = peer.acquire(job).unwrap();
        assert_eq!(replica.post(path), conflict(), "{path}");
        assert!(peer.release(&theirs), "{path}");
        assert_eq!(replica.post(path).0, 200, "{path}");
    }
    let running = replica.send("/sync/manual?takes_ms=1000");
    replica.says("working on issue-sync");
    poll("the job runs", || database.keys_held() == ["issue-sync"]);
    assert_eq!(peer.acquire(&PeerJob::of(SyncType::Scheduled)), None);
    assert_eq!(read(running).0, 200);
}
