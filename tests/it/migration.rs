//! The cleanup removes the orphaned `global` row and nothing else, ever.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use sync_lock::migrate::{MigrateError, Migration, MigrationReport, migrate};
use sync_lock::{LockError, LockState, MaxAge};

use crate::support::{Role, TestDatabase, expect_exit, race, seconds, sync_lock};

const UP: &str = include_str!("../../migrations/20261130000000_remove_orphaned_global_sync_lock/up.sql");
const PRISMA: &str = include_str!("../../migrations/20261130000000_remove_orphaned_global_sync_lock/migration.sql");
const RECORDED: &str = "SELECT count(*) FROM __diesel_schema_migrations";

/// Both tables as Prisma makes them, no bookkeeping yet, and rows that are nobody's business.
fn before_the_first_migration() -> TestDatabase {
    let database = TestDatabase::new();
    database.execute("DROP TABLE __diesel_schema_migrations");
    database.plant("issue-sync", Some("running"), 5.0);
    database.plant("reconcile", Some("expired"), 9_000.0);
    database.plant("groomer", None, 5.0);
    database.plant("Global", Some("expired too"), 9_000.0);
    database.plant("global ", None, 9_000.0);
    database
}

fn others(database: &TestDatabase) -> Vec<(String, Option<String>)> {
    database.locks_held().into_iter().filter(|(key, _)| key != "global").collect()
}

fn run(database: &TestDatabase, migration: &Migration) -> Result<MigrationReport, MigrateError> {
    migrate(&mut database.connect(), migration)
}

fn bookkeeping(database: &TestDatabase) -> bool {
    database.holds("SELECT to_regclass('__diesel_schema_migrations') IS NOT NULL AS holds")
}

#[test]
fn an_orphaned_or_expired_global_row_is_removed_and_reported_and_every_other_row_stays() {
    for (holder, age, state) in [(None, 5.0, LockState::Orphaned), (Some("crashed"), 1801.0, LockState::Expired)] {
        let database = before_the_first_migration();
        let untouched = others(&database);
        database.plant("global", holder, age);
        let report = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap();
        let removed = report.removed.expect("the row that was removed");
        assert_eq!((removed.holder.as_ref().map(sync_lock::RunId::as_str), removed.state), (holder, state));
        assert!((age..age + 60.0).contains(&removed.age_seconds));
        assert_eq!(report.applied, ["20261130000000"]);
        assert_eq!(database.locks_held(), untouched);
        let again = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap();
        assert_eq!(again, MigrationReport::default(), "running again is harmless");
        assert_eq!(database.count(RECORDED), 1);
    }
}

#[test]
fn without_a_global_row_the_migration_is_recorded_and_nothing_is_removed() {
    let database = before_the_first_migration();
    let untouched = database.locks_held();
    let report = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap();
    assert_eq!((report.removed, report.applied.len()), (None, 1));
    assert_eq!(database.locks_held(), untouched);
}

#[test]
fn a_live_global_row_stays_is_named_and_keeps_everything_else_as_it_is() {
    let database = before_the_first_migration();
    for age in [1_700.0, -3_600.0] {
        database.plant("global", Some("old replica"), age);
        let before = database.locks_held();
        let error = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap_err();
        let MigrateError::Live(row) = error else { panic!("{error:?}") };
        assert_eq!(row.holder.expect("a holder").as_str(), "old replica");
        assert_eq!(database.locks_held(), before);
        assert!(!bookkeeping(&database), "nothing was recorded");
    }
}

#[test]
fn a_row_that_a_late_replica_made_again_goes_too() {
    let database = TestDatabase::new();
    database.plant("global", Some("late replica"), 3_600.0);
    let report = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap();
    assert_eq!((report.applied.len(), report.removed.is_some()), (0, true));
    assert_eq!(database.locks_held(), []);
}

#[test]
fn the_configured_maximum_age_decides_what_is_orphaned() {
    let database = before_the_first_migration();
    database.plant("global", Some("peer"), 100.0);
    assert!(matches!(run(&database, &Migration::new(seconds(101.0))), Err(MigrateError::Live(_))));
    database.plant("global", Some("peer"), 100.0);
    assert!(run(&database, &Migration::new(seconds(99.5))).unwrap().removed.is_some());
    database.plant("global", Some("peer"), 3_000.0);
    assert!(matches!(run(&database, &Migration::new(seconds(1e9))), Err(MigrateError::Live(_))));
}

#[test]
fn waiting_ends_as_soon_as_the_live_row_is_gone_and_is_bounded() {
    let database = before_the_first_migration();
    database.plant("global", Some("old replica"), 10.0);
    let migration = |wait| Migration::new(MaxAge::DEFAULT).wait(wait);
    let started = Instant::now();
    assert!(matches!(run(&database, &migration(Duration::from_millis(700))), Err(MigrateError::Live(_))));
    assert!(started.elapsed() >= Duration::from_millis(700));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| run(&database, &migration(Duration::from_hours(1))));
        database.execute(r#"DELETE FROM "sync_lock" WHERE "id" = 'global'"#);
        assert_eq!(waiting.join().unwrap().unwrap().applied.len(), 1);
    });
}

#[test]
fn both_tools_run_the_same_statement() {
    assert_eq!(UP, PRISMA);
    assert_eq!(UP.matches(';').count(), 1, "one statement survives every way of splitting");
}

#[test]
fn the_statement_alone_keeps_a_live_row_and_counts_thirty_minutes() {
    let database = before_the_first_migration();
    let untouched = others(&database);
    for (age, stays) in [(1_799.0 - 60.0, true), (1_801.0, false), (-60.0, true)] {
        database.plant("global", Some("peer"), age);
        database.execute(PRISMA);
        assert_eq!(database.keys_held().contains(&"global".to_owned()), stays, "{age}");
        database.execute(r#"DELETE FROM "sync_lock" WHERE "id" = 'global'"#);
    }
    database.plant("global", None, 1.0);
    database.execute(PRISMA);
    database.execute(PRISMA);
    assert_eq!(database.locks_held(), untouched);
}

#[test]
fn the_statement_never_raises_whatever_the_setting_says() {
    let database = before_the_first_migration();
    for odd in ["", "30m", "-1", "1e9", "9999999999999999999999", "Infinity", " 5"] {
        database.plant("global", Some("peer"), 60.0);
        database.execute(&format!("SET sync_lock.max_age_seconds = '{odd}'; {PRISMA}"));
        assert!(database.keys_held().contains(&"global".to_owned()), "{odd:?} counts as 30 minutes");
    }
    database.execute(r#"UPDATE "sync_lock" SET "acquiredAt" = 'infinity' WHERE "id" = 'global'"#);
    database.execute(PRISMA);
    assert!(database.keys_held().contains(&"global".to_owned()));
    database.execute(r#"UPDATE "sync_lock" SET "acquiredAt" = '-infinity' WHERE "id" = 'global'"#);
    database.execute(PRISMA);
    assert!(!database.keys_held().contains(&"global".to_owned()));
}

#[test]
fn whichever_tool_runs_second_finds_nothing_to_do() {
    let database = before_the_first_migration();
    database.plant("global", None, 5.0);
    database.execute(PRISMA);
    let report = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap();
    assert_eq!((report.removed, report.applied.len()), (None, 1));
    database.execute(PRISMA);
    assert_eq!(database.count(RECORDED), 1);
}

#[test]
fn eight_replicas_that_migrate_at_once_all_succeed_and_one_of_them_does_the_work() {
    for _ in 0..10 {
        let database = before_the_first_migration();
        database.plant("global", Some("crashed"), 3_600.0);
        let reports = race(&database, 8, |_, conn| migrate(conn, &Migration::new(MaxAge::DEFAULT)).unwrap());
        assert_eq!(reports.iter().filter(|report| report.removed.is_some()).count(), 1);
        assert_eq!(reports.iter().filter(|report| !report.applied.is_empty()).count(), 1);
        assert_eq!(database.count(RECORDED), 1);
    }
}

#[test]
fn eight_processes_that_migrate_at_once_all_succeed() {
    let database = before_the_first_migration();
    database.plant("global", Some("crashed"), 3_600.0);
    let children: Vec<_> = (0..8)
        .map(|_| {
            let mut command = sync_lock(&database.url(), &["migrate"]);
            command.stdout(std::process::Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let outputs: Vec<_> = children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    let text = outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout)).collect::<String>();
    assert_eq!(text.matches("removed the row \"global\": held by crashed").count(), 1, "{text}");
    assert_eq!(database.count(RECORDED), 1);
}

#[test]
fn a_row_that_a_transaction_has_locked_is_waited_for_ten_seconds_at_most() {
    let database = before_the_first_migration();
    database.plant("global", Some("crashed"), 3_600.0);
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; SELECT 1 FROM "sync_lock" WHERE "id" = 'global' FOR UPDATE"#).unwrap();
    let started = Instant::now();
    let error = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap_err();
    assert!(matches!(error, MigrateError::Locked(_)), "{error:?}");
    assert!(started.elapsed() < Duration::from_secs(20));
    assert!(!bookkeeping(&database));
    rival.batch_execute("ROLLBACK").unwrap();
    assert!(run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap().removed.is_some());
}

#[test]
fn a_stricter_isolation_default_does_not_disturb_concurrent_migrations() {
    let database = before_the_first_migration();
    database.plant("global", Some("crashed"), 3_600.0);
    database.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''serializable''', current_database()); END $$",
    );
    let reports = race(&database, 8, |_, conn| migrate(conn, &Migration::new(MaxAge::DEFAULT)).unwrap());
    assert_eq!(reports.iter().filter(|report| report.removed.is_some()).count(), 1);
}

#[test]
fn a_dry_run_says_what_would_happen_and_changes_nothing() {
    let database = before_the_first_migration();
    database.plant("global", None, 5.0);
    let before = database.locks_held();
    let report = run(&database, &Migration::new(MaxAge::DEFAULT).dry_run(true)).unwrap();
    assert_eq!((report.applied.len(), report.removed.is_some()), (1, true));
    assert_eq!(database.locks_held(), before);
    assert!(!bookkeeping(&database));
    let (stdout, _) = expect_exit(&mut sync_lock(&database.url(), &["migrate", "--dry-run"]), 0);
    assert!(stdout.contains("would have removed the row \"global\": without a holder"), "{stdout}");
    assert_eq!(database.locks_held(), before);
}

#[test]
fn without_the_tables_nothing_is_made() {
    let database = TestDatabase::empty();
    let error = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap_err();
    assert!(matches!(&error, MigrateError::Lock(LockError::MissingTable(table)) if table == "sync_lock"), "{error:?}");
    assert!(database.holds("SELECT count(*) = 0 AS holds FROM pg_class WHERE relnamespace = 'public'::regnamespace"));
}

#[test]
fn bootstrap_makes_the_tables_of_the_contract_once() {
    let database = TestDatabase::empty();
    let bootstrap = Migration::new(MaxAge::DEFAULT).bootstrap(true);
    let reports = race(&database, 8, |_, conn| migrate(conn, &bootstrap).unwrap());
    assert_eq!(reports.iter().filter(|report| report.bootstrapped).count(), 1);
    let columns: Vec<String> = diesel::sql_query(
        r#"SELECT concat_ws(' ', table_name, column_name, data_type, datetime_precision, is_nullable, column_default) AS "column"
           FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> '__diesel_schema_migrations'
           ORDER BY table_name, ordinal_position"#,
    )
    .load::<Column>(&mut database.connect())
    .unwrap()
    .into_iter()
    .map(|row| row.column)
    .collect();
    assert_eq!(
        columns,
        [
            "IssueSyncRun id text NO",
            "IssueSyncRun status text NO",
            "IssueSyncRun reposFetched integer NO 0",
            "IssueSyncRun syncedCount integer NO 0",
            "IssueSyncRun errorMessage text YES",
            "IssueSyncRun notes text YES",
            "IssueSyncRun syncType text NO 'scheduled'::text",
            "IssueSyncRun startedAt timestamp with time zone 6 NO CURRENT_TIMESTAMP",
            "IssueSyncRun completedAt timestamp with time zone 6 YES",
            "sync_lock id text NO",
            "sync_lock syncRunId text YES",
            "sync_lock acquiredAt timestamp with time zone 6 NO CURRENT_TIMESTAMP",
        ]
    );
}

#[derive(QueryableByName)]
struct Column {
    #[diesel(sql_type = diesel::sql_types::Text)]
    column: String,
}

#[test]
fn bootstrap_refuses_a_database_that_prisma_manages() {
    let database = TestDatabase::empty();
    database.execute("CREATE TABLE _prisma_migrations (id text)");
    let error = run(&database, &Migration::new(MaxAge::DEFAULT).bootstrap(true)).unwrap_err();
    assert!(matches!(error, MigrateError::ManagedByPrisma), "{error:?}");
    expect_exit(&mut sync_lock(&database.url(), &["migrate", "--bootstrap"]), 78);
    assert!(database.holds("SELECT to_regclass('sync_lock') IS NULL AS holds"));
}

#[test]
fn a_table_of_the_same_name_with_other_columns_is_left_alone() {
    for other in [
        r#"CREATE TABLE "sync_lock" ("id" TEXT PRIMARY KEY, "owner" TEXT)"#,
        r#"CREATE TABLE "sync_lock" ("id" BIGINT, "syncRunId" TEXT, "acquiredAt" TIMESTAMPTZ)"#,
        r#"CREATE TABLE "sync_lock" ("id" TEXT, "syncRunId" UUID, "acquiredAt" TIMESTAMPTZ)"#,
        r#"CREATE TABLE "sync_lock" ("id" TEXT, "syncRunId" TEXT, "acquiredAt" TEXT)"#,
        r#"CREATE TABLE "sync_lock" ("id" TEXT, "syncrunid" TEXT, "acquiredat" TIMESTAMPTZ)"#,
    ] {
        let database = before_the_first_migration();
        database.execute(&format!(r#"DROP TABLE "sync_lock"; {other}; INSERT INTO "sync_lock" ("id") SELECT '0'"#));
        let error = run(&database, &Migration::new(MaxAge::DEFAULT)).unwrap_err();
        assert!(matches!(error, MigrateError::Lock(LockError::WrongTable { .. })), "{other}: {error:?}");
        expect_exit(&mut sync_lock(&database.url(), &["migrate"]), 78);
        assert!(!bookkeeping(&database));
        assert_eq!(database.count(r#"SELECT count(*) FROM "sync_lock""#), 1);
    }
}

#[test]
fn a_role_with_row_privileges_only_is_told_what_migrate_needs() {
    let database = before_the_first_migration();
    database.plant("global", None, 5.0);
    let role = Role::new(&database);
    role.grant("USAGE ON SCHEMA public");
    role.grant(r#"SELECT, INSERT, UPDATE, DELETE ON "sync_lock", "IssueSyncRun""#);
    let (_, stderr) = expect_exit(&mut sync_lock(&role.url(), &["migrate"]), 77);
    assert!(stderr.contains("CREATE on SCHEMA public"), "{stderr}");
    role.grant("CREATE ON SCHEMA public");
    expect_exit(&mut sync_lock(&role.url(), &["migrate"]), 0);
    assert!(!database.keys_held().contains(&"global".to_owned()));
}

#[test]
fn a_migration_that_is_killed_can_be_run_again() {
    let database = before_the_first_migration();
    database.plant("global", Some("crashed"), 3_600.0);
    let mut rival = database.connect();
    rival.batch_execute(r#"BEGIN; SELECT 1 FROM "sync_lock" WHERE "id" = 'global' FOR UPDATE"#).unwrap();
    let mut child = sync_lock(&database.url(), &["migrate"]).spawn().unwrap();
    crate::support::poll("a migration that waits for the row", || database.waiting() > 0);
    child.kill().unwrap();
    child.wait().unwrap();
    rival.batch_execute("ROLLBACK").unwrap();
    expect_exit(&mut sync_lock(&database.url(), &["migrate"]), 0);
    assert!(!database.keys_held().contains(&"global".to_owned()));
    assert_eq!(database.count(RECORDED), 1);
}

#[test]
fn bootstrap_leaves_a_database_with_only_one_of_the_tables_alone() {
    for (there, missing) in [("sync_lock", "IssueSyncRun"), ("IssueSyncRun", "sync_lock")] {
        let database = TestDatabase::new();
        database.execute(&format!(r#"DROP TABLE "{missing}""#));
        let (_, stderr) = expect_exit(&mut sync_lock(&database.url(), &["migrate", "--bootstrap"]), 78);
        assert!(stderr.contains(&format!(r#""{there}" is there and "{missing}" is not"#)), "{stderr}");
    }
}

#[test]
fn a_bookkeeping_table_that_somebody_has_locked_is_try_again_and_not_a_bug() {
    let database = TestDatabase::new();
    let mut rival = database.connect();
    rival.batch_execute("BEGIN; LOCK TABLE __diesel_schema_migrations IN EXCLUSIVE MODE").unwrap();
    expect_exit(&mut sync_lock(&database.url(), &["migrate"]), 75);
}
