//! The harness: a database per test on one throw-away server, contenders behind a barrier, bounded polling.

pub mod pgbouncer;
pub mod wire;

use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Barrier, Mutex, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Double, Nullable, Text};
use sync_lock::blocking::acquire_lock;
use sync_lock::migrate::{Migration, migrate};
use sync_lock::private_server::{Database, Durability, Server};
use sync_lock::{Acquisition, LockKey, MaxAge, RunId, Settings, SyncLock, SyncType};

/// Longer than anything here takes, even on a busy machine. Only a broken test waits that long.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The server that all tests of this process share.
pub fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::from_env(Durability::Fast).expect("a server for the tests"))
}

/// A database of the test's own.
pub struct TestDatabase {
    database: Database,
    /// On a given server the template goes with the last test that needs it.
    _template: Option<Arc<Database>>,
}

impl TestDatabase {
    /// With both tables, as `sync-lock migrate --bootstrap` leaves them.
    pub fn new() -> Self {
        let template = template();
        let database = server().create_database(Some(&template)).expect("a copy of the template");
        Self { database, _template: Some(template) }
    }

    /// With no tables at all.
    pub fn empty() -> Self {
        Self { database: server().create_database(None).expect("an empty database"), _template: None }
    }

    pub fn name(&self) -> &str {
        self.database.name()
    }

    pub fn url(&self) -> String {
        self.database.url()
    }

    /// The URL for another role, which must be able to connect without a password.
    pub fn url_as(&self, role: &str) -> String {
        let mut url = url::Url::parse(&self.url()).expect("a URL");
        url.set_username(role).expect("a URL with a host");
        url.to_string()
    }

    pub fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url()).expect("a connection to the test's database")
    }

    pub fn settings(&self) -> Settings {
        Settings::new(&self.url()).expect("the settings of the test's database")
    }

    pub fn locks(&self) -> SyncLock {
        SyncLock::new(&self.settings()).expect("a handle")
    }

    pub fn execute(&self, sql: &str) {
        self.connect().batch_execute(sql).unwrap_or_else(|error| panic!("{error}: {sql}"));
    }

    /// Writes a lock row as a peer would have, `age_seconds` ago.
    pub fn plant(&self, key: &str, holder: Option<&str>, age_seconds: f64) {
        diesel::sql_query(
            r#"INSERT INTO "sync_lock" VALUES ($1, $2, clock_timestamp() - make_interval(secs => $3))
               ON CONFLICT ("id") DO UPDATE SET "syncRunId" = excluded."syncRunId", "acquiredAt" = excluded."acquiredAt""#,
        )
        .bind::<Text, _>(key)
        .bind::<Nullable<Text>, _>(holder)
        .bind::<Double, _>(age_seconds)
        .execute(&mut self.connect())
        .expect("a planted row");
    }

    /// Makes every row older by this much.
    pub fn back_date(&self, seconds: f64) {
        diesel::sql_query(r#"UPDATE "sync_lock" SET "acquiredAt" = "acquiredAt" - make_interval(secs => $1)"#)
            .bind::<Double, _>(seconds)
            .execute(&mut self.connect())
            .expect("back-dated rows");
    }

    /// Takes a key over, again and again making its row older than any heartbeat can mend in between.
    pub fn take_over(&self, sync_type: SyncType) -> RunId {
        let mut conn = self.connect();
        let mut next = None;
        poll("a takeover", || {
            self.back_date(3_600.0);
            let answer = acquire_lock(&mut conn, sync_type, MaxAge::DEFAULT).expect("an answer");
            next = is_win(&answer).then(|| won(answer));
            next.is_some()
        });
        next.expect("the new holder")
    }

    /// Keys and holders.
    pub fn locks_held(&self) -> Vec<(String, Option<String>)> {
        #[derive(QueryableByName)]
        struct Row {
            #[diesel(sql_type = Text)]
            key: String,
            #[diesel(sql_type = Nullable<Text>)]
            holder: Option<String>,
        }
        diesel::sql_query(r#"SELECT "id" AS key, "syncRunId" AS holder FROM "sync_lock" ORDER BY "id""#)
            .load::<Row>(&mut self.connect())
            .expect("the lock rows")
            .into_iter()
            .map(|row| (row.key, row.holder))
            .collect()
    }

    pub fn keys_held(&self) -> Vec<String> {
        self.locks_held().into_iter().map(|(key, _)| key).collect()
    }

    pub fn runs(&self) -> Vec<Run> {
        diesel::sql_query(
            r#"SELECT "id", "status", "syncType" AS sync_type, "errorMessage" AS error_message, "notes",
                 "reposFetched"::bigint AS repos_fetched, "syncedCount"::bigint AS synced_count,
                 "completedAt" IS NOT NULL AS completed
               FROM "IssueSyncRun" ORDER BY "startedAt", "id""#,
        )
        .load(&mut self.connect())
        .expect("the run records")
    }

    pub fn run(&self, id: &RunId) -> Run {
        self.runs().into_iter().find(|run| run.id == id.as_str()).unwrap_or_else(|| panic!("no record of run {id}"))
    }

    /// One number of the caller's SQL.
    pub fn count(&self, sql: &str) -> i64 {
        #[derive(QueryableByName)]
        struct Row {
            #[diesel(sql_type = BigInt)]
            count: i64,
        }
        let row: Row = diesel::sql_query(sql).get_result(&mut self.connect()).unwrap_or_else(|e| panic!("{e}: {sql}"));
        row.count
    }

    /// How many backends of this database wait for a lock.
    pub fn waiting(&self) -> i64 {
        self.count(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
    }

    /// One truth of the caller's SQL.
    pub fn holds(&self, sql: &str) -> bool {
        holds(&mut self.connect(), sql)
    }

    /// What the server logged as an error of this database. None on a server whose log is out of reach.
    pub fn server_errors(&self) -> Option<Vec<String>> {
        let log = server().log()?.expect("the server's log");
        let ours = format!("] {} ", self.name());
        let severe = ["ERROR:", "FATAL:", "PANIC:"];
        let errors = log.lines().filter(|line| line.contains(&ours) && severe.iter().any(|mark| line.contains(mark)));
        Some(errors.map(str::to_owned).collect())
    }

    /// Asserts that no statement failed on the server in this database.
    pub fn assert_no_server_errors(&self) {
        match self.server_errors() {
            Some(errors) => assert_eq!(errors, Vec::<String>::new()),
            // A given server shows its counters only.
            None => poll("the counters of the server", || {
                self.holds("SELECT xact_rollback = 0 AS holds FROM pg_stat_database WHERE datname = current_database()")
            }),
        }
    }
}

/// A role that may connect and nothing else, dropped with everything it owns.
pub struct Role<'a> {
    database: &'a TestDatabase,
    pub name: String,
}

impl<'a> Role<'a> {
    pub fn new(database: &'a TestDatabase) -> Self {
        let name = format!("role_{}", database.name());
        database.execute(&format!(r#"CREATE ROLE "{name}" LOGIN; REVOKE ALL ON SCHEMA public FROM PUBLIC"#));
        Self { database, name }
    }

    pub fn grant(&self, what: &str) {
        self.database.execute(&format!(r#"GRANT {what} TO "{}""#, self.name));
    }

    pub fn url(&self) -> String {
        self.database.url_as(&self.name)
    }
}

impl Drop for Role<'_> {
    fn drop(&mut self) {
        let name = &self.name;
        let _ = self.database.connect().batch_execute(&format!(r#"DROP OWNED BY "{name}"; DROP ROLE "{name}""#));
    }
}

#[derive(Clone, Debug, PartialEq, QueryableByName)]
pub struct Run {
    #[diesel(sql_type = Text)]
    pub id: String,
    #[diesel(sql_type = Text)]
    pub status: String,
    #[diesel(sql_type = Text)]
    pub sync_type: String,
    #[diesel(sql_type = Nullable<Text>)]
    pub error_message: Option<String>,
    #[diesel(sql_type = Nullable<Text>)]
    pub notes: Option<String>,
    #[diesel(sql_type = BigInt)]
    pub repos_fetched: i64,
    #[diesel(sql_type = BigInt)]
    pub synced_count: i64,
    #[diesel(sql_type = Bool)]
    pub completed: bool,
}

/// One truth of the caller's SQL, on the caller's connection.
pub fn holds(conn: &mut PgConnection, sql: &str) -> bool {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = Bool)]
        holds: bool,
    }
    let row: Row = diesel::sql_query(sql).get_result(conn).unwrap_or_else(|error| panic!("{error}: {sql}"));
    row.holds
}

fn template() -> Arc<Database> {
    static TEMPLATE: Mutex<Weak<Database>> = Mutex::new(Weak::new());
    let mut template = TEMPLATE.lock().expect("no test panics while it makes the template");
    if let Some(template) = template.upgrade() {
        return template;
    }
    let made = Arc::new(server().create_database(None).expect("the template"));
    let mut conn = PgConnection::establish(&made.url()).expect("a connection to the template");
    migrate(&mut conn, &Migration::new(MaxAge::DEFAULT).bootstrap(true)).expect("a migrated template");
    *template = Arc::downgrade(&made);
    made
}

/// Lets contenders loose at the same moment, each on a warm connection of its own, and hands out their answers.
pub fn race<T: Send>(
    database: &TestDatabase,
    contenders: usize,
    contend: impl Fn(usize, &mut PgConnection) -> T + Sync,
) -> Vec<T> {
    let start = Barrier::new(contenders);
    let (start, contend) = (&start, &contend);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..contenders)
            .map(|index| {
                let mut conn = database.connect();
                scope.spawn(move || {
                    start.wait();
                    contend(index, &mut conn)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a contender")).collect()
    })
}

/// Says loudly that a test could not run. libtest hides what a passing test prints by `eprintln!`.
pub fn skipped(why: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Waits until something is so, looking often.
pub fn poll(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

pub fn seconds(seconds: f64) -> MaxAge {
    MaxAge::new(Duration::from_secs_f64(seconds)).expect("a maximum age")
}

pub fn key(text: &str) -> LockKey {
    LockKey::custom(text).expect("a key")
}

/// The run id of a win.
#[track_caller]
pub fn won(acquisition: Acquisition) -> RunId {
    match acquisition {
        Acquisition::Locked { run_id, .. } => run_id,
        conflict @ Acquisition::Conflict { .. } => panic!("expected a win: {conflict:?}"),
    }
}

pub fn is_win(acquisition: &Acquisition) -> bool {
    matches!(acquisition, Acquisition::Locked { .. })
}

/// The program with a clean environment and this database.
pub fn sync_lock(url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sync-lock"));
    command.args(arguments).env_clear().env("DATABASE_URL", url).stdin(Stdio::null());
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
}

/// Runs a command to its end and asserts its exit code.
#[track_caller]
pub fn expect_exit(command: &mut Command, code: i32) -> (String, String) {
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    let (stdout, stderr) =
        (String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr).into_owned());
    assert_eq!(status.code(), Some(code), "{command:?}\nstdout: {stdout}\nstderr: {stderr}");
    (stdout, stderr)
}
