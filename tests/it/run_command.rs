//! `sync-lock run`: any program under a lock, with its signals, its process group and its exit code.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sync_lock::MaxAge;
use sync_lock::blocking::acquire_lock;

use crate::support::{TestDatabase, expect_exit, key, poll, sync_lock, won};

/// `run` with a shell script as its command.
fn run(database: &TestDatabase, arguments: &[&str], script: &str) -> Command {
    let mut all = vec!["run"];
    all.extend(arguments);
    all.extend(["--", "sh", "-c", script]);
    sync_lock(&database.url(), &all)
}

/// The process ids that a script prints, and the rest of its output.
fn start(command: &mut Command, pids: usize) -> (Child, Vec<Pid>) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pids =
        (0..pids).map(|_| Pid::from_raw(lines.next().expect("a line").unwrap().trim().parse().unwrap())).collect();
    // What else is written goes nowhere, and does not block.
    std::thread::spawn(move || lines.for_each(drop));
    (child, pids)
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
}

fn is_gone(pid: Pid) -> bool {
    // A zombie that only its parent can bury has ended as well.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    kill(pid, None) == Err(Errno::ESRCH) || stat.split(") ").nth(1).is_none_or(|rest| rest.starts_with('Z'))
}

/// The exit code and what was written to stderr.
fn end(child: Child) -> (Option<i32>, String) {
    let output = child.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_command_runs_under_the_lock_and_leaves_it_free() {
    let database = TestDatabase::new();
    let (stdout, stderr) = expect_exit(&mut run(&database, &["reconcile"], "echo working"), 0);
    assert_eq!((stdout.as_str(), stderr.as_str()), ("working\n", ""));
    let run_record = database.runs().remove(0);
    assert_eq!((run_record.status.as_str(), run_record.sync_type.as_str()), ("completed", "reconcile"));
    assert_eq!(database.locks_held(), []);
}

#[test]
fn a_custom_key_keeps_a_record_only_if_it_is_given_a_sync_type() {
    let database = TestDatabase::new();
    expect_exit(&mut run(&database, &["--key", "contest-sync"], "true"), 0);
    assert_eq!(database.runs(), []);
    expect_exit(&mut run(&database, &["--key", "ci-failures", "--sync-type", "ci"], "true"), 0);
    assert_eq!(database.runs()[0].sync_type, "ci");
}

#[test]
fn the_commands_own_exit_code_is_handed_on_with_a_line_that_tells_it_from_ours() {
    let database = TestDatabase::new();
    for code in [1, 75, 76, 78, 255] {
        let (_, stderr) = expect_exit(&mut run(&database, &["reconcile"], &format!("exit {code}")), code);
        assert_eq!(stderr, format!("sync-lock: the command exited with {code}\n"));
    }
    let (_, stderr) = expect_exit(&mut run(&database, &["reconcile"], "kill -KILL $$"), 137);
    assert_eq!(stderr, "sync-lock: the command was ended by SIGKILL\n");
    assert_eq!(database.locks_held(), []);
    let messages: Vec<_> = database.runs().into_iter().map(|run| run.error_message.unwrap()).collect();
    assert_eq!(messages.first().map(String::as_str), Some("the command exited with 1"));
    assert_eq!(messages.last().map(String::as_str), Some("the command was ended by SIGKILL"));
}

#[test]
fn a_key_that_is_held_is_75_and_the_command_is_not_started() {
    let database = TestDatabase::new();
    database.plant("issue-sync", Some("peer-7"), 60.0);
    let (stdout, stderr) = expect_exit(&mut run(&database, &["manual"], "echo started"), 75);
    assert_eq!(stdout, "");
    assert!(stderr.contains("held by peer-7, claimed or renewed 1m"), "{stderr}");
    let (_, stderr) = expect_exit(&mut run(&database, &["manual", "--wait", "300ms"], "echo started"), 75);
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn waiting_for_a_key_ends_with_its_release() {
    let database = TestDatabase::new();
    let held = won(acquire_lock(&mut database.connect(), key("job"), MaxAge::DEFAULT).unwrap());
    let child = run(&database, &["--key", "job", "--wait", "1h"], "true").spawn().unwrap();
    sync_lock::blocking::release_lock(&mut database.connect(), &held).unwrap();
    assert_eq!(end(child).0, Some(0));
}

#[test]
fn a_command_that_cannot_be_run_is_126_or_127_and_frees_the_key() {
    let database = TestDatabase::new();
    for (program, code) in [("/nowhere/to-be-found", 127), ("no-such-program-here", 127), ("/etc/passwd", 126)] {
        let mut command = sync_lock(&database.url(), &["run", "reconcile", "--", program]);
        let (_, stderr) = expect_exit(&mut command, code);
        assert!(stderr.contains(program), "{stderr}");
        assert_eq!(database.locks_held(), []);
    }
    assert!(database.runs().iter().all(|run| run.status == "failed"));
}

#[test]
fn wrong_usage_is_64() {
    let database = TestDatabase::new();
    for arguments in [
        &["run", "--", "true"][..],
        &["run", "reconcile"],
        &["run", "nightly", "--", "true"],
        &["run", "--key", "global", "--", "true"],
        &["run", "--key", "", "--", "true"],
        &["run", "reconcile", "--key", "x", "--", "true"],
        &["run", "reconcile", "--sync-type", "x", "--", "true"],
        &["run", "--key", "x", "--sync-type", "", "--", "true"],
        &["run", "reconcile", "--wait", "soon", "--", "true"],
    ] {
        let (_, stderr) = expect_exit(&mut sync_lock(&database.url(), arguments), 64);
        assert!(!stderr.is_empty());
    }
    assert_eq!((database.locks_held(), database.runs()), (vec![], vec![]));
}

#[test]
fn a_maximum_age_too_short_for_a_lease_is_78() {
    let database = TestDatabase::new();
    let mut command = run(&database, &["reconcile"], "true");
    let (_, stderr) = expect_exit(command.env("DISPATCH_SYNC_LOCK_MAX_AGE_MS", "499"), 78);
    assert!(stderr.contains("DISPATCH_SYNC_LOCK_MAX_AGE_MS"), "{stderr}");
}

#[test]
fn a_signal_is_passed_on_and_the_key_is_free_when_the_command_has_ended() {
    let database = TestDatabase::new();
    for (number, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129), (Signal::SIGQUIT, 131)]
    {
        let (child, pids) = start(&mut run(&database, &["reconcile"], "ulimit -c 0; echo $$; exec sleep 1000"), 1);
        signal(&child, number);
        assert_eq!(end(child).0, Some(code), "{number}");
        assert!(is_gone(pids[0]));
        assert_eq!(database.locks_held(), []);
    }
    let polite = "trap 'exit 7' TERM; echo $$; while :; do sleep 0.01; done";
    let (child, _) = start(&mut run(&database, &["reconcile"], polite), 1);
    signal(&child, Signal::SIGTERM);
    assert_eq!(end(child).0, Some(7), "the command decides how it ends");
}

#[test]
fn a_signal_that_ends_nothing_is_passed_on_too() {
    let database = TestDatabase::new();
    let script = "trap 'echo heard; exit 0' USR1; echo $$; while :; do sleep 0.01; done";
    let (child, _) = start(&mut run(&database, &["reconcile"], script), 1);
    signal(&child, Signal::SIGUSR1);
    assert_eq!(end(child).0, Some(0));
}

#[test]
fn what_the_command_left_in_its_group_is_stopped_before_the_key_is_free() {
    let database = TestDatabase::new();
    // One leftover ends by SIGTERM, the other only by SIGKILL.
    let script =
        "sleep 1000 & echo $!; sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.01; done' & sleep 0.2; exit 3";
    let (child, pids) = start(&mut run(&database, &["reconcile"], script), 2);
    assert_eq!(database.keys_held(), ["reconcile"]);
    poll("the end of the gentle one", || is_gone(pids[0]));
    assert_eq!(database.keys_held(), ["reconcile"], "held while the stubborn one lives");
    assert_eq!(end(child).0, Some(3));
    assert!(pids.iter().all(|pid| is_gone(*pid)));
    assert_eq!(database.locks_held(), []);
}

#[test]
fn a_command_that_ignores_sigterm_is_killed_in_the_end() {
    let database = TestDatabase::new();
    let (child, pids) =
        start(&mut run(&database, &["reconcile"], "trap '' TERM; echo $$; while :; do sleep 0.01; done"), 1);
    signal(&child, Signal::SIGTERM);
    assert_eq!(end(child).0, Some(137));
    assert!(is_gone(pids[0]));
    assert_eq!(database.locks_held(), []);
}

#[test]
fn a_lost_lock_stops_the_command_at_once_with_76() {
    let database = TestDatabase::new();
    for stubborn in ["", "trap '' TERM;"] {
        let script = format!("{stubborn} echo $$; while :; do sleep 0.01; done");
        let mut command = run(&database, &["reconcile"], &script);
        let (child, pids) = start(command.env("DISPATCH_SYNC_LOCK_MAX_AGE_MS", "1500"), 1);
        let next = database.take_over(sync_lock::SyncType::Reconcile);
        let (code, stderr) = end(child);
        assert_eq!(code, Some(76), "{stderr}");
        assert!(stderr.contains("took the lock over"), "{stderr}");
        assert!(is_gone(pids[0]));
        assert_eq!(database.locks_held(), [("reconcile".to_owned(), Some(next.to_string()))]);
        sync_lock::blocking::release_lock(&mut database.connect(), &next).unwrap();
    }
}

#[test]
fn a_signal_while_waiting_ends_the_wait_and_leaves_nothing() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("peer"), 1.0);
    let child = run(&database, &["reconcile", "--wait", "1h"], "true").stderr(Stdio::piped()).spawn().unwrap();
    // Its handlers are in place before it asks the database for the first time.
    poll("a first attempt", || {
        database.count(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%SKIP LOCKED%'
            AND pid <> pg_backend_pid()",
        ) > 0
    });
    signal(&child, Signal::SIGTERM);
    let (code, stderr) = end(child);
    assert_eq!(code, Some(143), "{stderr}");
    assert_eq!(database.keys_held(), ["reconcile"]);
    assert_eq!(database.runs(), []);
}

#[test]
fn a_killed_wrapper_leaves_the_row_to_expire() {
    let database = TestDatabase::new();
    let (mut child, pids) = start(&mut run(&database, &["reconcile"], "echo $$; exec sleep 1000"), 1);
    signal(&child, Signal::SIGKILL);
    child.wait().unwrap();
    assert_eq!(database.keys_held(), ["reconcile"], "a non-guarantee, and documented as one");
    kill(pids[0], Signal::SIGKILL).unwrap();
}

/// The program as a child of a shell that has signals ignored.
fn with_ignored(database: &TestDatabase, signals: &str, script: &str) -> Command {
    let mut command = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_sync-lock");
    command.args(["-c", &format!("trap '' {signals}; exec {program} run reconcile -- sh -c '{script}'")]);
    command.env("DATABASE_URL", database.url()).stdin(Stdio::null());
    command
}

#[test]
fn an_ignored_sigchld_does_not_hide_how_the_command_ended() {
    let database = TestDatabase::new();
    expect_exit(&mut with_ignored(&database, "CHLD", "exit 0"), 0);
    expect_exit(&mut with_ignored(&database, "CHLD", "exit 3"), 3);
}

#[test]
fn a_signal_that_was_ignored_from_the_start_stays_ignored_as_under_nohup() {
    let database = TestDatabase::new();
    let (child, _) = start(&mut with_ignored(&database, "HUP", "echo $$; sleep 0.3"), 1);
    signal(&child, Signal::SIGHUP);
    assert_eq!(end(child).0, Some(0));
}

#[test]
fn a_command_that_was_stopped_still_gets_its_chance_to_end() {
    let database = TestDatabase::new();
    let script = "trap 'exit 7' TERM; echo $$; while :; do sleep 0.01; done";
    let (child, pids) = start(&mut run(&database, &["reconcile"], script), 1);
    kill(pids[0], Signal::SIGSTOP).unwrap();
    signal(&child, Signal::SIGTERM);
    assert_eq!(end(child).0, Some(7));
}

#[test]
fn ctrl_z_stops_the_command_and_not_the_heartbeat() {
    let database = TestDatabase::new();
    let script = "trap 'exit 5' TSTP; echo $$; while :; do :; done";
    let (child, _) = start(&mut run(&database, &["reconcile"], script), 1);
    signal(&child, Signal::SIGTSTP);
    assert_eq!(end(child).0, Some(5), "passed on, and not obeyed by the wrapper itself");
}

#[test]
fn a_new_holder_cannot_write_to_the_terminal() {
    let database = TestDatabase::new();
    let mut command = run(&database, &["reconcile"], "echo $$; exec sleep 1000");
    let (child, _) = start(command.env("DISPATCH_SYNC_LOCK_MAX_AGE_MS", "1500"), 1);
    database.execute("UPDATE \"sync_lock\" SET \"syncRunId\" = E'evil\\x1b[2J\\nnext'");
    let (code, stderr) = end(child);
    assert_eq!(code, Some(76), "{stderr}");
    assert!(!stderr.contains('\u{1b}') && !stderr.contains("\nnext"), "{stderr}");
}

#[test]
fn it_works_as_process_1() {
    let database = TestDatabase::new();
    let program = env!("CARGO_BIN_EXE_sync-lock");
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child"]);
        command.args([program, "run", "reconcile", "--", "sh", "-c", script]).env("DATABASE_URL", database.url());
        command.stdin(Stdio::null());
        command
    };
    if !unshare("true").output().is_ok_and(|output| output.status.success()) {
        crate::support::skipped("no PID namespace can be made here, so nothing runs as process 1");
        return;
    }
    // An orphan is left to process 1, which buries it and waits for nothing.
    let (_, stderr) = expect_exit(&mut unshare("(sleep 0.05 &) ; exit 4"), 4);
    assert_eq!(stderr, "sync-lock: the command exited with 4\n");
    expect_exit(&mut unshare("trap 'exit 9' TERM; kill -TERM 1; while :; do sleep 0.01; done"), 9);
    assert_eq!(database.locks_held(), []);
}

#[test]
fn a_time_zone_in_which_peers_are_misunderstood_is_warned_of_once() {
    let database = TestDatabase::new();
    expect_exit(&mut run(&database, &["reconcile"], "true"), 0);
    database.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = %L', current_database(), 'America/New_York'); END $$",
    );
    let (_, stderr) = expect_exit(&mut run(&database, &["reconcile"], "true"), 0);
    let warnings = stderr.lines().filter(|line| line.contains("the time zone of the database is not UTC"));
    assert_eq!(warnings.count(), 1, "{stderr}");
}
