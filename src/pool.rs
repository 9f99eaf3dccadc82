//! Connections for the async handle: a bounded wait for one, and another try where one turns out dead.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diesel::connection::{AnsiTransactionManager, CacheSize, TransactionManager};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Error as ManagerError, HandleError, PooledConnection};

use crate::config::Settings;
use crate::error::{ConnectError, LockError};
use crate::store::{self, Store};

/// How long one look for a free connection takes, before the reason why there is none is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// How often a call waits anew for a row that another transaction has locked.
const ROW_LOCK_TRIES: u32 = 5;

type Manager = ConnectionManager<PgConnection>;

/// A pool that opens connections when they are needed and never pings them: a dead one is noticed by the statement that
/// meets it, which is then sent again. Every statement of this crate may be sent twice.
pub(crate) struct Pool {
    connections: diesel::r2d2::Pool<Manager>,
    size: u32,
    timeout: Duration,
    last_failure: LastFailure,
    store: Store,
}

impl Pool {
    pub(crate) fn new(settings: &Settings) -> Self {
        let last_failure = LastFailure::default();
        let connections = diesel::r2d2::Pool::builder()
            .max_size(settings.pool_size)
            .min_idle(Some(0))
            .test_on_check_out(false)
            .connection_timeout(settings.pool_timeout.max(Duration::from_secs(1)))
            .error_handler(Box::new(last_failure.clone()))
            .connection_customizer(Box::new(Preparation {
                unprepared: settings.url.unprepared,
                looked: AtomicBool::new(false),
            }))
            .build_unchecked(Manager::new(settings.url.conninfo.clone()));
        Self {
            connections,
            size: settings.pool_size,
            timeout: settings.pool_timeout,
            last_failure,
            store: settings.store.clone(),
        }
    }

    /// The statements for the settings' schema.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Runs a call on a connection. A connection that turns out dead is thrown away and the call made again on another,
    /// once for each connection that the pool can hold and once more.
    pub(crate) fn run<T>(
        &self,
        deadline: Instant,
        mut call: impl FnMut(&mut PgConnection) -> Result<T, LockError>,
    ) -> Result<T, LockError> {
        let (mut dead, mut locked) = (0, 1);
        loop {
            let mut conn = self.checkout(deadline)?;
            match call(&mut conn) {
                Err(error) => {
                    Self::give_up_after(&error, &mut conn);
                    match error {
                        LockError::ConnectionLost(_) if dead < self.size && Instant::now() < deadline => dead += 1,
                        LockError::RowLocked(_) if locked < ROW_LOCK_TRIES && Instant::now() < deadline => locked += 1,
                        error => return Err(error),
                    }
                }
                Ok(value) => return Ok(value),
            }
        }
    }

    /// Makes the pool close a connection after an error that another one may not meet: it is broken, or leads to a node that
    /// became read-only. diesel by itself does not mark one as broken that the server closed before the statement was
    /// prepared on it, and the pool would hand it out for ever.
    pub(crate) fn give_up_after(error: &LockError, conn: &mut PgConnection) {
        if matches!(error, LockError::ConnectionLost(_) | LockError::ReadOnly(_)) {
            AnsiTransactionManager::transaction_manager_status_mut(conn).set_in_error();
        }
    }

    fn checkout(&self, deadline: Instant) -> Result<PooledConnection<Manager>, LockError> {
        let started = Instant::now();
        let bound = self.timeout.min(deadline.saturating_duration_since(started));
        loop {
            let left = bound.saturating_sub(started.elapsed());
            match self.connections.get_timeout(left.min(LOOK)) {
                Ok(conn) => {
                    self.last_failure.clear();
                    return Ok(conn);
                }
                Err(_) => match self.last_failure.get() {
                    // Waiting does not make a wrong password right.
                    Some(failure) if left.is_zero() || !failure.is_transient() => {
                        return Err(LockError::Unreachable(failure));
                    }
                    None if left.is_zero() && self.connections.state().connections == 0 => {
                        let failure = ConnectError::Unavailable("no answer to the attempt to connect".to_owned());
                        return Err(LockError::Unreachable(failure));
                    }
                    None if left.is_zero() => return Err(LockError::PoolExhausted(bound)),
                    _ => {}
                },
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("size", &self.size).field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Preparation {
    unprepared: bool,
    /// The first connection looks at the time zone.
    looked: AtomicBool,
}

impl CustomizeConnection<PgConnection, ManagerError> for Preparation {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), ManagerError> {
        if self.unprepared {
            conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        }
        if !self.looked.swap(true, Ordering::Relaxed) {
            // A look that fails is made by whoever needs the connection, and told there.
            if let Ok(server) = store::server(conn) {
                server.warn_of_time_zone();
            }
        }
        Ok(())
    }
}

/// Why the pool could not open a connection the last time it tried.
#[derive(Clone, Debug, Default)]
struct LastFailure(Arc<Mutex<Option<ConnectError>>>);

impl LastFailure {
    fn get(&self) -> Option<ConnectError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn clear(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl HandleError<ManagerError> for LastFailure {
    fn handle_error(&self, error: ManagerError) {
        let failure = match error {
            ManagerError::ConnectionError(error) => error.into(),
            ManagerError::QueryError(error) => ConnectError::Unavailable(error.to_string()),
        };
        tracing::warn!(error = %failure, "no connection to the database");
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
    }
}
