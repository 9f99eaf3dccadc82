//! What a run leaves behind when nobody can wait for its end: a dropped lease, a claim whose caller is gone, an end that
//! could not be written. One thread, only while there is something to do, with a connection of its own.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::config::Settings;
use crate::dedicated::Dedicated;
use crate::error::LockError;
use crate::key::LockKey;
use crate::run::{Ending, RunId};
use crate::store::Ended;

/// The pause after the first failed attempt, and the longest one.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// How long one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(5);

/// An end that is owed to the database.
#[derive(Clone, Debug)]
pub(crate) struct Leftover {
    pub(crate) key: LockKey,
    pub(crate) run_id: RunId,
    pub(crate) ending: Ending,
    /// How long trying makes sense: after the maximum age the row is free for everybody anyway.
    pub(crate) max_age: Duration,
    /// How often to look again when nothing was found: a claim whose answer was lost may still be under way on the server.
    pub(crate) looks: u32,
}

/// Cheap to clone; all clones share one queue.
#[derive(Clone)]
pub(crate) struct Cleanup {
    shared: Arc<Shared>,
}

struct Shared {
    settings: Settings,
    queue: Mutex<Queue>,
    wake: Condvar,
    owed: watch::Sender<usize>,
}

#[derive(Default)]
struct Queue {
    leftovers: VecDeque<(Leftover, Option<Instant>)>,
    /// A thread works on it.
    attended: bool,
}

impl Cleanup {
    pub(crate) fn new(settings: Settings) -> Self {
        let owed = watch::Sender::new(0);
        Self { shared: Arc::new(Shared { settings, queue: Mutex::default(), wake: Condvar::new(), owed }) }
    }

    /// Takes over an end that somebody owes. Never blocks.
    pub(crate) fn hand_over(&self, leftover: Leftover) {
        let mut queue = self.shared.queue();
        self.shared.owe();
        let give_up = Instant::now().checked_add(leftover.max_age);
        queue.leftovers.push_back((leftover, give_up));
        self.shared.wake.notify_one();
        if !queue.attended {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("sync-lock-cleanup".to_owned());
            match thread.spawn(move || shared.work()) {
                Ok(_) => queue.attended = true,
                // The next hand-over tries again.
                Err(error) => tracing::error!(%error, "no thread to clean up with"),
            }
        }
    }

    /// Counts something that may turn into a leftover, until it is dropped.
    pub(crate) fn expect(&self) -> Expected {
        self.shared.owe();
        Expected { cleanup: self.clone() }
    }

    /// Waits until nothing is owed any more, and nothing under way can come to be owed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops the wait and not the work.
    pub(crate) async fn settled(&self) {
        // The sender lives as long as this handle.
        let _ = self.shared.owed.subscribe().wait_for(|owed| *owed == 0).await;
    }
}

impl Shared {
    /// Whoever waits does so until nothing is owed: more is no news.
    fn owe(&self) {
        self.owed.send_if_modified(|owed| {
            *owed += 1;
            false
        });
    }

    fn pay(&self) {
        self.owed.send_if_modified(|owed| {
            *owed -= 1;
            *owed == 0
        });
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut dedicated = Dedicated::new(self.settings.clone());
        let mut pause = PAUSES.0;
        loop {
            let (mut leftover, give_up) = {
                let mut queue = self.queue();
                let Some(next) = queue.leftovers.pop_front() else {
                    queue.attended = false;
                    return;
                };
                next
            };
            match settle(&mut dedicated, &leftover) {
                Ok(Ended { recorded: false, freed: false, .. }) if leftover.looks > 0 => {
                    leftover.looks -= 1;
                    pause = self.later(leftover, give_up, pause);
                    continue;
                }
                Ok(Ended { recorded, freed, .. }) => {
                    let Leftover { key, run_id, .. } = &leftover;
                    tracing::info!(%key, %run_id, freed, recorded, "cleaned up after a run");
                    pause = PAUSES.0;
                }
                Err(error) if give_up.is_none_or(|give_up| Instant::now() < give_up) => {
                    tracing::debug!(key = %leftover.key, run_id = %leftover.run_id, %error, "not cleaned up yet");
                    pause = self.later(leftover, give_up, pause);
                    continue;
                }
                Err(error) => {
                    tracing::error!(key = %leftover.key, run_id = %leftover.run_id, %error, "left to expire");
                }
            }
            self.pay();
        }
    }

    /// Puts a leftover back and waits, and says how long to wait the next time. A new leftover ends the wait.
    fn later(&self, leftover: Leftover, give_up: Option<Instant>, pause: Duration) -> Duration {
        let mut queue = self.queue();
        let others_wait = !queue.leftovers.is_empty();
        queue.leftovers.push_back((leftover, give_up));
        // The others get their turn first, but not one of them without a pause.
        let pause = if others_wait { PAUSES.0 } else { pause };
        drop(self.wake.wait_timeout(queue, pause));
        (pause * 2).min(PAUSES.1)
    }
}

fn settle(dedicated: &mut Dedicated, leftover: &Leftover) -> Result<Ended, LockError> {
    let Leftover { key, run_id, ending, .. } = leftover.clone();
    dedicated.call(ATTEMPT, move |store, conn| store.end_and_release(conn, &key, &run_id, &ending))
}

/// A call that is under way. Whoever waits for [`Cleanup::settled`] waits for its end too.
pub(crate) struct Expected {
    cleanup: Cleanup,
}

impl Clone for Expected {
    fn clone(&self) -> Self {
        self.cleanup.expect()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.cleanup.shared.pay();
    }
}

/// Hands an end over when it is dropped, unless it was settled before. It is made before the statement that may make it
/// necessary, so that a future dropped at any point, a lost answer and a runtime that shuts down all lead here.
pub(crate) struct OnDrop {
    leftover: Option<Box<Leftover>>,
    /// Dropped after the leftover was handed over, so that nobody finds nothing owed in between.
    expected: Expected,
}

impl OnDrop {
    pub(crate) fn new(expected: Expected, leftover: Leftover) -> Self {
        Self { leftover: Some(Box::new(leftover)), expected }
    }

    /// Nothing is owed any more.
    pub(crate) fn settled(mut self) {
        self.leftover = None;
    }
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(leftover) = self.leftover.take() {
            self.expected.cleanup.hand_over(*leftover);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_settled_is_given_up_when_the_row_has_expired() {
        let nowhere = Settings::new("postgresql://127.0.0.1:1/nowhere").expect("a URL");
        let cleanup = Cleanup::new(nowhere);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        cleanup.hand_over(Leftover {
            key: LockKey::GROOMER,
            run_id: RunId::new(),
            ending: Ending::Failed("a test".to_owned()),
            max_age: Duration::from_millis(1),
            looks: 3,
        });
        let settled = async { tokio::time::timeout(Duration::from_secs(30), cleanup.settled()).await };
        runtime.block_on(settled).expect("the end of the attempts");
    }
}
