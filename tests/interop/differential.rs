//! Random operations run once through the peer and once through us, on two databases: the same answers, the same rows.
//!
//! Ids and exact times differ, and so does what `docs/compatibility.md` lists. Each of those deviations is named where it is
//! allowed here, and has a test of its own.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{Bool, Nullable, Text};
use serde_json::json;
use sync_lock::blocking::{acquire_lock, complete_run, fail_run, release_lock};
use sync_lock::{Acquisition, MaxAge, RunId, RunReport};

use crate::peer::{Peer, PeerJob, run_id_of};
use crate::support::{TestDatabase, poll};

const OPERATIONS: usize = 250;

#[derive(Clone, Debug)]
enum Operation {
    Acquire(usize),
    Release(usize),
    Complete(usize, i32),
    Fail(usize),
    /// Everything gets older by so many seconds; negative is a row from the future.
    Age(i32),
    Orphan(usize),
    Delete(usize),
    /// A row as some third replica would have written it.
    Plant(usize, i32),
}

/// What a side can be asked to do, in terms of runs numbered by the claims that made them.
trait Side {
    /// Whether the claim was won; an error is its code.
    fn acquire(&mut self, job: &PeerJob) -> Result<Option<RunId>, String>;
    fn release(&mut self, run_id: &RunId) -> bool;
    fn complete(&mut self, run_id: &RunId, synced: i32) -> bool;
    fn fail(&mut self, run_id: &RunId) -> bool;
}

impl Side for Peer {
    fn acquire(&mut self, job: &PeerJob) -> Result<Option<RunId>, String> {
        let mut claim = job.acquire.clone();
        // The one maximum age: newer groomers have a shorter one of their own.
        claim["staleMs"] = json!(1_800_000);
        self.try_ask(&claim).map(|answer| run_id_of(&answer))
    }
    fn release(&mut self, run_id: &RunId) -> bool {
        Peer::release(self, run_id)
    }
    fn complete(&mut self, run_id: &RunId, synced: i32) -> bool {
        self.ask(&json!({ "do": "complete", "runId": run_id.as_str(), "syncedCount": synced })) == json!(true)
    }
    fn fail(&mut self, run_id: &RunId) -> bool {
        self.ask(&json!({ "do": "fail", "runId": run_id.as_str(), "errorMessage": "boom" })) == json!(true)
    }
}

impl Side for PgConnection {
    fn acquire(&mut self, job: &PeerJob) -> Result<Option<RunId>, String> {
        match acquire_lock(self, job.ours.clone(), MaxAge::DEFAULT) {
            Ok(Acquisition::Locked { run_id, .. }) => Ok(Some(run_id)),
            Ok(Acquisition::Conflict { .. }) => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }
    fn release(&mut self, run_id: &RunId) -> bool {
        release_lock(self, run_id).unwrap()
    }
    fn complete(&mut self, run_id: &RunId, synced: i32) -> bool {
        complete_run(self, run_id, &RunReport { synced_count: synced, ..RunReport::default() }).unwrap()
    }
    fn fail(&mut self, run_id: &RunId) -> bool {
        fail_run(self, run_id, "boom").unwrap()
    }
}

/// One of the two worlds.
struct World<S> {
    side: S,
    conn: PgConnection,
    runs: Vec<RunId>,
}

/// What a row or a record says, without ids and times.
type Facts = BTreeMap<String, String>;

impl<S: Side> World<S> {
    fn new(side: S, database: &TestDatabase) -> Self {
        Self { side, conn: database.connect(), runs: Vec::new() }
    }

    fn execute(&mut self, sql: &str) {
        diesel::sql_query(sql).execute(&mut self.conn).unwrap_or_else(|error| panic!("{error}: {sql}"));
    }

    /// Does an operation, and says what the side answered.
    fn perform(&mut self, operation: &Operation, jobs: &[PeerJob]) -> String {
        let run = |index: &usize| self.runs[*index].clone();
        let row = |job: &usize| format!(r#"WHERE "id" = '{}'"#, jobs[*job].key());
        match operation {
            Operation::Acquire(job) => match self.side.acquire(&jobs[*job]) {
                Ok(Some(run_id)) => {
                    self.runs.push(run_id);
                    "locked".to_owned()
                }
                Ok(None) => "conflict".to_owned(),
                Err(code) => code,
            },
            Operation::Release(index) => self.side.release(&run(index)).to_string(),
            Operation::Complete(index, synced) => self.side.complete(&run(index), *synced).to_string(),
            Operation::Fail(index) => self.side.fail(&run(index)).to_string(),
            Operation::Age(seconds) => {
                self.execute(&format!(
                    r#"UPDATE "sync_lock" SET "acquiredAt" = "acquiredAt" - make_interval(secs => {seconds})"#
                ));
                String::new()
            }
            Operation::Orphan(job) => {
                self.execute(&format!(r#"UPDATE "sync_lock" SET "syncRunId" = NULL {}"#, row(job)));
                String::new()
            }
            Operation::Delete(job) => {
                self.execute(&format!(r#"DELETE FROM "sync_lock" {}"#, row(job)));
                String::new()
            }
            Operation::Plant(job, age) => {
                self.execute(&format!(
                    r#"INSERT INTO "sync_lock" VALUES ('{}', 'third', clock_timestamp() - make_interval(secs => {age}))
                       ON CONFLICT DO NOTHING"#,
                    jobs[*job].key()
                ));
                String::new()
            }
        }
    }

    fn name(&self, holder: Option<&str>) -> String {
        let Some(holder) = holder else { return "nobody".to_owned() };
        let run = self.runs.iter().position(|run| run.as_str() == holder);
        run.map_or_else(|| holder.to_owned(), |run| format!("run {run}"))
    }

    fn rows(&mut self) -> Facts {
        #[derive(QueryableByName)]
        struct Row {
            #[diesel(sql_type = Text)]
            key: String,
            #[diesel(sql_type = Nullable<Text>)]
            holder: Option<String>,
            #[diesel(sql_type = Bool)]
            expired: bool,
        }
        let rows: Vec<Row> = diesel::sql_query(
            r#"SELECT "id" AS key, "syncRunId" AS holder, "acquiredAt" < clock_timestamp() - interval '30 min' AS expired
               FROM "sync_lock""#,
        )
        .load(&mut self.conn)
        .unwrap();
        let row = |row: Row| (row.key, format!("{}, expired: {}", self.name(row.holder.as_deref()), row.expired));
        rows.into_iter().map(row).collect()
    }

    fn records(&mut self) -> Facts {
        #[derive(QueryableByName)]
        struct Record {
            #[diesel(sql_type = Text)]
            id: String,
            #[diesel(sql_type = Text)]
            says: String,
        }
        let records: Vec<Record> = diesel::sql_query(
            r#"SELECT "id", concat_ws(', ', "syncType", "status", "reposFetched", "syncedCount", "notes", "errorMessage",
                 "completedAt" IS NOT NULL, "startedAt" > clock_timestamp() - interval '5 min') AS says
               FROM "IssueSyncRun""#,
        )
        .load(&mut self.conn)
        .unwrap();
        records.into_iter().map(|record| (self.name(Some(&record.id)), record.says)).collect()
    }

    /// The run that holds a key.
    fn holder(&mut self, key: &str) -> Option<usize> {
        let row = self.rows().remove(key)?;
        row.strip_prefix("run ")?.split(',').next()?.parse().ok()
    }
}

fn random_operation(random: &mut fastrand::Rng, jobs: usize, runs: usize) -> Operation {
    let job = random.usize(..jobs);
    // Late runs are asked for more often, early ones now and then.
    let run = runs.checked_sub(1 + random.usize(..runs.clamp(1, 6)));
    match (random.u8(..20), run) {
        (0..=7, _) | (_, None) => Operation::Acquire(job),
        (8..=11, Some(run)) => Operation::Release(run),
        (12 | 13, Some(run)) => Operation::Complete(run, random.i32(..50)),
        (14, Some(run)) => Operation::Fail(run),
        (15, Some(_)) => Operation::Age(1801),
        (16, Some(_)) => Operation::Age([900, -900][random.usize(..2)]),
        (17, Some(_)) => Operation::Orphan(job),
        (18, Some(_)) => Operation::Delete(job),
        (_, Some(_)) => Operation::Plant(job, [5, 1700, 1900, -600][random.usize(..4)]),
    }
}

fn both_sides_agree(seed: u64) {
    let (at_theirs, at_ours) = (TestDatabase::new(), TestDatabase::new());
    let Some(peer) = Peer::beside(&at_theirs) else { return };
    let (mut theirs, mut ours) = (World::new(peer, &at_theirs), World::new(at_ours.connect(), &at_ours));
    let jobs = PeerJob::all();
    let mut random = fastrand::Rng::with_seed(seed);
    // Runs whose row was taken over while their record said `running`: we close it, the peer leaves it.
    let mut displaced: HashSet<usize> = HashSet::new();
    let mut done = Vec::new();
    let mut answers: BTreeMap<String, usize> = BTreeMap::new();
    for step in 0..OPERATIONS {
        let operation = random_operation(&mut random, jobs.len(), ours.runs.len());
        done.push(operation.clone());
        let context = |what: &str| format!("seed {seed}, step {step}, {what}; the last operations: {:?}", tail(&done));

        let before = match &operation {
            Operation::Acquire(job) => ours.holder(jobs[*job].key().as_str()),
            _ => None,
        };
        let (their_answer, our_answer) = (theirs.perform(&operation, &jobs), ours.perform(&operation, &jobs));
        *answers.entry(format!("{} {our_answer}", kind(&operation))).or_default() += 1;
        match &operation {
            Operation::Acquire(job) if jobs[*job].name == "groomer" && their_answer == "P2002" => {
                // Deviation: the peer's groomer cannot insert over an orphan. Both go on without the row.
                assert_eq!(our_answer, "locked", "{}", context("an orphan of the groomer"));
                let run = ours.runs.pop().unwrap();
                assert!(release_lock(&mut ours.side, &run).unwrap());
                theirs.perform(&Operation::Delete(*job), &jobs);
            }
            Operation::Complete(run, _) | Operation::Fail(run) if displaced.contains(run) => {
                // Deviation: the record of a displaced run is closed already.
                assert_eq!(our_answer, "false", "{}", context("the end of a displaced run"));
            }
            _ => assert_eq!(their_answer, our_answer, "{}", context("the answers")),
        }
        if let (Some(run), "locked") = (before, our_answer.as_str()) {
            let record = ours.records().remove(&format!("run {run}"));
            displaced.extend(record.filter(|says| says.contains("lock taken over by run")).map(|_| run));
        }
        assert_eq!(theirs.rows(), ours.rows(), "{}", context("the rows"));
        let (mut their_records, mut our_records) = (theirs.records(), ours.records());
        for run in &displaced {
            let name = format!("run {run}");
            let (their_record, our_record) = (their_records.remove(&name), our_records.remove(&name));
            assert!(their_record.is_some() && our_record.is_some_and(|says| says.contains("failed")), "{name}");
        }
        assert_eq!(their_records, our_records, "{}", context("the records"));
    }
    for needed in
        ["Acquire locked", "Acquire conflict", "Release true", "Release false", "Complete true", "Complete false"]
    {
        assert!(answers.contains_key(needed), "seed {seed} tried too little: {answers:?}");
    }
    assert!(!displaced.is_empty(), "seed {seed} tried too little: {answers:?}");
}

fn kind(operation: &Operation) -> String {
    format!("{operation:?}").split('(').next().unwrap_or_default().to_owned()
}

fn tail(operations: &[Operation]) -> &[Operation] {
    &operations[operations.len().saturating_sub(12)..]
}

#[test]
fn the_same_operations_have_the_same_answers_and_leave_the_same_rows() {
    for seed in [1, 2, 3] {
        both_sides_agree(seed);
    }
}

#[test]
fn only_we_close_the_record_of_a_displaced_run() {
    let (at_theirs, at_ours) = (TestDatabase::new(), TestDatabase::new());
    let Some(mut peer) = Peer::beside(&at_theirs) else { return };
    let mut conn = at_ours.connect();
    let job = &PeerJob::all()[0];
    let displaced = [Peer::acquire(&mut peer, job), Side::acquire(&mut conn, job).unwrap()].map(Option::unwrap);
    at_theirs.back_date(1801.0);
    at_ours.back_date(1801.0);
    assert!(Peer::acquire(&mut peer, job).is_some());
    let by = Side::acquire(&mut conn, job).unwrap().unwrap();
    assert_eq!(at_theirs.run(&displaced[0]).status, "running");
    let closed = at_ours.run(&displaced[1]);
    assert_eq!((closed.status.as_str(), closed.completed), ("failed", true));
    assert_eq!(closed.error_message, Some(format!("lock taken over by run {by}")));
    // What follows: a run that ends after its takeover is completed at the peer and stays failed with us.
    assert!(Side::complete(&mut peer, &displaced[0], 1));
    assert!(!Side::complete(&mut conn, &displaced[1], 1));
}

#[test]
fn only_we_say_who_holds_the_key() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    database.plant("reconcile", Some("somebody"), 60.0);
    let job = PeerJob::of(sync_lock::SyncType::Reconcile);
    assert_eq!(peer.ask(&job.acquire), json!({ "locked": false }));
    let answer = acquire_lock(&mut database.connect(), job.ours, MaxAge::DEFAULT).unwrap();
    let Acquisition::Conflict { holder: Some(holder), .. } = answer else { panic!("{answer:?}") };
    assert_eq!((holder.run_id.as_str(), holder.age.as_secs() / 30), ("somebody", 2));
}

#[test]
fn a_row_that_a_transaction_has_locked_makes_the_peer_throw_and_is_a_conflict_here() {
    let database = TestDatabase::new();
    let Some(mut peer) = Peer::beside(&database) else { return };
    database.plant("reconcile", Some("crashed"), 1801.0);
    let job = PeerJob::of(sync_lock::SyncType::Reconcile);
    let mut holder = database.connect();
    holder.batch_execute(r#"BEGIN; SELECT FROM "sync_lock" FOR UPDATE"#).unwrap();
    peer.send(&job.acquire);
    poll("the peer waits for the row", || database.waiting() == 1);
    // Prisma's own bound of a transaction. It ends no statement, but whatever comes after it.
    std::thread::sleep(Duration::from_millis(5500));
    assert_eq!(database.waiting(), 1, "the peer waits on");
    assert_eq!(Side::acquire(&mut database.connect(), &job), Ok(None));
    holder.batch_execute("ROLLBACK").unwrap();
    assert_eq!(peer.hear()["error"]["code"], "P2028");
    assert!(Side::acquire(&mut database.connect(), &job).unwrap().is_some());
}

#[test]
fn the_peer_reads_an_odd_maximum_age_as_milliseconds_and_we_keep_the_default() {
    let Some(mut command) = crate::peer::node() else { return };
    let script = r#"import("./lock.mjs").then(({ maxAgeFromEnv }) => console.log(JSON.stringify(["1e6", "1_800_000",
        "30m", "0", "-5", "", " 1500 "].map((value) => maxAgeFromEnv({ DISPATCH_SYNC_LOCK_MAX_AGE_MS: value })))))"#;
    let output = command.args(["-e", script]).output().expect("Node starts");
    let read: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // Ours are pinned in `src/config.rs`: all but the last keep the default.
    assert_eq!(read, json!([1, 1, 30, 1_800_000, 1_800_000, 1_800_000, 1500]));
}
