//! `sync-lock status`: who holds what.

use chrono::SecondsFormat;
use serde::Serialize;
use sync_lock::{LockRow, MaxAge, Settings, blocking};

use crate::cli::output::{age, print, shown, table};
use crate::cli::{Failure, bounded_transaction};

/// List the locks: key, holder, age and state
///
/// A lock is `held`, `expired` (older than the maximum age: the next claim takes it over), `orphaned` (without a holder: the
/// next claim takes it over), or stamped in the `future` (held until the clock has caught up and the maximum age is over).
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print JSON for machines
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    let max_age = settings.max_age();
    let rows = bounded_transaction(&settings, |conn| blocking::inspect(conn, max_age))?;
    if arguments.json { print(&json(&rows, max_age)?) } else { print(&human(&rows, max_age)) }
}

#[derive(Serialize)]
struct Report<'a> {
    max_age_ms: u64,
    locks: Vec<Lock<'a>>,
}

#[derive(Serialize)]
struct Lock<'a> {
    key: &'a str,
    holder: Option<&'a str>,
    acquired_at: Option<String>,
    age_ms: Option<i64>,
    state: &'static str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    legacy: bool,
}

fn json(rows: &[LockRow], max_age: MaxAge) -> Result<String, Failure> {
    let locks = rows.iter().map(|row| Lock {
        key: row.key.as_str(),
        holder: row.holder.as_ref().map(sync_lock::RunId::as_str),
        acquired_at: row.acquired_at.map(|at| at.to_rfc3339_opts(SecondsFormat::Micros, true)),
        age_ms: age_ms(row.age_seconds),
        state: row.state.as_str(),
        legacy: row.legacy,
    });
    let report = Report {
        max_age_ms: u64::try_from(max_age.duration().as_millis()).unwrap_or(u64::MAX),
        locks: locks.collect(),
    };
    let mut text = serde_json::to_string_pretty(&report).map_err(|error| Failure::bug(&error))?;
    text.push('\n');
    Ok(text)
}

/// None for a stamp without an age, such as `infinity`.
fn age_ms(seconds: f64) -> Option<i64> {
    #[expect(clippy::cast_possible_truncation, reason = "a float's conversion saturates, and the result is finite")]
    seconds.is_finite().then_some((seconds * 1000.0) as i64)
}

fn human(rows: &[LockRow], max_age: MaxAge) -> String {
    let limit = age(max_age.duration().as_secs_f64());
    if rows.is_empty() {
        return format!("no locks (maximum age {limit})\n");
    }
    let mut table = table(&["KEY", "HOLDER", "AGE", "STATE"]);
    for row in rows {
        let holder = row.holder.as_ref().map_or_else(|| "-".to_owned(), |holder| shown(holder.as_str()));
        let state =
            if row.legacy { format!("{} (retired key)", row.state.as_str()) } else { row.state.as_str().to_owned() };
        table.add_row([shown(row.key.as_str()), holder, age(row.age_seconds), state]);
    }
    format!("{}\nmaximum age {limit}\n", table.trim_fmt())
}
