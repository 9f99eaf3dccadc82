//! Beside a TypeScript peer: the real Prisma on the same database. What it needs is installed by `.ci/prepare-peer`.
//!
//! | file | what it proves |
//! | --- | --- |
//! | `exclusion` | each respects the other's lock, takes over the other's stale row and never frees the other's |
//! | `differential` | the same operations have the same answers and leave the same rows |
//! | `prisma` | Prisma's migration tool on the same folder, before and after ours |
//! | `page` | `docs/compatibility.md` names tests that exist |
//! | `schema` | the tables in a schema of their own |
//! | `server` | the example `server`, by real HTTP requests |
//! | `soak` | four processes of each side contend for a minute with crashes, judged by a trigger |
//! | `time` | a peer whose clock or time zone is wrong, and the remedy |

#![expect(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "the harness of the other tests has more than is needed here")]
mod support;

mod peer;

mod differential;
mod exclusion;
mod page;
mod prisma;
mod schema;
mod server;
mod soak;
mod time;
