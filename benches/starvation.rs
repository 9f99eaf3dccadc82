//! What one row for all jobs does to five jobs, and what a row per job does: `cargo bench --bench starvation`.
//!
//! On a private server with the durability of a real one, or in a database of its own on the server that
//! `TEST_DATABASE_URL` names. `-- --rounds N` sets how often the five jobs race (10,000 by default), `-- --quick` means
//! 500. A table goes to stdout, and table, JSON and picture to `target/starvation/`. It fails if a goal is missed. Without
//! the `--bench` that `cargo bench` passes, as under `cargo test --benches`, 20 rounds show that it works and no file is
//! written.

#![expect(clippy::expect_used, clippy::panic, reason = "a bench that cannot go on has nobody to tell but its user")]

use std::env;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Serialize;
use sync_lock::private_server::{Durability, Server};
use sync_lock::starvation::{SCHEDULE, Scheme, ServerFacts, Simulation, Tally, jain_index};

/// How much of the scheduler's time is replayed.
const DAY: u32 = 24 * 60;

/// Who starved in the schedule that was measured under the shared key.
const STARVED: [&str; 2] = ["pr-followup", "reconcile"];

/// Two colours that people with any colour vision can tell apart.
const COLOURS: [RGBColor; 2] = [RGBColor(213, 94, 0), RGBColor(0, 114, 178)];

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let bench = arguments.iter().any(|argument| argument == "--bench");
    let rounds = if bench { rounds(&arguments) } else { Some(20) };
    let Some(rounds) = rounds else {
        eprintln!("usage: cargo bench --bench starvation [-- [--rounds N] [--quick]]");
        return ExitCode::from(64);
    };
    let report = measure(rounds);
    let text = report.text();
    print!("{text}");
    if bench {
        // Cargo gives benches a folder in the target folder, wherever that is.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("starvation");
        report.save(&folder, &text).unwrap_or_else(|error| panic!("cannot write to {}: {error}", folder.display()));
        println!("\nWritten to {}: starvation.txt, starvation.json, starvation.svg", folder.display());
    }
    let missed = report.missed_goals();
    for goal in &missed {
        eprintln!("goal missed: {goal}");
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn rounds(arguments: &[String]) -> Option<u32> {
    let mut rounds = 10_000;
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--bench" => {}
            "--quick" => rounds = 500,
            "--rounds" => rounds = arguments.next()?.parse().ok().filter(|rounds| (1..=1_000_000).contains(rounds))?,
            _ => return None,
        }
    }
    Some(rounds)
}

fn measure(rounds: u32) -> Report {
    let server = Server::from_env(Durability::Durable).expect("a server to measure on");
    let database = server.create_database(None).expect("a database of our own");
    let mut simulation = Simulation::start(&database).expect("the tables");
    let facts = simulation.server().expect("the server's settings");
    let cpus = thread::available_parallelism().map_or(0, usize::from);
    eprintln!("PostgreSQL {}, {cpus} CPUs: {rounds} rounds and a day under each scheme …", facts.version);
    let schemes = Scheme::BOTH.map(|scheme| {
        let started = Instant::now();
        let at_once = simulation.at_once(scheme, rounds).expect("the rounds");
        let schedule = simulation.replay(scheme, DAY).expect("the schedule");
        eprintln!("{}: {:.1} s", scheme.as_str(), started.elapsed().as_secs_f64());
        Measured::new(scheme, at_once, schedule)
    });
    Report { server: facts, private_server: server.is_private(), cpus, rounds, schedule_minutes: DAY, schemes }
}

#[derive(Serialize)]
struct Report {
    server: ServerFacts,
    private_server: bool,
    cpus: usize,
    rounds: u32,
    schedule_minutes: u32,
    schemes: [Measured; 2],
}

#[derive(Serialize)]
struct Measured {
    scheme: &'static str,
    at_once: Vec<Row>,
    schedule: Vec<Row>,
    /// Over the success rates of the schedule.
    jain_index: f64,
    never_ran: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    tally: Tally,
    success_rate: f64,
}

impl Measured {
    fn new(scheme: Scheme, at_once: Vec<Tally>, schedule: Vec<Tally>) -> Self {
        let rates: Vec<_> = schedule.iter().map(Tally::success_rate).collect();
        let rows = |tallies: Vec<Tally>| {
            tallies.into_iter().map(|tally| Row { success_rate: tally.success_rate(), tally }).collect()
        };
        Self {
            scheme: scheme.as_str(),
            jain_index: jain_index(&rates),
            never_ran: schedule.iter().filter(|tally| tally.runs == 0).map(|tally| tally.job.clone()).collect(),
            at_once: rows(at_once),
            schedule: rows(schedule),
        }
    }
}

impl Report {
    fn missed_goals(&self) -> Vec<String> {
        let [shared, per_job] = &self.schemes;
        let mut missed = Vec::new();
        let mut goal = |reached: bool, goal: &str| {
            if !reached {
                missed.push(goal.to_owned());
            }
        };
        let wins = |row: &Row| (row.tally.runs, row.tally.conflicts);
        goal(
            per_job.at_once.iter().all(|row| wins(row) == (self.rounds.into(), 0)),
            "with a key per job every job wins every round",
        );
        goal(
            per_job.schedule.iter().zip(SCHEDULE).all(|(row, job)| wins(row) == ((DAY / job.every_minutes).into(), 0)),
            "with a key per job every job of the schedule runs at every tick",
        );
        goal(
            shared.at_once.iter().map(|row| row.tally.runs).sum::<i64>() == i64::from(self.rounds),
            "under the shared key exactly one of five jobs wins a round: 0.2 on average",
        );
        goal(shared.never_ran == STARVED, "under the shared key pr-followup and reconcile never run");
        missed
    }

    fn text(&self) -> String {
        let Self { server, cpus, rounds, .. } = self;
        let whose = if self.private_server { "private server" } else { "server of TEST_DATABASE_URL" };
        let mut text = format!(
            "PostgreSQL {} ({whose})\nfsync {}, synchronous_commit {}, {cpus} CPUs\n",
            server.version, server.fsync, server.synchronous_commit
        );
        for measured in &self.schemes {
            let share = |row: &Row| format!("{} {:.3}", row.tally.job, row.success_rate);
            let by_rate = |a: &&Row, b: &&Row| a.success_rate.total_cmp(&b.success_rate);
            let least = measured.at_once.iter().min_by(by_rate).map(share).unwrap_or_default();
            let most = measured.at_once.iter().max_by(by_rate).map(share).unwrap_or_default();
            let never = if measured.never_ran.is_empty() { "none".to_owned() } else { measured.never_ran.join(", ") };
            write!(text, "\n{}\n", measured.scheme.to_uppercase())
                .and_then(|()| table(&mut text, &format!("five at once, {rounds} rounds"), &measured.at_once))
                .and_then(|()| writeln!(text, "  average success rate {:.3}", average(&measured.at_once)))
                .and_then(|()| writeln!(text, "  spread from {least} to {most}\n"))
                .and_then(|()| table(&mut text, "the schedule, one day", &measured.schedule))
                .and_then(|()| writeln!(text, "  Jain's fairness index {:.3}", measured.jain_index))
                .and_then(|()| writeln!(text, "  jobs that never ran: {never}"))
                .expect("a String takes any text");
        }
        text
    }

    fn save(&self, folder: &Path, text: &str) -> Result<(), Box<dyn Error>> {
        fs::create_dir_all(folder)?;
        fs::write(folder.join("starvation.txt"), text)?;
        fs::write(folder.join("starvation.json"), serde_json::to_string_pretty(self)? + "\n")?;
        let mut picture = String::new();
        self.draw(&mut picture)?;
        fs::write(folder.join("starvation.svg"), picture)?;
        Ok(())
    }

    fn draw(&self, picture: &mut String) -> Result<(), Box<dyn Error>> {
        let [shared, per_job] = &self.schemes;
        let never = format!("{}, never ran: {}", shared.scheme, shared.never_ran.join(", "));
        let panels = [
            (format!("Five jobs at once, {} rounds", self.rounds), &shared.at_once, &per_job.at_once, String::new()),
            ("The schedule over a day".to_owned(), &shared.schedule, &per_job.schedule, never),
        ];
        let root = SVGBackend::with_string(picture, (1080, 460)).into_drawing_area();
        root.fill(&WHITE)?;
        root.draw_text("Claims that ran, in percent", &label(22, HPos::Left), (24, 26))?;
        for (index, (measured, colour)) in self.schemes.iter().zip(COLOURS).enumerate() {
            let left = 24 + 160 * i32::try_from(index)?;
            root.draw(&Rectangle::new([(left, 44), (left + 14, 58)], colour.filled()))?;
            root.draw_text(measured.scheme, &label(15, HPos::Left), (left + 20, 51))?;
        }
        for (area, (title, shared, per_job, remark)) in root.margin(56, 0, 0, 0).split_evenly((1, 2)).iter().zip(panels)
        {
            panel(area, &title, [shared, per_job], &remark)?;
        }
        root.present()?;
        Ok(())
    }
}

fn average(rows: &[Row]) -> f64 {
    let jobs = u32::try_from(rows.len()).expect("five jobs");
    rows.iter().map(|row| row.success_rate).sum::<f64>() / f64::from(jobs)
}

fn table(text: &mut String, title: &str, rows: &[Row]) -> std::fmt::Result {
    writeln!(text, "  {title}")?;
    writeln!(
        text,
        "  {:<12} {:>7} {:>10} {:>13} {:>22}",
        "job", "runs", "conflicts", "success rate", "longest losing streak"
    )?;
    for Row { tally, success_rate } in rows {
        let Tally { job, runs, conflicts, longest_losing_streak } = tally;
        writeln!(text, "  {job:<12} {runs:>7} {conflicts:>10} {success_rate:>13.3} {longest_losing_streak:>22}")?;
    }
    Ok(())
}

fn label(size: i32, horizontal: HPos) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size)).pos(Pos::new(horizontal, VPos::Center))
}

/// Two bars for each job, side by side, on an axis from nothing to all.
fn panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    title: &str,
    schemes: [&Vec<Row>; 2],
    remark: &str,
) -> Result<(), Box<dyn Error>> {
    let jobs = u32::try_from(schemes[0].len())?;
    let mut chart = ChartBuilder::on(area)
        .margin(24)
        .margin_bottom(64)
        .caption(title, ("sans-serif", 17))
        .y_label_area_size(40)
        .build_cartesian_2d(0.0..f64::from(jobs), 0.0..108.0)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(232, 232, 232))
        .y_labels(6)
        .y_label_style(("sans-serif", 13))
        .y_label_formatter(&|percent| if *percent > 100.0 { String::new() } else { format!("{percent:.0} %") })
        .draw()?;
    for (offset, (rows, colour)) in [0.12, 0.5].into_iter().zip(schemes.into_iter().zip(COLOURS)) {
        for (job, row) in (0..jobs).map(f64::from).zip(rows) {
            let (left, percent) = (job + offset, row.success_rate * 100.0);
            let bar = Rectangle::new([(left, 0.0), (left + 0.38, percent)], colour.filled());
            chart.draw_series([bar])?;
            let (x, y) = chart.backend_coord(&(left + 0.19, percent));
            let shown = if percent.fract() == 0.0 { format!("{percent:.0}") } else { format!("{percent:.1}") };
            let style = label(12, HPos::Center).color(&colour);
            area.draw_text(&shown, &style, area_position(area, (x, y - 8)))?;
        }
    }
    for (job, row) in (0..jobs).map(f64::from).zip(schemes[0]) {
        let (x, y) = chart.backend_coord(&(job + 0.5, 0.0));
        area.draw_text(&row.tally.job, &label(14, HPos::Center), area_position(area, (x, y + 14)))?;
    }
    let (x, y) = chart.backend_coord(&(f64::from(jobs) / 2.0, 0.0));
    area.draw_text(remark, &label(13, HPos::Center).color(&COLOURS[0]), area_position(area, (x, y + 38)))?;
    Ok(())
}

/// A position in the picture as one in the area, which is what text is drawn by.
fn area_position(area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>, (x, y): (i32, i32)) -> (i32, i32) {
    let (left, top) = area.get_base_pixel();
    (x - left, y - top)
}
