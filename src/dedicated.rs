//! A connection outside of the pool, and a bound on every call over it.
//!
//! libpq's own timeouts end a wait for a dead host but not one behind a proxy that accepts and never answers. So each call
//! runs on a thread that can be given up together with its connection.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::thread;
use std::time::Duration;

use diesel::prelude::*;

use crate::config::Settings;
use crate::error::LockError;
use crate::store::Store;

type Task = Box<dyn FnOnce(&mut Option<PgConnection>) + Send>;

/// A connection that is opened when it is needed and again after it was lost.
pub(crate) struct Dedicated {
    settings: Settings,
    worker: Option<Sender<Task>>,
}

impl Dedicated {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { settings, worker: None }
    }

    /// Runs a call, and after the bound gives it up: the call may still be carried out on the server.
    pub(crate) fn call<T: Send + 'static>(
        &mut self,
        bound: Duration,
        call: impl FnOnce(&Store, &mut PgConnection) -> Result<T, LockError> + Send + 'static,
    ) -> Result<T, LockError> {
        let (answer, answered) = sync_channel(1);
        let settings = self.settings.clone();
        let task: Task = Box::new(move |slot| {
            let outcome = connected(slot, &settings).and_then(|conn| call(&settings.store, conn));
            // After a failover a new connection may find the new primary.
            if matches!(outcome, Err(LockError::ConnectionLost(_) | LockError::ReadOnly(_))) {
                *slot = None;
            }
            // Nobody listens any more if the bound is over.
            let _ = answer.send(outcome);
        });
        if self.worker()?.send(task).is_err() {
            self.worker = None;
            return Err(LockError::CutOff);
        }
        answered.recv_timeout(bound).unwrap_or_else(|error| {
            // The thread ends when its call does, because nothing can be sent to it any more.
            self.worker = None;
            Err(match error {
                RecvTimeoutError::Timeout => LockError::TimedOut(bound),
                RecvTimeoutError::Disconnected => LockError::CutOff,
            })
        })
    }

    fn worker(&mut self) -> Result<&Sender<Task>, LockError> {
        if self.worker.is_none() {
            let (tasks, queue) = channel::<Task>();
            let work = move || {
                let mut slot = None;
                for task in queue {
                    task(&mut slot);
                }
            };
            thread::Builder::new().name("sync-lock-call".to_owned()).spawn(work).map_err(|_| LockError::CutOff)?;
            self.worker = Some(tasks);
        }
        self.worker.as_ref().ok_or(LockError::CutOff)
    }
}

fn connected<'a>(slot: &'a mut Option<PgConnection>, settings: &Settings) -> Result<&'a mut PgConnection, LockError> {
    match slot {
        Some(conn) => Ok(conn),
        None => Ok(slot.insert(settings.connect()?)),
    }
}
