//! Everything about the lock, against a real Postgres.
//!
//! | file | what it proves |
//! | --- | --- |
//! | `starvation` | jobs with different keys do not shut each other out |
//! | `contention` | exactly one winner, whoever meets whom |
//! | `release` | a run frees its own rows and nothing else |
//! | `records` | run records tell what happened |
//! | `logs` | logs tell who had the key |
//! | `bounds` | no wait without an end; one round trip; a loser writes nothing |
//! | `clock` | age is the database's affair, in any time zone |
//! | `transaction` | the claim inside the caller's own transaction |
//! | `handle` | the async handle: cancelled, cut off, without a database, with a full pool |
//! | `lease` | renewed while held, lost for a reason, fenced; nothing left behind |
//! | `runner` | one run of a job: every end has its outcome, record and free row |
//! | `migration` | the cleanup removes the orphaned `global` row and nothing else, ever |
//! | `command_line` | exit codes, output and bad input |
//! | `documentation` | the documents name tests that exist, and their SQL works |
//! | `run_command` | any program under a lock: signals, process group, exit codes |
//! | `contest_sync` | the example, as two real processes |
//! | `simulation` | the starvation as it was measured, and the demonstration |
//! | `schema` | the tables in a schema of their own |
//! | `pooler` | through PgBouncer in transaction mode |
//! | `tls` | with, without and against certificates |
//! | `faults` | what production does to databases |
//! | `admin` | release, force-release, doctor, completions |
//! | `soak` | 64 contenders for half a minute, judged by a trigger |

#![expect(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../support/mod.rs"]
mod support;

mod admin;
mod bounds;
mod clock;
mod command_line;
mod contention;
mod contest_sync;
mod documentation;
mod faults;
mod handle;
mod lease;
mod logs;
mod migration;
mod pooler;
mod records;
mod release;
mod run_command;
mod runner;
mod schema;
mod simulation;
mod soak;
mod starvation;
mod tls;
mod transaction;
