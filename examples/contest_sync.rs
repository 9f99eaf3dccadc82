//! Another application of the same design: an hourly contest sync on several replicas, of which one works at a time.
//!
//! ```sh
//! DATABASE_URL=postgresql://… cargo run --example contest_sync
//! ```
//!
//! It runs once at the start and then every hour. The key is `contest-sync`, without a run record. The maximum age is ten
//! minutes, which frees the key ten minutes after a replica has crashed; a run may take longer, because its lease is
//! renewed. The tables must be there: see `sync-lock migrate --bootstrap`.

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use clap::Parser;
use sync_lock::{Job, LockKey, MaxAge, RunOutcome, Settings, SyncLock};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{MissedTickBehavior, interval};

/// Sync the contests once at the start and then every hour, on one replica at a time
#[derive(Parser)]
struct Arguments {
    /// The time between two runs
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "1h")]
    every: Duration,
    /// How long the work takes; it is only acted
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "5s")]
    work: Duration,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let locks = SyncLock::new(&Settings::from_env()?)?;
    let max_age = MaxAge::new(Duration::from_mins(10))?;
    let job = Job::from(LockKey::custom("contest-sync")?).with_max_age(max_age);

    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut ticks = interval(arguments.every);
    // A run that takes longer than the interval is followed by one run, not by all that it missed.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hang_up.recv() => break,
        }
        let run = locks.run(job.clone(), move |lease| sync_contests(lease.run_id().to_string(), arguments.work));
        tokio::select! {
            outcome = run => println!("{}", describe(&outcome)),
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hang_up.recv() => break,
        }
    }
    // The run that was cut off has been cancelled; its row must not wait for its expiry.
    locks.shutdown().await;
    println!("stopped");
    Ok(())
}

async fn sync_contests(run_id: String, work: Duration) -> Result<(), Infallible> {
    println!("working as {run_id}");
    tokio::time::sleep(work).await;
    Ok(())
}

fn describe(outcome: &RunOutcome<Infallible>) -> String {
    match outcome {
        RunOutcome::Completed(_) => "done".to_owned(),
        RunOutcome::Failed(failure) => format!("failed: {failure}"),
        RunOutcome::Held { holder: Some(holder), .. } => {
            format!("skipped: {} works on it, renewed {:?} ago", holder.run_id, holder.age)
        }
        RunOutcome::Held { .. } => "skipped: another replica is just claiming or freeing it".to_owned(),
        RunOutcome::StillRunning => "skipped: the last run still works on it".to_owned(),
        RunOutcome::Unavailable(error) => format!("skipped: {error}"),
        RunOutcome::Lost(loss) => format!("cut off: {loss}"),
    }
}
