//! What would break exclusion or the migration, each with its remedy. It looks and changes nothing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::prelude::*;

use crate::blocking::{LockRow, LockState};
use crate::config::{OLDEST_SERVER, Settings};
use crate::error::{LockError, find_wrong_column};
use crate::store::{self, Store};

/// How far the clocks of client and server may differ before it is told. No decision depends on it; logs do.
const CLOCK_TOLERANCE: f64 = 2.0;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing.
    Note,
    /// May mislead somebody or cost time.
    Warning,
    /// Breaks exclusion or the migration.
    Problem,
}

impl Severity {
    /// The word for people and machines.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What it is.
    pub what: String,
    /// What to do about it; empty for a note that asks for nothing.
    pub remedy: String,
}

impl Finding {
    fn new(severity: Severity, what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { severity, what: what.into(), remedy: remedy.into() }
    }
}

/// Examines the database of these settings, the way to it, and the settings themselves.
///
/// # Errors
///
/// [`LockError`] if the database cannot be reached or asked; everything else is a finding.
pub fn examine(settings: &Settings) -> Result<Vec<Finding>, LockError> {
    let mut conn = settings.connect()?;
    settings.transaction(&mut conn, |conn| {
        store::set_local(conn, "statement_timeout", "10000")?;
        let mut findings = settings_themselves(settings);
        findings.extend(server(settings, &store::server(conn)?));
        let tables = tables(conn)?;
        let readable = tables.iter().all(|finding| finding.severity < Severity::Problem);
        findings.extend(tables);
        if readable {
            let rows = Store::default().inspect(conn, settings.max_age())?;
            findings.extend(rows.iter().filter_map(self::row));
        }
        Ok(findings)
    })
}

fn settings_themselves(settings: &Settings) -> Vec<Finding> {
    let max_age = settings.max_age().duration();
    let heartbeat = (max_age / 3).min(settings.heartbeat_interval);
    let mut findings = vec![Finding::new(
        Severity::Note,
        format!("maximum age {max_age:?}, renewed every {heartbeat:?} at the latest"),
        "the maximum age must be the same on every replica, TypeScript and Rust",
    )];
    if let Err(error) = settings.max_age().for_lease() {
        findings.push(Finding::new(Severity::Problem, error.to_string(), "unset it for the default of 30 minutes"));
    }
    findings
}

fn server(settings: &Settings, server: &store::Server) -> Vec<Finding> {
    let mut findings = Vec::new();
    if server.version < OLDEST_SERVER {
        let error = LockError::UnsupportedServer(server.version);
        findings.push(Finding::new(Severity::Problem, error.to_string(), "upgrade the server"));
    }
    if server.read_only {
        findings.push(Finding::new(
            Severity::Problem,
            "the server takes no writes: it is a standby, or read-only by default",
            "connect to the primary; with several hosts, add target_session_attrs=read-write to the URL",
        ));
    }
    if !server.speaks_utc() {
        findings.push(Finding::new(
            Severity::Warning,
            format!(
                "the time zone of this database is {}: TypeScript replicas write their times without a zone, so their \
                 rows land hours in the future or in the past, and they misjudge ours",
                server.time_zone
            ),
            "ALTER DATABASE … SET TimeZone = 'UTC', or add options=-c%20TimeZone%3DUTC to the URL of every TypeScript replica",
        ));
    }
    let client = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64();
    let ahead = server.clock - client;
    if ahead.abs() > CLOCK_TOLERANCE {
        findings.push(Finding::new(
            Severity::Warning,
            format!("the clock of the database is {ahead:+.1} s from the clock here"),
            "run a time service on both; ages are judged by the database alone, but TypeScript replicas use their own clock",
        ));
    }
    if let Some(dialled) = settings.url.port.filter(|dialled| server.port != Some(i64::from(*dialled))) {
        let listens = server.port.map_or_else(|| "a socket".to_owned(), |port| format!("port {port}"));
        let what = format!("something is between here (port {dialled}) and the server (which listens on {listens})");
        findings.push(if settings.url.unprepared {
            Finding::new(Severity::Note, what, "")
        } else {
            let remedy =
                "if it is PgBouncer in transaction mode, add pgbouncer=true to the URL: it breaks prepared statements";
            Finding::new(Severity::Warning, what, remedy)
        });
    }
    findings
}

fn tables(conn: &mut PgConnection) -> Result<Vec<Finding>, LockError> {
    let store = Store::default();
    let obstacles = store.bounded(conn, |conn| store.obstacles(conn))?.into_iter().map(LockError::of_obstacle);
    let mut found: Vec<_> = obstacles.collect();
    if found.is_empty() {
        found.extend(find_wrong_column(&store, conn));
    }
    let mut findings: Vec<_> = found
        .iter()
        .map(|error| Finding::new(Severity::Problem, error.to_string(), "see the message, and docs/operations.md"))
        .collect();
    if !found.is_empty() {
        return Ok(findings);
    }
    let stamped = store.bounded(conn, |conn| store.columns(conn, "sync_lock"))?;
    if stamped.iter().any(|(name, kind)| name == "acquiredAt" && kind == "timestamp without time zone") {
        findings.push(Finding::new(
            Severity::Note,
            "\"acquiredAt\" has no time zone, as `prisma db push` makes it; every statement here reads and writes it as UTC",
            "ALTER TABLE \"sync_lock\" ALTER \"acquiredAt\" TYPE TIMESTAMPTZ(6) USING \"acquiredAt\" AT TIME ZONE 'UTC' mends it",
        ));
    }
    for (privilege, object) in store.bounded(conn, store::migration_obstacles)? {
        findings.push(Finding::new(
            Severity::Note,
            format!("this role lacks {privilege} on {object}, which only `migrate` needs"),
            format!("run migrate as another role, or GRANT {privilege} ON {object}"),
        ));
    }
    Ok(findings)
}

fn row(row: &LockRow) -> Option<Finding> {
    let held = row.holder.as_ref().map_or("nobody", |holder| holder.as_str()).escape_debug();
    match (row.legacy, row.state) {
        (true, LockState::Held | LockState::Future) => Some(Finding::new(
            Severity::Problem,
            format!(
                "the row \"global\" is alive, held by {held}: a replica on the old shared key excludes nothing here"
            ),
            "give every TypeScript replica a key per job first; `sync-lock migrate --wait 35m` then removes the row",
        )),
        (true, LockState::Expired | LockState::Orphaned) => Some(Finding::new(
            Severity::Warning,
            format!("the row \"global\" is left over, last held by {held}"),
            "run `sync-lock migrate`",
        )),
        (false, LockState::Future) => Some(Finding::new(
            Severity::Warning,
            format!("the row {:?} is {:.0} s in the future, held by {held}", row.key.as_str(), -row.age_seconds),
            "look at the clock and the time zone of the replica that wrote it; if it is dead, use `sync-lock force-release`",
        )),
        (false, LockState::Expired | LockState::Orphaned) => Some(Finding::new(
            Severity::Note,
            format!("the row {:?} is {}: the next claim takes it over", row.key.as_str(), row.state.as_str()),
            "",
        )),
        (false, LockState::Held) => None,
    }
}
