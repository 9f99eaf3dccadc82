//! Exit codes, output and bad input.

use std::process::Command;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use serde_json::{Value, json};
use sync_lock::blocking::acquire_lock;
use sync_lock::private_server::{Durability, Server};
use sync_lock::{LockError, MaxAge, SyncType};

use crate::support::{Role, TestDatabase, expect_exit, is_win, sync_lock};

/// One line on stderr, and nothing that was secret.
#[track_caller]
fn complaint(command: &mut Command, code: i32) -> String {
    let (stdout, stderr) = expect_exit(command, code);
    assert_eq!(stdout, "");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(!stderr.contains("hunter2"), "{stderr}");
    stderr
}

#[test]
fn status_shows_every_state_to_people_and_machines() {
    let database = TestDatabase::new();
    let (stdout, _) = expect_exit(&mut sync_lock(&database.url(), &["status"]), 0);
    assert_eq!(stdout, "no locks (maximum age 30m)\n");

    database.execute(
        r#"INSERT INTO "sync_lock" VALUES
             ('a-held', 'run 1', now() - interval '90 s'), ('b-expired', 'run 2', '2020-01-02 03:04:05.678901+00'),
             ('c-orphaned', NULL, now()), ('d-future', 'run 4', now() + interval '1 h'),
             ('e-endless', 'run 5', 'infinity'), ('f-ancient', 'run 6', '4000-01-01 BC'),
             ('g-far', 'run 7', '290000-01-01'), ('global', 'old replica', now())"#,
    );
    let (stdout, stderr) = expect_exit(&mut sync_lock(&database.url(), &["status", "--json"]), 0);
    assert_eq!(stderr, "");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["max_age_ms"], 1_800_000);
    let locks = report["locks"].as_array().unwrap();
    let states: Vec<_> = locks.iter().map(|lock| lock["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["held", "expired", "orphaned", "future", "future", "expired", "future", "held"]);
    assert!((90_000..120_000).contains(&locks[0]["age_ms"].as_i64().unwrap()));
    assert_eq!(locks[1]["acquired_at"], "2020-01-02T03:04:05.678901Z");
    assert_eq!(locks[2]["holder"], Value::Null);
    assert!(locks[3]["age_ms"].as_i64().unwrap() < -3_500_000);
    assert_eq!((&locks[4]["acquired_at"], &locks[4]["age_ms"]), (&Value::Null, &Value::Null));
    assert_eq!(locks[6]["acquired_at"], Value::Null, "later than a date can be shown");
    assert_eq!(locks[7]["legacy"], true);
    assert_eq!(
        locks[0].as_object().unwrap().keys().collect::<Vec<_>>(),
        ["acquired_at", "age_ms", "holder", "key", "state"]
    );

    let (stdout, _) = expect_exit(&mut sync_lock(&database.url(), &["status"]), 0);
    assert_eq!(stdout.lines().count(), 1 + 8 + 1, "{stdout}");
    assert!(stdout.contains("held (retired key)"), "{stdout}");
}

#[test]
fn status_judges_by_the_maximum_age_of_the_environment() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("peer"), 60.0);
    for (value, state) in [("59000", "expired"), (" 120000 ", "held"), ("", "held")] {
        let mut command = sync_lock(&database.url(), &["status", "--json"]);
        let (stdout, stderr) = expect_exit(command.env("DISPATCH_SYNC_LOCK_MAX_AGE_MS", value), 0);
        let report: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!((report["locks"][0]["state"].as_str(), stderr.as_str()), (Some(state), ""), "{value:?}");
    }
}

#[test]
fn an_odd_maximum_age_keeps_the_default_and_is_reported_once_by_name() {
    let database = TestDatabase::new();
    for odd in ["30m", "1_800_000", "1e6", "0", "-5", "99999999999999999999"] {
        let mut command = sync_lock(&database.url(), &["status", "--json"]);
        let (stdout, stderr) = expect_exit(command.env("DISPATCH_SYNC_LOCK_MAX_AGE_MS", odd), 0);
        assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["max_age_ms"], 1_800_000, "{odd}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.contains("WARN DISPATCH_SYNC_LOCK_MAX_AGE_MS"), "{stderr}");
    }
}

#[test]
fn a_holder_cannot_write_to_the_terminal() {
    let database = TestDatabase::new();
    database.plant("reconcile", Some("\u{1b}[2Jgone\n"), 5.0);
    let (stdout, _) = expect_exit(&mut sync_lock(&database.url(), &["status"]), 0);
    assert!(stdout.contains(r#""\u{1b}[2Jgone\n""#), "{stdout}");
    let (stdout, _) = expect_exit(&mut sync_lock(&database.url(), &["status", "--json"]), 0);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(report["locks"][0]["holder"], json!("\u{1b}[2Jgone\n"));
}

#[test]
fn wrong_usage_exits_64_and_help_exits_0() {
    for arguments in [&["nonsense"][..], &[], &["migrate", "--wait", "soon"], &["status", "--jason"], &["migrate", "x"]]
    {
        let (stdout, stderr) = expect_exit(&mut sync_lock("", arguments), 64);
        assert_eq!(stdout, "");
        assert!(stderr.contains("--help") || stderr.contains("Usage: "), "{stderr}");
    }
    let (stdout, _) = expect_exit(&mut sync_lock("", &["--help"]), 0);
    for code in ["0  ", "64", "69", "70", "75", "77", "78"] {
        assert!(stdout.lines().any(|line| line.trim_start().starts_with(code)), "{code}: {stdout}");
    }
    expect_exit(&mut sync_lock("", &["--version"]), 0);
}

#[test]
fn a_database_url_that_cannot_be_used_exits_78_and_says_what_to_do() {
    for (url, hint) in [
        ("", "DATABASE_URL cannot be used: it is empty"),
        ("  ", "it is empty"),
        ("mysql://me:hunter2@h/db", "postgresql://"),
        ("me:hunter2@h", "postgresql://"),
        ("postgresql://me:hunter2@h:port/db", "not a URL"),
        ("postgresql://me:hunter2@h/db?conection_limit=3", "\"conection_limit\""),
        ("postgresql://me:hunter2@h/db?sslmode=maybe", "\"sslmode\""),
    ] {
        let stderr = complaint(&mut sync_lock(url, &["status"]), 78);
        assert!(stderr.contains(hint), "{url}: {stderr}");
    }
    let stderr = complaint(sync_lock("", &["migrate"]).env_remove("DATABASE_URL").env("PGHOST", "/tmp"), 78);
    assert!(stderr.contains("DATABASE_URL is not set"), "{stderr}");
}

#[test]
fn the_alias_counts_only_where_database_url_is_unset() {
    let database = TestDatabase::new();
    let mut alias = sync_lock("", &["status"]);
    expect_exit(alias.env_remove("DATABASE_URL").env("DISPATCH_DATABASE_URL", database.url()), 0);
    let mut empty = sync_lock("", &["status"]);
    complaint(empty.env("DISPATCH_DATABASE_URL", database.url()), 78);
}

#[test]
fn no_server_exits_69_and_an_unknown_database_or_role_78() {
    let stderr = complaint(&mut sync_lock("postgresql://me:hunter2@127.0.0.1:1/db", &["status"]), 69);
    assert!(stderr.contains("cannot be reached"), "{stderr}");
    let database = TestDatabase::new();
    let nowhere = database.url().replace(database.name(), "sync_lock_nowhere");
    assert!(complaint(&mut sync_lock(&nowhere, &["migrate"]), 78).contains("sync_lock_nowhere"));
    let nobody = database.url_as("sync_lock_nobody");
    assert!(complaint(&mut sync_lock(&nobody, &["status"]), 78).contains("sync_lock_nobody"));
}

#[test]
fn a_wrong_password_exits_78_and_is_not_shown() {
    // Only a server of its own lets a test decide who needs a password.
    let server = Server::private(Durability::Fast).unwrap();
    let mut admin = PgConnection::establish(&server.url("postgres")).unwrap();
    admin
        .batch_execute(
            "CREATE ROLE app LOGIN PASSWORD 'right';
             DO $$ BEGIN EXECUTE format('COPY (VALUES (%L), (%L)) TO %L', 'local all app scram-sha-256', 'local all all trust',
                current_setting('hba_file')); END $$;
             SELECT pg_reload_conf()",
        )
        .unwrap();
    let url = |password: &str| server.url("postgres").replace("postgres@", &format!("app:{password}@"));
    crate::support::poll("the new rules", || PgConnection::establish(&url("hunter2")).is_err());
    let stderr = complaint(&mut sync_lock(&url("hunter2"), &["status"]), 78);
    assert!(stderr.contains("password authentication failed"), "{stderr}");
    let stderr = complaint(&mut sync_lock(&url("right"), &["status"]), 78);
    assert!(stderr.contains("\"sync_lock\" does not exist"), "{stderr}");
}

#[test]
fn missing_tables_exit_78_and_say_what_to_run() {
    let database = TestDatabase::empty();
    for arguments in [&["status"][..], &["migrate"]] {
        let stderr = complaint(&mut sync_lock(&database.url(), arguments), 78);
        assert!(stderr.contains("--bootstrap"), "{stderr}");
    }
}

#[test]
fn a_live_global_row_exits_75_and_says_who_and_what_to_do() {
    let database = TestDatabase::new();
    database.plant("global", Some("old-replica-7"), 120.0);
    let stderr = complaint(&mut sync_lock(&database.url(), &["migrate"]), 75);
    assert!(stderr.contains("held by old-replica-7, 12") && stderr.contains("--wait"), "{stderr}");
    complaint(&mut sync_lock(&database.url(), &["migrate", "--wait", "600ms"]), 75);
    database.back_date(1_800.0);
    let (stdout, _) = expect_exit(&mut sync_lock(&database.url(), &["migrate", "--wait", "1h"]), 0);
    assert!(stdout.contains("removed the row \"global\": held by old-replica-7, 32m"), "{stdout}");
}

#[test]
fn a_missing_privilege_is_named_with_exit_77_and_by_the_library() {
    let database = TestDatabase::new();
    let role = Role::new(&database);
    assert!(complaint(&mut sync_lock(&role.url(), &["status"]), 77).contains("USAGE on SCHEMA public"));
    role.grant("USAGE ON SCHEMA public");
    assert!(complaint(&mut sync_lock(&role.url(), &["status"]), 77).contains("SELECT on TABLE sync_lock"));
    role.grant(r#"SELECT, UPDATE, DELETE ON "sync_lock""#);
    expect_exit(&mut sync_lock(&role.url(), &["status"]), 0);
    let mut conn = PgConnection::establish(&role.url()).unwrap();
    let claim = |conn: &mut PgConnection| acquire_lock(conn, SyncType::Reconcile, MaxAge::DEFAULT);
    let error = claim(&mut conn).unwrap_err();
    let LockError::MissingPrivilege { privilege, object } = error else { panic!("{error:?}") };
    assert_eq!((privilege.as_str(), object.as_str()), ("INSERT", "TABLE sync_lock"));
    role.grant(r#"INSERT ON "sync_lock""#);
    role.grant(r#"SELECT, INSERT, UPDATE ON "IssueSyncRun""#);
    assert!(is_win(&claim(&mut conn).unwrap()), "row privileges suffice");
}

#[test]
fn a_closed_pipe_ends_the_output_and_not_the_program() {
    let database = TestDatabase::new();
    let values: Vec<_> = (0..5_000).map(|n| format!("('key-{n}', 'run', now())")).collect();
    database.execute(&format!(r#"INSERT INTO "sync_lock" VALUES {}"#, values.join(", ")));
    let mut child = sync_lock(&database.url(), &["status"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_statement_that_the_server_cancels_is_try_again_and_not_a_bug() {
    let database = TestDatabase::new();
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; LOCK TABLE "sync_lock" IN ACCESS EXCLUSIVE MODE"#).unwrap();
    std::thread::scope(|scope| {
        for arguments in
            [&["status"][..], &["doctor"], &["release", "run"], &["force-release", "key", "--holder", "run"]]
        {
            let url = database.url();
            scope.spawn(move || {
                let stderr = complaint(&mut sync_lock(&url, arguments), 75);
                assert!(stderr.contains("cancelled the statement"), "{arguments:?}: {stderr}");
            });
        }
    });
}
