//! The starvation, on a real database: what one row for all jobs did to them, and what a row per job does. Shared by the
//! demonstration and the bench, not part of the library's public promise.
//!
//! Nothing here knows who will win. Every claim is a claim of the library's, every answer goes into a table of the
//! simulation's own, `simulated_claim`, once the race it belongs to is over, and every number is counted there by SQL. A
//! run of a job that keeps a record counts only if `IssueSyncRun` has it, completed and under the right sync type; of the
//! groomer, which keeps none, the claims that won are counted.

use std::io;
use std::mem;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{Array, BigInt, Integer, Nullable, Text};
use serde::Serialize;

use crate::blocking::{self, Acquisition};
use crate::config::MaxAge;
use crate::error::LockError;
use crate::key::{InvalidKey, Job, LockKey, SyncType};
use crate::migrate::{MigrateError, Migration, MigrationReport, migrate};
use crate::private_server::Database;
use crate::run::{RunId, RunReport};

/// After how many answers they are written down. A race is never interrupted for it.
const BATCH: usize = 5_000;

/// The jobs that are released at the same moment.
pub const AT_ONCE: [SyncType; 5] =
    [SyncType::Scheduled, SyncType::Automation, SyncType::PrFollowup, SyncType::Reconcile, SyncType::StaleWork];

/// The scheduler's jobs in the order in which they claim at a shared tick. All start with the same delay of 5 s, so that
/// they stay in phase.
pub const SCHEDULE: [PeriodicJob; 5] = [
    PeriodicJob { name: "sync", every_minutes: 15, sync_type: Some(SyncType::Scheduled) },
    PeriodicJob { name: "groomer", every_minutes: 10, sync_type: None },
    PeriodicJob { name: "pr-followup", every_minutes: 15, sync_type: Some(SyncType::PrFollowup) },
    PeriodicJob { name: "reconcile", every_minutes: 30, sync_type: Some(SyncType::Reconcile) },
    PeriodicJob { name: "stale-work", every_minutes: 5, sync_type: Some(SyncType::StaleWork) },
];

/// A job of the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct PeriodicJob {
    /// What the scheduler calls it.
    pub name: &'static str,
    /// The time between two of its ticks.
    pub every_minutes: u32,
    /// None for the groomer.
    sync_type: Option<SyncType>,
}

/// Which row a job claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// All but the groomer the same one.
    SharedKey,
    /// Each its own, as [`SyncType::key`] says.
    PerJobKeys,
}

impl Scheme {
    /// The old one and the new one.
    pub const BOTH: [Self; 2] = [Self::SharedKey, Self::PerJobKeys];

    /// Its name for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SharedKey => "one shared key",
            Self::PerJobKeys => "a key per job",
        }
    }

    fn job(self, sync_type: Option<SyncType>) -> Result<Job, InvalidKey> {
        match (self, sync_type) {
            // It had a row of its own under the old scheme, too.
            (_, None) => Ok(LockKey::GROOMER.into()),
            // The old row was called `global`, which the library refuses to lock. What starved was the sharing.
            (Self::SharedKey, Some(sync_type)) => LockKey::custom("shared")?.recorded_as(sync_type.as_str()),
            (Self::PerJobKeys, Some(sync_type)) => Ok(sync_type.into()),
        }
    }
}

/// What became of a job's claims, counted in the database.
#[derive(Clone, Debug, PartialEq, Eq, QueryableByName, Serialize)]
pub struct Tally {
    /// The job.
    #[diesel(sql_type = Text)]
    pub job: String,
    /// How often it ran.
    #[diesel(sql_type = BigInt)]
    pub runs: i64,
    /// How often it was shut out.
    #[diesel(sql_type = BigInt)]
    pub conflicts: i64,
    /// How often it was shut out in a row, at worst.
    #[diesel(sql_type = BigInt)]
    pub longest_losing_streak: i64,
}

impl Tally {
    /// The part of its claims that ran, from 0 to 1.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "nobody simulates 2^53 claims")]
    pub fn success_rate(&self) -> f64 {
        self.runs as f64 / (self.runs + self.conflicts).max(1) as f64
    }
}

/// Jain's fairness index: 1 if all rates are the same, 1/n if one job has everything. 0 where there is nothing to share
/// out, so that a schedule under which nobody runs does not look fair.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a handful of jobs")]
pub fn jain_index(rates: &[f64]) -> f64 {
    let sum: f64 = rates.iter().sum();
    let squares: f64 = rates.iter().map(|rate| rate * rate).sum();
    if squares > 0.0 { sum * sum / (rates.len() as f64 * squares) } else { 0.0 }
}

/// The server that is simulated on.
#[derive(Clone, Debug, QueryableByName, Serialize)]
pub struct ServerFacts {
    /// `server_version`.
    #[diesel(sql_type = Text)]
    pub version: String,
    /// `fsync`.
    #[diesel(sql_type = Text)]
    pub fsync: String,
    /// `synchronous_commit`.
    #[diesel(sql_type = Text)]
    pub synchronous_commit: String,
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimulationError {
    /// A claim or a release failed.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The tables could not be made or cleaned up.
    #[error(transparent)]
    Migrate(#[from] MigrateError),
    /// A key of the simulation's own is refused.
    #[error(transparent)]
    Key(#[from] InvalidKey),
    /// The answers could not be written down or counted.
    #[error("the answers could not be counted")]
    Count(#[from] diesel::result::Error),
    /// The system has no thread left.
    #[error("a job could not be started")]
    Thread(#[from] io::Error),
    /// Some claim won and did not run, or lost and left a record.
    #[error("the run records do not match the answers to the claims")]
    RecordsDiffer,
}

/// Five jobs, each with a connection of its own, in a database of the simulation's own.
pub struct Simulation {
    jobs: Vec<PgConnection>,
    ledger: PgConnection,
    experiments: i32,
}

impl Simulation {
    /// Makes the tables and connects.
    pub fn start(database: &Database) -> Result<Self, SimulationError> {
        let url = database.url();
        let connect = || PgConnection::establish(&url).map_err(|error| LockError::Unreachable(error.into()));
        let mut ledger = connect()?;
        migrate(&mut ledger, &Migration::new(MaxAge::DEFAULT).bootstrap(true))?;
        ledger.batch_execute(
            "CREATE TABLE simulated_claim (experiment INTEGER NOT NULL, round INTEGER NOT NULL, job TEXT NOT NULL, \
             sync_type TEXT, run_id TEXT, PRIMARY KEY (experiment, job, round))",
        )?;
        let jobs = AT_ONCE.iter().map(|_| connect()).collect::<Result<_, _>>()?;
        Ok(Self { jobs, ledger, experiments: 0 })
    }

    /// Which server this is and what it promises to keep.
    pub fn server(&mut self) -> Result<ServerFacts, SimulationError> {
        let facts = "SELECT current_setting('server_version') AS version, current_setting('fsync') AS fsync, \
                     current_setting('synchronous_commit') AS synchronous_commit";
        Ok(diesel::sql_query(facts).get_result(&mut self.ledger)?)
    }

    /// Leaves what a replica with the old module leaves when it is killed: the row `global`, held by nobody alive.
    pub fn plant_orphan(&mut self) -> Result<(), SimulationError> {
        let plant = "INSERT INTO \"sync_lock\" VALUES ('global', gen_random_uuid()::text, \
                     clock_timestamp() - interval '45 minutes')";
        diesel::sql_query(plant).execute(&mut self.ledger)?;
        Ok(())
    }

    /// Runs the cleanup migration.
    pub fn clean_up(&mut self) -> Result<MigrationReport, SimulationError> {
        Ok(migrate(&mut self.ledger, &Migration::new(MaxAge::DEFAULT))?)
    }

    /// Rounds in which the five jobs of [`AT_ONCE`] claim at the same moment. Whoever wins holds its row until all five
    /// have their answer.
    pub fn at_once(&mut self, scheme: Scheme, rounds: u32) -> Result<Vec<Tally>, SimulationError> {
        let jobs = AT_ONCE.iter().map(|sync_type| scheme.job(Some(*sync_type))).collect::<Result<Vec<_>, _>>()?;
        let mut answers = Answers::default();
        for round in 0..rounds {
            let run_ids = together(&mut self.jobs, round, |job, conn| claim(conn, &jobs[job]))?;
            together(&mut self.jobs, round, |job, conn| {
                run_ids[job].as_ref().map_or(Ok(()), |run_id| finish(conn, run_id))
            })?;
            for (sync_type, run_id) in AT_ONCE.into_iter().zip(run_ids) {
                answers.add(round, sync_type.as_str(), Some(sync_type), run_id);
            }
            if answers.jobs.len() >= BATCH {
                self.write_down(mem::take(&mut answers))?;
            }
        }
        self.write_down(answers)?;
        self.count(&AT_ONCE.map(SyncType::as_str))
    }

    /// The scheduler's ticks in virtual time. At each tick the jobs that are due claim in their order, and whoever wins
    /// holds its row while the others arrive.
    pub fn replay(&mut self, scheme: Scheme, minutes: u32) -> Result<Vec<Tally>, SimulationError> {
        let jobs = SCHEDULE.iter().map(|job| scheme.job(job.sync_type)).collect::<Result<Vec<_>, _>>()?;
        let mut answers = Answers::default();
        // A tick is at a full minute plus the delay of 5 s, the same for all.
        for minute in 0..minutes {
            let mut running = Vec::new();
            for ((periodic, job), conn) in SCHEDULE.iter().zip(&jobs).zip(&mut self.jobs) {
                if minute % periodic.every_minutes != 0 {
                    continue;
                }
                let run_id = claim(conn, job)?;
                answers.add(minute, periodic.name, periodic.sync_type, run_id.clone());
                running.extend(run_id.map(|run_id| (run_id, conn)));
            }
            for (run_id, conn) in running {
                finish(conn, &run_id)?;
            }
        }
        self.write_down(answers)?;
        self.count(&SCHEDULE.map(|job| job.name))
    }

    fn write_down(&mut self, answers: Answers) -> Result<(), SimulationError> {
        diesel::sql_query("INSERT INTO simulated_claim SELECT $1, * FROM unnest($2, $3, $4, $5)")
            .bind::<Integer, _>(self.experiments)
            .bind::<Array<Integer>, _>(answers.rounds)
            .bind::<Array<Text>, _>(answers.jobs)
            .bind::<Array<Nullable<Text>>, _>(answers.sync_types)
            .bind::<Array<Nullable<Text>>, _>(answers.run_ids)
            .execute(&mut self.ledger)?;
        Ok(())
    }

    /// Ends the experiment and counts its answers.
    fn count(&mut self, jobs: &[&str]) -> Result<Vec<Tally>, SimulationError> {
        // A losing streak is what has the same number of wins before it.
        const TALLIES: &str = r#"
            WITH claim AS (
              SELECT c.job, c.run_id IS NULL AS lost, c.sync_type IS NULL AND c.run_id IS NOT NULL OR r."id" IS NOT NULL AS ran,
                count(c.run_id) OVER (PARTITION BY c.job ORDER BY c.round) AS wins_before
              FROM simulated_claim c LEFT JOIN "IssueSyncRun" r
                ON r."id" = c.run_id AND r."syncType" = c.sync_type AND r."status" = 'completed'
              WHERE c.experiment = $1),
            streak AS (
              SELECT job, count(*) FILTER (WHERE ran) AS runs, count(*) FILTER (WHERE lost) AS losses
              FROM claim GROUP BY job, wins_before)
            SELECT job, sum(runs)::bigint AS runs, sum(losses)::bigint AS conflicts, max(losses) AS longest_losing_streak
            FROM streak GROUP BY job ORDER BY array_position($2, job)"#;
        const DIFFERENCES: &str = r#"
            SELECT count(*) AS count
            FROM (SELECT run_id, sync_type FROM simulated_claim WHERE run_id IS NOT NULL AND sync_type IS NOT NULL) c
            FULL JOIN "IssueSyncRun" r ON r."id" = c.run_id AND r."syncType" = c.sync_type
            WHERE c.run_id IS NULL OR r."status" IS DISTINCT FROM 'completed'"#;
        let experiment = self.experiments;
        self.experiments += 1;
        if diesel::sql_query(DIFFERENCES).get_result::<Count>(&mut self.ledger)?.count != 0 {
            return Err(SimulationError::RecordsDiffer);
        }
        let tallies = diesel::sql_query(TALLIES).bind::<Integer, _>(experiment).bind::<Array<Text>, _>(jobs);
        Ok(tallies.get_results(&mut self.ledger)?)
    }
}

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

/// Answers that are not written down yet, by column.
#[derive(Default)]
struct Answers {
    rounds: Vec<i32>,
    jobs: Vec<&'static str>,
    sync_types: Vec<Option<&'static str>>,
    run_ids: Vec<Option<String>>,
}

impl Answers {
    fn add(&mut self, round: u32, job: &'static str, sync_type: Option<SyncType>, run_id: Option<RunId>) {
        self.rounds.push(round.cast_signed());
        self.jobs.push(job);
        self.sync_types.push(sync_type.map(SyncType::as_str));
        self.run_ids.push(run_id.map(|run_id| run_id.to_string()));
    }
}

/// Lets every job do its work on its connection, all released at the same moment by somebody who does not take part. A
/// job that came last would otherwise be the first to go. They spin: those who sleep are woken one after the other. And
/// each round another job's thread is started first, because the place in that order is worth something too.
fn together<T: Send>(
    conns: &mut [PgConnection],
    round: u32,
    work: impl Fn(usize, &mut PgConnection) -> Result<T, LockError> + Sync,
) -> Result<Vec<T>, SimulationError> {
    let (arrived, open) = (&AtomicUsize::new(0), &AtomicBool::new(false));
    let work = &work;
    let mut places: Vec<_> = conns.iter_mut().enumerate().collect();
    let expected = places.len();
    places.rotate_left(round as usize % expected);
    thread::scope(|scope| {
        let start = |(job, conn)| {
            thread::Builder::new().spawn_scoped(scope, move || {
                arrived.fetch_add(1, Ordering::AcqRel);
                while !open.load(Ordering::Acquire) {
                    thread::yield_now();
                }
                work(job, conn)
            })
        };
        let started = places.into_iter().map(start).collect::<io::Result<Vec<_>>>();
        while started.is_ok() && arrived.load(Ordering::Acquire) < expected {
            thread::yield_now();
        }
        open.store(true, Ordering::Release);
        let ends = started?.into_iter().map(|job| job.join().unwrap_or_else(|panic| resume_unwind(panic)));
        let mut answers = ends.collect::<Result<Vec<_>, _>>()?;
        answers.rotate_right(round as usize % expected);
        Ok(answers)
    })
}

/// The run that holds the key now, or none where somebody else does.
fn claim(conn: &mut PgConnection, job: &Job) -> Result<Option<RunId>, LockError> {
    Ok(match blocking::acquire_lock(conn, job.clone(), MaxAge::DEFAULT)? {
        Acquisition::Locked { run_id, .. } => Some(run_id),
        Acquisition::Conflict { .. } => None,
    })
}

fn finish(conn: &mut PgConnection, run_id: &RunId) -> Result<(), LockError> {
    blocking::complete_run(conn, run_id, &RunReport::default())?;
    blocking::release_lock(conn, run_id)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::float_cmp, reason = "exact in binary")]
    fn jains_index_tells_how_evenly_the_rates_are_spread() {
        assert_eq!(jain_index(&[0.5; 4]), 1.0);
        assert_eq!(jain_index(&[1.0, 0.0, 0.0, 0.0]), 0.25);
        assert_eq!(jain_index(&[1.0, 0.5]), 0.9);
        assert_eq!(jain_index(&[0.0; 5]), 0.0);
        assert_eq!(jain_index(&[]), 0.0);
    }

    #[test]
    #[expect(clippy::float_cmp, reason = "exact in binary")]
    fn a_job_that_never_claimed_has_a_success_rate_of_zero() {
        let rate =
            |runs, conflicts| Tally { job: String::new(), runs, conflicts, longest_losing_streak: 0 }.success_rate();
        assert_eq!(rate(3, 1), 0.75);
        assert_eq!(rate(0, 0), 0.0);
    }
}
