//! Why the database did not do what was asked.

use std::time::Duration;

use diesel::connection::AnsiTransactionManager;
use diesel::connection::TransactionManager;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::config::InvalidMaxAge;
use crate::store::Store;

/// A statement, or the way to the database, failed. An ordinary conflict is never one of these.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// No connection could be made within the bound. Whatever the server said is in the source.
    #[error("the database cannot be reached")]
    Unreachable(#[source] ConnectError),
    /// Every connection of the pool was in use for longer than the pool's timeout.
    #[error("no connection of the pool came free within {0:?}: raise connection_limit, or look for a call that hangs")]
    PoolExhausted(Duration),
    /// The call did not end within its bound. A claim that was under way is undone in the background.
    #[error("the database did not answer within {0:?}")]
    TimedOut(Duration),
    /// The connection broke while the statement was under way. It may or may not have been carried out.
    #[error("the connection to the database was lost")]
    ConnectionLost(#[source] DieselError),
    /// The server only takes reads, such as a former primary after a failover.
    #[error("the database is read-only: connect to the primary")]
    ReadOnly(#[source] DieselError),
    /// Another transaction came in between, under REPEATABLE READ or SERIALIZABLE. Begin the transaction again.
    #[error("the statement was in conflict with a concurrent transaction: try the transaction again")]
    Serialization(#[source] DieselError),
    /// The server ended the statement: its `statement_timeout`, or an operator did.
    #[error("the server cancelled the statement: look for a table lock, or raise its statement_timeout")]
    Cancelled(#[source] DieselError),
    /// The row is locked by another transaction that did not end in time.
    #[error("the row is locked by another transaction: try again")]
    RowLocked(#[source] DieselError),
    /// A server that is too old, by its `server_version_num`. Only the migration and the doctor look.
    #[error("the server's version {0} is not supported: PostgreSQL 14 or later is")]
    UnsupportedServer(i64),
    /// The table is not there: not in the URL's `schema`, or without one not in the search path of this role.
    #[error(
        "the table \"{0}\" does not exist: run Prisma's migrations first, or `sync-lock migrate --bootstrap` for a database that Prisma does not manage"
    )]
    MissingTable(String),
    /// A table of that name is there, but it is another one.
    #[error(
        "the table \"{table}\" has no column \"{column}\" of type {expected}: it is not the table of the sync lock"
    )]
    WrongTable {
        /// The table.
        table: &'static str,
        /// The column that is missing or of another type.
        column: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// The role may not do it.
    #[error("the role lacks {privilege} on {object}: have the owner run GRANT {privilege} ON {object} TO the role")]
    MissingPrivilege {
        /// The privilege, as GRANT spells it.
        privilege: String,
        /// What it is missing on, as GRANT spells it.
        object: String,
    },
    /// Anything else that the database refused.
    #[error("the database refused the statement")]
    Database(#[source] DieselError),
    /// The job's own maximum age cannot be used.
    #[error(transparent)]
    MaxAge(#[from] InvalidMaxAge),
    /// [`SyncLock::shutdown`](crate::SyncLock::shutdown) was called: no lease can be had any more.
    #[error("this process shuts down: no lease can be had any more")]
    ShutDown,
    /// The thread that ran the statement ended without an answer, because the runtime shuts down or by a bug.
    #[error("the call was cut off")]
    CutOff,
}

impl LockError {
    /// What diesel's own error says, without asking the database.
    pub(crate) fn of_statement(error: DieselError) -> Self {
        match error {
            DieselError::DatabaseError(
                DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand,
                _,
            )
            | DieselError::BrokenTransactionManager => Self::ConnectionLost(error),
            DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _) => Self::ReadOnly(error),
            DieselError::DatabaseError(DatabaseErrorKind::SerializationFailure, _) => Self::Serialization(error),
            _ => Self::Database(error),
        }
    }

    /// From what [`Store::obstacles`] found.
    pub(crate) fn of_obstacle((privilege, object): (Option<String>, String)) -> Self {
        match privilege {
            Some(privilege) => Self::MissingPrivilege { privilege, object },
            None => Self::MissingTable(object),
        }
    }

    /// Whether the same call may succeed later without anybody doing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable(source) => source.is_transient(),
            Self::PoolExhausted(_)
            | Self::TimedOut(_)
            | Self::ConnectionLost(_)
            | Self::ReadOnly(_)
            | Self::Serialization(_)
            | Self::Cancelled(_)
            | Self::RowLocked(_) => true,
            Self::MissingTable(_)
            | Self::WrongTable { .. }
            | Self::MissingPrivilege { .. }
            | Self::Database(_)
            | Self::MaxAge(_)
            | Self::UnsupportedServer(_)
            | Self::ShutDown
            | Self::CutOff => false,
        }
    }
}

/// Of BEGIN and COMMIT, for callers who run a transaction of their own around calls of this crate.
impl From<DieselError> for LockError {
    fn from(error: DieselError) -> Self {
        Self::of_statement(error)
    }
}

/// No connection could be made. The message is libpq's own; it names host, role and database but no password, because
/// libpq never sees the URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Nobody answered, or the server has no connection left, or it is starting up or shutting down.
    #[error("{0}")]
    Unavailable(String),
    /// The server answered and refused: wrong password, no such database or role, TLS demanded or missing.
    #[error("{0}")]
    Refused(String),
}

impl ConnectError {
    /// Whether connecting may succeed later without anybody doing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }

    /// Sorts libpq's message. libpq hands out no code for a failed connection, so the text is all there is: what the
    /// server itself said starts with FATAL, and the passing reasons are known. A text in another language counts as a
    /// refusal if it carries the mark, and as unavailable otherwise.
    pub(crate) fn from_message(message: &str) -> Self {
        const PASSING: [&str; 6] = [
            "too many clients",
            "remaining connection slots",
            "too many connections",
            "the database system is",
            "terminating connection",
            "timeout expired",
        ];
        const SETTINGS: [&str; 4] =
            ["server does not support SSL", "certificate", "invalid connection option", "SSL error"];
        let text = message.trim().replace('\n', " ");
        let says = |needle: &&str| text.contains(*needle);
        if PASSING.iter().any(says) {
            Self::Unavailable(text)
        } else if text.contains("FATAL:") || SETTINGS.iter().any(says) || text.contains("no password supplied") {
            Self::Refused(text)
        } else {
            Self::Unavailable(text)
        }
    }
}

impl From<ConnectionError> for ConnectError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::BadConnection(message) => Self::from_message(&message),
            other => Self::Refused(other.to_string()),
        }
    }
}

/// Says what a failed statement means, asking the catalog where the error alone does not tell. Messages are not
/// interpreted: the server writes them in its own language.
pub(crate) fn explain(store: &Store, conn: &mut PgConnection, error: DieselError) -> LockError {
    match error {
        // In a transaction that the failure has aborted, the catalog does not answer and the error stays as it is.
        DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) => {
            find_obstacle(store, conn).unwrap_or(LockError::Database(error))
        }
        _ => LockError::of_statement(error),
    }
}

/// The first thing that keeps every claim from working: a table that is missing or another one, or a privilege.
pub(crate) fn find_obstacle(store: &Store, conn: &mut PgConnection) -> Option<LockError> {
    let first = store.obstacles(conn).ok()?.into_iter().next();
    first.map(LockError::of_obstacle).or_else(|| find_wrong_column(store, conn))
}

/// The first column that is not as Prisma made it, in both tables, or a key that is missing.
pub(crate) fn find_wrong_column(store: &Store, conn: &mut PgConnection) -> Option<LockError> {
    /// What a column should be, and what counts as that.
    type Kind = (&'static str, &'static [&'static str]);
    const TEXT: Kind = ("TEXT", &["text", "character varying"]);
    const TIME: Kind = ("TIMESTAMPTZ", &["timestamp with time zone", "timestamp without time zone"]);
    const WHOLE: Kind = ("INTEGER", &["integer", "bigint"]);
    const TABLES: [(&str, &[(&str, Kind)]); 2] = [
        ("sync_lock", &[("id", TEXT), ("syncRunId", TEXT), ("acquiredAt", TIME)]),
        (
            "IssueSyncRun",
            &[
                ("id", TEXT),
                ("status", TEXT),
                ("syncType", TEXT),
                ("reposFetched", WHOLE),
                ("syncedCount", WHOLE),
                ("errorMessage", TEXT),
                ("notes", TEXT),
                ("startedAt", TIME),
                ("completedAt", TIME),
            ],
        ),
    ];
    for (table, columns) in TABLES {
        let found = store.columns(conn, table).ok()?;
        for (column, (expected, kinds)) in columns {
            if !found.iter().any(|(name, kind)| name == column && kinds.contains(&kind.as_str())) {
                return Some(LockError::WrongTable { table, column, expected });
            }
        }
        if !store.has_key(conn, table).ok()? {
            return Some(LockError::WrongTable { table, column: "id", expected: "PRIMARY KEY" });
        }
    }
    None
}

/// Whether diesel has a transaction open on the connection.
pub(crate) fn in_transaction(conn: &mut PgConnection) -> bool {
    let status = AnsiTransactionManager::transaction_manager_status_mut(conn);
    !matches!(status.transaction_depth(), Ok(None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_connection_is_sorted_into_passing_and_lasting() {
        let lasting = [
            "connection to server at \"h\" (::1), port 5432 failed: FATAL:  password authentication failed for user \"u\"",
            "connection to server on socket \"/x\" failed: FATAL:  database \"nope\" does not exist",
            "connection to server at \"h\" failed: server does not support SSL, but SSL was required",
            "connection to server at \"h\" failed: fe_sendauth: no password supplied",
        ];
        let passing = [
            "connection to server at \"h\", port 1 failed: Connection refused\n\tIs the server running on that host?",
            "connection to server at \"h\" failed: FATAL:  sorry, too many clients already",
            "connection to server at \"h\" failed: FATAL:  the database system is starting up",
            "connection to server at \"10.0.0.1\" failed: timeout expired",
            "could not translate host name \"nowhere\" to address: Name or service not known",
        ];
        for message in lasting {
            assert!(!ConnectError::from_message(message).is_transient(), "{message}");
        }
        for message in passing {
            assert!(ConnectError::from_message(message).is_transient(), "{message}");
        }
    }
}
