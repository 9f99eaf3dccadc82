//! `sync-lock migrate`: the cleanup on deploy.

use std::time::Duration;

use sync_lock::migrate::{Migration, MigrationReport, migrate};
use sync_lock::{LockRow, Settings};

use crate::cli::Failure;
use crate::cli::output::{age, print, shown};

/// Remove the orphaned row `global` of the retired shared key
///
/// Safe to run on every deploy, by any number of replicas at once. A row that is alive stays, and nothing is changed.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Wait this long for a live row `global` to go, for instance 90s or 35m
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "0s")]
    wait: Duration,
    /// Say what would be done and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Make the two tables first, for a database that Prisma will never manage
    #[arg(long)]
    bootstrap: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    let migration = Migration::from_settings(&settings)
        .wait(arguments.wait)
        .bootstrap(arguments.bootstrap)
        .dry_run(arguments.dry_run);
    let report = migrate(&mut settings.connect()?, &migration)?;
    print(&describe(&report, arguments.dry_run))
}

fn describe(report: &MigrationReport, dry_run: bool) -> String {
    let would = if dry_run { "would have " } else { "" };
    let mut lines = Vec::new();
    if report.bootstrapped {
        lines.push(format!("{would}made the tables \"IssueSyncRun\" and \"sync_lock\""));
    }
    for version in &report.applied {
        lines.push(format!("{would}applied migration {version}"));
    }
    if report.applied.is_empty() {
        lines.push("every migration was applied before".to_owned());
    }
    lines.push(match &report.removed {
        Some(row) => format!("{would}removed the row \"global\": {}", describe_row(row)),
        None => "there is no row \"global\" to remove".to_owned(),
    });
    lines.join("\n") + "\n"
}

fn describe_row(row: &LockRow) -> String {
    let holder = match &row.holder {
        Some(holder) => format!("held by {}", shown(holder.as_str())),
        None => "without a holder".to_owned(),
    };
    format!("{holder}, {} old", age(row.age_seconds))
}
