//! The private server starts everywhere, and leaves nothing behind whatever
//! happens to the process that started it.
//!
//! That process is this test binary again, running [`child`] alone in the part
//! that `SYNC_LOCK_CHILD` names. Its `TMPDIR` is its own, so that a test knows
//! the folder and all processes that work in it.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::sql_types::{BigInt, Text};
use diesel::{Connection, PgConnection, QueryableByName, RunQueryDsl};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, Uid};
use sync_lock::private_server::{Durability, Server, ServerError};

const PART: &str = "SYNC_LOCK_CHILD";
const READY: &str = "the server is ready";
const NOBODY: u32 = 65534;
const LIMIT: Duration = Duration::from_mins(1);

static NEVER_DROPPED: OnceLock<Server> = OnceLock::new();

/// Not a test: what the other process does.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else {
        return;
    };
    let server = Server::from_env(Durability::Fast).unwrap();
    let database = server.create_database(None).unwrap();
    assert_eq!(text(&database.url(), "SELECT current_user"), "postgres");
    println!("\n{READY}");
    match part.as_str() {
        "drops" => {}
        "keeps it in a static" => {
            std::mem::forget(database);
            NEVER_DROPPED.set(server).unwrap();
        }
        "keeps a hanging server in a static" => {
            let folder = std::env::temp_dir();
            // Not the postmaster: the kernel wakes it when our end orphans its process group.
            kill(pid_of(&folder, "checkpointer"), Signal::SIGSTOP).unwrap();
            std::mem::forget(database);
            NEVER_DROPPED.set(server).unwrap();
        }
        "panics" => panic!("on purpose"),
        "aborts" => std::process::abort(),
        "waits with a child of its own" => {
            // A child that outlives us must not keep the server alive. It ends with its standard input.
            let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
            println!("sleeper {}", sleeper.id());
            sleeper.wait().unwrap();
        }
        "waits" => loop {
            thread::park();
        },
        other => panic!("no part {other}"),
    }
}

#[test]
fn a_private_server_is_ready_isolated_and_gone_after_stop() {
    let scene = Scene::new();
    let started = Instant::now();
    let server = Server::private(Durability::Fast).unwrap();
    let took = started.elapsed();
    assert!(took < Duration::from_secs(15), "{took:?}");
    println!("started in {took:?}");
    assert!(server.is_private());

    let database = server.create_database(None).unwrap();
    let url = database.url();
    assert_eq!(text(&url, "SELECT current_database()::text"), database.name());
    for (setting, value) in [
        ("TimeZone", "UTC"),
        ("listen_addresses", ""),
        ("fsync", "off"),
        ("full_page_writes", "off"),
        ("synchronous_commit", "off"),
        ("server_encoding", "UTF8"),
        ("lc_messages", "C"),
        ("max_connections", "300"),
    ] {
        assert_eq!(text(&url, &format!("SELECT current_setting('{setting}')")), value);
    }
    assert_eq!(text(&url, "SELECT datcollate::text FROM pg_database WHERE datname = current_database()"), "C");

    let folder = PathBuf::from(text(&url, "SELECT current_setting('unix_socket_directories')"));
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);

    connect(&url).batch_execute("SELECT 1 FROM nowhere").unwrap_err();
    let log = server.log().unwrap().unwrap();
    let line = log.lines().find(|line| line.contains("nowhere")).expect(&log);
    assert!(line.contains(&format!("] {} ERROR", database.name())), "{line}");

    drop(database);
    let stopping = Instant::now();
    server.stop().unwrap();
    println!("stopped in {:?}", stopping.elapsed());
    assert!(!folder.exists());
    assert_eq!(processes_in(&folder), Vec::<String>::new());
    drop(scene);
}

#[test]
fn a_durable_server_has_the_defaults_of_postgres() {
    let server = Server::private(Durability::Durable).unwrap();
    for setting in ["fsync", "full_page_writes", "synchronous_commit"] {
        assert_eq!(text(&server.url("postgres"), &format!("SELECT current_setting('{setting}')")), "on");
    }
}

#[test]
fn an_unprivileged_user_starts_a_server_as_itself() {
    let scene = Scene::new();
    let output = scene.child("drops").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    scene.is_left_empty();

    if Uid::effective().is_root() {
        // The binary may be in a folder that only root can read.
        let copy = scene.folder.join("test-binary");
        fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        let mut command = scene.child_of(&copy, "waits");
        command.uid(NOBODY).gid(NOBODY);
        let mut child = ready(command);
        let postgres = processes_in(&scene.folder);
        assert!(postgres.iter().any(|p| p.contains("/postgres -D")), "{postgres:?}");
        for folder in scene.servers() {
            let owner = std::os::unix::fs::MetadataExt::uid(&fs::metadata(folder).unwrap());
            assert_eq!(owner, NOBODY);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        fs::remove_file(copy).unwrap();
        scene.is_left_empty();
    }
}

#[test]
fn nothing_is_left_after_a_kill() {
    let scene = Scene::new();
    let mut child = ready(scene.child("waits"));
    assert_eq!(scene.servers().len(), 1);
    assert!(processes_in(&scene.folder).len() > 3);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    scene.is_left_empty();
}

#[test]
fn nothing_is_left_after_a_kill_although_a_child_of_the_user_lives_on() {
    let scene = Scene::new();
    let mut command = scene.child("waits with a child of its own");
    command.stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let sleeper = lines
        .map_while(Result::ok)
        .find_map(|line| line.strip_prefix("sleeper ").map(str::to_owned))
        .expect("a sleeper");
    child.kill().unwrap();
    child.wait().unwrap();
    let sleeper = Sleeper(Pid::from_raw(sleeper.parse().unwrap()));
    kill(sleeper.0, None).expect("the sleeper lives");
    scene.is_left_empty();
    kill(sleeper.0, None).expect("the sleeper still lives");
}

#[test]
fn nothing_is_left_after_a_ctrl_c() {
    let scene = Scene::new();
    for signal in [Signal::SIGINT, Signal::SIGHUP, Signal::SIGTERM, Signal::SIGQUIT] {
        let mut command = scene.child("waits");
        command.process_group(0);
        let mut child = ready(command);
        killpg(pid(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal as i32));
        scene.is_left_empty();
    }
}

#[test]
fn a_watchdog_outlives_the_signals_of_the_terminal() {
    let scene = Scene::new();
    let mut child = ready(scene.child("waits"));
    let watchdog = pid_of(&scene.folder, "sync-lock-pg-watchdog");
    for signal in [Signal::SIGINT, Signal::SIGHUP, Signal::SIGTERM, Signal::SIGQUIT] {
        kill(watchdog, signal).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    scene.is_left_empty();
}

#[test]
fn nothing_is_left_after_a_panic_an_abort_and_a_normal_end_with_a_static() {
    let scene = Scene::new();
    for (part, succeeds) in [("panics", false), ("aborts", false), ("keeps it in a static", true)] {
        let output = scene.child(part).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains(READY), "{part}: {output:?}");
        assert_eq!(output.status.success(), succeeds, "{part}: {output:?}");
        scene.is_left_empty();
    }
}

#[test]
fn nothing_is_left_after_a_kill_at_any_moment_of_the_start() {
    type Moment = (&'static str, fn(&Path) -> bool);
    let moments: [Moment; 7] = [
        ("no folder yet", |_| true),
        ("the watchdog is there", |_| true),
        ("the folder is there", |folder| folder.exists()),
        ("initdb has begun", |folder| folder.join("data").exists()),
        ("initdb bootstraps", |folder| folder.join("data/base/1").exists()),
        ("initdb fills the catalog", |folder| {
            folder.join("data/PG_VERSION").exists() && folder.join("data/base/1/2619").exists()
        }),
        ("postgres has begun", |folder| folder.join("server.log").exists()),
    ];
    for (name, reached) in moments {
        let scene = Scene::new();
        let mut child = scene.child("waits").stdout(Stdio::null()).spawn().unwrap();
        if name == "the watchdog is there" {
            until(name, || !processes_in(&scene.folder).is_empty());
        } else if name != "no folder yet" {
            until(name, || scene.servers().iter().any(|folder| reached(folder)));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        println!("killed: {name}: {:?}", processes_in(&scene.folder));
        scene.is_left_empty();
    }
}

#[test]
fn a_server_that_hangs_is_killed() {
    let server = Server::private(Durability::Fast).unwrap();
    let socket = "SELECT current_setting('unix_socket_directories')";
    let folder = PathBuf::from(text(&server.url("postgres"), socket));
    kill(pid_of(&folder, "/postgres -D"), Signal::SIGSTOP).unwrap();
    server.stop().unwrap();
    assert!(!folder.exists());
    until("no process is left", || processes_in(&folder).is_empty());
}

#[test]
fn a_shell_that_collects_the_output_is_not_held_up() {
    let scene = Scene::new();
    let (program, arguments) = (std::env::current_exe().unwrap(), child_arguments());
    let mut shell = Command::new("sh")
        .args(["-c", r#"x=$("$@" 2>&1 4>&1); echo "${#x}"; kill -0 $(cat "$TMPDIR"/*/child.pid) && echo alive"#, "sh"])
        .arg(program)
        .args(arguments)
        .env(PART, "keeps a hanging server in a static")
        .env("TMPDIR", &scene.folder)
        .env_remove("TEST_DATABASE_URL")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    until("the shell returns", || shell.try_wait().unwrap().is_some());
    let output = shell.wait_with_output().unwrap();
    // The server takes 5 s to die; who waited for it would find it dead.
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("alive"), "{said}");
    scene.is_left_empty();
}

#[test]
fn a_restart_keeps_socket_and_data_and_cuts_sessions_off() {
    let server = Server::private(Durability::Fast).unwrap();
    let database = server.create_database(None).unwrap();
    let mut before = connect(&database.url());
    before.batch_execute("CREATE TABLE kept AS SELECT 42 AS n").unwrap();
    let started = "SELECT pg_postmaster_start_time()::text";
    let first = text(&database.url(), started);

    for _ in 0..3 {
        let restarting = Instant::now();
        server.restart().unwrap();
        println!("restarted in {:?}", restarting.elapsed());
        before.batch_execute("SELECT 1").unwrap_err();
        assert_eq!(text(&database.url(), "SELECT n::text FROM kept"), "42");
        before = connect(&database.url());
    }
    assert_ne!(text(&database.url(), started), first);
}

#[test]
fn a_restart_brings_back_a_server_that_was_killed() {
    let scene = Scene::new();
    let server = Server::private(Durability::Fast).unwrap();
    let database = server.create_database(None).unwrap();
    let folder = text(&database.url(), "SELECT current_setting('unix_socket_directories')");
    kill(pid_of(Path::new(&folder), "/postgres -D"), Signal::SIGKILL).unwrap();
    server.restart().unwrap();
    assert_eq!(text(&database.url(), "SELECT 'back'"), "back");
    drop(scene);
}

#[test]
fn a_server_that_cannot_restart_says_why() {
    let server = Server::private(Durability::Fast).unwrap();
    connect(&server.url("postgres")).batch_execute("ALTER SYSTEM SET max_wal_senders = 9999").unwrap();
    connect(&server.url("postgres")).batch_execute("ALTER SYSTEM SET wal_level = minimal").unwrap();
    let started = Instant::now();
    let error = server.restart().unwrap_err();
    assert!(matches!(error, ServerError::Start { .. }), "{error:?}");
    assert!(error.to_string().contains("max_wal_senders"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(15));
}

#[test]
fn sixteen_databases_are_copied_from_one_template_at_once() {
    let server = Server::private(Durability::Fast).unwrap();
    let template = server.create_database(None).unwrap();
    connect(&template.url()).batch_execute("CREATE TABLE copied AS SELECT 7 AS n").unwrap();

    let barrier = Barrier::new(16);
    let started = Instant::now();
    let copies: Vec<_> = thread::scope(|scope| {
        let copy = || {
            barrier.wait();
            server.create_database(Some(&template)).unwrap()
        };
        let threads: Vec<_> = (0..16).map(|_| scope.spawn(copy)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("16 copies in {:?}", started.elapsed());
    for copy in &copies {
        assert_eq!(text(&copy.url(), "SELECT n::text FROM copied"), "7");
    }

    let count = "SELECT count(*) AS n FROM pg_database WHERE datname LIKE 'sync\\_lock\\_%'";
    assert_eq!(number(&server.url("postgres"), count), 17);
    drop(copies);
    assert_eq!(number(&server.url("postgres"), count), 1);
}

#[test]
fn a_template_in_use_is_waited_for_and_then_refused() {
    let server = Server::private(Durability::Fast).unwrap();
    let template = server.create_database(None).unwrap();
    let mut session = connect(&template.url());
    session.batch_execute("SELECT 1").unwrap();
    let started = Instant::now();
    let error = server.create_database(Some(&template)).unwrap_err();
    assert!(matches!(error, ServerError::Create(_)), "{error:?}");
    let waited = started.elapsed();
    assert!(waited > Duration::from_secs(9) && waited < Duration::from_secs(25), "{waited:?}");
    drop(session);
    server.create_database(Some(&template)).unwrap();
}

#[test]
fn a_database_drops_itself_under_open_sessions_and_nothing_else() {
    let server = Server::private(Durability::Fast).unwrap();
    let [one, other] = [(); 2].map(|()| server.create_database(None).unwrap());
    let mut session = connect(&one.url());
    session.batch_execute("CREATE TABLE t ()").unwrap();
    let name = one.name().to_owned();
    drop(one);
    session.batch_execute("SELECT 1").unwrap_err();
    let names = "SELECT string_agg(datname, ' ') FROM pg_database";
    let names = text(&server.url("postgres"), names);
    assert!(!names.contains(&name) && names.contains(other.name()), "{names}");

    // Dropped by somebody else, or after the server: no panic.
    let url = server.url("postgres");
    connect(&url).batch_execute(&format!("DROP DATABASE {}", other.name())).unwrap();
    drop(other);
    let late = server.create_database(None).unwrap();
    server.stop().unwrap();
    drop(late);
}

#[test]
fn a_given_server_is_used_and_left_alone() {
    let host = Server::private(Durability::Fast).unwrap();
    let given = Server::given(&host.url("postgres")).unwrap();
    assert!(!given.is_private());
    assert!(given.log().is_none());
    assert!(matches!(given.restart(), Err(ServerError::NotPrivate)));
    let template = given.create_database(None).unwrap();
    let copy = given.create_database(Some(&template)).unwrap();
    assert_eq!(text(&copy.url(), "SELECT current_database()::text"), copy.name());
    drop((template, copy));
    given.stop().unwrap();

    // The variable, in a process of its own.
    let scene = Scene::new();
    let count = "SELECT count(*) AS n FROM pg_stat_database WHERE datname LIKE 'sync\\_lock\\_%'";
    let output = scene.child("drops").env("TEST_DATABASE_URL", host.url("postgres")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(host.log().unwrap().is_ok());
    assert_eq!(number(&host.url("postgres"), count), 0);
    let output = scene.child("keeps it in a static").env("TEST_DATABASE_URL", host.url("postgres")).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(number(&host.url("postgres"), count), 1, "that database was never dropped");

    for (value, problem) in [("", "empty"), (" ", "empty")] {
        let output = scene.child("drops").env("TEST_DATABASE_URL", value).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(&format!("Variable(\"{problem}\")")), "{said}");
    }
    assert_eq!(ServerError::Variable("empty").to_string(), "TEST_DATABASE_URL is empty");
    scene.is_left_empty();
}

#[test]
fn only_the_path_of_a_given_url_is_replaced() {
    let given = "postgresql://me:pa%2Fss@db.example:6543/mine?sslmode=require&options=-c%20a%3Db";
    let server = Server::given(given).unwrap();
    assert_eq!(server.url("x/y"), given.replace("/mine", "/x%2Fy"));
    for (url, problem) in [
        ("mysql://localhost/x", "not postgresql"),
        ("postgresql:nonsense", "not postgresql"),
        ("postgresql://h/x?dbname=y", "dbname"),
        ("postgresql://me:12#34@h/x", "%23"),
        ("hunter2", "malformed"),
    ] {
        let error = Server::given(url).unwrap_err();
        assert!(error.to_string().contains(problem), "{url}: {error}");
    }
}

#[test]
fn no_password_is_printed() {
    let host = Server::private(Durability::Fast).unwrap();
    let socket = text(&host.url("postgres"), "SELECT current_setting('unix_socket_directories')");
    let urls = [
        "postgresql://me:hunter2@127.0.0.1:1/x".to_owned(),
        "postgresql://me:hunter2%zz@127.0.0.1:1/x".to_owned(),
        "postgresql://me@127.0.0.1:1/x?password=hunter2".to_owned(),
        "postgresql://me@127.0.0.1:1/x?password=hunter2%zz".to_owned(),
        "postgresql://me@127.0.0.1:1/x?password=hunter2=3".to_owned(),
        "postgresql://me:hunter2@127.0.0.1:1/x?nonsense=1".to_owned(),
        format!("postgresql://me:hunter2@localhost/x?host={socket}"),
    ];
    for url in urls {
        let server = Server::given(&url).unwrap();
        let error = server.create_database(None).unwrap_err();
        let mut said = format!("{server:?} {error:?}");
        let mut next: Option<&dyn std::error::Error> = Some(&error);
        while let Some(error) = next {
            said = format!("{said} / {error}");
            next = error.source();
        }
        println!("{said}");
        assert!(!said.contains("hunter2"), "{said}");
    }
    for url in ["postgresql://me:hunter2@h:port/x", "postgresql://me:hunter2@/x", "postgresql://me:hun#ter2@h/x"] {
        let error = format!("{:?}", Server::given(url).unwrap_err());
        assert!(!error.contains("hunter2") && !error.contains("ter2"), "{error}");
    }
    let database = host.create_database(None).unwrap();
    assert!(format!("{database:?}").contains(database.name()));
}

#[test]
fn a_temporary_folder_that_does_not_suit_is_replaced_by_tmp() {
    let scene = Scene::new();
    for name in ["l".repeat(80), "a b'c".to_owned(), "missing".to_owned()] {
        let temporary = scene.folder.join(&name);
        if name != "missing" {
            fs::create_dir(&temporary).unwrap();
            fs::set_permissions(&temporary, fs::Permissions::from_mode(0o1777)).unwrap();
        }
        let output = scene.child("drops").env("TMPDIR", &temporary).output().unwrap();
        assert!(output.status.success(), "{name}: {output:?}");
    }
    // What root alone can reach.
    fs::set_permissions(&scene.folder, fs::Permissions::from_mode(0o700)).unwrap();
    let output = scene.child("drops").output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_failing_initdb_or_postgres_is_quoted() {
    let binaries = [
        ("a failing initdb", "echo no luck today; exit 3", "", ["Initdb", "initdb 3", "no luck today"]),
        (
            "a failing postgres",
            r#"mkdir "$2" && : >"$2/postgresql.conf""#,
            "echo no luck today; exit 4",
            ["Start", "server 4", "no luck today"],
        ),
    ];
    for (name, initdb, postgres, words) in binaries {
        let scene = Scene::new();
        let output = with_binaries(&scene, &[("initdb", initdb), ("postgres", postgres)]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{name}");
        for word in words {
            assert!(said.contains(word), "{name}: {said}");
        }
        scene.is_left_empty();
    }
}

#[test]
fn a_pg_config_without_both_binaries_is_not_believed() {
    let scene = Scene::new();
    let output = with_binaries(&scene, &[("initdb", "exit 5")]);
    assert!(output.status.success(), "{output:?}");
    scene.is_left_empty();
}

#[test]
fn variables_of_libpq_and_of_the_locale_do_not_interfere() {
    let scene = Scene::new();
    let mut child = scene.child("drops");
    for variable in ["PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGDATA", "LC_ALL", "TZ"] {
        child.env(variable, "nonsense");
    }
    let output = child.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    scene.is_left_empty();
}

#[test]
fn missing_binaries_are_named_with_the_remedy() {
    let said = ServerError::Binaries.to_string();
    assert!(said.contains("apt-get install postgresql"), "{said}");
}

#[test]
fn a_server_can_be_shared() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Server>();
    shared::<sync_lock::private_server::Database>();
    shared::<ServerError>();
}

/// A child that does not outlive a test that fails.
struct Started(Child);

impl Deref for Started {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Started {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A grandchild, likewise.
struct Sleeper(Pid);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
    }
}

/// A `TMPDIR` for one test.
struct Scene {
    folder: PathBuf,
}

impl Scene {
    fn new() -> Self {
        let folder = PathBuf::from(format!("/tmp/ps-test-{:08x}", uuid::Uuid::new_v4().as_fields().0));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
        Self { folder }
    }

    fn child(&self, part: &str) -> Command {
        self.child_of(&std::env::current_exe().unwrap(), part)
    }

    fn child_of(&self, program: &Path, part: &str) -> Command {
        let mut command = Command::new(program);
        command.args(child_arguments()).env(PART, part).env("TMPDIR", &self.folder).env_remove("TEST_DATABASE_URL");
        command
    }

    fn servers(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.folder).unwrap().flatten();
        let servers = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("sync-lock-pg-"));
        servers.map(|entry| entry.path()).collect()
    }

    /// Both at the same moment: a process may still be about to make a folder.
    fn is_left_empty(&self) {
        until("nothing is left", || processes_in(&self.folder).is_empty() && self.servers().is_empty());
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn child_arguments() -> [String; 4] {
    let module = module_path!().split_once("::");
    let name = module.map_or("child".to_owned(), |(_, module)| format!("{module}::child"));
    [name, "--exact".into(), "--nocapture".into(), "--test-threads=1".into()]
}

/// Starts the child and waits until it says that its server is ready.
fn ready(mut command: Command) -> Started {
    let mut child = Started(command.stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == READY), "the child ended early");
    child
}

/// Everything that works in a folder or was told of it: watchdog, initdb,
/// postmaster, and backends, which show neither but have it as working folder.
fn processes_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let mut found = Vec::new();
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let arguments = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments).replace('\0', " ");
        let place = fs::read_link(entry.path().join("cwd")).unwrap_or_default();
        let folder = folder.to_string_lossy();
        // Not a test binary that was started from there.
        let told = arguments.contains(&*folder) && !arguments.contains("test-threads");
        if told || place.to_string_lossy().starts_with(&*folder) {
            found.push(format!("{name} {arguments}"));
        }
    }
    found
}

/// Runs a child whose `pg_config` names a folder of shell scripts.
fn with_binaries(scene: &Scene, scripts: &[(&str, &str)]) -> Output {
    let folder = scene.folder.join("binaries");
    fs::create_dir(&folder).unwrap();
    let pg_config = format!("echo {}", folder.display());
    for (name, script) in scripts.iter().chain([&("pg_config", pg_config.as_str())]) {
        let program = folder.join(name);
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = std::env::var("PATH").unwrap();
    let mut child = scene.child("drops");
    child.env("PATH", format!("{}:{path}", folder.display()));
    child.output().unwrap()
}

fn pid_of(folder: &Path, words: &str) -> Pid {
    let processes = processes_in(folder);
    // The lowest: a watchdog's monitor looks the same and comes later.
    let found = processes.iter().filter(|process| process.contains(words));
    let pids = found.filter_map(|process| process.split(' ').next()?.parse().ok());
    Pid::from_raw(pids.min().unwrap_or_else(|| panic!("no {words} in {processes:?}")))
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().try_into().unwrap())
}

#[track_caller]
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let limit = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < limit, "not within {LIMIT:?}: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

fn connect(url: &str) -> PgConnection {
    PgConnection::establish(url).unwrap()
}

fn text(url: &str, statement: &str) -> String {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = Text)]
        value: String,
    }
    let statement = format!("SELECT value FROM ({statement}) AS it (value)");
    diesel::sql_query(statement).get_result::<Row>(&mut connect(url)).unwrap().value
}

fn number(url: &str, statement: &str) -> i64 {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = BigInt)]
        n: i64,
    }
    diesel::sql_query(statement).get_result::<Row>(&mut connect(url)).unwrap().n
}
