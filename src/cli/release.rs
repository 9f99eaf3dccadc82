//! `sync-lock release` and `sync-lock force-release`: for operators.

use sync_lock::{RunId, Settings, blocking};

use crate::cli::exit;
use crate::cli::output::{print, shown};
use crate::cli::{Failure, bounded_transaction};

/// Free what a run holds, and close its record
///
/// It frees nothing but the rows of this run, and may be repeated. A run that renews its lock learns that it is lost.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The run, as `status` shows it
    #[arg(value_name = "RUN_ID")]
    run_id: RunId,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let settings = Settings::from_env()?;
    let freed = bounded_transaction(&settings, |conn| {
        let freed = blocking::release_lock(conn, &arguments.run_id)?;
        if freed {
            blocking::fail_run(conn, &arguments.run_id, "the lock was released by an operator")?;
        }
        Ok(freed)
    })?;
    let run_id = shown(arguments.run_id.as_str());
    print(&if freed { format!("freed what {run_id} held\n") } else { format!("{run_id} holds nothing\n") })
}

/// Free a key, but only if its holder is still the one that you saw
///
/// A holder that renews its lock learns that it is lost. If the holder has changed, nothing is freed (exit code 75).
#[derive(clap::Args)]
pub(crate) struct ForceArguments {
    /// The key, as `status` shows it
    #[arg(value_name = "KEY")]
    key: String,
    /// The holder that you saw
    #[arg(long, value_name = "RUN_ID")]
    holder: RunId,
}

pub(crate) fn force(arguments: &ForceArguments) -> Result<(), Failure> {
    let ForceArguments { key, holder } = arguments;
    let settings = Settings::from_env()?;
    let freed = bounded_transaction(&settings, |conn| blocking::force_release(conn, key, holder))?;
    let (key, holder) = (shown(key), shown(holder.as_str()));
    if !freed {
        let message = format!("{key} is not held by {holder} any more, and stays as it is: look again with `status`");
        return Err(Failure::told(exit::TRY_AGAIN, &message));
    }
    print(&format!("freed {key}, which {holder} held\n"))
}
