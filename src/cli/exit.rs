//! From an outcome to an exit code and one line on stderr.

use std::error::Error;
use std::fmt::Write as _;
use std::process::ExitCode;

use crate::cli::output::printable;

use diesel::ConnectionError;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use sync_lock::migrate::MigrateError;
use sync_lock::private_server::ServerError;
use sync_lock::starvation::SimulationError;
use sync_lock::{ConnectError, InvalidEnvironment, LockError};

pub(crate) const USAGE: u8 = 64;
const UNAVAILABLE: u8 = 69;
const SOFTWARE: u8 = 70;
pub(crate) const TRY_AGAIN: u8 = 75;
pub(crate) const LOST: u8 = 76;
pub(crate) const NOT_EXECUTABLE: u8 = 126;
pub(crate) const NOT_FOUND: u8 = 127;
const NO_PERMISSION: u8 = 77;
const CONFIGURATION: u8 = 78;

/// What ends a command early: an exit code and the line that explains it.
pub(crate) struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// A failure that no user could have caused or cured.
    pub(crate) fn bug(error: &dyn Error) -> Self {
        Self::new(SOFTWARE, error)
    }

    /// Something that this machine lacks or that the environment says wrongly.
    pub(crate) fn configuration(error: &dyn Error) -> Self {
        Self::new(CONFIGURATION, error)
    }

    /// An argument that only the library can judge.
    pub(crate) fn usage(error: &dyn Error) -> Self {
        Self::new(USAGE, error)
    }

    /// A failure in the words of the command itself.
    pub(crate) fn told(code: u8, message: &str) -> Self {
        Self { code, message: printable(message) }
    }

    fn new(code: u8, error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            // Writing to a String cannot fail.
            let _ = write!(message, ": {error}");
            cause = error.source();
        }
        if code == SOFTWARE {
            message.push_str(" (if this looks like a bug, report it with this line and the output of RUST_LOG=debug)");
        }
        let message = message.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        Self::told(code, &message)
    }

    /// Prints the line and hands out the code.
    pub(crate) fn report(&self) -> ExitCode {
        use std::io::Write as _;
        // With stderr closed there is nobody left to tell.
        let _ = writeln!(std::io::stderr(), "sync-lock: {}", self.message);
        ExitCode::from(self.code)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Self {
        Self::new(lock_code(&error), &error)
    }
}

impl From<MigrateError> for Failure {
    fn from(error: MigrateError) -> Self {
        let code = match &error {
            MigrateError::Live(_) | MigrateError::Locked(_) => TRY_AGAIN,
            MigrateError::ManagedByPrisma | MigrateError::OneTable { .. } => CONFIGURATION,
            MigrateError::Lock(error) => lock_code(error),
            _ => SOFTWARE,
        };
        Self::new(code, &error)
    }
}

impl From<InvalidEnvironment> for Failure {
    fn from(error: InvalidEnvironment) -> Self {
        Self::configuration(&error)
    }
}

impl From<ServerError> for Failure {
    fn from(error: ServerError) -> Self {
        use DatabaseErrorKind::{ClosedConnection, ReadOnlyTransaction};
        let code = match &error {
            // What libpq cannot read starts with "invalid"; what it could not do does not.
            ServerError::Connect(ConnectionError::BadConnection(message)) if !message.starts_with("invalid ") => {
                let source = ConnectionError::BadConnection(message.clone());
                lock_code(&LockError::Unreachable(source.into()))
            }
            ServerError::Timeout { .. }
            | ServerError::Create(DieselError::DatabaseError(ClosedConnection | ReadOnlyTransaction, _)) => UNAVAILABLE,
            // diesel keeps SQLSTATE 42501 to itself.
            ServerError::Create(refusal) if refusal.to_string().starts_with("permission denied") => NO_PERMISSION,
            ServerError::Create(_) | ServerError::Drop(_) => SOFTWARE,
            _ => CONFIGURATION,
        };
        let mut failure = Self::new(code, &error);
        if matches!(error, ServerError::Connect(_) | ServerError::Url(_) | ServerError::UnsuitableUrl(_)) {
            failure.message.insert_str(0, "TEST_DATABASE_URL: ");
        }
        failure
    }
}

impl From<SimulationError> for Failure {
    fn from(error: SimulationError) -> Self {
        match error {
            SimulationError::Lock(error) => error.into(),
            SimulationError::Migrate(error) => error.into(),
            error => Self::bug(&error),
        }
    }
}

fn lock_code(error: &LockError) -> u8 {
    match error {
        LockError::Unreachable(ConnectError::Refused(message)) if message.contains("CONNECT privilege") => {
            NO_PERMISSION
        }
        LockError::Unreachable(ConnectError::Refused(_))
        | LockError::MissingTable(_)
        | LockError::WrongTable { .. }
        | LockError::MaxAge(_)
        | LockError::UnsupportedServer(_) => CONFIGURATION,
        LockError::Unreachable(_)
        | LockError::PoolExhausted(_)
        | LockError::TimedOut(_)
        | LockError::ConnectionLost(_)
        | LockError::ReadOnly(_) => UNAVAILABLE,
        LockError::Serialization(_) | LockError::RowLocked(_) | LockError::Cancelled(_) => TRY_AGAIN,
        LockError::MissingPrivilege { .. } => NO_PERMISSION,
        _ => SOFTWARE,
    }
}

/// clap's message, with 64 for wrong usage and 0 for `--help` and `--version`.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    // A closed pipe is no reason to fail.
    let _ = error.print();
    if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
}
