//! What is locked and what is recorded: [`SyncType`], [`LockKey`] and the [`Job`] that joins them.
//!
//! The map from sync types to keys is the contract with every other replica. A key too few starves jobs that have
//! nothing to do with each other; a key too many lets two runs of one job overlap.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::config::MaxAge;

/// The longest key and the longest sync type, in bytes.
const MAX_BYTES: usize = 255;

/// The row that all jobs once shared. It starved them, is removed by the migration and can never be locked again.
pub(crate) const LEGACY_KEY: &str = "global";

/// A kind of issue sync, as `IssueSyncRun.syncType` spells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SyncType {
    /// `scheduled`: the full issue sync, started by the scheduler.
    Scheduled,
    /// `manual`: the same full issue sync, started by a person.
    Manual,
    /// `automation`: the automation pass.
    Automation,
    /// `pr-followup`: follow-ups on pull requests.
    PrFollowup,
    /// `reconcile`: reconciles local state with the issue tracker.
    Reconcile,
    /// `stale-work`: finds work that nobody moves.
    StaleWork,
}

impl SyncType {
    /// All six, in the order of their declaration.
    pub const ALL: [Self; 6] =
        [Self::Scheduled, Self::Manual, Self::Automation, Self::PrFollowup, Self::Reconcile, Self::StaleWork];

    /// The name in the database and on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Manual => "manual",
            Self::Automation => "automation",
            Self::PrFollowup => "pr-followup",
            Self::Reconcile => "reconcile",
            Self::StaleWork => "stale-work",
        }
    }

    /// The key that a run of this type holds.
    ///
    /// `scheduled` and `manual` are the same full issue sync, which creates issues with a plain insert, so they exclude
    /// each other. The rest work on their own tables or with conditional writes and share with nobody.
    #[must_use]
    pub const fn key(self) -> LockKey {
        LockKey(Cow::Borrowed(match self {
            Self::Scheduled | Self::Manual => "issue-sync",
            Self::Automation => "automation",
            Self::PrFollowup => "pr-followup",
            Self::Reconcile => "reconcile",
            Self::StaleWork => "stale-work",
        }))
    }
}

impl fmt::Display for SyncType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for SyncType {
    type Err = UnknownSyncType;

    /// Takes exactly the six names: no other case, no white space around them.
    fn from_str(text: &str) -> Result<Self, UnknownSyncType> {
        Self::ALL
            .into_iter()
            .find(|sync_type| sync_type.as_str() == text)
            .ok_or_else(|| UnknownSyncType(text.to_owned()))
    }
}

/// The text is none of the six sync types.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown sync type {0:?}: use one of scheduled, manual, automation, pr-followup, reconcile, stale-work, or a key of your own"
)]
pub struct UnknownSyncType(String);

/// The name of a lock, which is the primary key of its row in `sync_lock`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockKey(Cow<'static, str>);

impl LockKey {
    /// The groomer's key. It is not a sync type: its runs leave no `IssueSyncRun` row.
    pub const GROOMER: Self = Self(Cow::Borrowed("groomer"));

    /// A key for a job outside the six sync types, such as `contest-sync`.
    ///
    /// It is taken as it is: case and white space count. A custom key that spells one of the built-in keys is that key.
    ///
    /// # Errors
    ///
    /// Refuses `global` (the retired shared key), empty text, a NUL, and more than 255 bytes.
    pub fn custom(key: impl Into<String>) -> Result<Self, InvalidKey> {
        let key = key.into();
        check_text(&key).map_err(|problem| InvalidKey::of(problem, "lock key"))?;
        if key == LEGACY_KEY {
            return Err(InvalidKey::Global);
        }
        Ok(Self(Cow::Owned(key)))
    }

    /// A key as some replica wrote it. For rows that are read, never for a claim.
    pub(crate) fn from_row(key: String) -> Self {
        Self(Cow::Owned(key))
    }

    /// The text in `sync_lock.id`.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A job on this key whose runs are recorded in `IssueSyncRun` under a sync type of the caller's own.
    ///
    /// # Errors
    ///
    /// Refuses an empty sync type, a NUL, and more than 255 bytes.
    pub fn recorded_as(self, sync_type: impl Into<String>) -> Result<Job, InvalidKey> {
        let sync_type = sync_type.into();
        check_text(&sync_type).map_err(|problem| InvalidKey::of(problem, "sync type"))?;
        Ok(Job { sync_type: Some(Cow::Owned(sync_type)), ..Job::from(self) })
    }
}

impl fmt::Display for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl From<SyncType> for LockKey {
    fn from(sync_type: SyncType) -> Self {
        sync_type.key()
    }
}

/// The key or the sync type of a custom job cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKey {
    /// The retired shared key: one job on it would shut out nobody and be removed by the migration.
    #[error("the lock key \"global\" is retired: use a key of the job's own")]
    Global,
    /// Nothing but empty text.
    #[error("the {0} is empty: name the job, for instance contest-sync")]
    Empty(&'static str),
    /// Postgres text cannot hold a NUL.
    #[error("the {0} contains a NUL character, which Postgres cannot store")]
    Nul(&'static str),
    /// Longer than 255 bytes.
    #[error("the {what} has {bytes} bytes: use at most {MAX_BYTES}")]
    TooLong {
        /// Which text: the lock key or the sync type.
        what: &'static str,
        /// Its length.
        bytes: usize,
    },
}

impl InvalidKey {
    fn of(problem: TextProblem, what: &'static str) -> Self {
        match problem {
            TextProblem::Empty => Self::Empty(what),
            TextProblem::Nul => Self::Nul(what),
            TextProblem::TooLong(bytes) => Self::TooLong { what, bytes },
        }
    }
}

#[derive(Clone, Copy)]
enum TextProblem {
    Empty,
    Nul,
    TooLong(usize),
}

fn check_text(text: &str) -> Result<(), TextProblem> {
    if text.is_empty() {
        return Err(TextProblem::Empty);
    }
    if text.contains('\0') {
        return Err(TextProblem::Nul);
    }
    if text.len() > MAX_BYTES {
        return Err(TextProblem::TooLong(text.len()));
    }
    Ok(())
}

/// What a claim asks for: the key to lock, and the sync type of the run record if there is to be one.
///
/// Made from a [`SyncType`] (its key, recorded under its name), from a bare [`LockKey`] (no run record), or by
/// [`LockKey::recorded_as`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Job {
    key: LockKey,
    sync_type: Option<Cow<'static, str>>,
    max_age: Option<MaxAge>,
    deadline: Option<Duration>,
}

impl Job {
    /// The key that a run of this job holds.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// The `syncType` of the run record, or `None` for a job that keeps none.
    #[must_use]
    pub fn sync_type(&self) -> Option<&str> {
        self.sync_type.as_deref()
    }

    /// Sets a maximum age for this job alone. It must be the same on every replica that runs the job. Defaults to that of
    /// the handle. The functions in [`blocking`](crate::blocking) take theirs as an argument and ignore it.
    #[must_use]
    pub fn with_max_age(mut self, max_age: MaxAge) -> Self {
        self.max_age = Some(max_age);
        self
    }

    /// Sets how long a run of this job by [`SyncLock::run`](crate::SyncLock::run) may take before it is cancelled and
    /// counts as failed. Defaults to no limit.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    pub(crate) fn max_age(&self) -> Option<MaxAge> {
        self.max_age
    }

    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.deadline
    }
}

impl From<SyncType> for Job {
    fn from(sync_type: SyncType) -> Self {
        Self { sync_type: Some(Cow::Borrowed(sync_type.as_str())), ..Self::from(sync_type.key()) }
    }
}

impl From<LockKey> for Job {
    fn from(key: LockKey) -> Self {
        Self { key, sync_type: None, max_age: None, deadline: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_the_contract_with_the_peers() {
        let map = SyncType::ALL.map(|sync_type| (sync_type.as_str(), sync_type.key().as_str().to_owned()));
        let expected = [
            ("scheduled", "issue-sync"),
            ("manual", "issue-sync"),
            ("automation", "automation"),
            ("pr-followup", "pr-followup"),
            ("reconcile", "reconcile"),
            ("stale-work", "stale-work"),
        ];
        assert_eq!(map, expected.map(|(name, key)| (name, key.to_owned())));
        assert_eq!(LockKey::GROOMER.as_str(), "groomer");
    }

    #[test]
    fn a_sync_type_is_parsed_from_exactly_its_name() {
        for sync_type in SyncType::ALL {
            assert_eq!(sync_type.to_string().parse(), Ok(sync_type));
        }
        for odd in ["", "Scheduled", " scheduled", "scheduled\n", "pr_followup", "groomer", "issue-sync", "global"] {
            assert_eq!(odd.parse::<SyncType>(), Err(UnknownSyncType(odd.to_owned())));
        }
    }

    #[test]
    fn a_custom_key_is_refused_only_where_it_could_not_work() {
        assert_eq!(LockKey::custom("global"), Err(InvalidKey::Global));
        assert_eq!(LockKey::custom(""), Err(InvalidKey::Empty("lock key")));
        assert_eq!(LockKey::custom("a\0b"), Err(InvalidKey::Nul("lock key")));
        assert_eq!(LockKey::custom("é".repeat(128)), Err(InvalidKey::TooLong { what: "lock key", bytes: 256 }));
        for fine in ["x", "Global", "contest-sync", "Wettbewerb – täglich", "'; --", &"k".repeat(255)] {
            assert_eq!(LockKey::custom(fine).map(|key| key.to_string()), Ok(fine.to_owned()));
        }
    }

    #[test]
    fn a_job_is_recorded_under_its_sync_type_and_a_bare_key_is_not() {
        assert_eq!(Job::from(SyncType::Manual).sync_type(), Some("manual"));
        assert_eq!(Job::from(SyncType::Manual).key(), &SyncType::Scheduled.key());
        assert_eq!(Job::from(LockKey::GROOMER).sync_type(), None);
        let recorded = LockKey::GROOMER.recorded_as("ci-failures");
        assert_eq!(recorded.as_ref().map(|job| job.sync_type()), Ok(Some("ci-failures")));
        assert_eq!(LockKey::GROOMER.recorded_as(""), Err(InvalidKey::Empty("sync type")));
        assert_eq!(LockKey::GROOMER.recorded_as("a\0"), Err(InvalidKey::Nul("sync type")));
        let long = LockKey::GROOMER.recorded_as("t".repeat(256));
        assert_eq!(long, Err(InvalidKey::TooLong { what: "sync type", bytes: 256 }));
    }
}
