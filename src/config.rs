//! Settings: where the database is, how old a row may get, how long anything may wait. Every default lives here.

use std::env::{self, VarError};
use std::fmt;
use std::time::Duration;

use diesel::connection::CacheSize;
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use crate::database_url::{DatabaseUrl, InvalidDatabaseUrl};
use crate::error::LockError;
use crate::store::{Store, set_schema};

/// The variable with the maximum age in milliseconds, shared with the TypeScript replicas.
const MAX_AGE_VARIABLE: &str = "DISPATCH_SYNC_LOCK_MAX_AGE_MS";

/// How long a whole call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// The oldest server that is supported, as in `server_version_num`.
pub(crate) const OLDEST_SERVER: i64 = 140_000;

/// The longest time between two renewals.
const LONGEST_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);

/// The shortest maximum age of a lease: three renewals, each with time for a round trip on a busy machine.
const SHORTEST_LEASE: Duration = Duration::from_millis(500);

/// The variable with the connection string, and the documented alias that counts where it is unset.
const URL_VARIABLES: [&str; 2] = ["DATABASE_URL", "DISPATCH_DATABASE_URL"];

/// How old a row may get before another contender may take it over.
///
/// The contender's value decides, so it must be the same on every replica, TypeScript and Rust.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MaxAge(Duration);

impl MaxAge {
    /// 30 minutes, the value of the TypeScript module.
    pub const DEFAULT: Self = Self(Duration::from_mins(30));

    /// A maximum age of the caller's own.
    ///
    /// # Errors
    ///
    /// Refuses less than a millisecond, which would make every lock free.
    pub fn new(age: Duration) -> Result<Self, InvalidMaxAge> {
        if age < Duration::from_millis(1) { Err(InvalidMaxAge::TooShort) } else { Ok(Self(age)) }
    }

    /// Refuses what is too short for a heartbeat to keep up with.
    pub(crate) fn for_lease(self) -> Result<(), InvalidMaxAge> {
        if self.0 < SHORTEST_LEASE { Err(InvalidMaxAge::TooShortForLease(self.0)) } else { Ok(()) }
    }

    /// What `DISPATCH_SYNC_LOCK_MAX_AGE_MS` says, or [`MaxAge::DEFAULT`] where it is unset or blank.
    ///
    /// Any other value than a whole number of milliseconds from 1 keeps the default as well and is reported as a
    /// `tracing` warning that names the variable. It is never read as a shorter time than was meant.
    #[must_use]
    pub fn from_env() -> Self {
        let value = match env::var(MAX_AGE_VARIABLE) {
            Ok(value) => value,
            Err(VarError::NotPresent) => return Self::DEFAULT,
            Err(VarError::NotUnicode(raw)) => raw.to_string_lossy().into_owned(),
        };
        Self::from_text(&value).unwrap_or_else(|| {
            tracing::warn!(
                variable = MAX_AGE_VARIABLE,
                ?value,
                "{MAX_AGE_VARIABLE} is not a whole number of milliseconds from 1: the default of 30 minutes counts"
            );
            Self::DEFAULT
        })
    }

    /// The default for blank text, `None` for text that is no whole number of milliseconds from 1.
    fn from_text(text: &str) -> Option<Self> {
        let digits = text.trim();
        if digits.is_empty() {
            return Some(Self::DEFAULT);
        }
        // `u64::from_str` takes a leading plus, which the peers do not write.
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let milliseconds = digits.parse().ok()?;
        Self::new(Duration::from_millis(milliseconds)).ok()
    }

    /// The age as a duration.
    #[must_use]
    pub const fn duration(self) -> Duration {
        self.0
    }
}

impl Default for MaxAge {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A maximum age that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMaxAge {
    /// Below one millisecond.
    #[error(
        "a maximum age below 1 ms would make every lock free: use longer than the longest pause of a healthy holder"
    )]
    TooShort,
    /// Below 500 ms, where a lease could not be renewed reliably.
    #[error("a maximum age of {0:?} is too short for a lease, which needs 500 ms: raise {MAX_AGE_VARIABLE}")]
    TooShortForLease(Duration),
}

/// Everything a [`SyncLock`](crate::SyncLock) needs to know. `Debug` never shows a password.
#[derive(Clone)]
pub struct Settings {
    pub(crate) url: DatabaseUrl,
    pub(crate) store: Store,
    pub(crate) max_age: MaxAge,
    pub(crate) pool_size: u32,
    pub(crate) pool_timeout: Duration,
    pub(crate) call_timeout: Duration,
    pub(crate) heartbeat_interval: Duration,
}

impl Settings {
    /// Settings for a database, given as a URL in libpq's or Prisma's dialect. The rest has its defaults.
    ///
    /// # Errors
    ///
    /// A URL that cannot be used, with what to change. No part of the URL but a parameter's name is repeated.
    pub fn new(database_url: &str) -> Result<Self, InvalidDatabaseUrl> {
        let url = DatabaseUrl::parse(database_url)?;
        let call_timeout = url.socket_timeout.filter(|bound| !bound.is_zero()).unwrap_or(CALL_TIMEOUT);
        Ok(Self {
            store: Store::new(url.schema.as_deref()),
            max_age: MaxAge::DEFAULT,
            pool_size: url.connection_limit.unwrap_or(5),
            // Zero is no limit to Prisma; here the call's own bound ends every wait.
            pool_timeout: match url.pool_timeout {
                Some(Duration::ZERO) => call_timeout,
                Some(wait) => wait,
                None => Duration::from_secs(10),
            },
            call_timeout,
            heartbeat_interval: LONGEST_HEARTBEAT_INTERVAL,
            url,
        })
    }

    /// Settings from `DATABASE_URL` (or `DISPATCH_DATABASE_URL` where that is unset) and
    /// `DISPATCH_SYNC_LOCK_MAX_AGE_MS`.
    ///
    /// # Errors
    ///
    /// Neither variable is set, or the one that counts is empty or cannot be used. Never falls back to `PGHOST`.
    pub fn from_env() -> Result<Self, InvalidEnvironment> {
        for variable in URL_VARIABLES {
            match env::var(variable) {
                Ok(url) => {
                    let settings = Self::new(&url).map_err(|source| InvalidEnvironment::Url { variable, source })?;
                    return Ok(settings.with_max_age(MaxAge::from_env()));
                }
                Err(VarError::NotPresent) => {}
                Err(VarError::NotUnicode(_)) => return Err(InvalidEnvironment::NotUnicode { variable }),
            }
        }
        Err(InvalidEnvironment::Unset)
    }

    /// Sets the maximum age of a row. A shorter one frees the key of a crashed holder sooner and steals from a slow one
    /// more easily. Defaults to 30 minutes.
    #[must_use]
    pub fn with_max_age(mut self, max_age: MaxAge) -> Self {
        self.max_age = max_age;
        self
    }

    /// Sets how many connections the pool may open. Zero counts as one. Defaults to the URL's `connection_limit`, or 5.
    #[must_use]
    pub fn with_pool_size(mut self, connections: u32) -> Self {
        self.pool_size = connections.max(1);
        self
    }

    /// Sets how long a call may wait for a connection of the pool. Defaults to the URL's `pool_timeout`, or 10 s.
    #[must_use]
    pub fn with_pool_timeout(mut self, wait: Duration) -> Self {
        self.pool_timeout = wait;
        self
    }

    /// Sets the bound of a whole call, the wait for a connection and repeated attempts included. Defaults to the URL's
    /// `socket_timeout`, or 15 s.
    #[must_use]
    pub fn with_call_timeout(mut self, bound: Duration) -> Self {
        self.call_timeout = bound;
        self
    }
}

impl Settings {
    /// Sets the longest time between two renewals of a lease. A third of the lease's maximum age counts where that is
    /// shorter, and 30 s at most, because the newest groomer peer calls a row stale after 90 s. Defaults to 30 s.
    #[must_use]
    pub fn with_heartbeat_interval(mut self, interval: Duration) -> Self {
        self.heartbeat_interval = interval.clamp(Duration::from_millis(1), LONGEST_HEARTBEAT_INTERVAL);
        self
    }

    /// The maximum age that counts.
    #[must_use]
    pub fn max_age(&self) -> MaxAge {
        self.max_age
    }

    /// Runs a READ COMMITTED transaction in which the functions of [`blocking`](crate::blocking) find the tables in the
    /// URL's `schema`. Without a `schema` the search path of the role counts, and the transaction is an ordinary one.
    ///
    /// # Errors
    ///
    /// The body's own, and those of BEGIN and COMMIT.
    pub fn transaction<T, E: From<DieselError>>(
        &self,
        conn: &mut PgConnection,
        body: impl FnOnce(&mut PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        conn.build_transaction().read_committed().run(|conn| {
            if let Some(schema) = &self.url.schema {
                set_schema(conn, schema)?;
            }
            body(conn)
        })
    }

    /// Opens a connection of the caller's own, for the functions in [`blocking`](crate::blocking).
    ///
    /// # Errors
    ///
    /// [`LockError::Unreachable`], after five seconds an address at most unless the URL's `connect_timeout` says otherwise.
    pub fn connect(&self) -> Result<PgConnection, LockError> {
        let mut conn =
            PgConnection::establish(&self.url.conninfo).map_err(|error| LockError::Unreachable(error.into()))?;
        if self.url.unprepared {
            conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        }
        Ok(conn)
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("database", &self.url)
            .field("max_age", &self.max_age.duration())
            .field("pool_size", &self.pool_size)
            .field("pool_timeout", &self.pool_timeout)
            .field("call_timeout", &self.call_timeout)
            .field("heartbeat_interval", &self.heartbeat_interval)
            .finish_non_exhaustive()
    }
}

/// The environment does not say which database to use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEnvironment {
    /// Neither variable is set.
    #[error("DATABASE_URL is not set: set it to postgresql://user:password@host:5432/database")]
    Unset,
    /// The variable holds bytes that are not UTF-8.
    #[error("{variable} is not valid UTF-8")]
    NotUnicode {
        /// Which variable.
        variable: &'static str,
    },
    /// The variable holds something that cannot be used.
    #[error("{variable} cannot be used")]
    Url {
        /// Which variable.
        variable: &'static str,
        /// What is wrong with it.
        #[source]
        source: InvalidDatabaseUrl,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_maximum_age_is_a_whole_number_of_milliseconds_or_the_default() {
        let ms = |text| MaxAge::from_text(text).map(|age| age.duration().as_millis());
        assert_eq!(ms(""), Some(1_800_000));
        assert_eq!(ms(" \t\n"), Some(1_800_000));
        assert_eq!(ms(" 1500\n"), Some(1500));
        assert_eq!(ms("1"), Some(1));
        for odd in ["30m", "1_800_000", "1e6", "0", "-5", "+5", "1.5", "0x10", "99999999999999999999", "１０"] {
            assert_eq!(ms(odd), None, "{odd}");
        }
        assert_eq!(MaxAge::new(Duration::ZERO), Err(InvalidMaxAge::TooShort));
        assert_eq!(MaxAge::new(Duration::from_micros(999)), Err(InvalidMaxAge::TooShort));
    }

    #[test]
    fn settings_shown_for_debugging_hide_user_and_password() {
        let settings = Settings::new("postgresql://dispatch:hunter2@db/app").map(|settings| format!("{settings:?}"));
        let shown = settings.unwrap_or_default();
        assert!(shown.contains("app on db"), "{shown}");
        assert!(!shown.contains("hunter2") && !shown.contains("dispatch"), "{shown}");
    }
}
