//! The TypeScript peer of `tests/peer` as a child process, and what to do where it cannot run.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};
use sync_lock::{Job, LockKey, RunId, SyncType};

use crate::support::{PATIENCE, TestDatabase, key};

/// Set where a test that cannot run is no proof, as `.ci/run` does.
const REQUIRE: &str = "SYNC_LOCK_REQUIRE_ALL";

/// A process that speaks the protocol of the TypeScript module through Prisma Client. It ends when this is dropped.
pub struct Peer {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Peer {
    /// A peer on the test's database, or `None` where Node or Prisma are missing: the test then says that it is skipped.
    pub fn beside(database: &TestDatabase) -> Option<Self> {
        Self::with(&database.url(), 0)
    }

    /// A peer that was told of a schema in the way of Prisma 7, which is not the URL.
    pub fn in_schema(url: &str, schema: &str) -> Option<Self> {
        Self::start(url, &["--schema", schema])
    }

    /// A peer with a connection string of its own, and a clock that is ahead by so many milliseconds.
    pub fn with(url: &str, clock_offset_ms: i64) -> Option<Self> {
        Self::start(url, &[&format!("--clock-offset={clock_offset_ms}")])
    }

    fn start(url: &str, options: &[&str]) -> Option<Self> {
        let mut command = node()?;
        command.arg("driver.mjs").args(options).env("DATABASE_URL", url);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("Node starts");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let (tell, answers) = channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let peer = Self { child, input, answers };
        assert_eq!(peer.hear(), json!({ "ready": true }));
        Some(peer)
    }

    pub fn send(&mut self, command: &Value) {
        writeln!(self.input, "{command}").expect("the peer reads");
    }

    /// The next line that the peer says.
    pub fn hear(&self) -> Value {
        let line = self.answers.recv_timeout(PATIENCE).expect("the peer answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// What the peer answered, or the code of what Prisma threw.
    pub fn try_ask(&mut self, command: &Value) -> Result<Value, String> {
        self.send(command);
        let mut answer = self.hear();
        match answer.get_mut("ok") {
            Some(ok) => Ok(ok.take()),
            None => Err(answer["error"]["code"].as_str().map_or_else(|| answer.to_string(), str::to_owned)),
        }
    }

    #[track_caller]
    pub fn ask(&mut self, command: &Value) -> Value {
        self.try_ask(command).unwrap_or_else(|threw| panic!("{command} threw {threw}"))
    }

    /// Claims, and hands out the run id of a win.
    #[track_caller]
    pub fn acquire(&mut self, job: &PeerJob) -> Option<RunId> {
        run_id_of(&self.ask(&job.acquire))
    }

    /// Whether a release freed anything.
    #[track_caller]
    pub fn release(&mut self, run_id: &RunId) -> bool {
        self.ask(&json!({ "do": "release", "runId": run_id.as_str() })) == json!(true)
    }
}

impl Peer {
    /// Ends the process at once, as a crash does.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
    }

    /// What a peer that was killed has said and nobody has heard.
    pub fn rest(&self) -> Vec<Value> {
        self.answers.iter().map(|line| serde_json::from_str(&line).unwrap_or(Value::String(line))).collect()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// The run id in the peer's answer to a claim; `None` for a conflict.
pub fn run_id_of(answer: &Value) -> Option<RunId> {
    assert!(answer["locked"].is_boolean(), "an answer to a claim: {answer}");
    answer["runId"].as_str().map(|id| id.parse().expect("a run id"))
}

/// One job as both sides know it.
pub struct PeerJob {
    pub name: &'static str,
    pub ours: Job,
    /// The peer's claim.
    pub acquire: Value,
}

impl PeerJob {
    pub fn of(sync_type: SyncType) -> Self {
        let name = sync_type.as_str();
        Self { name, ours: sync_type.into(), acquire: json!({ "do": "acquire", "syncType": name }) }
    }

    pub fn groomer() -> Self {
        Self { name: "groomer", ours: LockKey::GROOMER.into(), acquire: json!({ "do": "acquireGroomer" }) }
    }

    /// A key of an application's own.
    pub fn custom() -> Self {
        let name = "contest-sync";
        let ours = key(name).recorded_as(name).expect("a job");
        Self { name, ours, acquire: json!({ "do": "acquire", "syncType": name, "key": name }) }
    }

    /// All six sync types, the groomer and a custom key.
    pub fn all() -> Vec<Self> {
        SyncType::ALL.into_iter().map(Self::of).chain([Self::groomer(), Self::custom()]).collect()
    }

    pub fn key(&self) -> &LockKey {
        self.ours.key()
    }

    /// Whether runs of this job leave a record.
    pub fn is_recorded(&self) -> bool {
        self.ours.sync_type().is_some()
    }
}

/// Node in the peer's folder with a clean environment, or `None` where it or Prisma are missing.
pub fn node() -> Option<Command> {
    let folder = folder();
    let own = folder.join("node/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(own).chain(std::env::split_paths(&path))).expect("a PATH");
    let mut command = Command::new("/usr/bin/env");
    command.arg("node").env_clear().env("PATH", path).current_dir(&folder).stdin(Stdio::null());
    if let Some(home) = std::env::var_os("HOME") {
        command.env("HOME", home);
    }
    is_installed(&folder).then_some(command)
}

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peer")
}

fn is_installed(folder: &Path) -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    let installed = *INSTALLED.get_or_init(|| folder.join("node_modules/.sync-lock-installed").exists());
    if !installed {
        let name = thread::current().name().unwrap_or_default().to_owned();
        let message = format!("SKIPPED {name}: no Node or no Prisma in tests/peer; run .ci/prepare-peer");
        assert!(std::env::var_os(REQUIRE).is_none(), "{message}");
        // Not eprintln!, which nobody sees of a test that passes.
        let _ = writeln!(std::io::stderr(), "{message}");
    }
    installed
}
