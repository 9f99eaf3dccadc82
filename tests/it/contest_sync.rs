//! The example `contest_sync`, as two real processes.

use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{PATIENCE, TestDatabase};

struct Replica {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Replica {
    fn start(database: &TestDatabase, arguments: &[&str]) -> Self {
        // Cargo builds the examples beside the program before it runs the tests.
        let program = PathBuf::from(env!("CARGO_BIN_EXE_sync-lock")).with_file_name("examples").join("contest_sync");
        let mut command = Command::new(program);
        command.args(arguments).env("DATABASE_URL", database.url()).env_remove("DISPATCH_SYNC_LOCK_MAX_AGE_MS");
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("the example is built");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The rest of the next line that begins like this.
    fn says(&mut self, beginning: &str) -> String {
        let started = Instant::now();
        for line in self.lines.by_ref().map(Result::unwrap) {
            assert!(started.elapsed() < PATIENCE, "no line {beginning:?} in time");
            if let Some(rest) = line.strip_prefix(beginning) {
                return rest.to_owned();
            }
        }
        panic!("it ended without a line {beginning:?}");
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    fn ends(mut self) {
        self.says("stopped");
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn one_replica_works_and_the_other_skips_until_the_release() {
    let database = TestDatabase::new();
    // The first run of the first replica is ended by a signal, long before its ten minutes are over.
    let mut first = Replica::start(&database, &["--every", "1h", "--work", "1h"]);
    let working = first.says("working as ");
    let mut second = Replica::start(&database, &["--every", "20ms", "--work", "1ms"]);
    let skipped = second.says("skipped: ");
    assert!(skipped.starts_with(&format!("{working} works on it")), "{skipped}");
    first.signal(Signal::SIGTERM);
    first.ends();
    let next = second.says("working as ");
    assert_ne!(next, working);
    second.says("done");
    second.signal(Signal::SIGINT);
    second.ends();
    assert_eq!(database.locks_held(), []);
    assert_eq!(database.runs(), [], "a custom key without a sync type keeps no record");
}
