//! What the benches of speed share: arguments, a place to measure in, repetitions, tables, documents.

pub mod clients;
pub mod peer;
pub mod picture;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::Text;
use serde::Serialize;
use sync_lock::MaxAge;
use sync_lock::migrate::{Migration, migrate};
use sync_lock::private_server::{Database, Durability, Server};

use clients::{Times, connect};

/// What the arguments ask for.
pub struct Options {
    /// Cargo says `--bench`. Without it everything is done once and quickly, nothing is judged and no file written.
    pub bench: bool,
    pub repetitions: usize,
    /// How many turns a contestant has in a repetition.
    pub turns: usize,
    /// How long a turn is.
    pub slice: Duration,
    /// Writes the results where the documents are.
    pub write_docs: bool,
}

impl Options {
    /// The arguments of this bench, or the code to leave with.
    pub fn from_arguments(name: &str) -> Result<Self, ExitCode> {
        let arguments: Vec<_> = env::args().skip(1).collect();
        let bench = arguments.iter().any(|argument| argument == "--bench");
        let (repetitions, turns, slice) = if bench { (5, 10, 50) } else { (1, 1, 20) };
        let mut options = Self { bench, repetitions, turns, slice: Duration::from_millis(slice), write_docs: false };
        let mut arguments = arguments.iter().map(String::as_str);
        while let Some(argument) = arguments.next() {
            let number = |text: Option<&str>| text.and_then(|text| text.parse().ok()).filter(|number| *number > 0);
            let understood = match argument {
                "--bench" => true,
                "--quick" => {
                    options.turns = 3;
                    true
                }
                "--write-docs" => {
                    options.write_docs = bench;
                    bench
                }
                "--repetitions" => {
                    let repetitions = number(arguments.next());
                    options.repetitions = repetitions.unwrap_or(options.repetitions);
                    repetitions.is_some()
                }
                _ => false,
            };
            if !understood {
                eprintln!("usage: cargo bench --bench {name} [-- [--quick] [--repetitions N] [--write-docs]]");
                return Err(ExitCode::from(64));
            }
        }
        Ok(options)
    }
}

/// The server that is measured on.
pub struct Place {
    pub server: Server,
    pub facts: Facts,
}

/// What the numbers depend on.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    pub measured_at: String,
    pub crate_version: &'static str,
    pub private_server: bool,
    pub settings: BTreeMap<String, String>,
    pub cpu: String,
    pub cpus: usize,
    /// Of a private server.
    pub disk: Option<String>,
    /// How busy the machine was before we came: processes that run or want to, on average over a minute.
    pub load_before: Option<f64>,
    pub round_trip_us: f64,
    pub one_row_commit_us: f64,
    pub repetitions: usize,
    pub turns: usize,
    pub turn_ms: u128,
}

impl Place {
    /// Finds or starts the server and says what it is. The lines that come first in every bench.
    pub fn open(options: &Options) -> Self {
        let load_before = fs::read_to_string("/proc/loadavg").ok();
        let load_before = load_before.and_then(|load| load.split(' ').next()?.parse().ok());
        let server = Server::from_env(Durability::Durable).expect("a server to measure on");
        let database = database(&server);
        let url = database.url();
        clients::learn_texts(&url);
        let conn = &mut connect(&url);
        let names = [
            "server_version",
            "fsync",
            "synchronous_commit",
            "full_page_writes",
            "wal_level",
            "shared_buffers",
            "max_connections",
        ];
        let settings: BTreeMap<_, _> = names.map(|name| (name.to_owned(), setting(conn, name))).into();
        let times = if options.bench { 300 } else { 20 };
        let round_trip_us = typical(times, || conn.batch_execute("SELECT 1").expect("an answer"));
        conn.batch_execute("CREATE TABLE one (n int); INSERT INTO one VALUES (0)").expect("a table");
        let one_row_commit_us = typical(times, || conn.batch_execute("UPDATE one SET n = n + 1").expect("a commit"));
        let facts = Facts {
            measured_at: chrono::Utc::now().format("%Y-%m-%d %H:%M UTC").to_string(),
            crate_version: env!("CARGO_PKG_VERSION"),
            private_server: server.is_private(),
            cpu: cpu().unwrap_or_else(|| env::consts::ARCH.to_owned()),
            cpus: thread::available_parallelism().map_or(0, usize::from),
            disk: server.is_private().then(|| disk(&setting(conn, "data_directory"))).flatten(),
            load_before,
            round_trip_us,
            one_row_commit_us,
            repetitions: options.repetitions,
            turns: options.turns,
            turn_ms: options.slice.as_millis(),
            settings,
        };
        let place = Self { server, facts };
        println!("{}", place.facts.text());
        place
    }

    /// A database of the bench's own with both tables. It is dropped with the value.
    pub fn database(&self) -> Database {
        database(&self.server)
    }

    /// Whether the server takes that many connections beside the few that it needs itself.
    pub fn takes(&self, connections: usize) -> bool {
        let most = self.facts.settings.get("max_connections").and_then(|most| most.parse::<usize>().ok());
        most.is_some_and(|most| connections + 20 <= most)
    }
}

impl Facts {
    /// For people, a fact a line.
    pub fn text(&self) -> String {
        let whose = if self.private_server { "private server" } else { "server of TEST_DATABASE_URL" };
        let get = |name| self.settings.get(name).map_or("?", String::as_str);
        let mut text = format!("PostgreSQL {} ({whose})\n", get("server_version"));
        let settings = ["fsync", "synchronous_commit", "full_page_writes", "wal_level", "shared_buffers"];
        let settings: Vec<_> = settings.map(|name| format!("{name} {}", get(name))).into();
        let load = self.load_before.map_or_else(String::new, |load| format!(", load {load:.1} before the bench"));
        let _ = writeln!(text, "{}", settings.join(", "));
        let _ = writeln!(
            text,
            "round trip {:.0} µs, commit of one row {:.0} µs",
            self.round_trip_us, self.one_row_commit_us
        );
        let _ = write!(text, "{} × {}{load}", self.cpus, self.cpu);
        if let Some(disk) = &self.disk {
            let _ = write!(text, "\ndata on {disk}");
        }
        text
    }
}

fn database(server: &Server) -> Database {
    let database = server.create_database(None).expect("a database of our own");
    let migration = Migration::new(MaxAge::DEFAULT).bootstrap(true);
    migrate(&mut connect(&database.url()), &migration).expect("the tables");
    database
}

/// One text that a query answers with.
pub fn text(conn: &mut PgConnection, query: &str) -> String {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = Text)]
        value: String,
    }
    let query = format!("SELECT ({query})::text AS value");
    diesel::sql_query(query).get_result::<Row>(conn).expect("an answer").value
}

/// One number that a query answers with.
pub fn number(conn: &mut PgConnection, query: &str) -> f64 {
    text(conn, query).parse().expect("a number")
}

fn setting(conn: &mut PgConnection, name: &str) -> String {
    text(conn, &format!("current_setting('{name}', true)"))
}

fn typical(times: u32, mut call: impl FnMut()) -> f64 {
    let each = (0..times).map(|_| micros(&mut call));
    median(each.collect::<Vec<_>>())
}

/// How long a call takes, in microseconds.
pub fn micros(call: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    call();
    begun.elapsed().as_secs_f64() * 1e6
}

fn cpu() -> Option<String> {
    let facts = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = facts.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// File system and kind of disk under a folder.
fn disk(folder: &str) -> Option<String> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ');
        let (device, target, kind) = (fields.next()?, fields.next()?, fields.next()?);
        Path::new(folder).starts_with(target).then(|| (target.len(), device.to_owned(), kind.to_owned()))
    });
    let (_, device, kind) = mounts.max_by_key(|(length, ..)| *length)?;
    let name = device.strip_prefix("/dev/").unwrap_or_default().to_owned();
    let turns = fs::read_to_string(format!("/sys/class/block/{name}/queue/rotational"));
    let disk = match turns.as_deref().map(str::trim) {
        _ if name.starts_with("vd") => ", a virtual disk",
        Ok("0") => ", a disk that does not rotate",
        Ok("1") => ", a disk that rotates",
        _ => "",
    };
    Some(format!("{kind}{disk}"))
}

/// The middle one; of an even number the mean of the two.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.into_iter().filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// The value below which 99 of 100 lie.
fn p99(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let index = (values.len() * 99).div_ceil(100).saturating_sub(1);
    values.get(index).copied().unwrap_or(f64::NAN)
}

type TimesOf = fn(&Times) -> &Vec<f64>;

/// What one contestant did in one repetition of one operation.
#[derive(Clone, Copy)]
struct Measured {
    p50: f64,
    p99: f64,
    per_second: f64,
    samples: usize,
}

/// The repetitions of one scenario, by operation and contestant.
pub struct Scenario {
    pub name: String,
    pub workers: usize,
    floor: &'static str,
    /// What a claim that wins is called.
    claim: &'static str,
    repetitions: Vec<BTreeMap<(&'static str, &'static str), Measured>>,
    order: Vec<(&'static str, &'static str)>,
}

/// One line of a table: medians over the repetitions; a ratio is the median of the ratios within each repetition.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub scenario: String,
    pub workers: usize,
    pub operation: &'static str,
    pub contestant: &'static str,
    pub p50_us: f64,
    pub p99_us: f64,
    pub per_second: f64,
    /// Its median to that of the floor; the lower the better.
    pub p50_ratio: f64,
    pub p99_ratio: f64,
    /// Its throughput to that of the floor; the higher the better.
    pub per_second_ratio: f64,
    pub per_second_ratio_range: [f64; 2],
    pub samples: usize,
}

impl Scenario {
    /// A scenario in which ratios are to that contestant.
    pub fn new(name: impl Into<String>, workers: usize, floor: &'static str) -> Self {
        Self { name: name.into(), workers, floor, claim: "acquire", repetitions: Vec::new(), order: Vec::new() }
    }

    /// The same, where what wins is not an acquire.
    pub fn of(mut self, claim: &'static str) -> Self {
        self.claim = claim;
        self
    }

    /// One repetition: lets the contestants take so many turns, in an order that changes from turn to turn.
    pub fn repeat<C: Copy>(
        &mut self,
        contestants: &[C],
        turns: usize,
        name: impl Fn(C) -> &'static str,
        mut run: impl FnMut(C) -> Vec<Times>,
    ) {
        let repetition = self.repetitions.len();
        let mut told: Vec<Vec<Times>> = contestants.iter().map(|_| Vec::new()).collect();
        for turn in 0..turns {
            let turn = turn + repetition * turns;
            for place in 0..contestants.len() {
                let place = if turn.is_multiple_of(2) { place } else { contestants.len() - 1 - place };
                let index = (place + turn / 2) % contestants.len();
                for (worker, times) in run(contestants[index]).into_iter().enumerate() {
                    match told[index].get_mut(worker) {
                        Some(sum) => sum.extend(times),
                        None => told[index].push(times),
                    }
                }
            }
        }
        let mut measured = BTreeMap::new();
        for (contestant, times) in contestants.iter().zip(&told) {
            self.add(&mut measured, name(*contestant), times);
        }
        // The table keeps the order of the contestants.
        let rank = |contestant: &str| contestants.iter().position(|other| name(*other) == contestant);
        self.order.sort_by_key(|(operation, contestant)| (*operation, rank(contestant)));
        self.repetitions.push(measured);
    }

    fn add(
        &mut self,
        measured: &mut BTreeMap<(&'static str, &'static str), Measured>,
        contestant: &'static str,
        times: &[Times],
    ) {
        let operations: [(&str, TimesOf); 4] = [
            (self.claim, |times| &times.acquire),
            ("lose", |times| &times.lose),
            ("release", |times| &times.release),
            ("cycle", |times| &times.cycle),
        ];
        for (operation, of) in operations {
            let all: Vec<_> = times.iter().flat_map(|times| of(times).iter().copied()).collect();
            if all.is_empty() {
                continue;
            }
            let rates = times.iter().filter(|times| times.seconds > 0.0);
            let per_second = rates.map(|times| of(times).len() as f64 / times.seconds).sum();
            let (p50, p99) = (median(all.iter().copied()), p99(&all));
            measured.insert((operation, contestant), Measured { p50, p99, per_second, samples: all.len() });
            if !self.order.contains(&(operation, contestant)) {
                self.order.push((operation, contestant));
            }
        }
    }

    pub fn rows(&self) -> Vec<Row> {
        self.order.iter().map(|(operation, contestant)| self.row(operation, contestant)).collect()
    }

    fn row(&self, operation: &'static str, contestant: &'static str) -> Row {
        let all = self.repetitions.iter().filter_map(|measured| measured.get(&(operation, contestant)));
        let all: Vec<_> = all.copied().collect();
        let of = |pick: fn(&Measured) -> f64| median(all.iter().map(pick));
        let ratios = |pick: fn(&Measured) -> f64| self.ratios(operation, contestant, self.floor, pick);
        let rates = ratios(|measured| measured.per_second);
        Row {
            scenario: self.name.clone(),
            workers: self.workers,
            operation,
            contestant,
            p50_us: of(|measured| measured.p50),
            p99_us: of(|measured| measured.p99),
            per_second: of(|measured| measured.per_second),
            p50_ratio: median(ratios(|measured| measured.p50)),
            p99_ratio: median(ratios(|measured| measured.p99)),
            per_second_ratio: median(rates.iter().copied()),
            per_second_ratio_range: [
                rates.iter().copied().fold(f64::INFINITY, f64::min),
                rates.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            ],
            samples: all.iter().map(|measured| measured.samples).sum(),
        }
    }

    fn ratios(
        &self,
        operation: &'static str,
        one: &'static str,
        other: &'static str,
        pick: fn(&Measured) -> f64,
    ) -> Vec<f64> {
        let each = self.repetitions.iter().filter_map(|measured| {
            Some(pick(measured.get(&(operation, one))?) / pick(measured.get(&(operation, other))?))
        });
        each.collect()
    }

    /// How many times the throughput of another contestant this one has.
    pub fn throughput(&self, operation: &'static str, one: &'static str, other: &'static str) -> f64 {
        median(self.ratios(operation, one, other, |measured| measured.per_second))
    }

    /// How many times the median time of another contestant this one takes.
    pub fn latency(&self, operation: &'static str, one: &'static str, other: &'static str) -> f64 {
        median(self.ratios(operation, one, other, |measured| measured.p50))
    }
}

/// The lines of a scenario as a Markdown table.
pub fn table(rows: &[Row]) -> String {
    let mut text =
        "| operation | contestant | p50 µs | p99 µs | per s | p50 ÷ floor | p99 ÷ floor | per s ÷ floor (range) |\n\
                    | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
            .to_owned();
    for row in rows {
        let Row { operation, contestant, p50_us, p99_us, per_second, p50_ratio, p99_ratio, per_second_ratio, .. } = row;
        let [least, most] = row.per_second_ratio_range;
        let ratios = if p50_ratio.is_finite() {
            format!("{p50_ratio:.2} | {p99_ratio:.2} | {per_second_ratio:.2} ({least:.2}–{most:.2})")
        } else {
            "– | – | –".to_owned()
        };
        let _ =
            writeln!(text, "| {operation} | {contestant} | {p50_us:.0} | {p99_us:.0} | {per_second:.0} | {ratios} |");
    }
    text
}

/// What must be reached, and what was.
#[derive(Clone, Debug, Serialize)]
pub struct Goal {
    pub what: String,
    pub bound: String,
    pub measured: String,
    /// None where it could not be measured.
    pub met: Option<bool>,
}

impl Goal {
    pub fn at_least(goal: impl Into<String>, bound: f64, measured: f64) -> Self {
        let (bound_text, met) = (format!("≥ {bound} ×"), measured >= bound);
        Self { what: goal.into(), bound: bound_text, measured: format!("{measured:.2} ×"), met: Some(met) }
    }

    pub fn at_most(goal: impl Into<String>, bound: f64, measured: f64) -> Self {
        let (bound_text, met) = (format!("≤ {bound} ×"), measured <= bound);
        Self { what: goal.into(), bound: bound_text, measured: format!("{measured:.2} ×"), met: Some(met) }
    }

    pub fn unmeasured(goal: impl Into<String>, why: &str) -> Self {
        Self { what: goal.into(), bound: String::new(), measured: why.to_owned(), met: None }
    }
}

pub fn goals_table(goals: &[Goal]) -> String {
    let mut text = "| goal | bound | measured | met |\n| --- | ---: | ---: | --- |\n".to_owned();
    for Goal { what, bound, measured, met } in goals {
        let met = met.map_or("not measured", |met| if met { "yes" } else { "no" });
        let _ = writeln!(text, "| {what} | {bound} | {measured} | {met} |");
    }
    text
}

/// Writes JSON and pictures into a folder of the target folder, and with `--write-docs` where the documents are, together
/// with the part of the page that this bench owns.
pub fn save(options: &Options, name: &str, report: &impl Serialize, pictures: &[(&str, String)], page: &str) {
    if !options.bench {
        return;
    }
    // Cargo gives benches a folder in the target folder, wherever that is.
    let mut folders = vec![Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("performance")];
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    if options.write_docs {
        folders.push(docs.join("performance"));
    }
    let json = serde_json::to_string_pretty(report).expect("JSON") + "\n";
    for folder in folders {
        let written = |file: &str, content: &str| {
            let path: PathBuf = folder.join(file);
            fs::create_dir_all(&folder)
                .and_then(|()| fs::write(&path, content))
                .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
        };
        written(&format!("{name}.json"), &json);
        for (file, picture) in pictures {
            written(file, picture);
        }
        println!("\nWritten to {}", folder.display());
    }
    if options.write_docs {
        let path = docs.join("performance.md");
        let document = fs::read_to_string(&path).expect("docs/performance.md");
        let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->"));
        let (before, rest) = document.split_once(&begin).expect("the begin of this bench's part");
        let (_, after) = rest.split_once(&end).expect("the end of this bench's part");
        fs::write(&path, format!("{before}{begin}\n{page}\n{end}{after}")).expect("docs/performance.md");
    }
}
