//! Beside a TypeScript peer: the real Prisma on the same database. What it needs is installed by `.ci/prepare`.
//!
//! | file | what it proves |
//! | --- | --- |
//! | `exclusion` | each respects the other's lock, takes over the other's stale row and never frees the other's |

#![expect(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../support/mod.rs"]
#[allow(dead_code, reason = "the harness of the other tests has more than is needed here")]
mod support;

mod peer;

mod exclusion;
