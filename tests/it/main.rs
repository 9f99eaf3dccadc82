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
//! | `migration` | the cleanup removes the orphaned `global` row and nothing else, ever |
//! | `command_line` | exit codes, output and bad input |
//! | `soak` | 64 contenders for half a minute, judged by a trigger |

#![expect(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../support/mod.rs"]
mod support;

mod bounds;
mod clock;
mod command_line;
mod contention;
mod handle;
mod logs;
mod migration;
mod records;
mod release;
mod soak;
mod starvation;
mod transaction;
