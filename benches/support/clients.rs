//! Who is measured: the crate through each of its doors, the floor under it, and what a user would pick instead.

use std::marker::PhantomData;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::sql_types::{Array, Bool, Double, Nullable, Text};
use serde::Deserialize;
use sync_lock::{Acquisition, Job, LockKey, MaxAge, RunId, Settings, SyncLock, bench_support, blocking};
use tokio::runtime::Runtime;

/// The sync type under which the runs of a bench are recorded.
pub const SYNC_TYPE: &str = "bench";

/// A job of a bench's own, with a run record as the peer's runs have one.
pub fn job(key: &str) -> Job {
    let key = LockKey::custom(key).expect("a key");
    key.recorded_as(SYNC_TYPE).expect("a sync type")
}

pub fn connect(url: &str) -> PgConnection {
    PgConnection::establish(url).expect("a connection to the bench's database")
}

/// How often a connection sends a statement until the server has settled for a plan. The first five times it makes a new one,
/// which for a claim takes longer than the claim.
const UNTIL_PLANNED: usize = 8;

/// Does what autovacuum does in time, where nobody claims and frees thousands of times a second.
pub fn vacuum(conn: &mut PgConnection) {
    conn.batch_execute(r#"VACUUM "sync_lock""#).expect("a vacuum");
}

/// Whom a worker asks, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The floor: the very statements of the crate, sent by the barest client that diesel allows. They are prepared once and
    /// known by their type, so that not even their text is built again; there is no pool, and of the answer only the first
    /// column is read, which says won or freed.
    Bare,
    /// The floor's client and statements on a thread of tokio's for code that blocks: the least that any client costs an
    /// async caller while it is driven that way, as diesel's is.
    BareTokio,
    /// `blocking` on a connection of the caller's own.
    Connection,
    /// `blocking` on a connection out of an r2d2 pool.
    Pooled,
    /// `SyncLock` from tokio tasks.
    Tokio,
    /// One row and nothing else: an upsert, and a delete by primary key.
    Upsert,
    /// The statements of the TypeScript module, one after the other, without Prisma.
    Transaction,
    /// A session-level advisory lock, which leaves no row, no record, and dies with its session.
    Advisory,
    /// A SELECT of the holder by primary key, by the barest client.
    Select,
    /// The same SELECT on a connection out of an r2d2 pool.
    SelectPooled,
    /// The same SELECT on a pooled connection, from tokio tasks.
    SelectTokio,
    /// The crate's renewal of one lease by the barest client.
    BareRenew,
    /// The crate's renewal of one lease, its answer read.
    Renew,
    /// An UPDATE of one row by primary key.
    Update,
}

impl Kind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Bare | Self::BareRenew => "floor: same statement, barest client",
            Self::BareTokio => "floor behind tokio's spawn_blocking",
            Self::Connection => "sync-lock on a connection",
            Self::Pooled => "sync-lock through a pool",
            Self::Tokio => "sync-lock through tokio",
            Self::Upsert => "one-row upsert, delete",
            Self::Transaction => "transaction as in TypeScript",
            Self::Advisory => "pg_try_advisory_lock",
            Self::Select => "SELECT by primary key, barest client",
            Self::SelectPooled => "SELECT by primary key, through a pool",
            Self::SelectTokio => "SELECT by primary key, pool and tokio",
            Self::Renew => "sync-lock renewal",
            Self::Update => "one-row update",
        }
    }

    const fn is_async(self) -> bool {
        matches!(self, Self::BareTokio | Self::Tokio | Self::SelectTokio)
    }

    /// One client for each worker. Those that share a pool share one as large as there are workers.
    fn clients(self, url: &str, workers: usize) -> Vec<Client> {
        let size = u32::try_from(workers).expect("a few workers");
        let each = |client: &dyn Fn() -> Client| (0..workers).map(|_| client()).collect();
        let pool = || {
            let manager = ConnectionManager::new(url);
            let pool = Pool::builder().max_size(size).test_on_check_out(false);
            pool.build(manager).expect("a pool")
        };
        match self {
            Self::Pooled | Self::SelectPooled | Self::SelectTokio => {
                let pool = pool();
                each(&|| Client::Pool(pool.clone()))
            }
            Self::Tokio => {
                let settings = Settings::new(url).expect("settings").with_pool_size(size);
                let locks = SyncLock::new(&settings).expect("a handle");
                each(&|| Client::Handle(locks.clone()))
            }
            Self::BareTokio => each(&|| Client::Lent(Some(connect(url)))),
            _ => each(&|| Client::Connection(connect(url))),
        }
    }
}

enum Client {
    Connection(PgConnection),
    /// Lent to the thread that works on it.
    Lent(Option<PgConnection>),
    Pool(Pool<ConnectionManager<PgConnection>>),
    Handle(SyncLock),
}

/// How a won key is freed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// It is kept.
    Never,
    /// As the contestant does it; for the crate that is by run id alone.
    Own,
    /// By primary key and without taking the time.
    Untimed,
}

/// What each worker does until the time is over.
#[derive(Clone, Copy)]
pub struct Task {
    pub release: Release,
    /// What every claim must answer; without it either answer will do.
    pub wins: Option<bool>,
    /// Whether a worker begins again when it has been through all of its keys.
    pub repeat: bool,
}

/// What one worker took its time for, in microseconds.
#[derive(Default, Deserialize)]
pub struct Times {
    pub acquire: Vec<f64>,
    pub lose: Vec<f64>,
    pub release: Vec<f64>,
    pub cycle: Vec<f64>,
    /// From the first call that counts to the end of the last.
    pub seconds: f64,
}

impl Times {
    pub fn extend(&mut self, more: Self) {
        self.acquire.extend(more.acquire);
        self.lose.extend(more.lose);
        self.release.extend(more.release);
        self.cycle.extend(more.cycle);
        self.seconds += more.seconds;
    }
}

/// The workers of one contestant, with their connections.
pub struct Team {
    kind: Kind,
    workers: Vec<Worker>,
}

impl Team {
    /// A worker for each list of keys. When this returns each has opened its connection, prepared its statements and sent
    /// them so often that the server plans them no more: with the task, or, where that can be done only once, with keys of
    /// no account.
    pub fn new(kind: Kind, url: &str, keys: &[Vec<String>], task: Task) -> Self {
        let clients = kind.clients(url, keys.len());
        let workers = clients.into_iter().zip(keys).map(|(client, keys)| Worker::new(kind, client, keys));
        let mut team = Self { kind, workers: workers.collect() };
        // A handle opens its connections only when it needs them, and then in the background.
        let enough = Instant::now() + Duration::from_millis(if kind == Kind::Tokio { 300 } else { 100 });
        if task.repeat {
            team.run(task, enough, enough);
            return team;
        }
        let once: Vec<_> =
            (0..).zip(&mut team.workers).map(|(worker, it)| it.give(&[format!("warm-up-{worker}")])).collect();
        team.run(Task { release: Release::Own, wins: None, repeat: true }, enough, enough);
        team.workers.iter_mut().zip(once).for_each(|(worker, jobs)| worker.jobs = jobs);
        team
    }

    /// Lets every worker do the task for the time of a slice, after a fifth of that to warm up where it can be repeated.
    pub fn slice(&mut self, task: Task, slice: Duration) -> Vec<Times> {
        let start = Instant::now() + if task.repeat { slice / 5 } else { Duration::ZERO };
        self.run(task, start, start + slice)
    }

    fn run(&mut self, task: Task, start: Instant, end: Instant) -> Vec<Times> {
        if self.kind.is_async() {
            return runtime().block_on(async {
                let workers = std::mem::take(&mut self.workers).into_iter().map(|mut worker| {
                    tokio::spawn(async move {
                        let times = worker.run(task, start, end).await;
                        (worker, times)
                    })
                });
                let mut told = Vec::new();
                for worker in workers.collect::<Vec<_>>() {
                    let (worker, times) = worker.await.expect("a worker that ends");
                    self.workers.push(worker);
                    told.push(times);
                }
                told
            });
        }
        thread::scope(|scope| {
            let threads =
                self.workers.iter_mut().map(|worker| scope.spawn(move || ready(worker.run(task, start, end))));
            let threads: Vec<_> = threads.collect();
            threads.into_iter().map(|thread| thread.join().expect("a worker that ends")).collect()
        })
    }
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| Runtime::new().expect("a runtime"))
}

/// The answer of a future that never waits: what does not go through tokio is not to pay for it.
fn ready<T>(future: impl Future<Output = T>) -> T {
    match std::pin::pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => unreachable!("only tokio's contestants wait"),
    }
}

struct Worker {
    kind: Kind,
    client: Client,
    jobs: Vec<(String, Job)>,
}

impl Worker {
    fn new(kind: Kind, client: Client, keys: &[String]) -> Self {
        let mut worker = Self { kind, client, jobs: Vec::new() };
        worker.give(keys);
        worker
    }

    /// Gives it other keys to work on, and hands out the jobs it had.
    fn give(&mut self, keys: &[String]) -> Vec<(String, Job)> {
        std::mem::replace(&mut self.jobs, keys.iter().map(|key| (key.clone(), job(key))).collect())
    }

    async fn run(&mut self, task: Task, start: Instant, end: Instant) -> Times {
        let (mut times, mut first, mut next) = (Times::default(), None, 0);
        let all = self.jobs.len();
        while let Some((key, job)) = self.jobs.get(if task.repeat { next % all } else { next }) {
            next += 1;
            let begun = Instant::now();
            let run = acquire(self.kind, &mut self.client, key, job).await;
            let answered = Instant::now();
            if let Some(wins) = task.wins {
                assert_eq!(run.is_some(), wins, "{} on {key}", self.kind.as_str());
            }
            let mut freed = answered;
            if let (Some(run), true) = (&run, task.release != Release::Never) {
                let kind = if task.release == Release::Own { self.kind } else { Kind::Upsert };
                release(kind, &mut self.client, key, run).await;
                freed = Instant::now();
            }
            if end > start && begun >= start {
                first.get_or_insert(begun);
                let micros = |duration: Duration| duration.as_secs_f64() * 1e6;
                let answer = micros(answered - begun);
                if run.is_some() {
                    times.acquire.push(answer);
                } else {
                    times.lose.push(answer);
                }
                if run.is_some() && task.release == Release::Own {
                    times.release.push(micros(freed - answered));
                    times.cycle.push(micros(freed - begun));
                }
            }
            let warm = end > start || next >= UNTIL_PLANNED;
            if freed >= end && warm {
                break;
            }
        }
        times.seconds = first.map_or(0.0, |first| first.elapsed().as_secs_f64());
        times
    }
}

/// Claims the key, or does what stands in for it; says by which run it was won.
async fn acquire(kind: Kind, client: &mut Client, key: &str, job: &Job) -> Option<RunId> {
    let won = |acquisition| match acquisition {
        Acquisition::Locked { run_id, .. } => Some(run_id),
        Acquisition::Conflict { .. } => None,
    };
    match client {
        Client::Handle(locks) => won(locks.acquire_lock(job.clone()).await.expect("an answer")),
        Client::Lent(conn) => {
            let key = key.to_owned();
            lend(conn, move |conn| claim_bare(conn, &key)).await
        }
        Client::Pool(pool) if kind == Kind::SelectTokio => {
            let (pool, key) = (pool.clone(), key.to_owned());
            let select = move || select_holder(&mut pool.get().expect("a pooled connection"), &key);
            tokio::task::spawn_blocking(select).await.expect("an answer");
            None
        }
        Client::Pool(pool) => {
            let mut conn = pool.get().expect("a pooled connection");
            if kind == Kind::SelectPooled {
                select_holder(&mut conn, key);
                return None;
            }
            won(blocking::acquire_lock(&mut conn, job.clone(), MaxAge::DEFAULT).expect("an answer"))
        }
        Client::Connection(conn) => {
            let won_row = match kind {
                Kind::Bare => return claim_bare(conn, key),
                Kind::Upsert => {
                    let run = RunId::new();
                    run_bare::<Upsert>(conn, &texts().upsert, &[Value::Text(key), Value::Text(run.as_str())]);
                    return Some(run);
                }
                Kind::Transaction => return transaction(conn, key),
                Kind::Advisory => ask_bare::<Advise>(conn, &texts().advise, &[Value::Text(key)]),
                Kind::BareRenew => {
                    let one = [key];
                    run_bare::<Beat>(conn, &texts().renew, &[Value::Texts(&one), Value::Texts(&one)]);
                    true
                }
                Kind::Renew => bench_support::renew(conn, &[key], &[key]).expect("a renewal") == 1,
                Kind::Update => run_bare::<Touch>(conn, &texts().update, &[Value::Text(key), Value::Text(key)]) == 1,
                Kind::Select => {
                    select_holder(conn, key);
                    false
                }
                _ => {
                    let claimed = blocking::acquire_lock(conn, job.clone(), MaxAge::DEFAULT);
                    return won(claimed.expect("an answer"));
                }
            };
            won_row.then(RunId::new)
        }
    }
}

async fn release(kind: Kind, client: &mut Client, key: &str, run: &RunId) {
    match client {
        Client::Handle(locks) => assert!(locks.release_lock(run).await.expect("an answer")),
        Client::Lent(conn) => {
            let run = run.clone();
            assert!(lend(conn, move |conn| free_bare(conn, &run)).await);
        }
        Client::Pool(pool) => {
            let mut conn = pool.get().expect("a pooled connection");
            assert!(blocking::release_lock(&mut conn, run).expect("an answer"));
        }
        Client::Connection(conn) => {
            let id = Value::Text(run.as_str());
            match kind {
                Kind::Bare => assert!(free_bare(conn, run)),
                Kind::Upsert => assert_eq!(run_bare::<Delete>(conn, &texts().delete, &[Value::Text(key), id]), 1),
                Kind::Transaction => assert_eq!(run_bare::<DeleteRun>(conn, &texts().delete_run, &[id]), 1),
                Kind::Advisory => assert!(ask_bare::<Unadvise>(conn, &texts().unadvise, &[Value::Text(key)])),
                _ => assert!(blocking::release_lock(conn, run).expect("an answer")),
            }
        }
    }
}

fn claim_bare(conn: &mut PgConnection, key: &str) -> Option<RunId> {
    let (run, age) = (RunId::new(), MaxAge::DEFAULT.duration().as_secs_f64());
    let (key, id) = (Value::Text(key), Value::Text(run.as_str()));
    let binds = [key, id, Value::MaybeText(Some(SYNC_TYPE)), Value::Float(age), Value::Text("200")];
    ask_bare::<Claim>(conn, &texts().claim, &binds).then_some(run)
}

fn free_bare(conn: &mut PgConnection, run: &RunId) -> bool {
    ask_bare::<Free>(conn, &texts().release, &[Value::Text(run.as_str()), Value::Text("200")])
}

/// Does something with a connection on a thread that may block, and puts it back.
async fn lend<T: Send + 'static>(
    lent: &mut Option<PgConnection>,
    call: impl FnOnce(&mut PgConnection) -> T + Send + 'static,
) -> T {
    let mut conn = lent.take().expect("a connection that is lent to nobody");
    let done = tokio::task::spawn_blocking(move || (call(&mut conn), conn)).await;
    let (answer, conn) = done.expect("an answer");
    *lent = Some(conn);
    answer
}

/// The claim of the TypeScript module: a look, and a transaction of four statements.
fn transaction(conn: &mut PgConnection, key: &str) -> Option<RunId> {
    let texts = texts();
    let run = RunId::new();
    let (key, id) = (Value::Text(key), Value::Text(run.as_str()));
    if run_bare::<Live>(conn, &texts.live, &[key]) > 0 {
        return None;
    }
    conn.batch_execute("BEGIN").expect("a transaction");
    run_bare::<Record>(conn, &texts.record, &[id]);
    let mut won = run_bare::<Take>(conn, &texts.take, &[id, key]);
    if won == 0 {
        won = run_bare::<Put>(conn, &texts.put, &[key, id]);
    }
    if won == 0 {
        won = run_bare::<Take>(conn, &texts.take, &[id, key]);
    }
    conn.batch_execute(if won > 0 { "COMMIT" } else { "ROLLBACK" }).expect("the end of a transaction");
    (won > 0).then_some(run)
}

fn select_holder(conn: &mut PgConnection, key: &str) {
    let select = Bare::<Holder, Text> { text: &texts().select, binds: &[Value::Text(key)], types: PhantomData };
    select.get_result::<String>(conn).expect("a holder");
}

/// The texts that the barest client sends, cut where a value comes for the first time.
struct Texts {
    claim: Pieces,
    release: Pieces,
    renew: Pieces,
    upsert: Pieces,
    delete: Pieces,
    update: Pieces,
    select: Pieces,
    advise: Pieces,
    unadvise: Pieces,
    live: Pieces,
    record: Pieces,
    take: Pieces,
    put: Pieces,
    delete_run: Pieces,
}

type Pieces = Vec<String>;

static TEXTS: OnceLock<Texts> = OnceLock::new();

fn texts() -> &'static Texts {
    TEXTS.get().expect("learn_texts comes first")
}

/// Learns the crate's own statements from the server, which knows what was prepared.
pub fn learn_texts(url: &str) {
    #[derive(QueryableByName)]
    struct Prepared {
        #[diesel(sql_type = Text)]
        statement: String,
    }

    let conn = &mut connect(url);
    let claimed = blocking::acquire_lock(conn, job("learn"), MaxAge::DEFAULT).expect("a claim");
    let Acquisition::Locked { run_id, .. } = claimed else { unreachable!("nobody else is here") };
    blocking::release_lock(conn, &run_id).expect("a release");
    bench_support::renew(conn, &["learn"], &["learn"]).expect("a renewal");
    let prepared = diesel::sql_query("SELECT statement FROM pg_prepared_statements");
    let prepared = prepared.load::<Prepared>(conn).expect("the prepared statements");
    let find = |part: &str| {
        let found = prepared.iter().find(|prepared| prepared.statement.contains(part));
        pieces(&found.expect("a statement of the crate").statement)
    };
    let fresh = r#"INSERT INTO "sync_lock" VALUES ($1, $2, clock_timestamp()) ON CONFLICT ("id") DO "#;
    let taken = r#"UPDATE SET "syncRunId" = excluded."syncRunId", "acquiredAt" = excluded."acquiredAt""#;
    let texts = Texts {
        claim: find("made AS ("),
        release: find("freed AS ("),
        renew: find("beat AS ("),
        upsert: pieces(&(fresh.to_owned() + taken)),
        delete: pieces(r#"DELETE FROM "sync_lock" WHERE "id" = $1 AND "syncRunId" = $2"#),
        update: pieces(
            r#"UPDATE "sync_lock" SET "acquiredAt" = clock_timestamp() WHERE "id" = $1 AND "syncRunId" = $2"#,
        ),
        select: pieces(r#"SELECT "syncRunId" FROM "sync_lock" WHERE "id" = $1"#),
        advise: pieces("SELECT pg_try_advisory_lock(hashtextextended($1, 0))"),
        unadvise: pieces("SELECT pg_advisory_unlock(hashtextextended($1, 0))"),
        live: pieces(
            r#"SELECT "syncRunId", "acquiredAt" FROM "sync_lock"
               WHERE "id" = $1 AND "acquiredAt" > clock_timestamp() - interval '30 minutes'"#,
        ),
        record: pieces(r#"INSERT INTO "IssueSyncRun" ("id", "status", "syncType") VALUES ($1, 'running', 'bench')"#),
        take: pieces(
            r#"UPDATE "sync_lock" SET "syncRunId" = $1, "acquiredAt" = clock_timestamp() WHERE "id" = $2
               AND ("syncRunId" IS NULL OR "acquiredAt" < clock_timestamp() - interval '30 minutes')"#,
        ),
        put: pieces(&(fresh.to_owned() + "NOTHING")),
        delete_run: pieces(r#"DELETE FROM "sync_lock" WHERE "syncRunId" = $1"#),
    };
    assert!(TEXTS.set(texts).is_ok(), "the texts are learnt once");
}

/// Cuts a text at the first place of `$1`, of `$2` behind it, and so on.
fn pieces(text: &str) -> Pieces {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while let Some((piece, tail)) = rest.split_once(&format!("${}", pieces.len() + 1)) {
        pieces.push(piece.to_owned());
        rest = tail;
    }
    pieces.push(rest.to_owned());
    pieces
}

#[derive(Clone, Copy)]
enum Value<'a> {
    Text(&'a str),
    MaybeText(Option<&'a str>),
    Float(f64),
    Texts(&'a [&'a str]),
}

/// A statement that diesel caches by its type, so that its text is built only once a connection.
struct Bare<'a, Tag, Answer = Bool> {
    text: &'static [String],
    binds: &'a [Value<'a>],
    types: PhantomData<(Tag, Answer)>,
}

/// Says how many rows there were.
fn run_bare<Tag: 'static>(conn: &mut PgConnection, text: &'static [String], binds: &[Value<'_>]) -> usize {
    Bare::<Tag> { text, binds, types: PhantomData }.execute(conn).expect("an answer")
}

/// Says what the first column of the one row is.
fn ask_bare<Tag: 'static>(conn: &mut PgConnection, text: &'static [String], binds: &[Value<'_>]) -> bool {
    Bare::<Tag> { text, binds, types: PhantomData }.get_result(conn).expect("an answer")
}

impl<Tag: 'static, Answer> QueryId for Bare<'_, Tag, Answer> {
    type QueryId = Tag;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<Tag, Answer> Query for Bare<'_, Tag, Answer> {
    type SqlType = Answer;
}

impl<Tag, Answer> RunQueryDsl<PgConnection> for Bare<'_, Tag, Answer> {}

impl<Tag, Answer> QueryFragment<Pg> for Bare<'_, Tag, Answer> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        let mut binds = self.binds.iter();
        for (index, piece) in self.text.iter().enumerate() {
            out.push_sql(piece);
            if index + 1 == self.text.len() {
                break;
            }
            match binds.next() {
                Some(Value::Text(value)) => out.push_bind_param::<Text, _>(*value)?,
                Some(Value::MaybeText(value)) => out.push_bind_param::<Nullable<Text>, _>(value)?,
                Some(Value::Float(value)) => out.push_bind_param::<Double, _>(value)?,
                Some(Value::Texts(values)) => out.push_bind_param::<Array<Text>, [&str]>(values)?,
                None => unreachable!("a value for each place"),
            }
        }
        Ok(())
    }
}

/// Names for the statements: diesel tells them apart by these types.
macro_rules! tags {
    ($($tag:ident),*) => { $(struct $tag;)* };
}
tags!(Claim, Free, Beat, Upsert, Put, Delete, Touch, Holder, Advise, Unadvise, Live, Record, Take, DeleteRun);
