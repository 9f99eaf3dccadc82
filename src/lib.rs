//! A lock per periodic job in a Postgres table, shared with TypeScript replicas that use Prisma.
//!
//! A row in `sync_lock` is a lock and no row is a free lock. The claim is one statement that the database decides by
//! its own clock; a row without a holder, or older than the maximum age, is taken over. [`SyncLock::run`] puts a job
//! under a [`Lease`]: its row is renewed while the job runs, a loss cancels the job, and the row is freed however the
//! job ends. [`SyncLock::acquire_lock`] only claims. What is guaranteed and what is not stands in `docs/guarantees.md`,
//! with the test that pins each point.
//!
//! # Layout
//!
//! | module | job |
//! | --- | --- |
//! | `key` | [`SyncType`], [`LockKey`], [`Job`]: the map from jobs to rows |
//! | `run` | [`RunId`] and [`RunReport`]: who holds a row, and how a run ends |
//! | `store` | all SQL, one function a statement, for the search path or a schema of its own |
//! | [`blocking`] | the lock over a connection of the caller's own |
//! | `lock` | [`SyncLock`]: the lock for async code, waiting, shutdown |
//! | `lease` | [`Lease`]: a lock that is renewed, says when it is lost, and fences writes |
//! | `runner` | [`SyncLock::run`] and [`RunOutcome`]: one run of a job, from the overlap guard to its record |
//! | `heartbeat` | the thread that renews leases, the trust that each has left, and [`Loss`] |
//! | `cleanup` | frees what nobody could wait for: dropped leases, abandoned claims, unwritten ends |
//! | `dedicated` | a connection outside of the pool, with a bound on every call |
//! | `boottime` | a clock that goes on during suspend |
//! | `pool` | connections for the async handle |
//! | `config` | [`Settings`] and [`MaxAge`], from code or from the environment; every default |
//! | `database_url` | `DATABASE_URL` in Prisma's dialect, turned into what libpq takes |
//! | [`migrate`](mod@migrate) | the cleanup of the retired shared key |
//! | `doctor` | what would break exclusion or the migration, with remedies (feature `cli`) |
//! | `error` | [`LockError`]: why the database did not do what was asked |
//! | `starvation`, `private_server` | the simulation and its throw-away Postgres, for demonstration, tests and benches |
//! | `main`, `cli` | the program `sync-lock`: one file a subcommand, and the exit codes |
//!
//! # Examples
//!
//! One run of a job. The outcome says whether it ran, and why not:
//!
//! ```no_run
//! use sync_lock::{RunOutcome, Settings, SyncLock, SyncType};
//!
//! # async fn work() -> Result<(), std::io::Error> { Ok(()) }
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = SyncLock::new(&Settings::from_env()?)?;
//! match locks.run(SyncType::Reconcile, |_lease| work()).await {
//!     RunOutcome::Completed(_) => println!("done"),
//!     RunOutcome::Held { holder, .. } => println!("skipped: {holder:?} has the key"),
//!     RunOutcome::Failed(failure) => println!("failed: {failure}"),
//!     other => println!("skipped or lost: {other:?}"),
//! }
//! locks.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! The names of the TypeScript module, line by line. Nobody renews this row:
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

#[cfg(feature = "private-server")]
#[doc(hidden)]
pub mod bench_support;
pub mod blocking;
mod boottime;
mod cleanup;
mod config;
mod database_url;
mod dedicated;
#[cfg(feature = "cli")]
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

/// The examples of the port guide, compiled as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/port.md")]
struct PortGuide;
