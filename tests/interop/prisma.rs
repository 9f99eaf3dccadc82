//! Prisma's own migration tool on the same folder, before and after ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use sync_lock::MaxAge;
use sync_lock::migrate::{MigrateError, Migration, MigrationReport, migrate};

use crate::peer::{folder, node};
use crate::support::{TestDatabase, poll};

const OURS: &str = "20261130000000_remove_orphaned_global_sync_lock";
const BASE: &str = "20250101000000_the_tables";

/// The remedy of `docs/compatibility.md`: what Prisma should leave alone.
const EXTERNAL: &str = "public.__diesel_schema_migrations";

/// An application's migration folder on a database that Prisma manages.
struct Prisma<'a> {
    database: &'a TestDatabase,
    migrations: PathBuf,
    external: bool,
    splits_at_semicolons: bool,
}

impl<'a> Prisma<'a> {
    /// With the migration that makes the tables, not yet applied. `None` where Prisma is missing.
    fn on(database: &'a TestDatabase) -> Option<Self> {
        node()?;
        let migrations = Path::new(env!("CARGO_TARGET_TMPDIR")).join(database.name());
        let prisma = Self { database, migrations, external: false, splits_at_semicolons: false };
        prisma.write(BASE, &fs::read_to_string(root().join("src/bootstrap.sql")).unwrap());
        fs::write(prisma.migrations.join("migration_lock.toml"), "provider = \"postgresql\"\n").unwrap();
        Some(prisma)
    }

    fn write(&self, name: &str, sql: &str) {
        fs::create_dir_all(self.migrations.join(name)).unwrap();
        fs::write(self.migrations.join(name).join("migration.sql"), sql).unwrap();
    }

    /// Adds our folder as it is, diesel's files and all.
    fn add_ours(&self) {
        fs::create_dir_all(self.migrations.join(OURS)).unwrap();
        for file in fs::read_dir(root().join("migrations").join(OURS)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), self.migrations.join(OURS).join(file.file_name())).unwrap();
        }
    }

    fn output(&self, arguments: &[&str]) -> Output {
        let mut command = node().expect("it was there before");
        command.arg("node_modules/prisma/build/index.js").args(arguments);
        command.env("DATABASE_URL", self.database.url()).env("PEER_MIGRATIONS", &self.migrations);
        command.env("PRISMA_SCHEMA_ENGINE_BINARY", folder().join("schema-engine-shim.mjs"));
        command.env("NO_COLOR", "1").env("PRISMA_HIDE_UPDATE_MESSAGE", "1").env("CHECKPOINT_DISABLE", "1");
        if self.external {
            command.env("PEER_EXTERNAL", EXTERNAL);
        }
        if self.splits_at_semicolons {
            command.env("SHIM_STOCK", "1");
        }
        command.output().expect("Prisma starts")
    }

    /// Runs a command line of Prisma and asserts its exit code.
    #[track_caller]
    fn run(&self, code: i32, arguments: &str) -> String {
        let output = self.output(&arguments.split(' ').collect::<Vec<_>>());
        let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert_eq!(output.status.code(), Some(code), "prisma {arguments}\n{said}");
        said
    }

    /// Whether Prisma sees a difference between the database and its schema.
    #[track_caller]
    fn drifts(&self, expected: bool) -> String {
        let code = if expected { 2 } else { 0 };
        self.run(code, "migrate diff --from-config-datasource --to-schema prisma/schema.prisma --exit-code")
    }

    fn ours(&self) -> Result<MigrationReport, MigrateError> {
        migrate(&mut self.database.connect(), &Migration::new(MaxAge::DEFAULT))
    }
}

impl Drop for Prisma<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.migrations);
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn prisma_first_then_ours_leaves_nothing_to_do_and_no_drift_but_diesels_own_table() {
    let database = TestDatabase::empty();
    let Some(mut prisma) = Prisma::on(&database) else { return };
    prisma.run(0, "migrate deploy");
    database.plant("global", None, 5.0);
    database.plant("reconcile", None, 5.0);
    prisma.add_ours();
    let said = prisma.run(0, "migrate deploy");
    assert!(said.contains(OURS), "{said}");
    assert_eq!(database.keys_held(), ["reconcile"]);
    prisma.run(0, "migrate status");
    prisma.drifts(false);

    let report = prisma.ours().unwrap();
    assert_eq!((report.applied.len(), report.removed), (1, None));
    prisma.run(0, "migrate status");
    let said = prisma.run(0, "migrate deploy");
    assert!(said.contains("No pending migrations"), "{said}");
    let said = prisma.drifts(true);
    assert!(said.contains("__diesel_schema_migrations") && said.matches("[-]").count() == 1, "{said}");
    prisma.external = true;
    prisma.drifts(false);
}

#[test]
fn ours_first_then_prisma_leaves_nothing_to_do_and_no_drift_but_diesels_own_table() {
    let database = TestDatabase::empty();
    let Some(mut prisma) = Prisma::on(&database) else { return };
    prisma.run(0, "migrate deploy");
    database.plant("global", Some("crashed"), 1801.0);
    database.plant("reconcile", None, 5.0);
    let removed = prisma.ours().unwrap().removed.expect("an expired row");
    assert_eq!(removed.holder.map(|holder| holder.to_string()).as_deref(), Some("crashed"));
    // Prisma does not know of it yet: its own folder has nothing new.
    prisma.run(0, "migrate status");
    prisma.add_ours();
    let said = prisma.run(1, "migrate status");
    assert!(said.contains("have not yet been applied") && said.contains(OURS), "{said}");
    prisma.run(0, "migrate deploy");
    assert_eq!(database.keys_held(), ["reconcile"]);
    prisma.run(0, "migrate status");
    prisma.external = true;
    prisma.drifts(false);
    assert_eq!(prisma.ours().unwrap(), MigrationReport::default(), "and again");
}

#[test]
fn a_live_global_row_passes_prismas_deploy_stays_and_goes_by_the_commands_of_the_page() {
    let database = TestDatabase::empty();
    let Some(prisma) = Prisma::on(&database) else { return };
    prisma.run(0, "migrate deploy");
    database.plant("global", Some("old-replica"), 60.0);
    prisma.add_ours();
    prisma.run(0, "migrate deploy");
    prisma.run(0, "migrate status");
    assert_eq!(database.keys_held(), ["global"], "recorded as applied, and the row is still there");
    let again = "migrate deploy";
    assert!(prisma.run(0, again).contains("No pending migrations"));
    assert!(matches!(prisma.ours(), Err(MigrateError::Live(_))));

    // The first way, without Rust: the same statement again. While the row lives it changes nothing.
    let page = fs::read_to_string(root().join("docs/compatibility.md")).unwrap();
    let command = format!("prisma db execute --file prisma/migrations/{OURS}/migration.sql");
    assert!(page.contains(&command), "the page says: {command}");
    let file = prisma.migrations.join(OURS).join("migration.sql");
    let execute = format!("db execute --file {}", file.display());
    prisma.run(0, &execute);
    assert_eq!(database.keys_held(), ["global"]);
    database.back_date(1801.0);
    prisma.run(0, &execute);
    assert_eq!(database.keys_held(), Vec::<String>::new());

    // The second way: ours removes it however often Prisma has been deployed.
    database.plant("global", Some("old-replica"), 1801.0);
    assert!(page.contains("sync-lock migrate --wait 35m"));
    assert!(prisma.ours().unwrap().removed.is_some());
    prisma.run(0, "migrate status");
}

#[test]
fn a_deploy_that_failed_blocks_every_later_one_until_it_is_resolved_as_rolled_back() {
    let database = TestDatabase::empty();
    let Some(prisma) = Prisma::on(&database) else { return };
    prisma.run(0, "migrate deploy");
    database.plant("global", None, 5.0);
    // The statement itself never raises, so something has to keep the role from running it.
    database.execute(r#"ALTER TABLE "sync_lock" RENAME TO "elsewhere""#);
    prisma.add_ours();
    let said = prisma.run(1, "migrate deploy");
    assert!(said.contains("No such table: sync_lock"), "{said}");
    database.execute(r#"ALTER TABLE "elsewhere" RENAME TO "sync_lock""#);
    let said = prisma.run(1, "migrate deploy");
    assert!(said.contains("P3009"), "{said}");
    let page = fs::read_to_string(root().join("docs/compatibility.md")).unwrap();
    let resolve = format!("migrate resolve --rolled-back {OURS}");
    assert!(page.contains(&format!("prisma {resolve}")), "the page says: prisma {resolve}");
    prisma.run(0, &resolve);
    prisma.run(0, "migrate deploy");
    assert_eq!(database.keys_held(), Vec::<String>::new());
    prisma.run(0, "migrate status");
}

#[test]
fn a_tool_that_splits_the_file_at_semicolons_runs_the_same_statement() {
    let text = fs::read_to_string(root().join("migrations").join(OURS).join("migration.sql")).unwrap();
    let pieces: Vec<_> = text.split(';').filter(|piece| !piece.trim().is_empty()).collect();
    assert_eq!(pieces.len(), 1, "{pieces:?}");

    let database = TestDatabase::empty();
    let Some(mut prisma) = Prisma::on(&database) else { return };
    prisma.splits_at_semicolons = true;
    prisma.run(0, "migrate deploy");
    database.plant("global", None, 5.0);
    database.plant("reconcile", None, 5.0);
    prisma.add_ours();
    prisma.run(0, "migrate deploy");
    assert_eq!(database.keys_held(), ["reconcile"]);
}

#[test]
fn both_tools_at_the_same_moment_both_succeed() {
    let database = TestDatabase::empty();
    let Some(prisma) = Prisma::on(&database) else { return };
    prisma.run(0, "migrate deploy");
    database.plant("global", None, 5.0);
    prisma.add_ours();
    // Ours begins while Prisma's statement waits for the row.
    let mut holder = database.connect();
    diesel::connection::SimpleConnection::batch_execute(&mut holder, r#"BEGIN; SELECT FROM "sync_lock" FOR UPDATE"#)
        .unwrap();
    std::thread::scope(|scope| {
        let theirs = scope.spawn(|| prisma.run(0, "migrate deploy"));
        let ours = scope.spawn(|| prisma.ours());
        poll("both wait for the row", || database.waiting() == 2);
        diesel::connection::SimpleConnection::batch_execute(&mut holder, "COMMIT").unwrap();
        theirs.join().unwrap();
        assert_eq!(ours.join().unwrap().unwrap().applied.len(), 1);
    });
    assert_eq!(database.keys_held(), Vec::<String>::new());
    prisma.run(0, "migrate status");
}
