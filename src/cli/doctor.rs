//! `sync-lock doctor`: what would break exclusion or the migration.

use std::fmt::Write as _;
use std::process::ExitCode;

use serde::Serialize;
use sync_lock::Settings;
use sync_lock::doctor::{Finding, Severity, examine};

use crate::cli::Failure;
use crate::cli::output::print;

/// Look for what would break exclusion or the migration
///
/// Exits 0 with nothing but notes, 1 with warnings, 2 with problems. A database that cannot be reached has the exit code of
/// every other command. It changes nothing.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Print JSON for machines
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let mut findings = examine(&Settings::from_env()?)?;
    // The worst comes first; what is as bad stays in the order in which it was found.
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    print(&if arguments.json { json(&findings)? } else { human(&findings) })?;
    Ok(ExitCode::from(match findings.first().map(|finding| finding.severity) {
        Some(Severity::Problem) => 2,
        Some(Severity::Warning) => 1,
        Some(Severity::Note) | None => 0,
    }))
}

#[derive(Serialize)]
struct Report<'a> {
    severity: &'static str,
    what: &'a str,
    remedy: &'a str,
}

fn json(findings: &[Finding]) -> Result<String, Failure> {
    let reports: Vec<_> = findings
        .iter()
        .map(|Finding { severity, what, remedy, .. }| Report { severity: severity.as_str(), what, remedy })
        .collect();
    let mut text = serde_json::to_string_pretty(&reports).map_err(|error| Failure::bug(&error))?;
    text.push('\n');
    Ok(text)
}

fn human(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { severity, what, remedy, .. } in findings {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{:8} {what}", format!("{}:", severity.as_str()));
        if !remedy.is_empty() {
            let _ = writeln!(text, "         {remedy}");
        }
    }
    let worst = findings.first().map(|finding| finding.severity);
    if worst.is_none_or(|worst| worst == Severity::Note) {
        text.push_str("nothing is wrong\n");
    }
    text
}
