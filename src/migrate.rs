//! The migration: removes the orphaned `global` row of the retired shared key, under one transaction-scoped lock.
//!
//! The folder `migrations/` serves both tools. Prisma runs `migration.sql` with the default maximum age; [`migrate`] runs
//! the same statement with the configured one, records it in diesel's bookkeeping, and runs it again every time, because
//! a late replica may have made the row anew.

use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};

use crate::blocking::{LockRow, LockState};
use crate::config::{MaxAge, OLDEST_SERVER, Settings};
use crate::error::{LockError, explain, find_wrong_column};
use crate::store::{self, Store};

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations");

/// How long a migration waits for another one that is under way.
const PATIENCE_MS: &str = "30000";

/// How long it waits for a row that a transaction has locked.
const ROW_WAIT_MS: &str = "10000";

/// How often a live `global` row is looked at again.
const POLL: Duration = Duration::from_millis(500);

/// What a migration is to do.
#[derive(Clone, Debug, Default)]
pub struct Migration {
    max_age: MaxAge,
    schema: Option<String>,
    wait: Duration,
    bootstrap: bool,
    dry_run: bool,
}

impl Migration {
    /// Removes an orphaned `global` row: one without a holder or older than this.
    #[must_use]
    pub fn new(max_age: MaxAge) -> Self {
        Self { max_age, ..Self::default() }
    }

    /// With the maximum age and the schema of these settings. diesel's bookkeeping goes into the same schema.
    #[must_use]
    pub fn from_settings(settings: &Settings) -> Self {
        Self { max_age: settings.max_age, schema: settings.url.schema.clone(), ..Self::default() }
    }

    /// Sets how long to wait for a live `global` row to go. Defaults to not waiting.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// Sets whether to make the two tables first where they are missing, for a database that Prisma will never manage.
    /// Defaults to not making them: a table made early breaks Prisma's own migration.
    #[must_use]
    pub fn bootstrap(mut self, bootstrap: bool) -> Self {
        self.bootstrap = bootstrap;
        self
    }

    /// Sets whether to roll everything back and only say what would have been done. Defaults to doing it.
    #[must_use]
    pub fn dry_run(mut self, dry_run: bool) -> Self {
        self.dry_run = dry_run;
        self
    }
}

/// What a migration did, or would have done.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct MigrationReport {
    /// The tables were made.
    pub bootstrapped: bool,
    /// The versions that were recorded as applied.
    pub applied: Vec<String>,
    /// The `global` row that was removed.
    pub removed: Option<LockRow>,
}

/// Why a migration changed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// A `global` row is alive: some replica still uses the retired shared key.
    #[error(
        "the row \"global\" is alive, held by {holder}, {age_seconds:.0} s old: a replica still uses the shared key. Stop it or let its run end, then migrate again (`--wait` waits)",
        holder = .0.holder.as_ref().map_or("nobody", |holder| holder.as_str()).escape_debug(),
        age_seconds = .0.age_seconds,
    )]
    Live(Box<LockRow>),
    /// Another transaction, or another migration, kept a lock for longer than the bound.
    #[error("another transaction holds a lock that the migration needs: wait for it or end it, then migrate again")]
    Locked(#[source] LockError),
    /// The tables are not to be made in a database that Prisma manages.
    #[error(
        "this database is managed by Prisma (it has _prisma_migrations): run Prisma's migrations instead of --bootstrap"
    )]
    ManagedByPrisma,
    /// One of the two tables is there and the other is not, so that it is unclear whose they are.
    #[error(
        "the table \"{there}\" is there and \"{missing}\" is not: drop the one or restore the other, then --bootstrap again"
    )]
    OneTable {
        /// The table that is there.
        there: &'static str,
        /// The table that is not.
        missing: &'static str,
    },
    /// A step failed.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The embedded migrations failed.
    #[error("the migration could not be applied: {0}")]
    Apply(String),
}

/// Only for diesel, which wants to turn its own errors of BEGIN and COMMIT into the transaction's.
impl From<DieselError> for MigrateError {
    fn from(error: DieselError) -> Self {
        Self::Lock(LockError::Database(error))
    }
}

/// Applies the migration on a connection that has no transaction open. All or nothing.
///
/// It waits at most 30 s for another migration, 10 s for a row that a transaction has locked, and as long as
/// [`Migration::wait`] says for a live `global` row. Eight replicas that migrate at once all succeed.
///
/// # Errors
///
/// [`MigrateError`]; nothing was changed then.
pub fn migrate(conn: &mut PgConnection, migration: &Migration) -> Result<MigrationReport, MigrateError> {
    let started = Instant::now();
    loop {
        match migrate_once(conn, migration) {
            Err(MigrateError::Live(row)) => {
                let left = migration.wait.saturating_sub(started.elapsed());
                if left.is_zero() {
                    return Err(MigrateError::Live(row));
                }
                tracing::info!(holder = ?row.holder, age_seconds = row.age_seconds, "waiting for the row \"global\"");
                thread::sleep(left.min(POLL));
            }
            outcome => return outcome,
        }
    }
}

fn migrate_once(conn: &mut PgConnection, migration: &Migration) -> Result<MigrationReport, MigrateError> {
    let mut report = MigrationReport::default();
    let outcome = conn.build_transaction().read_committed().run(|conn| {
        report = steps(conn, migration)?;
        if migration.dry_run { Err(DieselError::RollbackTransaction.into()) } else { Ok(()) }
    });
    match outcome {
        Err(MigrateError::Lock(LockError::Database(DieselError::RollbackTransaction))) | Ok(()) => Ok(report),
        Err(MigrateError::Lock(error @ LockError::RowLocked(_))) => Err(MigrateError::Locked(error)),
        Err(MigrateError::Lock(LockError::Database(error))) => Err(explain(&Store::default(), conn, error).into()),
        Err(error) => Err(error),
    }
}

fn steps(conn: &mut PgConnection, migration: &Migration) -> Result<MigrationReport, MigrateError> {
    let mut report = MigrationReport::default();
    Store::default().bounded(conn, |conn| {
        store::set_local(conn, "lock_timeout", PATIENCE_MS)?;
        store::lock_migrations(conn)?;
        store::set_local(conn, "lock_timeout", ROW_WAIT_MS)
    })?;
    if let Some(schema) = &migration.schema {
        store::set_schema(conn, schema)?;
    }
    let version = store::server(conn)?.version;
    if version < OLDEST_SERVER {
        return Err(LockError::UnsupportedServer(version).into());
    }
    if migration.bootstrap {
        report.bootstrapped = bootstrap(conn)?;
    }
    check(conn)?;
    let age = format!("{:.6}", migration.max_age.duration().as_secs_f64());
    Store::default().bounded(conn, |conn| store::set_local(conn, "sync_lock.max_age_seconds", &age))?;
    if let Some(row) = Store::default().bounded(conn, store::lock_legacy_row)? {
        let row = LockRow::new(row, migration.max_age);
        match row.state {
            LockState::Expired | LockState::Orphaned => report.removed = Some(row),
            LockState::Held | LockState::Future => return Err(MigrateError::Live(Box::new(row))),
        }
    }
    // diesel flattens its errors to text, so the wait for its table is made here.
    if store::table_exists(conn, "__diesel_schema_migrations")? {
        Store::default().bounded(conn, store::lock_bookkeeping)?;
    }
    let applied = conn.run_pending_migrations(MIGRATIONS).map_err(|error| MigrateError::Apply(error.to_string()))?;
    report.applied = applied.iter().map(ToString::to_string).collect();
    Store::default().bounded(conn, |conn| conn.batch_execute(store::CLEANUP))?;
    Ok(report)
}

/// Makes the tables unless both are there.
fn bootstrap(conn: &mut PgConnection) -> Result<bool, MigrateError> {
    if store::table_exists(conn, "_prisma_migrations")? {
        return Err(MigrateError::ManagedByPrisma);
    }
    match (store::table_exists(conn, "sync_lock")?, store::table_exists(conn, "IssueSyncRun")?) {
        (true, true) => return Ok(false),
        (true, false) => return Err(MigrateError::OneTable { there: "sync_lock", missing: "IssueSyncRun" }),
        (false, true) => return Err(MigrateError::OneTable { there: "IssueSyncRun", missing: "sync_lock" }),
        (false, false) => {}
    }
    Store::default().bounded(conn, |conn| conn.batch_execute(store::BOOTSTRAP))?;
    Ok(true)
}

/// Looks before anything is changed: the right tables, and a role that may do what is to be done.
fn check(conn: &mut PgConnection) -> Result<(), MigrateError> {
    // What a claim needs on the rows is not the migration's affair; a table that cannot be found is.
    let unseen = |(privilege, _): &(Option<String>, String)| privilege.as_deref().is_none_or(|name| name == "USAGE");
    if let Some(obstacle) = Store::default().obstacles(conn)?.into_iter().find(unseen) {
        return Err(LockError::of_obstacle(obstacle).into());
    }
    if let Some(wrong) = find_wrong_column(&Store::default(), conn) {
        return Err(wrong.into());
    }
    if let Some((privilege, object)) = store::migration_obstacles(conn)?.into_iter().next() {
        return Err(LockError::of_obstacle((Some(privilege), object)).into());
    }
    Ok(())
}
