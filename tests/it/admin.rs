//! Release, force-release, doctor, completions.

use serde_json::Value;
use sync_lock::blocking::acquire_lock;
use sync_lock::{MaxAge, SyncType};

use crate::support::{Role, TestDatabase, expect_exit, sync_lock, won};

#[test]
fn a_release_frees_the_run_and_closes_its_record_and_nothing_else() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let run = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    let other = won(acquire_lock(&mut conn, SyncType::Automation, MaxAge::DEFAULT).unwrap());
    let mut release = sync_lock(&database.url(), &["release", run.as_str()]);
    assert_eq!(expect_exit(&mut release, 0).0, format!("freed what {run} held\n"));
    assert_eq!(expect_exit(&mut release, 0).0, format!("{run} holds nothing\n"));
    assert_eq!(database.keys_held(), ["automation"]);
    assert_eq!(database.run(&run).error_message.as_deref(), Some("the lock was released by an operator"));
    assert_eq!(database.run(&other).status, "running");
    expect_exit(&mut sync_lock(&database.url(), &["release", ""]), 64);
}

#[test]
fn a_key_is_forced_free_only_if_its_holder_is_still_the_one_that_was_seen() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let seen = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    database.back_date(3_600.0);
    let next = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    let force = |key: &str, holder: &str| sync_lock(&database.url(), &["force-release", key, "--holder", holder]);
    let (_, stderr) = expect_exit(&mut force("reconcile", seen.as_str()), 75);
    assert!(stderr.contains("stays as it is"), "{stderr}");
    expect_exit(&mut force("automation", next.as_str()), 75);
    assert_eq!(database.keys_held(), ["reconcile"]);
    assert_eq!(database.run(&next).status, "running", "a record is not closed over a key that stays");
    let (stdout, _) = expect_exit(&mut force("reconcile", next.as_str()), 0);
    assert_eq!(stdout, format!("freed reconcile, which {next} held\n"));
    assert_eq!(database.locks_held(), []);
    assert_eq!(database.run(&next).status, "failed");
    database.plant("global", Some("old replica"), 5.0);
    expect_exit(&mut force("global", "old replica"), 0);
    expect_exit(&mut sync_lock(&database.url(), &["force-release", "reconcile"]), 64);
}

/// What doctor finds, as severity and text, and its exit code asserted.
#[track_caller]
fn doctor(url: &str, code: i32) -> Vec<(String, String)> {
    let (stdout, stderr) = expect_exit(&mut sync_lock(url, &["doctor", "--json"]), code);
    assert_eq!(stderr, "");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let text = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let findings = report.as_array().unwrap().iter();
    findings
        .map(|finding| (text(finding, "severity"), text(finding, "what") + " / " + &text(finding, "remedy")))
        .collect()
}

fn found(findings: &[(String, String)], severity: &str, words: &str) -> bool {
    findings.iter().any(|(found, text)| found == severity && text.contains(words))
}

#[test]
fn doctor_finds_nothing_wrong_with_a_database_that_is_right() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("peer"), 5.0);
    let findings = doctor(&database.url(), 0);
    assert!(found(&findings, "note", "maximum age 1800s, renewed every 30s"), "{findings:?}");
    let (stdout, _) = expect_exit(&mut sync_lock(&database.url(), &["doctor"]), 0);
    assert!(stdout.ends_with("nothing is wrong\n"), "{stdout}");
}

#[test]
fn doctor_finds_leftover_and_live_global_rows_and_rows_from_the_future() {
    let database = TestDatabase::new();
    database.plant("global", Some("crashed"), 7_200.0);
    assert!(found(&doctor(&database.url(), 1), "warning", "run `sync-lock migrate`"));
    database.plant("global", Some("old\u{1b}[2J replica"), 5.0);
    let findings = doctor(&database.url(), 2);
    assert!(found(&findings, "problem", "excludes nothing here"), "{findings:?}");
    assert!(findings.iter().all(|(_, text)| !text.contains('\u{1b}')));
    database.execute(r#"TRUNCATE "sync_lock""#);
    database.plant("reconcile", Some("ahead"), -3_600.0);
    database.plant("automation", Some("crashed"), 7_200.0);
    let findings = doctor(&database.url(), 1);
    assert!(found(&findings, "warning", "\"reconcile\" is 3"), "{findings:?}");
    assert!(found(&findings, "note", "\"automation\" is expired"), "{findings:?}");
}

#[test]
fn doctor_finds_a_time_zone_in_which_peers_misjudge_ages_and_columns_without_one() {
    let database = TestDatabase::new();
    database.execute("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = ''America/New_York''', current_database()); END $$");
    assert!(found(&doctor(&database.url(), 1), "warning", "the time zone of this database is America/New_York"));
    database.execute(
        r#"ALTER TABLE "sync_lock" ALTER "acquiredAt" TYPE TIMESTAMP(3);
           DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET TimeZone = ''UTC''', current_database()); END $$"#,
    );
    assert!(found(&doctor(&database.url(), 0), "note", "TYPE TIMESTAMPTZ(6)"));
}

#[test]
fn doctor_finds_a_clock_that_is_off() {
    let database = TestDatabase::new();
    database.execute(
        "CREATE SCHEMA shifted;
         CREATE FUNCTION shifted.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
           AS $$ SELECT pg_catalog.clock_timestamp() + interval '45 minutes' $$;
         DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = shifted, pg_catalog, public', current_database()); END $$",
    );
    assert!(found(&doctor(&database.url(), 1), "warning", "is +2700."), "{:?}", doctor(&database.url(), 1));
}

#[test]
fn doctor_finds_missing_tables_wrong_tables_and_missing_privileges() {
    let database = TestDatabase::empty();
    assert!(found(&doctor(&database.url(), 2), "problem", "\"sync_lock\" does not exist"));
    let database = TestDatabase::new();
    database.execute(r#"ALTER TABLE "sync_lock" DROP COLUMN "acquiredAt", ADD "acquiredAt" TEXT"#);
    assert!(found(&doctor(&database.url(), 2), "problem", "no column \"acquiredAt\" of type"));
    let database = TestDatabase::new();
    let role = Role::new(&database);
    role.grant("USAGE ON SCHEMA public");
    role.grant(r#"SELECT, INSERT, UPDATE ON "sync_lock", "IssueSyncRun""#);
    assert!(found(&doctor(&role.url(), 2), "problem", "lacks DELETE on TABLE sync_lock"));
    role.grant(r#"DELETE ON "sync_lock""#);
    assert!(found(&doctor(&role.url(), 0), "note", "CREATE on SCHEMA public, which only `migrate` needs"));
}

#[test]
fn doctor_and_migrate_find_a_table_that_every_claim_would_fail_on() {
    for (change, words) in [
        (r#"ALTER TABLE "sync_lock" DROP CONSTRAINT "sync_lock_pkey""#, "no column \"id\" of type PRIMARY KEY"),
        (r#"ALTER TABLE "IssueSyncRun" RENAME "status" TO "state""#, "no column \"status\" of type TEXT"),
        (r#"ALTER TABLE "IssueSyncRun" ALTER "startedAt" TYPE TEXT"#, "no column \"startedAt\" of type TIMESTAMPTZ"),
    ] {
        let database = TestDatabase::new();
        database.execute(change);
        let findings = doctor(&database.url(), 2);
        assert!(found(&findings, "problem", words), "{findings:?}");
        let (_, stderr) = expect_exit(&mut sync_lock(&database.url(), &["migrate"]), 78);
        assert!(stderr.contains(words), "{stderr}");
        expect_exit(&mut sync_lock(&database.url(), &["run", "reconcile", "--", "true"]), 78);
    }
}

#[test]
fn doctor_finds_a_read_only_server_and_a_maximum_age_too_short_for_a_lease() {
    let database = TestDatabase::new();
    let mut command = sync_lock(&database.url(), &["doctor"]);
    let (stdout, _) = expect_exit(command.env("DISPATCH_SYNC_LOCK_MAX_AGE_MS", "100"), 2);
    assert!(stdout.starts_with("problem: a maximum age of 100ms is too short"), "{stdout}");
    database.execute("DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = on', current_database()); END $$");
    assert!(found(&doctor(&database.url(), 2), "problem", "the server takes no writes"));
}

#[test]
fn completions_are_printed_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (stdout, _) = expect_exit(&mut sync_lock("", &["completions", shell]), 0);
        assert!(stdout.contains("force-release"), "{shell}");
    }
    expect_exit(&mut sync_lock("", &["completions", "cmd"]), 64);
}
