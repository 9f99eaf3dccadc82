//! A run of a job: the [`RunId`] that holds the lock, and what is recorded when the run ends.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use uuid::Uuid;

/// Names one run. It is the holder in `sync_lock."syncRunId"` and, for jobs that keep a record, `IssueSyncRun.id`.
///
/// Our own are random UUIDs. A peer may write any text, so any text that Postgres can hold is read.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunId(String);

impl RunId {
    /// A new random id (UUID version 4). It never names a run that exists.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "two defaults that differ would surprise")]
    pub fn new() -> Self {
        Self(Uuid::new_v4().to_string())
    }

    /// A holder as some replica wrote it, even one that [`FromStr`] refuses.
    pub(crate) fn from_row(holder: String) -> Self {
        Self(holder)
    }

    /// The text in the database.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for RunId {
    type Err = InvalidRunId;

    /// Takes the text as it is, white space and all.
    fn from_str(text: &str) -> Result<Self, InvalidRunId> {
        if text.is_empty() {
            return Err(InvalidRunId::Empty);
        }
        if text.contains('\0') {
            return Err(InvalidRunId::Nul);
        }
        Ok(Self(text.to_owned()))
    }
}

/// The text cannot name a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRunId {
    /// An empty text names nobody.
    #[error("the run id is empty: copy it from `sync-lock status`")]
    Empty,
    /// Postgres text cannot hold a NUL, so no row has such a holder.
    #[error("the run id contains a NUL character, which Postgres cannot store")]
    Nul,
}

/// What a completed run reports into its record. The default is zero counts and no notes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunReport {
    /// `reposFetched`: how many repositories were read.
    pub repos_fetched: i32,
    /// `syncedCount`: how many issues were written.
    pub synced_count: i32,
    /// `notes`: free text for people.
    pub notes: Option<String>,
}

/// For a job that has nothing to report.
impl From<()> for RunReport {
    fn from((): ()) -> Self {
        Self::default()
    }
}

/// How a run ended, as its record will say.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    Completed(RunReport),
    Failed(String),
}

/// Names this process in logs: host, process id and a random part, since containers share the first two.
pub(crate) fn owner_id() -> &'static str {
    static OWNER: OnceLock<String> = OnceLock::new();
    OWNER.get_or_init(|| {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let random = Uuid::new_v4().simple().to_string();
        format!("{host}-{}-{}", std::process::id(), random.get(..8).unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_id_is_made_as_a_uuid_and_read_as_any_text() {
        let made = RunId::new();
        assert_eq!(Uuid::parse_str(made.as_str()).map(|id| id.get_version_num()), Ok(4));
        assert_ne!(made, RunId::new());
        for text in ["cmb1x2y3z0000", " ", "'quoted\"", "läuft ✓", &"x".repeat(10_000)] {
            assert_eq!(text.parse::<RunId>().map(|id| id.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("".parse::<RunId>(), Err(InvalidRunId::Empty));
        assert_eq!("a\0".parse::<RunId>(), Err(InvalidRunId::Nul));
    }
}
