//! `sync-lock run`: any program under a lock.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitCode, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use sync_lock::{Job, Lease, LeaseAttempt, LockKey, Loss, RunReport, Settings, SyncLock, SyncType};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use crate::cli::Failure;
use crate::cli::exit;
use crate::cli::output::{age, printable, shown};

/// How long the command may take to end after the signal that was passed on, and the rest of its group after SIGTERM.
const GRACE: Duration = Duration::from_secs(5);

/// How long the group gets between SIGTERM and SIGKILL once the lease is lost. Somebody else may be working already.
const GRACE_AFTER_LOSS: Duration = Duration::from_secs(1);

/// How often to look whether the group is gone.
const LOOK: Duration = Duration::from_millis(10);

/// The signals that are passed on, and whether the command is expected to end by them.
const SIGNALS: [(Signal, bool); 8] = [
    (Signal::SIGTERM, true),
    (Signal::SIGINT, true),
    (Signal::SIGHUP, true),
    (Signal::SIGQUIT, true),
    (Signal::SIGUSR1, false),
    (Signal::SIGUSR2, false),
    // Ctrl-Z stops the command and not the heartbeat.
    (Signal::SIGTSTP, false),
    (Signal::SIGCONT, false),
];

/// Run a command under the lock of a job
///
/// The lock is renewed while the command runs, and freed when it and every process it left in its group have ended. If the
/// lock is lost, the command is stopped at once (exit code 76). A key that somebody else holds is exit code 75.
///
/// If this program itself is killed with SIGKILL, the command goes on, without a lock after the maximum age.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// The job: scheduled, manual, automation, pr-followup, reconcile or stale-work
    #[arg(value_name = "SYNC TYPE", required_unless_present = "key", conflicts_with_all = ["key", "record_as"])]
    sync_type: Option<SyncType>,
    /// A key of your own, such as contest-sync
    #[arg(long, value_name = "KEY", value_parser = |text: &str| LockKey::custom(text))]
    key: Option<LockKey>,
    /// Keep a run record of this sync type for the key
    #[arg(long = "sync-type", value_name = "TYPE", requires = "key", id = "record_as")]
    record_as: Option<String>,
    /// Wait this long for the lock, for instance 90s or 10m
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration, default_value = "0s")]
    wait: Duration,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let job = job(arguments)?;
    let settings = Settings::from_env()?;
    // Which database is wrong or missing is told at once and precisely, before anything waits.
    drop(settings.connect()?);
    let locks = SyncLock::new(&settings).map_err(|error| Failure::configuration(&error))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| Failure::bug(&error))?;
    let outcome = runtime.block_on(async {
        let outcome = under_lock(&locks, job, arguments).await;
        locks.shutdown().await;
        outcome
    });
    // A thread that waits for a database which never answers must not keep the program.
    runtime.shutdown_background();
    outcome
}

fn job(arguments: &Arguments) -> Result<Job, Failure> {
    match (arguments.sync_type, &arguments.key, &arguments.record_as) {
        (Some(sync_type), _, _) => Ok(sync_type.into()),
        (None, Some(key), Some(sync_type)) => {
            key.clone().recorded_as(sync_type.as_str()).map_err(|error| Failure::usage(&error))
        }
        (None, Some(key), None) => Ok(key.clone().into()),
        (None, None, _) => Err(Failure::told(exit::USAGE, "name a sync type or a --key")),
    }
}

async fn under_lock(locks: &SyncLock, job: Job, arguments: &Arguments) -> Result<ExitCode, Failure> {
    // Before the claim: a signal in between must not leave a row behind.
    let mut signals = listen().map_err(|error| Failure::bug(&error))?;
    let attempt = tokio::select! {
        attempt = locks.lease_within(job, arguments.wait) => attempt?,
        Some((signal, _)) = signals.recv() => {
            complain(&format!("ended by {signal} before the command was started"));
            return Ok(by_signal(signal as i32));
        }
    };
    let lease = match attempt {
        LeaseAttempt::Leased(lease) => lease,
        LeaseAttempt::Conflict { holder, .. } => {
            let holder = holder.map_or_else(
                || "another run that is just claiming or freeing it".to_owned(),
                |holder| {
                    let ago = age(holder.age.as_secs_f64());
                    format!("{}, claimed or renewed {ago} ago", shown(holder.run_id.as_str()))
                },
            );
            return Err(Failure::told(exit::TRY_AGAIN, &format!("the lock is held by {holder}")));
        }
    };
    let group = match start(&arguments.command) {
        Ok(group) => group,
        Err(error) => {
            let program = arguments.command.first().map(|program| program.to_string_lossy().into_owned());
            let message = format!("cannot run {:?}: {error}", program.unwrap_or_default());
            // What cannot be written now is written in the background; the command's own trouble is what matters here.
            let _ = lease.fail(&message).await;
            let code = if error.kind() == io::ErrorKind::NotFound { exit::NOT_FOUND } else { exit::NOT_EXECUTABLE };
            return Err(Failure::told(code, &message));
        }
    };
    let (status, loss) = supervise(&lease, group, &mut signals).await;
    match loss.or_else(|| lease.loss()) {
        Some(loss) => Err(stopped(&lease, &loss).await),
        None => report(&lease, status).await,
    }
}

/// The command as the leader of a process group of its own.
fn start(command: &[OsString]) -> io::Result<Group> {
    let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // The waiter comes first: a command that was started must never be without one.
    let (hand_over, started) = std::sync::mpsc::channel();
    let (tell, ended) = oneshot::channel();
    thread::Builder::new().name("sync-lock-wait".to_owned()).spawn(move || {
        if let Some(status) = started.recv().ok().and_then(wait_for) {
            // Nobody listens any more if the program itself ends.
            let _ = tell.send(status);
        }
    })?;
    let child = Command::new(program).args(arguments).process_group(0).spawn()?;
    let leader = Pid::from_raw(i32::try_from(child.id()).map_err(io::Error::other)?);
    // The waiter waits for it.
    let _ = hand_over.send(leader);
    Ok(Group { leader, ended, status: None })
}

/// Waits for the leader, and as process 1 for every orphan as well.
fn wait_for(leader: Pid) -> Option<ExitStatus> {
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == leader => return Some(ExitStatus::from_raw(code << 8)),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == leader => {
                return Some(ExitStatus::from_raw(signal as i32));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return None,
        }
    }
}

struct Group {
    leader: Pid,
    ended: oneshot::Receiver<ExitStatus>,
    status: Option<ExitStatus>,
}

impl Group {
    /// Waits for the leader; again and again if it must be.
    async fn leader_ended(&mut self) {
        if self.status.is_none() {
            // Whoever could not wait for the leader knows no better than that it failed.
            self.status = Some((&mut self.ended).await.unwrap_or_else(|_| ExitStatus::from_raw(0xff00)));
        }
    }

    fn signal(&self, signal: Signal) {
        // A group that is gone needs no signal.
        let _ = killpg(self.leader, signal);
    }

    /// A signal to end by reaches a process that was stopped only when it goes on.
    fn end_by(&self, signal: Signal) {
        self.signal(signal);
        self.signal(Signal::SIGCONT);
    }

    /// Waits for the end of every process of the group.
    async fn gone_within(&mut self, bound: Duration) -> bool {
        let started = Instant::now();
        loop {
            if self.status.is_none() {
                // While the leader lives, its own waiter collects whatever ends.
                let _ = tokio::time::timeout(LOOK, self.leader_ended()).await;
            } else {
                while matches!(waitpid(None, Some(WaitPidFlag::WNOHANG)), Ok(status) if status != WaitStatus::StillAlive)
                {
                }
                if killpg(self.leader, None) == Err(Errno::ESRCH) {
                    return true;
                }
                tokio::time::sleep(LOOK).await;
            }
            if started.elapsed() >= bound {
                return false;
            }
        }
    }

    /// Stops what is left of the group, by force if it must be.
    async fn stop(&mut self, grace: Duration) {
        if self.gone_within(Duration::ZERO).await {
            return;
        }
        self.end_by(Signal::SIGTERM);
        if !self.gone_within(grace).await {
            self.signal(Signal::SIGKILL);
            self.gone_within(GRACE).await;
        }
    }
}

/// Sees the command to its end: signals are passed on, a loss stops it at once, and nothing of its group outlives it.
async fn supervise(
    lease: &Lease,
    mut group: Group,
    signals: &mut mpsc::UnboundedReceiver<(Signal, bool)>,
) -> (ExitStatus, Option<Loss>) {
    let mut stop_at = None;
    let loss = loop {
        let patience = async {
            match stop_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = group.leader_ended() => break None,
            loss = lease.lost() => break Some(loss),
            Some((signal, ends)) = signals.recv() => {
                if ends { group.end_by(signal) } else { group.signal(signal) }
                if ends {
                    stop_at.get_or_insert_with(|| tokio::time::Instant::now() + GRACE);
                }
            }
            () = patience => break None,
        }
    };
    if let Some(loss) = &loss {
        complain(&format!("{loss}: stopping the command"));
    }
    // Until the last process has ended, the lease is renewed; only then the row is freed.
    group.stop(if loss.is_some() { GRACE_AFTER_LOSS } else { GRACE }).await;
    group.leader_ended().await;
    (group.status.unwrap_or_else(|| ExitStatus::from_raw(0xff00)), loss)
}

async fn stopped(lease: &Lease, loss: &Loss) -> Failure {
    // The row is not ours any more, or may not be; the record is closed in any case.
    if let Err(error) = lease.fail(&loss.to_string()).await {
        tracing::warn!(%error, "the end of the run could not be written yet");
    }
    Failure::told(exit::LOST, &format!("{loss}. The command was stopped"))
}

/// Writes the end of the run and hands out the command's own exit code.
async fn report(lease: &Lease, status: ExitStatus) -> Result<ExitCode, Failure> {
    let (code, ended) = match (status.code(), status.signal()) {
        (Some(0), _) => (ExitCode::SUCCESS, None),
        (Some(code), _) => {
            let code = u8::try_from(code).unwrap_or(u8::MAX);
            (ExitCode::from(code), Some(format!("the command exited with {code}")))
        }
        (None, signal) => {
            let signal = signal.unwrap_or_default();
            let name = Signal::try_from(signal).map_or("an unknown signal", Signal::as_str);
            (by_signal(signal), Some(format!("the command was ended by {name}")))
        }
    };
    let still_ours = match &ended {
        None => lease.complete(&RunReport::default()).await,
        Some(message) => {
            complain(message);
            lease.fail(message).await
        }
    };
    match still_ours {
        Ok(true) => Ok(code),
        Ok(false) => Err(Failure::told(exit::LOST, "the lock was lost before the command ended")),
        Err(error) => {
            tracing::warn!(%error, "the end of the run could not be written yet");
            Ok(code)
        }
    }
}

/// Listens for every signal that is passed on, but for those that whoever started us had us ignore, as `nohup` does.
fn listen() -> io::Result<mpsc::UnboundedReceiver<(Signal, bool)>> {
    let (tell, heard) = mpsc::unbounded_channel();
    let ignored = ignored_signals();
    for (number, ends) in SIGNALS.into_iter().filter(|(number, _)| !ignored.contains(number)) {
        let mut stream = signal(SignalKind::from_raw(number as i32))?;
        let tell = tell.clone();
        tokio::spawn(async move { while stream.recv().await.is_some() && tell.send((number, ends)).is_ok() {} });
    }
    // With SIGCHLD ignored nobody could learn how the command ended. A handler is not inherited by it.
    let _ = signal(SignalKind::child())?;
    Ok(heard)
}

fn ignored_signals() -> Vec<Signal> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).map(str::trim);
    let mask = mask.and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or_default();
    let is_ignored = |number: &Signal| mask >> (*number as i32 - 1) & 1 == 1;
    SIGNALS.into_iter().map(|(number, _)| number).filter(is_ignored).collect()
}

fn by_signal(signal: i32) -> ExitCode {
    ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX))
}

fn complain(message: &str) {
    // With stderr closed there is nobody left to tell.
    let _ = writeln!(io::stderr(), "sync-lock: {}", printable(message));
}
