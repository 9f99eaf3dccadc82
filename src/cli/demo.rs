//! `sync-lock demo`.

use crate::cli::Failure;

/// Watch five jobs starve each other, and then all win
#[derive(clap::Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_arguments: &Arguments) -> Result<(), Failure> {
    Ok(())
}
