//! What the lock costs: `cargo bench --bench latency`.
//!
//! Every contestant runs in short slices that take turns on one server, because machines are noisy: a ratio is the median
//! of the ratios within each repetition. On a private server with the durability of a real one, or in a database of its
//! own on the server that `TEST_DATABASE_URL` names. `-- --quick` takes shorter slices, `-- --repetitions N` sets how many,
//! `-- --write-docs` renews `docs/performance.md`. Tables and goals go to stdout, JSON and picture to `target/performance/`.
//! Without the `--bench` that `cargo bench` passes, as under `cargo test --benches`, everything is done once and quickly,
//! and no file is written.

#![expect(
    clippy::cast_precision_loss,
    clippy::expect_used,
    clippy::panic,
    reason = "counts fit into a float, and a bench that cannot go on has nobody to tell but its user"
)]

#[allow(dead_code, reason = "each bench uses its part of it")]
mod support;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use serde::Serialize;
use sync_lock::private_server::Database;

use support::clients::{Kind, Release, Task, Team, Times, connect, vacuum};
use support::peer::{self, Peer};
use support::picture::{Panel, draw};
use support::{Facts, Goal, Options, Place, Row, Scenario, goals_table, save, table};

const WORKERS: [usize; 3] = [1, 8, 64];

/// How many expired rows each worker takes over in a slice at most.
const TAKEOVERS: usize = 100;

const CYCLES: [Kind; 8] = [
    Kind::Bare,
    Kind::BareTokio,
    Kind::Connection,
    Kind::Pooled,
    Kind::Tokio,
    Kind::Upsert,
    Kind::Transaction,
    Kind::Advisory,
];

const RENEWERS: [Kind; 3] = [Kind::BareRenew, Kind::Renew, Kind::Update];

/// Longer than it takes to go once through all keys, but not for ever.
const LONG: Duration = Duration::from_secs(2);

const LOSERS: [Kind; 8] = [
    Kind::Bare,
    Kind::Connection,
    Kind::Pooled,
    Kind::Tokio,
    Kind::Select,
    Kind::SelectPooled,
    Kind::SelectTokio,
    Kind::Transaction,
];

fn main() -> ExitCode {
    let options = match Options::from_arguments("latency") {
        Ok(options) => options,
        Err(code) => return code,
    };
    let place = Place::open(&options);
    let bench = Bench { options, database: place.database(), place };
    let mut report = Report { facts: bench.place.facts.clone(), peer: None, goals: Vec::new(), rows: Vec::new() };
    let (mut page, mut goals) = (String::new(), Vec::new());
    for workers in WORKERS {
        if !bench.place.takes(workers) {
            println!("\n{workers} workers: skipped, the server does not take that many connections");
            continue;
        }
        let mut scenarios = vec![bench.cycles(workers, false, &mut report.peer, &mut goals)];
        if workers > 1 {
            scenarios.push(bench.cycles(workers, true, &mut report.peer, &mut goals));
        }
        scenarios.push(bench.losers(workers, false, &mut goals));
        if workers > 1 {
            scenarios.push(bench.losers(workers, true, &mut goals));
        }
        scenarios.push(bench.takeovers(workers, false));
        if workers > 1 {
            scenarios.push(bench.takeovers(workers, true));
        }
        scenarios.push(bench.renewals(workers));
        for scenario in scenarios {
            let rows = scenario.rows();
            let text = format!("### {}\n\n{}", scenario.name, table(&rows));
            println!("\n{text}");
            let _ = writeln!(page, "{text}");
            report.rows.extend(rows);
        }
    }
    if bench.options.bench {
        println!("{}", goals_table(&goals));
    }
    report.goals = goals;
    let page = report.page(&page);
    save(&bench.options, "latency", &report, &[("latency.svg", report.picture())], &page);
    ExitCode::SUCCESS
}

struct Bench {
    options: Options,
    // Dropped before the server.
    database: Database,
    place: Place,
}

impl Bench {
    /// Keys for each worker: one of its own, or the one for all.
    fn keys(workers: usize, shared: bool) -> Vec<Vec<String>> {
        (0..workers).map(|worker| vec![if shared { "shared".to_owned() } else { format!("worker-{worker}") }]).collect()
    }

    fn empty(&self) {
        let conn = &mut connect(&self.database.url());
        conn.batch_execute(r#"TRUNCATE "sync_lock", "IssueSyncRun""#).expect("empty tables");
    }

    /// Holds the keys by live rows, or by rows that expired an hour ago. The runs have a past, as in every database in use:
    /// a small table is read as a whole.
    fn hold(&self, keys: &[Vec<String>], age: &str) {
        self.empty();
        let keys: BTreeSet<_> = keys.iter().flatten().map(|key| format!("'{key}'")).collect();
        let keys = keys.into_iter().collect::<Vec<_>>().join(", ");
        let sql = format!(
            r#"INSERT INTO "IssueSyncRun" ("id", "status", "syncType")
                 SELECT 'past-' || n, 'completed', 'bench' FROM generate_series(1, 10000) n;
               INSERT INTO "IssueSyncRun" ("id", "status", "syncType", "startedAt")
                 SELECT key, 'running', 'bench', clock_timestamp() - interval '{age}' FROM unnest(ARRAY[{keys}]) key;
               INSERT INTO "sync_lock" SELECT key, key, clock_timestamp() - interval '{age}' FROM unnest(ARRAY[{keys}]) key;
               ANALYZE "sync_lock", "IssueSyncRun""#
        );
        connect(&self.database.url()).batch_execute(&sql).expect("rows that are held");
    }

    fn teams(&self, kinds: &[Kind], keys: &[Vec<String>], task: Task) -> Teams {
        let Options { turns, slice, .. } = self.options;
        let url = self.database.url();
        // The Prisma peer has connections too.
        let all_at_once = self.place.takes((kinds.len() + 1) * keys.len());
        let waiting = if all_at_once { kinds } else { &[] };
        let waiting = waiting.iter().map(|kind| (*kind, Team::new(*kind, &url, keys, task))).collect();
        let (turns, slice) = if all_at_once { (turns, slice) } else { (1, slice * 6) };
        Teams { waiting, url, keys: keys.to_vec(), task, turns, slice }
    }

    /// Acquire and release, again and again.
    fn cycles(
        &self,
        workers: usize,
        shared: bool,
        peer_version: &mut Option<String>,
        goals: &mut Vec<Goal>,
    ) -> Scenario {
        let keys = if shared { "one key for all" } else { "a key each" };
        let name = format!("Acquire and release, {}, {keys}", count(workers));
        eprintln!("{name} …");
        let (url, floor) = (self.database.url(), Kind::Bare.as_str());
        let mut peer = if workers <= 8 { Peer::start(&url, workers) } else { Err(String::new()) };
        let keys = Self::keys(workers, shared);
        let task = Task { release: Release::Own, wins: (!shared).then_some(true), repeat: true };
        let mut scenario = Scenario::new(name, workers, floor);
        // An upsert takes a key from whoever has it: it is no lock.
        let kinds: Vec<_> = CYCLES.into_iter().filter(|kind| !shared || *kind != Kind::Upsert).collect();
        let mut contestants: Vec<_> = kinds.iter().copied().map(Some).collect();
        if let Ok(peer) = &peer {
            *peer_version = Some(peer.version.clone());
            contestants.push(None);
        }
        self.empty();
        let conn = &mut connect(&url);
        let mut teams = self.teams(&kinds, &keys, task);
        for _ in 0..self.options.repetitions {
            scenario.repeat(
                &contestants,
                teams.turns,
                |kind| kind.map_or(peer::NAME, Kind::as_str),
                |kind| {
                    // Nobody is to wade through what those before him deleted.
                    vacuum(conn);
                    match (kind, &mut peer) {
                        (Some(kind), _) => teams.slice(kind),
                        (None, Ok(peer)) => peer.slice(&keys, self.options.slice),
                        (None, Err(_)) => Vec::new(),
                    }
                },
            );
        }
        if !shared && workers <= 8 {
            let count = count(workers);
            let reached = scenario.throughput("cycle", Kind::Tokio.as_str(), floor);
            goals.push(Goal::at_least(
                format!("acquire + release through tokio and the pool, {count}: throughput to the same statements by the barest client"),
                0.9,
                reached,
            ));
            goals.push(Goal::at_least(
                format!("acquire + release through tokio and the pool, {count}: throughput to the barest client behind tokio's spawn_blocking"),
                0.9,
                scenario.throughput("cycle", Kind::Tokio.as_str(), Kind::BareTokio.as_str()),
            ));
            let goal = format!("acquire + release through tokio and the pool, {count}: throughput to the Prisma peer");
            let bound = if workers == 1 { 4.5 } else { 6.0 };
            goals.push(match &peer {
                Ok(_) => Goal::at_least(goal, bound, scenario.throughput("cycle", Kind::Tokio.as_str(), peer::NAME)),
                Err(why) => {
                    println!("\nno comparison with the Prisma peer: {why}");
                    Goal::unmeasured(goal, why)
                }
            });
        }
        scenario
    }

    /// Claims that lose against committed live rows.
    fn losers(&self, workers: usize, shared: bool, goals: &mut Vec<Goal>) -> Scenario {
        let keys = if shared { "one key for all" } else { "a key each" };
        let name = format!("Losing against a live row, {}, {keys}", count(workers));
        eprintln!("{name} …");
        let keys = Self::keys(workers, shared);
        self.hold(&keys, "0 s");
        let task = Task { release: Release::Never, wins: Some(false), repeat: true };
        let mut scenario = Scenario::new(name, workers, Kind::Bare.as_str());
        let mut teams = self.teams(&LOSERS, &keys, task);
        for _ in 0..self.options.repetitions {
            scenario.repeat(&LOSERS, teams.turns, Kind::as_str, |kind| teams.slice(kind));
        }
        if !shared {
            for (door, loser, select) in
                [("the pool", Kind::Pooled, Kind::SelectPooled), ("tokio and the pool", Kind::Tokio, Kind::SelectTokio)]
            {
                goals.push(Goal::at_most(
                    format!(
                        "losing through {door}, {}: median time to a primary-key SELECT the same way",
                        count(workers)
                    ),
                    1.2,
                    scenario.latency("lose", loser.as_str(), select.as_str()),
                ));
            }
        }
        scenario
    }

    /// Claims that take over expired rows and close the records of their runs: each worker its own, or all the same ones in
    /// the same order, where one of them wins each.
    fn takeovers(&self, workers: usize, shared: bool) -> Scenario {
        let whose = if shared { "the same keys for all" } else { "keys of their own" };
        let name = format!("Takeover of expired rows, {}, {whose}", count(workers));
        eprintln!("{name} …");
        let each = if shared { TAKEOVERS } else { (2 * TAKEOVERS / workers).clamp(5, TAKEOVERS) };
        let list = |worker: usize| (0..each).map(|key| format!("expired-{worker}-{key}")).collect();
        let keys: Vec<Vec<_>> = (0..workers).map(|worker| list(if shared { 0 } else { worker })).collect();
        let task = Task { release: Release::Never, wins: (!shared).then_some(true), repeat: false };
        // An upsert takes a key from whoever has it: it is no lock.
        let contestants = [Kind::Bare, Kind::Connection, Kind::Pooled, Kind::Tokio, Kind::Upsert, Kind::Transaction];
        let contestants: Vec<_> = contestants.into_iter().filter(|kind| !shared || *kind != Kind::Upsert).collect();
        let mut scenario = Scenario::new(name, workers, Kind::Bare.as_str()).of("take over");
        for _ in 0..self.options.repetitions {
            scenario.repeat(&contestants, 1, Kind::as_str, |kind| {
                self.hold(&keys, "1 hour");
                Team::new(kind, &self.database.url(), &keys, task).slice(task, LONG)
            });
        }
        scenario
    }

    /// The heartbeat's statement for one lease, on a connection: the heartbeat has one of its own, so neither a pool nor tokio
    /// comes into it.
    fn renewals(&self, workers: usize) -> Scenario {
        let name = format!("Renewal of one lease, {}, a key each", count(workers));
        eprintln!("{name} …");
        let keys = Self::keys(workers, false);
        self.hold(&keys, "0 s");
        let task = Task { release: Release::Never, wins: Some(true), repeat: true };
        let mut scenario = Scenario::new(name, workers, Kind::BareRenew.as_str()).of("renew");
        let mut teams = self.teams(&RENEWERS, &keys, task);
        for _ in 0..self.options.repetitions {
            scenario.repeat(&RENEWERS, teams.turns, Kind::as_str, |kind| teams.slice(kind));
        }
        scenario
    }
}

/// The contestants of a scenario: all with open connections in turn, or, where the server has not enough of them, one after
/// the other in fewer and longer turns.
struct Teams {
    waiting: Vec<(Kind, Team)>,
    url: String,
    keys: Vec<Vec<String>>,
    task: Task,
    turns: usize,
    slice: Duration,
}

impl Teams {
    fn slice(&mut self, kind: Kind) -> Vec<Times> {
        match self.waiting.iter_mut().find(|(other, _)| *other == kind) {
            Some((_, team)) => team.slice(self.task, self.slice),
            None => Team::new(kind, &self.url, &self.keys, self.task).slice(self.task, self.slice),
        }
    }
}

fn count(workers: usize) -> String {
    if workers == 1 { "1 worker".to_owned() } else { format!("{workers} workers") }
}

#[derive(Serialize)]
struct Report {
    facts: Facts,
    /// Versions of the Prisma peer, if it took part.
    peer: Option<String>,
    goals: Vec<Goal>,
    rows: Vec<Row>,
}

impl Report {
    fn page(&self, tables: &str) -> String {
        let peer = self.peer.as_deref().unwrap_or("did not take part");
        let Facts { measured_at, repetitions, turns, turn_ms, .. } = &self.facts;
        format!(
            "Measured {measured_at}, {repetitions} repetitions of {turns} turns of {turn_ms} ms a contestant. Prisma peer: {peer}.\n\n```text\n{}\n```\n\n{}\n\
             ![Throughput of the contestants](performance/latency.svg)\n\n{tables}",
            self.facts.text(),
            goals_table(&self.goals)
        )
    }

    fn picture(&self) -> String {
        let panel = |title: &str, scenario: &str, operation: &str, contestants: &[&'static str]| {
            let find = |contestant: &str, workers: usize| {
                let mut rows =
                    self.rows.iter().filter(|row| row.scenario.starts_with(scenario) && row.workers == workers);
                let row = rows.find(|row| row.operation == operation && row.contestant == contestant);
                row.map_or(f64::NAN, |row| row.per_second)
            };
            Panel::Bars {
                title: title.to_owned(),
                groups: WORKERS.map(count).into(),
                series: contestants
                    .iter()
                    .map(|name| ((*name).to_owned(), WORKERS.map(|workers| find(name, workers)).into()))
                    .collect(),
            }
        };
        let shown = |kind: &&Kind| !matches!(kind, Kind::Advisory | Kind::BareTokio);
        let mut cycles: Vec<_> = CYCLES.iter().filter(shown).map(|kind| kind.as_str()).collect();
        cycles.push(peer::NAME);
        let losers: Vec<_> =
            LOSERS.iter().filter(|kind| **kind != Kind::Transaction).map(|kind| kind.as_str()).collect();
        draw(&[
            panel("Acquire and release a second, a key each", "Acquire and release", "cycle", &cycles),
            panel("Losing claims a second, a key each", "Losing", "lose", &losers),
        ])
    }
}
