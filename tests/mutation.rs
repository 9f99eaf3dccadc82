//! The tests notice a fault: each one here is planted in a copy of the real source, and the real tests run there.
//!
//! A fault is an exact replacement in a file. Tests that must fail over it are named, with words of their message, and
//! so are tests that must still pass, which shows that the fault is what failed and not the copy. The copy and its
//! programs are in the target folder. It shares the build folder of the `cargo test` that runs this, so that what it
//! depends on is not built again.

#![expect(clippy::expect_used, reason = "a test that cannot go on has failed")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// What the build and the tests of the copy need, as far as it is there.
const SOURCE: [&str; 9] =
    ["Cargo.toml", "build.rs", "README.md", "benches", "docs", "examples", "migrations", "src", "tests"];

struct Fault {
    /// File, what stands there exactly once, and what to put in its place.
    edits: &'static [(&'static str, &'static str, &'static str)],
    /// Tests that fail, with words of their messages.
    fail: &'static [(&'static str, &'static str)],
    /// Tests that pass.
    pass: &'static [&'static str],
}

/// One key for all jobs, as it once was: every test of the independence of jobs fails, and what jobs of one key do to
/// each other stays as it is.
const SHARED_KEY: Fault = Fault {
    edits: &[(
        "src/key.rs",
        r#"
            Self::Scheduled | Self::Manual => "issue-sync",
            Self::Automation => "automation",
            Self::PrFollowup => "pr-followup",
            Self::Reconcile => "reconcile",
            Self::StaleWork => "stale-work",
        }))"#,
        r#"
            _ => "global",
        }))"#,
    )],
    fail: &[
        ("key::tests::the_map_is_the_contract_with_the_peers", r#"("automation", "global")"#),
        ("starvation::five_jobs_at_the_same_moment_all_win", "one winner and four starved jobs is the old fault"),
        ("starvation::five_jobs_at_the_same_moment_all_win", "left: 1\n right: 5"),
        ("starvation::releasing_one_key_does_not_free_another", "releasing scheduled freed automation"),
    ],
    pass: &[
        "contention::a_live_lock_is_not_stolen_and_its_release_lets_the_next_in",
        "contention::fifty_contenders_for_one_expired_row_have_exactly_one_winner_in_each_of_200_rounds",
        "contention::of_two_contenders_for_a_free_key_one_wins",
        "contention::of_two_contenders_for_an_expired_row_one_wins_and_names_whom_it_displaced",
        "contention::of_two_contenders_for_an_orphaned_row_one_wins_and_says_that_nobody_held_it",
        "release::a_release_deletes_the_row_and_may_be_repeated",
        "starvation::a_scheduled_and_a_manual_sync_exclude_each_other",
        "starvation::the_groomer_and_custom_keys_are_locks_of_their_own",
    ],
};

/// Nothing ever expires.
const WITHOUT_AGE: Fault = Fault {
    edits: &[(
        "src/store.rs",
        r#"("syncRunId" IS NULL
                OR extract(epoch FROM "acquiredAt") < extract(epoch FROM clock_timestamp()) - $4)"#,
        r#"("syncRunId" IS NULL)"#,
    )],
    fail: &[
        ("contention::of_two_contenders_for_an_expired_row_one_wins_and_names_whom_it_displaced", "left: 0\n right: 1"),
        ("contention::the_contenders_maximum_age_decides", "seconds(9.9)"),
    ],
    pass: &[
        "contention::a_live_lock_is_not_stolen_and_its_release_lets_the_next_in",
        "contention::of_two_contenders_for_an_orphaned_row_one_wins_and_says_that_nobody_held_it",
    ],
};

/// Everything has always expired.
const WITHOUT_AGE_LIMIT: Fault = Fault {
    edits: &[(
        "src/store.rs",
        r"< extract(epoch FROM clock_timestamp()) - $4)",
        r"<= extract(epoch FROM clock_timestamp()))",
    )],
    fail: &[
        ("contention::the_contenders_maximum_age_decides", "seconds(20.0)"),
        ("starvation::a_scheduled_and_a_manual_sync_exclude_each_other", "!is_win("),
    ],
    pass: &[
        "release::a_release_deletes_the_row_and_may_be_repeated",
        "starvation::five_jobs_at_the_same_moment_all_win",
    ],
};

/// An orphan is held like any other row.
const WITHOUT_NULL: Fault = Fault {
    edits: &[(
        "src/store.rs",
        r#"("syncRunId" IS NULL
                OR extract"#,
        r#"("syncRunId" IS NOT NULL
            AND extract"#,
    )],
    fail: &[(
        "contention::of_two_contenders_for_an_orphaned_row_one_wins_and_says_that_nobody_held_it",
        "left: 0\n right: 1",
    )],
    pass: &[
        "contention::a_live_lock_is_not_stolen_and_its_release_lets_the_next_in",
        "contention::of_two_contenders_for_an_expired_row_one_wins_and_names_whom_it_displaced",
    ],
};

/// The run's job is looked up and its key freed, whoever holds it by now.
const RELEASE_BY_KEY: Fault = Fault {
    edits: &[(
        "src/store.rs",
        r#"DELETE FROM "sync_lock" USING before
              WHERE "syncRunId" = $1 AND"#,
        r#"DELETE FROM "sync_lock" USING before
          WHERE "id" = (SELECT replace(replace("syncType", 'scheduled', 'issue-sync'), 'manual', 'issue-sync')
            FROM "IssueSyncRun" r WHERE r."id" = $1) AND"#,
    )],
    fail: &[("release::a_late_release_after_a_takeover_frees_nothing", "!release_lock(&mut conn, &slow)")],
    pass: &[
        "contention::a_live_lock_is_not_stolen_and_its_release_lets_the_next_in",
        "release::a_release_deletes_the_row_and_may_be_repeated",
    ],
};

/// A row without a holder is left, which a peer cannot insert over.
const RELEASE_BY_NULL: Fault = Fault {
    edits: &[(
        "src/store.rs",
        r#"DELETE FROM "sync_lock" USING before
              WHERE "syncRunId" = $1 AND"#,
        r#"UPDATE "sync_lock" SET "syncRunId" = NULL FROM before
          WHERE "syncRunId" = $1 AND"#,
    )],
    fail: &[(
        "release::a_release_deletes_the_row_and_may_be_repeated",
        "a row without a holder would shut out a peer for ever",
    )],
    pass: &[
        "release::a_late_release_after_a_takeover_frees_nothing",
        "starvation::a_scheduled_and_a_manual_sync_exclude_each_other",
    ],
};

/// The run is recorded whether it won or not.
const RECORD_OF_A_LOSS: Fault = Fault {
    edits: &[(
        "src/store.rs",
        r"FROM won WHERE $3::text IS NOT NULL",
        r"FROM (SELECT coalesce((SELECT at FROM won), extract(epoch FROM clock_timestamp())) AS at) won
          WHERE $3::text IS NOT NULL",
    )],
    fail: &[(
        "bounds::a_loser_against_a_live_row_writes_nothing_and_raises_nothing",
        "a transaction that wrote has an id",
    )],
    pass: &[
        "records::a_win_records_a_running_run_with_its_sync_type",
        "starvation::five_jobs_at_the_same_moment_all_win",
    ],
};

/// A claim whose caller is gone stays won.
const WITHOUT_GUARD: Fault = Fault {
    edits: &[
        ("src/cleanup.rs", "self.expected.cleanup.hand_over(*leftover);", "drop(leftover);"),
        // These tests fail by waiting in vain, and the real patience is for a busy machine.
        (
            "tests/support/mod.rs",
            "PATIENCE: Duration = Duration::from_secs(30)",
            "PATIENCE: Duration = Duration::from_secs(5)",
        ),
    ],
    fail: &[
        (
            "handle::a_claim_whose_answer_was_lost_with_the_database_is_undone_when_it_is_back",
            "no row and no running record",
        ),
        ("lease::a_shutdown_waits_for_claims_under_way_whose_callers_are_gone", r#"left: [("reconcile""#),
    ],
    pass: &["handle::a_lock_is_acquired_recorded_and_released", "handle::the_settings_maximum_age_counts"],
};

/// The moment before which a row has expired is reckoned by the client.
const CLIENT_CLOCK: Fault = Fault {
    edits: &[
        ("src/store.rs", r"< extract(epoch FROM clock_timestamp()) - $4)", r"< $4)"),
        (
            "src/store.rs",
            "let max_age = max_age.duration().as_secs_f64();",
            "let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let max_age = now.as_secs_f64() - max_age.duration().as_secs_f64();",
        ),
    ],
    fail: &[(
        "clock::age_is_judged_by_the_clock_of_the_database_and_not_by_the_clients",
        "clock ahead by 45 minutes: Conflict",
    )],
    pass: &[
        "contention::of_two_contenders_for_an_expired_row_one_wins_and_names_whom_it_displaced",
        "contention::the_contenders_maximum_age_decides",
    ],
};

/// A takeover looks like a takeover of an orphan.
const SILENT_TAKEOVER: Fault = Fault {
    edits: &[(
        "src/store.rs",
        r#"CASE WHEN w.fresh IS NULL THEN c."syncRunId" ELSE w.prev END"#,
        r#"CASE WHEN w.fresh IS NULL THEN c."syncRunId" END"#,
    )],
    fail: &[(
        "contention::of_two_contenders_for_an_expired_row_one_wins_and_names_whom_it_displaced",
        "left: None\n right: Some(\"crashed\")",
    )],
    pass: &[
        "contention::a_live_lock_is_not_stolen_and_its_release_lets_the_next_in",
        "contention::of_two_contenders_for_an_orphaned_row_one_wins_and_says_that_nobody_held_it",
        "records::a_takeover_closes_the_displaced_runs_record_and_names_the_new_run",
    ],
};

const FAULTS: [&Fault; 10] = [
    &SHARED_KEY,
    &WITHOUT_AGE,
    &WITHOUT_AGE_LIMIT,
    &WITHOUT_NULL,
    &RELEASE_BY_KEY,
    &RELEASE_BY_NULL,
    &RECORD_OF_A_LOSS,
    &WITHOUT_GUARD,
    &CLIENT_CLOCK,
    &SILENT_TAKEOVER,
];

#[test]
fn without_a_fault_every_test_named_here_passes() {
    let named = FAULTS.iter().flat_map(|fault| fault.tests());
    let mut tests: Vec<_> = named.collect();
    tests.sort_unstable();
    tests.dedup();
    let report = run(&[], &tests);
    for test in tests {
        report.assert_passed(test);
    }
}

#[test]
fn one_key_for_all_jobs_is_noticed_and_contention_for_one_key_is_as_before() {
    SHARED_KEY.is_noticed();
}

#[test]
fn a_claim_without_the_age_condition_is_noticed() {
    WITHOUT_AGE.is_noticed();
    WITHOUT_AGE_LIMIT.is_noticed();
}

#[test]
fn a_claim_without_the_null_condition_is_noticed() {
    WITHOUT_NULL.is_noticed();
}

#[test]
fn a_release_by_key_is_noticed() {
    RELEASE_BY_KEY.is_noticed();
}

#[test]
fn a_release_that_nulls_the_holder_is_noticed() {
    RELEASE_BY_NULL.is_noticed();
}

#[test]
fn a_run_record_written_on_loss_is_noticed() {
    RECORD_OF_A_LOSS.is_noticed();
}

#[test]
fn a_missing_guard_is_noticed() {
    WITHOUT_GUARD.is_noticed();
}

#[test]
fn the_clients_clock_in_place_of_the_databases_is_noticed() {
    CLIENT_CLOCK.is_noticed();
}

#[test]
fn a_takeover_that_does_not_say_whom_it_displaced_is_noticed() {
    SILENT_TAKEOVER.is_noticed();
}

impl Fault {
    fn tests(&self) -> Vec<&'static str> {
        let failing = self.fail.iter().map(|(test, _)| *test);
        failing.chain(self.pass.iter().copied()).collect()
    }

    #[track_caller]
    fn is_noticed(&self) {
        let report = run(self.edits, &self.tests());
        for (test, words) in self.fail {
            report.assert_failed(test, words);
        }
        for test in self.pass {
            report.assert_passed(test);
        }
    }
}

/// Runs the named tests in a copy of the source with these edits.
fn run(edits: &[(&str, &str, &str)], tests: &[&str]) -> Report {
    // One copy, one after the other: what did not change is not compiled again, and nobody waits for cargo's lock.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);

    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("the target folder");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutation");
    let (original, copy) = (Path::new(env!("CARGO_MANIFEST_DIR")), folder.join("source"));
    for name in SOURCE {
        renew(&original.join(name), &copy.join(name));
    }
    // As a member of a workspace the copy is another package to cargo. A package at the root of its own would be taken
    // for the original, and its faulty library would replace the one that the documentation's examples run with.
    renew(&original.join("Cargo.lock"), &folder.join("Cargo.lock"));
    fs::write(folder.join("Cargo.toml"), "[workspace]\nmembers = [\"source\"]\nresolver = \"3\"\n")
        .expect("a manifest");
    for (file, from, to) in edits {
        let path = copy.join(file);
        let text = fs::read_to_string(&path).expect("a file of the copy");
        assert_eq!(text.matches(from).count(), 1, "{file} has changed, so this check must too; it looks for: {from}");
        fs::write(path, text.replace(from, to)).expect("a writable copy");
    }

    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["test", "--offline", "--locked", "--no-fail-fast", "--lib", "--test", "it", "--", "--exact"]);
    cargo.args(tests).current_dir(&copy).stdin(Stdio::null());
    cargo.env("CARGO_BUILD_BUILD_DIR", target).env("CARGO_TARGET_DIR", folder.join("target"));
    cargo.env("CARGO_TERM_COLOR", "never").env("RUST_BACKTRACE", "0").env_remove("RUST_TEST_NOCAPTURE");
    let output = cargo.output().expect("cargo starts");
    Report::new(&String::from_utf8_lossy(&output.stdout), &String::from_utf8_lossy(&output.stderr))
}

/// Makes the copy equal to the source, and touches only what differs, so that cargo builds nothing needlessly.
fn renew(source: &Path, copy: &Path) {
    if source.is_dir() {
        fs::create_dir_all(copy).expect("a folder of the copy");
        let entries = |folder| fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
        for stale in entries(copy).filter(|entry| !source.join(entry.file_name()).exists()) {
            remove(&stale.path());
        }
        // What npm installs for the TypeScript peer is large, and no test here needs it.
        let installed = |name: &OsStr| name == "node_modules" || name == "node";
        for entry in entries(source).filter(|entry| !installed(&entry.file_name())) {
            renew(&entry.path(), &copy.join(entry.file_name()));
        }
    } else if source.exists() {
        let wanted = fs::read(source).expect("a file of the source");
        if fs::read(copy).ok().as_ref() != Some(&wanted) {
            fs::create_dir_all(copy.parent().expect("a folder")).expect("a folder of the copy");
            fs::write(copy, wanted).expect("a writable copy");
        }
    }
}

fn remove(path: &Path) {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("a writable copy");
}

/// What the tests of the copy said.
struct Report {
    /// By name: whether it passed.
    passed: BTreeMap<String, bool>,
    /// By name: what a failed test printed.
    messages: BTreeMap<String, String>,
    whole: String,
}

impl Report {
    fn new(stdout: &str, stderr: &str) -> Self {
        let mut report = Self {
            passed: BTreeMap::new(),
            messages: BTreeMap::new(),
            whole: format!("--- stdout of the tests with the fault:\n{stdout}\n--- stderr:\n{stderr}"),
        };
        let mut speaker = None;
        for line in stdout.lines() {
            if let Some((test, verdict)) = line.strip_prefix("test ").and_then(|line| line.rsplit_once(" ... ")) {
                report.passed.insert(test.to_owned(), verdict == "ok");
            } else if let Some(test) = line.strip_prefix("---- ").and_then(|line| line.strip_suffix(" stdout ----")) {
                speaker = Some(report.messages.entry(test.to_owned()).or_default());
            } else if line == "failures:" {
                speaker = None;
            } else if let Some(message) = &mut speaker {
                message.push_str(line);
                message.push('\n');
            }
        }
        report
    }

    #[track_caller]
    fn assert_passed(&self, test: &str) {
        assert_eq!(self.passed.get(test), Some(&true), "{test} should pass\n{}", self.whole);
    }

    #[track_caller]
    fn assert_failed(&self, test: &str, words: &str) {
        assert_eq!(self.passed.get(test), Some(&false), "{test} should fail\n{}", self.whole);
        let message = self.messages.get(test).map_or("", String::as_str);
        assert!(message.contains(words), "{test} should fail with {words:?}\n{}", self.whole);
    }
}
