//! The lock over a connection of the caller's own, for code that is not async or that wants the claim inside its own
//! transaction.
//!
//! Every function sends one statement. Inside a transaction that diesel opened ([`Connection::transaction`]), the
//! statement gets a savepoint of its own, which costs two more round trips: a bounded wait that runs out is then an
//! ordinary answer and the transaction stays usable. What it did is committed, or undone, with the transaction. Until
//! then contenders who meet the row wait for it, at most 200 ms, and count it as a conflict. The transaction must be READ
//! COMMITTED: under the stricter levels a lost race is a [`LockError::Serialization`] and the transaction has to be begun
//! again. A transaction opened by a `BEGIN` of the caller's own text is not seen and gets no savepoint.
//!
//! The tables are those that the search path of the connection finds. Where the URL names a `schema`, run the functions
//! in [`Settings::transaction`](crate::Settings::transaction), which sets it.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::config::MaxAge;
use crate::error::{LockError, explain, in_transaction};
use crate::key::{Job, LEGACY_KEY, LockKey};
use crate::run::{Ending, RunId, RunReport, owner_id};
use crate::store::{self, Claim, Ended, Store};

/// How often a statement outside a transaction is sent as it is while it fails to serialize, where that is the default of
/// the database.
const SERIALIZATION_TRIES: u32 = 3;

/// The answer to a claim. A conflict is an ordinary outcome, like HTTP 409, and not an error.
#[must_use = "a locked key stays locked until it is released or expires"]
#[derive(Clone, Debug, PartialEq)]
pub enum Acquisition {
    /// The key is ours from now on.
    #[non_exhaustive]
    Locked {
        /// The run that holds it. Release it by this id.
        run_id: RunId,
        /// When the row was stamped, by the database's clock.
        acquired_at: DateTime<Utc>,
        /// Whom the claim displaced, if it took over an expired or orphaned row.
        displaced: Option<Displaced>,
    },
    /// Somebody else has the key. The claim left no trace.
    #[non_exhaustive]
    Conflict {
        /// Who holds it. None where that could not be known in the same round trip: the row is locked by a transaction
        /// that is just claiming or freeing it.
        holder: Option<Holder>,
    },
}

/// Who holds a key.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Holder {
    /// The run in the row, as whoever wrote it spelt it.
    pub run_id: RunId,
    /// How long ago it was claimed or last renewed, by the database's clock. Zero for a row stamped in the future.
    pub age: Duration,
}

impl Holder {
    fn from_row(run_id: String, age_seconds: f64) -> Self {
        Self { run_id: RunId::from_row(run_id), age: duration(age_seconds) }
    }
}

/// Whom a takeover displaced.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Displaced {
    /// The previous holder, or `None` for an orphaned row.
    pub run_id: Option<RunId>,
    /// How old its row was at the takeover, by the database's clock. Zero for an orphan stamped in the future.
    pub age: Duration,
}

/// Claims the key of a sync type, or of a [`LockKey`] or [`Job`] of the caller's own.
///
/// The claim wins over no row, a row without a holder, and a row older than `max_age` by the database's clock. A job
/// with a sync type gets an `IssueSyncRun` row in the same commit, and a displaced run that still says `running` is closed
/// as failed.
///
/// # Errors
///
/// Only what keeps the claim from being decided: see [`LockError`]. After [`LockError::ConnectionLost`] it may have been
/// won all the same.
pub fn acquire_lock(conn: &mut PgConnection, job: impl Into<Job>, max_age: MaxAge) -> Result<Acquisition, LockError> {
    Store::default().acquire(conn, &job.into(), &RunId::new(), max_age)
}

/// Frees what the run holds and says whether that was anything.
///
/// Deletes by run id alone: after a takeover it frees nothing, and it may be repeated any number of times.
///
/// # Errors
///
/// [`LockError::RowLocked`] if another transaction has the row locked for more than 200 ms, and what any statement may meet.
pub fn release_lock(conn: &mut PgConnection, run_id: &RunId) -> Result<bool, LockError> {
    Store::default().release_lock(conn, run_id)
}

/// Marks a run as completed and says whether its record was still `running`. A finished record is never changed.
pub fn complete_run(conn: &mut PgConnection, run_id: &RunId, report: &RunReport) -> Result<bool, LockError> {
    Store::default().end_run(conn, run_id, &Ending::Completed(report.clone()))
}

/// Marks a run as failed and says whether its record was still `running`. A finished record is never changed.
pub fn fail_run(conn: &mut PgConnection, run_id: &RunId, error_message: &str) -> Result<bool, LockError> {
    Store::default().end_run(conn, run_id, &Ending::Failed(error_message.to_owned()))
}

/// Frees a key by force, for an operator, and says whether the run that was seen still held it. If not, nothing is freed.
///
/// The key is taken as it stands in the table, `global` included. The run's record is closed as failed if the row was freed.
/// A holder of a lease learns at its next renewal that it is lost; one that does not renew learns nothing.
///
/// # Errors
///
/// As for [`release_lock`].
pub fn force_release(conn: &mut PgConnection, key: &str, holder: &RunId) -> Result<bool, LockError> {
    let store = Store::default();
    // Looked at first, because a record must not be closed over a key that somebody else holds.
    let held = store.bounded(conn, |conn| store.holder(conn, &LockKey::from_row(key.to_owned())))?;
    if held.as_deref() != Some(holder.as_str()) {
        return Ok(false);
    }
    let freed = store.bounded(conn, |conn| store.force_release(conn, key, holder))?;
    tracing::warn!(key, run_id = %holder, owner = owner_id(), freed, "force-released");
    Ok(freed)
}

/// A row of the lock table.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LockRow {
    /// Whose lock it is.
    pub key: LockKey,
    /// The run that holds it; `None` for an orphan.
    pub holder: Option<RunId>,
    /// When it was claimed or last renewed; `None` for a time that cannot be shown, such as `infinity`.
    pub acquired_at: Option<DateTime<Utc>>,
    /// Seconds since then by the database's clock. Negative for a stamp in the future, infinite for an infinite one.
    pub age_seconds: f64,
    /// What the next claim would make of it.
    pub state: LockState,
    /// The row of the retired shared key, which a replica that still uses it wrote.
    pub legacy: bool,
}

/// What the next claim would make of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockState {
    /// A conflict.
    Held,
    /// A takeover: the row is older than the maximum age.
    Expired,
    /// A takeover: the row has no holder.
    Orphaned,
    /// A conflict, and for longer than the maximum age from now: the row is stamped later than the database's clock.
    Future,
}

impl LockState {
    fn of(holder: Option<&str>, age_seconds: f64, max_age: MaxAge) -> Self {
        match holder {
            None => Self::Orphaned,
            Some(_) if age_seconds > max_age.duration().as_secs_f64() => Self::Expired,
            Some(_) if age_seconds < 0.0 => Self::Future,
            Some(_) => Self::Held,
        }
    }

    /// The name in `sync-lock status --json`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Expired => "expired",
            Self::Orphaned => "orphaned",
            Self::Future => "future",
        }
    }
}

/// Lists the rows of the lock table by key. It locks nothing and changes nothing.
pub fn inspect(conn: &mut PgConnection, max_age: MaxAge) -> Result<Vec<LockRow>, LockError> {
    Store::default().inspect(conn, max_age)
}

impl LockRow {
    pub(crate) fn new(row: store::Row, max_age: MaxAge) -> Self {
        Self {
            state: LockState::of(row.holder.as_deref(), row.age, max_age),
            legacy: row.key == LEGACY_KEY,
            key: LockKey::from_row(row.key),
            holder: row.holder.map(RunId::from_row),
            acquired_at: row.at_micros.and_then(DateTime::from_timestamp_micros),
            age_seconds: row.age,
        }
    }
}

/// What the answers of the statements mean.
impl Store {
    /// Claims the key for a run that the caller named. Asking again for the same run is safe: a claim whose answer was lost
    /// finds its own row and counts as won.
    pub(crate) fn acquire(
        &self,
        conn: &mut PgConnection,
        job: &Job,
        run_id: &RunId,
        max_age: MaxAge,
    ) -> Result<Acquisition, LockError> {
        let first = self.claim_once(conn, job, run_id, max_age)?;
        // A row that is free but locked, or that came up while we looked, is worth one more look: then the race is over.
        let answer = match first {
            Answer::Undecided(_) => self.claim_once(conn, job, run_id, max_age)?,
            decided @ Answer::Decided(_) => decided,
        };
        let (Answer::Decided(acquisition) | Answer::Undecided(acquisition)) = answer;
        report(job, &acquisition);
        Ok(acquisition)
    }

    /// Looks whether a claim would lose, and says to whom. A statement that may write costs the server several times what a
    /// look costs, so a key that is still held is lost cheaply; one that has come free costs one more round trip. Not for a
    /// claim that was sent before: its own row would look like somebody else's.
    pub(crate) fn look_for_conflict(
        &self,
        conn: &mut PgConnection,
        job: &Job,
        max_age: MaxAge,
    ) -> Result<Option<Acquisition>, LockError> {
        let seen = self.bounded(conn, |conn| self.look(conn, job.key()))?;
        let held = seen.filter(|(_, age)| *age <= max_age.duration().as_secs_f64());
        let conflict = held.map(|(holder, age)| Acquisition::Conflict { holder: Some(Holder::from_row(holder, age)) });
        if let Some(conflict) = &conflict {
            report(job, conflict);
        }
        Ok(conflict)
    }

    fn claim_once(
        &self,
        conn: &mut PgConnection,
        job: &Job,
        run_id: &RunId,
        max_age: MaxAge,
    ) -> Result<Answer, LockError> {
        let claim = match self.bounded(conn, |conn| self.claim(conn, job, run_id, max_age)) {
            Ok(claim) => claim,
            Err(LockError::RowLocked(_)) => return Ok(Answer::Undecided(Acquisition::Conflict { holder: None })),
            Err(error) => return Err(error),
        };
        let ours = claim.holder.as_deref() == Some(run_id.as_str());
        if claim.won || ours {
            if let Some(displaced) = claim.holder.as_deref().filter(|_| claim.displaced_open) {
                self.close_record(conn, displaced, run_id);
            }
            return Ok(Answer::Decided(locked(claim, run_id)));
        }
        let held = claim.age.is_some_and(|age| age <= max_age.duration().as_secs_f64());
        let holder = claim.holder.zip(claim.age).map(|(holder, age)| Holder::from_row(holder, age));
        let decided = held && holder.is_some();
        let conflict = Acquisition::Conflict { holder };
        Ok(if decided { Answer::Decided(conflict) } else { Answer::Undecided(conflict) })
    }

    /// Closes a displaced run whose record the claim could not see or did not want to wait for. The claim stands either way.
    fn close_record(&self, conn: &mut PgConnection, displaced: &str, by: &RunId) {
        match self.bounded(conn, |conn| self.close_displaced(conn, displaced, by)) {
            Ok(true) => {}
            Ok(false) => {
                tracing::debug!(run_id = %by, displaced, "the displaced run's record is finished, gone or locked: left as it is");
            }
            Err(error) => {
                tracing::warn!(run_id = %by, displaced, %error, "the displaced run's record was left as it is");
            }
        }
    }

    /// See [`release_lock`].
    pub(crate) fn release_lock(&self, conn: &mut PgConnection, run_id: &RunId) -> Result<bool, LockError> {
        let freed = self.bounded(conn, |conn| self.release(conn, run_id))?;
        tracing::info!(%run_id, owner = owner_id(), freed, "released");
        Ok(freed)
    }

    /// See [`complete_run`] and [`fail_run`].
    pub(crate) fn end_run(&self, conn: &mut PgConnection, run_id: &RunId, ending: &Ending) -> Result<bool, LockError> {
        let changed = self.bounded(conn, |conn| self.finish(conn, run_id, ending))?;
        match ending {
            Ending::Completed(_) => tracing::info!(%run_id, owner = owner_id(), changed, "succeeded"),
            Ending::Failed(message) => {
                tracing::info!(%run_id, owner = owner_id(), changed, error_message = message.as_str(), "failed");
            }
        }
        Ok(changed)
    }

    /// See [`inspect`].
    pub(crate) fn inspect(&self, conn: &mut PgConnection, max_age: MaxAge) -> Result<Vec<LockRow>, LockError> {
        let rows = self.bounded(conn, |conn| self.rows(conn))?;
        Ok(rows.into_iter().map(|row| LockRow::new(row, max_age)).collect())
    }

    /// See [`Store::finish_and_release`].
    pub(crate) fn end_and_release(
        &self,
        conn: &mut PgConnection,
        key: &LockKey,
        run_id: &RunId,
        ending: &Ending,
    ) -> Result<Ended, LockError> {
        self.bounded(conn, |conn| self.finish_and_release(conn, key, run_id, ending))
    }

    /// Runs one statement: in a savepoint if the caller has a transaction open, repeated after a serialization failure if
    /// not, and with its failure explained.
    pub(crate) fn bounded<T>(
        &self,
        conn: &mut PgConnection,
        mut statement: impl FnMut(&mut PgConnection) -> QueryResult<T>,
    ) -> Result<T, LockError> {
        let sent = Instant::now();
        let outcome = if in_transaction(conn) {
            conn.transaction(|conn| statement(conn))
        } else {
            let failed = |outcome: &QueryResult<T>| {
                matches!(outcome, Err(DieselError::DatabaseError(DatabaseErrorKind::SerializationFailure, _)))
            };
            let mut tries = 1;
            let mut outcome = statement(conn);
            while failed(&outcome) && tries < SERIALIZATION_TRIES {
                tries += 1;
                outcome = statement(conn);
            }
            // Every statement is right under READ COMMITTED, where it cannot fail this way. It is not the first choice because
            // it costs the round trips of a transaction.
            if failed(&outcome) {
                outcome = conn.build_transaction().read_committed().run(|conn| statement(conn));
            }
            outcome
        };
        outcome.map_err(|error| self.explain(conn, error, sent.elapsed()))
    }

    /// Says what a failed statement means that took this long.
    pub(crate) fn explain(&self, conn: &mut PgConnection, error: DieselError, waited: Duration) -> LockError {
        let (timed_out, in_english) = match &error {
            DieselError::DatabaseError(DatabaseErrorKind::Unknown, information) => {
                (is_lock_timeout(information.message(), waited), information.message().starts_with(CANCELLED))
            }
            _ => (false, false),
        };
        if timed_out && in_english {
            return LockError::RowLocked(error);
        }
        match explain(self, conn, error) {
            LockError::Database(error) if in_english && !timed_out => LockError::Cancelled(error),
            LockError::Database(error) if timed_out => LockError::RowLocked(error),
            explained => explained,
        }
    }
}

enum Answer {
    Decided(Acquisition),
    /// A conflict with somebody who was claiming or freeing the key at that moment.
    Undecided(Acquisition),
}

fn locked(claim: Claim, run_id: &RunId) -> Acquisition {
    let displaced = (claim.won && !claim.fresh).then(|| Displaced {
        run_id: claim.holder.map(RunId::from_row),
        age: claim.age.map_or(Duration::ZERO, duration),
    });
    let acquired_at = claim.at_micros.and_then(DateTime::from_timestamp_micros).unwrap_or_default();
    Acquisition::Locked { run_id: run_id.clone(), acquired_at, displaced }
}

fn report(job: &Job, acquisition: &Acquisition) {
    let (key, sync_type) = (job.key(), job.sync_type());
    match acquisition {
        Acquisition::Locked { run_id, displaced: None, .. } => {
            tracing::info!(%key, sync_type, %run_id, owner = owner_id(), "acquired");
        }
        Acquisition::Locked { run_id, displaced: Some(displaced), .. } => {
            let previous = displaced.run_id.as_ref().map(RunId::as_str);
            tracing::warn!(%key, sync_type, %run_id, owner = owner_id(), previous, age = ?displaced.age, "taken over");
        }
        Acquisition::Conflict { holder } => {
            let (age, holder) = (holder.as_ref().map(|holder| holder.age), holder.as_ref().map(|h| h.run_id.as_str()));
            tracing::info!(%key, sync_type, owner = owner_id(), holder, ?age, "skipped");
        }
    }
}

/// How an English server begins when it gives up on a statement.
const CANCELLED: &str = "canceling statement due to ";

/// diesel keeps SQLSTATE 55P03 to itself. An English server's message tells; in any other language it is the one error
/// that nothing else explains and that took as long as the wait itself.
fn is_lock_timeout(message: &str, waited: Duration) -> bool {
    match message.strip_prefix(CANCELLED) {
        Some(reason) => reason.starts_with("lock timeout"),
        None => waited >= store::LOCK_WAIT,
    }
}

/// An age in seconds as a duration; what lies outside of one counts as its nearest end.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_says_what_the_next_claim_would_do() {
        let state = |holder, age| LockState::of(holder, age, MaxAge::DEFAULT);
        assert_eq!(state(Some("run"), 0.0), LockState::Held);
        assert_eq!(state(Some("run"), 1800.0), LockState::Held);
        assert_eq!(state(Some("run"), 1800.1), LockState::Expired);
        assert_eq!(state(Some("run"), f64::INFINITY), LockState::Expired);
        assert_eq!(state(Some("run"), -0.1), LockState::Future);
        assert_eq!(state(Some("run"), f64::NEG_INFINITY), LockState::Future);
        assert_eq!(state(None, -5.0), LockState::Orphaned);
        assert_eq!(state(None, 9999.0), LockState::Orphaned);
    }

    #[test]
    fn a_lock_timeout_is_known_in_any_language() {
        let (short, long) = (Duration::from_millis(20), Duration::from_millis(201));
        assert!(is_lock_timeout("canceling statement due to lock timeout", short));
        assert!(!is_lock_timeout("canceling statement due to statement timeout", long));
        assert!(is_lock_timeout("breche Anfrage ab wegen Zeitüberschreitung für Sperre", long));
        assert!(!is_lock_timeout("keine Berechtigung für Tabelle sync_lock", short));
    }

    #[test]
    fn an_age_outside_of_a_duration_is_its_nearest_end() {
        assert_eq!(duration(1.5), Duration::from_millis(1500));
        assert_eq!(duration(-3.0), Duration::ZERO);
        assert_eq!(duration(f64::NEG_INFINITY), Duration::ZERO);
        assert_eq!(duration(f64::INFINITY), Duration::MAX);
    }
}
