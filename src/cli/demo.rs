//! `sync-lock demo`: the starvation and its end, on a server that nobody else uses.

use sync_lock::private_server::{Durability, Server};
use sync_lock::starvation::{SCHEDULE, Scheme, Simulation, Tally};

use crate::cli::Failure;
use crate::cli::output::{age, print, shown, table};

/// How much of the scheduler's time is replayed: as long as the old module was watched.
const MINUTES: u32 = 70;

/// Watch five jobs starve each other, and then all win
///
/// Starts a Postgres of its own, shows in a few seconds what one lock for all jobs does to them and what a lock per job
/// does, and removes everything again. It needs the server programs of Postgres (`apt-get install postgresql`). With
/// `TEST_DATABASE_URL` set it works on that server instead, in a database of its own. It never looks at `DATABASE_URL`.
#[derive(clap::Args)]
pub(crate) struct Arguments {}

pub(crate) fn run(_arguments: &Arguments) -> Result<(), Failure> {
    let server = Server::from_env(Durability::Fast)?;
    let database = server.create_database(None)?;
    let mut simulation = Simulation::start(&database)?;
    let version = simulation.server()?.version;
    let whose = if server.is_private() { "of our own" } else { "from TEST_DATABASE_URL" };
    print(&format!("PostgreSQL {version} {whose}, database {}: gone when this ends.\n", database.name()))?;

    print("\n1. A crashed replica of the old module left its row behind. The migration cleans up.\n\n")?;
    simulation.plant_orphan()?;
    let removed = simulation.clean_up()?.removed;
    print(&removed.map_or_else(
        || "   There was nothing to remove.\n".to_owned(),
        |row| {
            let holder = row.holder.as_ref().map_or("nobody", |holder| holder.as_str());
            format!("   Removed \"{}\", {} old, held by {}\n", row.key, age(row.age_seconds), shown(holder))
        },
    ))?;

    print("\n2. Five jobs claim their lock at the same moment.\n\n")?;
    let [shared, per_job] = Scheme::BOTH.map(|scheme| simulation.at_once(scheme, 1));
    print(&at_once(&shared?, &per_job?))?;

    print(&format!("\n3. The scheduler's first {MINUTES} minutes, in fast motion.\n\n"))?;
    let [shared, per_job] = Scheme::BOTH.map(|scheme| simulation.replay(scheme, MINUTES));
    print(&schedule(&shared?, &per_job?))
}

fn at_once(shared: &[Tally], per_job: &[Tally]) -> String {
    let fate = |tally: &Tally| if tally.runs > 0 { "ran" } else { "starved" };
    let mut table = table(&["  JOB", "ONE SHARED KEY", "A KEY PER JOB"]);
    for (before, after) in shared.iter().zip(per_job) {
        table.add_row([&format!("  {}", before.job), fate(before), fate(after)]);
    }
    table.add_row(["", &ran(shared), &ran(per_job)]);
    format!("{}\n", table.trim_fmt())
}

fn ran(tallies: &[Tally]) -> String {
    format!("{} of {} ran", tallies.iter().filter(|tally| tally.runs > 0).count(), tallies.len())
}

fn schedule(shared: &[Tally], per_job: &[Tally]) -> String {
    let fate = |tally: &Tally| match tally {
        Tally { runs: 0, conflicts, .. } => format!("never ran, shut out {conflicts} ×"),
        Tally { runs, conflicts: 0, .. } => format!("ran {runs} ×"),
        Tally { runs, conflicts, .. } => format!("ran {runs} ×, shut out {conflicts} ×"),
    };
    let mut table = table(&["  JOB", "EVERY", "ONE SHARED KEY", "A KEY PER JOB"]);
    for ((job, before), after) in SCHEDULE.iter().zip(shared).zip(per_job) {
        let every = format!("{} min", job.every_minutes);
        table.add_row([format!("  {}", before.job), every, fate(before), fate(after)]);
    }
    table.add_row([String::new(), String::new(), ran(shared), ran(per_job)]);
    format!("{}\n\nEvery number was counted in the database.\n", table.trim_fmt())
}
