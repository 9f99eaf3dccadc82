//! The simulation, which the demonstration and the bench share, and the demonstration itself.

use std::process::Command;

use sync_lock::starvation::{AT_ONCE, SCHEDULE, Scheme, Simulation, Tally};

use crate::support::{expect_exit, server};

/// Job, runs, conflicts, longest losing streak.
type Row<'a> = (&'a str, i64, i64, i64);

fn rows(tallies: &[Tally]) -> Vec<Row<'_>> {
    let row = |tally: &Tally| (tally.runs, tally.conflicts, tally.longest_losing_streak);
    let rows = tallies.iter().map(|tally| (tally.job.as_str(), row(tally)));
    rows.map(|(job, (runs, conflicts, streak))| (job, runs, conflicts, streak)).collect()
}

#[test]
fn seventy_minutes_come_out_as_measured_under_one_shared_key() {
    let database = server().create_database(None).unwrap();
    let mut simulation = Simulation::start(&database).unwrap();
    let tallies = simulation.replay(Scheme::SharedKey, 70).unwrap();
    assert_eq!(
        rows(&tallies),
        [
            ("sync", 5, 0, 0),
            ("groomer", 7, 0, 0),
            ("pr-followup", 0, 5, 5),
            ("reconcile", 0, 3, 3),
            ("stale-work", 9, 5, 1)
        ]
    );
}

#[test]
fn every_tick_runs_with_a_key_per_job() {
    let database = server().create_database(None).unwrap();
    let mut simulation = Simulation::start(&database).unwrap();
    let tallies = simulation.replay(Scheme::PerJobKeys, 70).unwrap();
    assert_eq!(
        rows(&tallies),
        [
            ("sync", 5, 0, 0),
            ("groomer", 7, 0, 0),
            ("pr-followup", 5, 0, 0),
            ("reconcile", 3, 0, 0),
            ("stale-work", 14, 0, 0)
        ]
    );
    let day = simulation.replay(Scheme::PerJobKeys, 24 * 60).unwrap();
    for (tally, job) in day.iter().zip(SCHEDULE) {
        assert_eq!((tally.runs, tally.conflicts), (i64::from(24 * 60 / job.every_minutes), 0), "{}", tally.job);
    }
}

#[test]
fn one_shared_key_lets_one_of_five_run_and_a_key_per_job_all_of_them() {
    const ROUNDS: i64 = 30;
    let database = server().create_database(None).unwrap();
    let mut simulation = Simulation::start(&database).unwrap();
    let [shared, per_job] = Scheme::BOTH.map(|scheme| simulation.at_once(scheme, 30).unwrap());
    assert_eq!(shared.iter().map(|tally| tally.runs).sum::<i64>(), ROUNDS, "{shared:?}");
    assert_eq!(shared.iter().map(|tally| tally.conflicts).sum::<i64>(), 4 * ROUNDS, "{shared:?}");
    assert_eq!(rows(&per_job), AT_ONCE.map(|sync_type| (sync_type.as_str(), ROUNDS, 0, 0)));
}

/// The demonstration, with a `DATABASE_URL` that would end it at once if anybody looked at it.
fn demo() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sync-lock"));
    command.arg("demo").env("DATABASE_URL", "garbage").env("DISPATCH_DATABASE_URL", "");
    command
}

#[test]
fn the_demonstration_shows_who_starved_and_never_looks_at_database_url() {
    let (stdout, stderr) = expect_exit(&mut demo(), 0);
    assert_eq!(stderr, "");
    let line = |start: &str, nth: usize| {
        let lines = stdout.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
        lines.filter(|line| line.starts_with(start)).nth(nth).unwrap_or_else(|| format!("no {start} in {stdout}"))
    };
    assert!(line("Removed \"global\", 45m", 0).contains("old, held by "), "{stdout}");
    assert_eq!(line("1 of 5 ran", 0), "1 of 5 ran 5 of 5 ran");
    assert_eq!(line("sync", 0), "sync 15 min ran 5 × ran 5 ×");
    assert_eq!(line("groomer", 0), "groomer 10 min ran 7 × ran 7 ×");
    assert_eq!(line("pr-followup", 1), "pr-followup 15 min never ran, shut out 5 × ran 5 ×");
    assert_eq!(line("reconcile", 1), "reconcile 30 min never ran, shut out 3 × ran 3 ×");
    assert_eq!(line("stale-work", 1), "stale-work 5 min ran 9 ×, shut out 5 × ran 14 ×");
}

#[test]
fn a_test_server_that_cannot_be_used_is_one_line_and_an_exit_code() {
    for (url, code) in [
        ("", 78),
        ("garbage", 78),
        ("mysql://root:hunter2@localhost/app", 78),
        ("postgresql://root:hunter2@localhost/app?schema=x", 78),
        ("postgresql://root:hunter2@127.0.0.1:1/app", 69),
    ] {
        let (stdout, stderr) = expect_exit(demo().env("TEST_DATABASE_URL", url), code);
        assert_eq!(stdout, "");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.contains("TEST_DATABASE_URL") && !stderr.contains("hunter2"), "{stderr}");
    }
}
