//! A lock per periodic job in a Postgres table, shared with TypeScript replicas that use Prisma.
//!
//! A row in `sync_lock` is a lock and no row is a free lock. The claim is one statement that the database decides by its
//! own clock; a row without a holder, or older than the maximum age, is taken over. What is guaranteed and what is not
//! stands in `docs/guarantees.md`, with the test that pins each point.
//!
//! # Layout
//!
//! | module | job |
//! | --- | --- |
//! | `key` | [`SyncType`], [`LockKey`], [`Job`]: the map from jobs to rows |
//! | `run` | [`RunId`] and [`RunReport`]: who holds a row, and how a run ends |
//! | `store` | all SQL, one function a statement |
//! | [`blocking`] | the lock over a connection of the caller's own |
//! | `lock` | [`SyncLock`]: the lock for async code |
//! | `pool` | connections for the async handle |
//! | `config`, `database_url` | [`Settings`] and [`MaxAge`], from code or from the environment |
//! | [`migrate`](mod@migrate) | the cleanup of the retired shared key |
//! | `error` | [`LockError`]: why the database did not do what was asked |
//!
//! # Example
//!
//! ```no_run
//! use sync_lock::{Acquisition, RunReport, Settings, SyncLock, SyncType};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = SyncLock::new(&Settings::from_env()?)?;
//! match locks.acquire_lock(SyncType::Reconcile).await? {
//!     Acquisition::Locked { run_id, .. } => {
//!         // … the work …
//!         locks.complete_run(&run_id, &RunReport::default()).await?;
//!         locks.release_lock(&run_id).await?;
//!     }
//!     Acquisition::Conflict { holder, .. } => println!("skipped: {holder:?} has the key"),
//! }
//! # Ok(())
//! # }
//! ```

pub mod blocking;
mod boottime;
mod cleanup;
mod config;
mod database_url;
mod dedicated;
pub mod doctor;
mod error;
mod heartbeat;
mod key;
mod lease;
mod lock;
pub mod migrate;
mod pool;
#[cfg(feature = "private-server")]
#[doc(hidden)]
pub mod private_server;
mod run;
mod runner;
#[cfg(feature = "private-server")]
#[doc(hidden)]
pub mod starvation;
mod store;

pub use blocking::{Acquisition, Displaced, Holder, LockRow, LockState};
pub use config::{InvalidEnvironment, InvalidMaxAge, MaxAge, Settings};
pub use database_url::InvalidDatabaseUrl;
pub use error::{ConnectError, LockError};
pub use heartbeat::Loss;
pub use key::{InvalidKey, Job, LockKey, SyncType, UnknownSyncType};
pub use lease::{FencedError, Lease, LeaseAttempt};
pub use lock::SyncLock;
pub use run::{InvalidRunId, RunId, RunReport};
pub use runner::{JobFailure, RunOutcome, ScheduledReport};

/// The examples of the README, compiled as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
