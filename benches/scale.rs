//! How the cost grows: `cargo bench --bench scale`.
//!
//! With the rows in the table, with the leases that one process holds, and with the contenders for one key. On a private
//! server with the durability of a real one, or in databases of its own on the server that `TEST_DATABASE_URL` names.
//! `-- --quick` takes shorter slices, `-- --repetitions N` sets how many, `-- --write-docs` renews `docs/performance.md`.
//! Tables and goals go to stdout, JSON and picture to `target/performance/`. Without the `--bench` that `cargo bench`
//! passes, as under `cargo test --benches`, everything is done once with small numbers, and no file is written.

#![expect(
    clippy::cast_precision_loss,
    clippy::expect_used,
    clippy::panic,
    reason = "counts fit into a float, and a bench that cannot go on has nobody to tell but its user"
)]

#[allow(dead_code, reason = "each bench uses its part of it")]
mod support;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::connection::SimpleConnection;
use serde::Serialize;
use sync_lock::bench_support::{CHUNK, renew};
use sync_lock::private_server::Database;
use sync_lock::{LeaseAttempt, RunReport, Settings, SyncLock};
use tokio::runtime::Runtime;

use support::clients::{Kind, Release, Task, Team, Times, connect, job, vacuum};
use support::picture::{Panel, draw};
use support::{Facts, Goal, Options, Place, Row, Scenario, goals_table, median, micros, number, save, table, text};

/// What a table with so many rows is called in a scenario whose contestants are tables.
const TABLES: [(&str, usize); 3] = [("10 rows", 10), ("1,000 rows", 1_000), ("100,000 rows", 100_000)];

/// The leases that one process holds, and how many beats show what they leave behind.
const LEASES: [(usize, usize); 3] = [(1, 10_000), (100, 10_000), (10_000, 50)];

const CONTENDERS: usize = 64;

const TABLE_SIZE: &str = r#"pg_relation_size('"sync_lock"')"#;

fn main() -> ExitCode {
    let options = match Options::from_arguments("scale") {
        Ok(options) => options,
        Err(code) => return code,
    };
    let place = Place::open(&options);
    let bench = Bench { options, place };
    let mut report = Report {
        facts: bench.place.facts.clone(),
        goals: Vec::new(),
        rows: Vec::new(),
        leases: Vec::new(),
        renewals: Vec::new(),
        chunks_to_singles: f64::NAN,
        contention: Vec::new(),
    };
    bench.rows(&mut report);
    bench.leases(&mut report);
    bench.contenders(&mut report);
    let page = report.page();
    println!("\n{page}");
    save(&bench.options, "scale", &report, &[("scale.svg", report.picture())], &page);
    ExitCode::SUCCESS
}

/// Keys, and what a worker does with them; none where leases are taken in turn.
type Claims<'a> = Option<(&'a Vec<Vec<String>>, Task)>;

struct Bench {
    options: Options,
    place: Place,
}

impl Bench {
    /// Cost over the size of the table.
    fn rows(&self, report: &mut Report) {
        let tables: Vec<_> = TABLES
            .iter()
            .map(|(name, rows)| {
                let rows = if self.options.bench { *rows } else { (*rows).min(100) };
                let database = self.place.database();
                fill(&mut connect(&database.url()), rows);
                (*name, database)
            })
            .collect();
        let urls: Vec<_> = tables.iter().map(|(name, database)| (*name, database.url())).collect();
        let url = |name: &str| &urls.iter().find(|(other, _)| *other == name).expect("one of the tables").1;
        let names = TABLES.map(|(name, _)| name);
        let own = vec![vec!["own".to_owned()]];
        let held = vec![vec!["row-1".to_owned()]];
        let by_key = Task { release: Release::Untimed, wins: Some(true), repeat: true };
        let by_run = Task { release: Release::Own, ..by_key };
        let loses = Task { release: Release::Never, wins: Some(false), repeat: true };
        let scenarios: [(&str, Claims); 4] = [
            ("Acquire over the size of the table (freed by key)", Some((&own, by_key))),
            ("Acquire, and release by run id alone, over the size of the table", Some((&own, by_run))),
            ("Losing over the size of the table", Some((&held, loses))),
            ("Lease and its end by key and run id, through tokio, over the size of the table", None),
        ];
        for (title, what) in scenarios {
            eprintln!("{title} …");
            let mut scenario = Scenario::new(title, 1, names[0]);
            let mut teams: Vec<_> = match what {
                Some((keys, task)) => {
                    names.iter().map(|name| (*name, Team::new(Kind::Connection, url(name), keys, task))).collect()
                }
                None => Vec::new(),
            };
            let handles: Vec<_> = names.iter().map(|name| (*name, handle(url(name)))).collect();
            for _ in 0..self.options.repetitions {
                scenario.repeat(
                    &names,
                    self.options.turns,
                    |name| name,
                    |name| {
                        let team = teams.iter_mut().find(|(other, _)| *other == name);
                        if let (Some((_, team)), Some((_, task))) = (team, what) {
                            return team.slice(task, self.options.slice);
                        }
                        let (_, handle) = handles.iter().find(|(other, _)| *other == name).expect("a handle");
                        vec![leases_in_turn(handle, self.options.slice)]
                    },
                );
            }
            if title.starts_with("Acquire over") {
                report.goals.push(Goal::at_most(
                    "acquire with 100,000 rows in the table: median time to that with 10",
                    1.2,
                    scenario.latency("acquire", names[2], names[0]),
                ));
            }
            report.rows.extend(scenario.rows());
        }
    }

    /// Cost over the number of leases.
    fn leases(&self, report: &mut Report) {
        for (leases, beats) in LEASES {
            let (leases, beats) = if self.options.bench { (leases, beats) } else { (leases.min(100), 2) };
            eprintln!("{leases} leases, {beats} beats …");
            let database = self.place.database();
            let conn = &mut connect(&database.url());
            report.leases.push(beat_often(conn, leases, beats));
        }
        let leases = if self.options.bench { 10_000 } else { 100 };
        eprintln!("{leases} leases renewed in chunks, at once, and one by one …");
        let database = self.place.database();
        let conn = &mut connect(&database.url());
        fill(conn, leases);
        let keys = keys(leases);
        let mut ways = [("in chunks of 50", CHUNK), ("in one statement", leases), ("one by one", 1)]
            .map(|(way, chunk)| (chunk, Renewals { way, leases, ms: 0.0, all_ms: Vec::new(), hot_shares: Vec::new() }));
        for repetition in 0..self.options.repetitions.min(5) {
            for turn in 0..ways.len() {
                let (chunk, way) = &mut ways[(turn + repetition) % 3];
                vacuum(conn);
                let (ms, hot_share) = hot_share(conn, leases, |conn| micros(|| beat(conn, &keys, *chunk)) / 1000.0);
                way.all_ms.push(ms);
                way.hot_shares.push(hot_share);
            }
        }
        let [(_, chunks), (_, together), (_, singles)] = &ways;
        let share = |way: &Renewals| median(way.all_ms.iter().zip(&singles.all_ms).map(|(way, singles)| way / singles));
        report.goals.push(Goal::at_most(
            "10,000 leases renewed in one statement: time to 10,000 single renewals",
            0.1,
            share(together),
        ));
        // What the heartbeat does instead, for the sake of updates in place.
        report.chunks_to_singles = share(chunks);
        report.renewals = ways.map(|(_, way)| Renewals { ms: median(way.all_ms.iter().copied()), ..way }).into();
    }

    /// Cost of many contenders for one key.
    fn contenders(&self, report: &mut Report) {
        if !self.place.takes(CONTENDERS) {
            eprintln!("{CONTENDERS} contenders: skipped, the server does not take that many connections");
            return;
        }
        let database = self.place.database();
        let (url, slice_time) = (database.url(), self.options.slice * 16);
        let watch = &mut connect(&url);
        for (what, task, kinds) in [
            (
                "64 losers against a live row",
                Task { release: Release::Never, wins: Some(false), repeat: true },
                &[Kind::Bare, Kind::Connection, Kind::Tokio, Kind::Select][..],
            ),
            (
                "64 contenders that take and free one key",
                Task { release: Release::Own, wins: None, repeat: true },
                &[Kind::Bare, Kind::Connection, Kind::Tokio, Kind::Advisory][..],
            ),
        ] {
            let loses = task.wins.is_some();
            eprintln!("{what} …");
            fill(watch, usize::from(loses));
            let keys = vec![vec![if loses { "row-0" } else { "free" }.to_owned()]; CONTENDERS];
            let mut measured: Vec<Vec<Contention>> = kinds.iter().map(|_| Vec::new()).collect();
            for repetition in 0..self.options.repetitions {
                for turn in 0..kinds.len() {
                    let index = (turn + repetition) % kinds.len();
                    let kind = kinds[index];
                    vacuum(watch);
                    let wal = wal(watch);
                    let meter = CpuMeter::start(&database, self.place.facts.private_server);
                    let begun = Instant::now();
                    let times = Team::new(kind, &url, &keys, task).slice(task, slice_time);
                    let seconds = begun.elapsed().as_secs_f64();
                    let cpu = meter.stop();
                    let grown = wal_since(watch, &wal);
                    measured[index].push(Contention::of(what, kind, &times, grown, cpu, seconds));
                }
            }
            for repetitions in &measured {
                report.contention.push(Contention::typical(repetitions));
            }
        }
        let ours = report
            .contention
            .iter()
            .filter(|row| row.what.contains("losers") && row.contestant.starts_with("sync-lock"));
        let most = ours.map(|row| row.wal_bytes).fold(0.0, f64::max);
        report.goals.push(Goal {
            what: "losing against a committed live row: WAL of 64 losers".to_owned(),
            bound: "0 bytes".to_owned(),
            measured: format!("{most:.0} bytes"),
            met: Some(most == 0.0),
        });
    }
}

/// Makes the table hold so many live rows, `row-0` and so on, each with a holder of the same name.
fn fill(conn: &mut PgConnection, rows: usize) {
    let sql = format!(
        r#"TRUNCATE "sync_lock", "IssueSyncRun";
           INSERT INTO "sync_lock" SELECT 'row-' || n, 'row-' || n, clock_timestamp()
             FROM generate_series(0, {rows} - 1) n"#
    );
    conn.batch_execute(&sql).expect("rows");
    conn.batch_execute(r#"VACUUM ANALYZE "sync_lock""#).expect("a vacuum");
}

fn keys(leases: usize) -> Vec<String> {
    (0..leases).map(|lease| format!("row-{lease}")).collect()
}

/// Renews every lease as the heartbeat does, in chunks of that size.
fn beat(conn: &mut PgConnection, keys: &[String], chunk: usize) {
    for chunk in keys.chunks(chunk) {
        let chunk: Vec<_> = chunk.iter().map(String::as_str).collect();
        assert_eq!(renew(conn, &chunk, &chunk).expect("a renewal"), chunk.len());
    }
}

fn wal(conn: &mut PgConnection) -> String {
    text(conn, "pg_current_wal_insert_lsn()")
}

fn wal_since(conn: &mut PgConnection, start: &str) -> f64 {
    number(conn, &format!("pg_current_wal_insert_lsn() - '{start}'::pg_lsn"))
}

/// What a work that makes so many updates says, and how many of them among all were made in place.
fn hot_share<T>(conn: &mut PgConnection, updates: usize, work: impl FnOnce(&mut PgConnection) -> T) -> (T, f64) {
    let before = (settled_updates(conn, 0.0), statistic(conn, "n_tup_hot_upd"));
    let told = work(conn);
    let made = settled_updates(conn, before.0 + updates as f64) - before.0;
    (told, (statistic(conn, "n_tup_hot_upd") - before.1) / made.max(1.0))
}

/// Beats so often, and says what each took and what they left behind.
fn beat_often(conn: &mut PgConnection, leases: usize, beats: usize) -> Leases {
    fill(conn, leases);
    let keys = keys(leases);
    let size_before = number(conn, TABLE_SIZE);
    let ((times, wal_bytes), hot_share) = hot_share(conn, leases * beats, |conn| {
        let start = wal(conn);
        let times: Vec<_> = (0..beats).map(|_| micros(|| beat(conn, &keys, CHUNK)) / 1000.0).collect();
        (times, wal_since(conn, &start))
    });
    Leases {
        held: leases,
        beats,
        statements: leases.div_ceil(CHUNK),
        beat_ms: median(times.iter().copied()),
        wal_bytes_per_beat: wal_bytes / beats as f64,
        wal_bytes_per_lease: wal_bytes / (beats * leases) as f64,
        dead_rows: statistic(conn, "n_dead_tup"),
        hot_share,
        table_kib_before: size_before / 1024.0,
        table_kib_after: number(conn, TABLE_SIZE) / 1024.0,
    }
}

/// What the statistics of the table say.
fn statistic(conn: &mut PgConnection, column: &str) -> f64 {
    number(conn, &format!(r#"SELECT {column} FROM pg_stat_user_tables WHERE relid = '"sync_lock"'::regclass"#))
}

/// How many updates the statistics know of, when they know of that many or have had their time.
fn settled_updates(conn: &mut PgConnection, expected: f64) -> f64 {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let known = statistic(conn, "n_tup_upd");
        if known >= expected || Instant::now() > deadline {
            return known;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn handle(url: &str) -> (Runtime, SyncLock) {
    let locks = SyncLock::new(&Settings::new(url).expect("settings")).expect("a handle");
    (Runtime::new().expect("a runtime"), locks)
}

/// Leases one key and ends the lease, again and again.
fn leases_in_turn((runtime, locks): &(Runtime, SyncLock), time: Duration) -> Times {
    runtime.block_on(async {
        let (mut times, start) = (Times::default(), Instant::now() + time / 5);
        let end = start + time;
        while Instant::now() < end {
            let begun = Instant::now();
            let attempt = locks.lease(job("leased")).await.expect("an answer");
            let LeaseAttempt::Leased(lease) = attempt else { panic!("nobody else wants the key") };
            let answered = Instant::now();
            assert!(lease.complete(&RunReport::default()).await.expect("an answer"));
            if begun >= start {
                let micros = |duration: Duration| duration.as_secs_f64() * 1e6;
                times.acquire.push(micros(answered - begun));
                times.release.push(micros(answered.elapsed()));
                times.cycle.push(micros(begun.elapsed()));
            }
        }
        times.seconds = start.elapsed().as_secs_f64();
        times
    })
}

/// Sums up the processor time of a database's sessions on this machine while they last.
struct CpuMeter {
    stop: Sender<()>,
    thread: thread::JoinHandle<Option<f64>>,
}

impl CpuMeter {
    fn start(database: &Database, here: bool) -> Self {
        let (stop, stopped) = channel();
        let url = database.url();
        let measure = move || {
            let conn = &mut connect(&url);
            let (mut ticks, mut looks) = (HashMap::new(), 0);
            loop {
                let pids = "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity \
                            WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()";
                for pid in text(conn, &format!("coalesce(({pids}), '')")).split(' ').filter(|_| here) {
                    if let Some(now) = processor_ticks(pid) {
                        // Who comes later began with nothing.
                        let before = if looks == 0 { now } else { 0.0 };
                        ticks.entry(pid.to_owned()).or_insert((before, now)).1 = now;
                    }
                }
                looks += 1;
                if stopped.recv_timeout(Duration::from_millis(50)) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            let sum: f64 = ticks.values().map(|(before, now): &(f64, f64)| now - before).sum();
            here.then_some(sum / 100.0)
        };
        Self { stop, thread: thread::spawn(measure) }
    }

    /// Seconds.
    fn stop(self) -> Option<f64> {
        let _ = self.stop.send(());
        self.thread.join().expect("a meter that ends")
    }
}

/// User and system time of a process in hundredths of a second.
fn processor_ticks(pid: &str) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<_> = stat.rsplit_once(") ")?.1.split(' ').collect();
    Some(fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?)
}

#[derive(Serialize)]
struct Report {
    facts: Facts,
    goals: Vec<Goal>,
    rows: Vec<Row>,
    leases: Vec<Leases>,
    renewals: Vec<Renewals>,
    chunks_to_singles: f64,
    contention: Vec<Contention>,
}

#[derive(Serialize)]
struct Leases {
    held: usize,
    beats: usize,
    statements: usize,
    beat_ms: f64,
    wal_bytes_per_beat: f64,
    wal_bytes_per_lease: f64,
    dead_rows: f64,
    hot_share: f64,
    table_kib_before: f64,
    table_kib_after: f64,
}

#[derive(Serialize)]
struct Renewals {
    way: &'static str,
    leases: usize,
    ms: f64,
    all_ms: Vec<f64>,
    /// Updates in place among all, which leave the index alone.
    hot_shares: Vec<f64>,
}

#[derive(Clone, Serialize)]
struct Contention {
    what: &'static str,
    contestant: &'static str,
    wins_per_second: f64,
    losses_per_second: f64,
    loss_p50_us: f64,
    /// Of the server's sessions, while all contenders were at it, their connecting included.
    cpus_busy: Option<f64>,
    wal_bytes: f64,
}

impl Contention {
    fn of(what: &'static str, kind: Kind, times: &[Times], wal_bytes: f64, cpu: Option<f64>, seconds: f64) -> Self {
        let rate = |of: fn(&Times) -> usize| {
            let rates = times.iter().filter(|times| times.seconds > 0.0);
            rates.map(|times| of(times) as f64 / times.seconds).sum()
        };
        Self {
            what,
            contestant: kind.as_str(),
            wins_per_second: rate(|times| times.acquire.len()),
            losses_per_second: rate(|times| times.lose.len()),
            loss_p50_us: median(times.iter().flat_map(|times| times.lose.iter().copied())),
            cpus_busy: cpu.map(|cpu| cpu / seconds),
            wal_bytes,
        }
    }

    fn typical(repetitions: &[Self]) -> Self {
        let of = |pick: fn(&Self) -> f64| median(repetitions.iter().map(pick));
        let busy = of(|row| row.cpus_busy.unwrap_or(f64::NAN));
        Self {
            wins_per_second: of(|row| row.wins_per_second),
            losses_per_second: of(|row| row.losses_per_second),
            loss_p50_us: of(|row| row.loss_p50_us),
            cpus_busy: busy.is_finite().then_some(busy),
            wal_bytes: of(|row| row.wal_bytes),
            ..repetitions[0].clone()
        }
    }
}

impl Report {
    fn page(&self) -> String {
        let Facts { measured_at, repetitions, turns, turn_ms, .. } = &self.facts;
        let mut text = format!(
            "Measured {measured_at}, {repetitions} repetitions of {turns} turns of {turn_ms} ms a contestant.\n\n```text\n{}\n```\n\n{}\n\
             ![Cost over rows and leases](performance/scale.svg)\n",
            self.facts.text(),
            goals_table(&self.goals)
        );
        let mut title = "";
        for row in &self.rows {
            if row.scenario != title {
                title = &row.scenario;
                let rows: Vec<_> = self.rows.iter().filter(|row| row.scenario == title).cloned().collect();
                let table = table(&rows).replace("contestant", "table").replace("floor", "10 rows");
                let _ = write!(text, "\n### {title}\n\n{table}");
            }
        }
        text += "\n### Leases of one process\n\nA beat renews every lease, 50 a statement.\n\n\
                 | leases | statements a beat | ms a beat | WAL bytes a beat | WAL bytes a lease | after beats | dead rows | HOT share | table KiB before, after |\n\
                 | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        for row in &self.leases {
            let _ = writeln!(
                text,
                "| {} | {} | {:.2} | {:.0} | {:.0} | {} | {:.0} | {:.0} % | {:.0}, {:.0} |",
                row.held,
                row.statements,
                row.beat_ms,
                row.wal_bytes_per_beat,
                row.wal_bytes_per_lease,
                row.beats,
                row.dead_rows,
                row.hot_share * 100.0,
                row.table_kib_before,
                row.table_kib_after
            );
        }
        text += "\n| renewed | leases | ms | HOT share |\n| --- | ---: | ---: | ---: |\n";
        for row in &self.renewals {
            let hot = median(row.hot_shares.iter().copied()) * 100.0;
            let _ = writeln!(text, "| {} | {} | {:.0} | {hot:.0} % |", row.way, row.leases, row.ms);
        }
        let _ =
            writeln!(text, "\nIn chunks of 50 it takes {:.2} × the time of single renewals.", self.chunks_to_singles);
        let mut title = "";
        for row in &self.contention {
            if row.what != title {
                title = row.what;
                let _ = write!(
                    text,
                    "\n### {title}\n\n| contestant | wins per s | losses per s | loss p50 µs | CPUs of the server busy | WAL bytes |\n\
                     | --- | ---: | ---: | ---: | ---: | ---: |\n"
                );
            }
            let busy = row.cpus_busy.map_or("–".to_owned(), |busy| format!("{busy:.2}"));
            let loss = if row.loss_p50_us.is_finite() { format!("{:.0}", row.loss_p50_us) } else { "–".to_owned() };
            let _ = writeln!(
                text,
                "| {} | {:.0} | {:.0} | {loss} | {busy} | {:.0} |",
                row.contestant, row.wins_per_second, row.losses_per_second, row.wal_bytes
            );
        }
        text
    }

    fn picture(&self) -> String {
        let over_rows = |name: &str, scenario: &str, operation: &str| {
            let point = |(table, rows): &(&str, usize)| {
                let mut found = self.rows.iter().filter(|row| row.scenario.starts_with(scenario));
                let row = found.find(|row| row.operation == operation && row.contestant == *table)?;
                Some((*rows as f64, row.p50_us))
            };
            (name.to_owned(), TABLES.iter().filter_map(point).collect())
        };
        let over_leases = |name: &str, of: fn(&Leases) -> f64| {
            (name.to_owned(), self.leases.iter().map(|row| (row.held as f64, of(row))).collect())
        };
        draw(&[
            Panel::Lines {
                title: "Median time over the rows in the table, µs".to_owned(),
                x: "rows in sync_lock".to_owned(),
                series: vec![
                    over_rows("acquire", "Acquire over", "acquire"),
                    over_rows("lose", "Losing", "lose"),
                    over_rows("release by run id alone", "Acquire, and", "release"),
                    over_rows("end of a lease, by key", "Lease", "release"),
                ],
            },
            Panel::Lines {
                title: "One beat over the leases of a process".to_owned(),
                x: "leases".to_owned(),
                series: vec![
                    over_leases("ms a beat", |row| row.beat_ms),
                    over_leases("WAL a beat, KiB", |row| row.wal_bytes_per_beat / 1024.0),
                ],
            },
        ])
    }
}
