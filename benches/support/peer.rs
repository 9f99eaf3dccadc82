//! The real Prisma peer as a contestant: a process of its own that counts its own cycles.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::clients::Times;

pub const NAME: &str = "Prisma peer";

/// A Node process with the TypeScript peer's lock, for a number of workers.
pub struct Peer {
    /// Node's version and Prisma's.
    pub version: String,
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the peer, or says why there is none.
    pub fn start(url: &str, workers: usize) -> Result<Self, String> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        if !root.join("tests/peer/lock.mjs").exists() {
            return Err("tests/peer is not there".to_owned());
        }
        if !root.join("tests/peer/node_modules").exists() {
            return Err("the packages of tests/peer are not installed".to_owned());
        }
        let mut command = Command::new("node");
        command.arg(root.join("benches/peer.mjs")).arg(workers.to_string()).env("DATABASE_URL", url);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| format!("node does not start: {error}"))?;
        let (orders, answers) = (child.stdin.take(), child.stdout.take());
        let mut peer = Self {
            version: String::new(),
            child,
            orders: orders.expect("a pipe"),
            answers: BufReader::new(answers.expect("a pipe")),
        };
        let ready = peer.hear();
        let version = ready.trim().strip_prefix("ready, ").ok_or("the peer ended before it was ready")?;
        version.clone_into(&mut peer.version);
        Ok(peer)
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the peer's answer");
        line
    }

    /// Lets its workers claim and release their keys for the time of a slice, after a fifth of that to warm up.
    pub fn slice(&mut self, keys: &[Vec<String>], slice: Duration) -> Vec<Times> {
        let keys: Vec<_> = keys.iter().map(|keys| keys[0].as_str()).collect();
        let order = serde_json::json!({ "keys": keys, "milliseconds": slice.as_millis() });
        writeln!(self.orders, "{order}").expect("a peer that listens");
        serde_json::from_str(&self.hear()).expect("the peer's times")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
