//! The command line: one file a subcommand, and the exit codes that scripts depend on.

mod completions;
mod demo;
mod doctor;
mod exit;
mod migrate;
mod output;
mod release;
mod run;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use sync_lock::{LockError, Settings};
use tracing_subscriber::EnvFilter;

use exit::Failure;

const EXIT_CODES: &str = "\
Environment:
  DATABASE_URL                   the database, as Prisma writes it (or DISPATCH_DATABASE_URL where it is unset)
  DISPATCH_SYNC_LOCK_MAX_AGE_MS  how old a row may get before it is taken over [default: 1800000, 30 minutes]
  RUST_LOG                       what to log on stderr [default: warn]

Exit codes:
   0  done; for run: the command succeeded under the lock
  64  wrong usage or an invalid argument
  69  the database cannot be reached in time, has no connection left, or only takes reads
  75  not now, try again: the key is held by another (run), \"global\" is alive or a row is locked (migrate), the
      holder changed (force-release)
  76  run: the lock was lost while the command ran
  77  the role lacks a privilege (named in the message)
  78  configuration or schema: bad DATABASE_URL, wrong password, no such database, tables missing or of another type
  70  anything else: a bug
   1, 2  doctor: warnings; findings that break exclusion or the migration
 126, 127  run: the command cannot be executed, cannot be found
 its own, 128 + n  run: the command's exit code, or the signal that ended it; a line on stderr says so";

/// A lock per job in a Postgres table, shared with TypeScript replicas that use Prisma.
#[derive(Parser)]
#[command(name = "sync-lock", version, after_help = EXIT_CODES, max_term_width = 120)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Migrate(migrate::Arguments),
    Status(status::Arguments),
    Run(run::Arguments),
    Release(release::Arguments),
    ForceRelease(release::ForceArguments),
    Doctor(doctor::Arguments),
    Demo(demo::Arguments),
    Completions(completions::Arguments),
}

pub(crate) fn main() -> ExitCode {
    log_to_stderr();
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => return exit::usage(&error),
    };
    let done = |()| ExitCode::SUCCESS;
    let outcome = match arguments.command {
        Command::Migrate(arguments) => migrate::run(&arguments).map(done),
        Command::Status(arguments) => status::run(&arguments).map(done),
        Command::Run(arguments) => run::run(&arguments),
        Command::Release(arguments) => release::run(&arguments).map(done),
        Command::ForceRelease(arguments) => release::force(&arguments).map(done),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Completions(arguments) => completions::run::<Arguments>(&arguments).map(done),
        Command::Demo(arguments) => demo::run(&arguments).map(done),
    };
    outcome.unwrap_or_else(|failure| failure.report())
}

/// Runs a transaction of an operator's command. Nobody waits for ever behind a table lock.
fn bounded_transaction<T>(
    settings: &Settings,
    body: impl FnOnce(&mut PgConnection) -> Result<T, LockError>,
) -> Result<T, LockError> {
    settings.transaction(&mut settings.connect()?, |conn| {
        conn.batch_execute("SET LOCAL statement_timeout = '10s'")?;
        body(conn)
    })
}

/// Warnings of the library reach people; `RUST_LOG` shows more.
fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .without_time()
        .init();
}
