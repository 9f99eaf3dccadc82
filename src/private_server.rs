//! A throw-away Postgres for tests, benches and the demo, from the installed
//! server binaries. Not part of the library's public promise.
//!
//! Who owns what: this process owns one end of a socket, and a `/bin/sh`
//! watchdog on the other end owns everything else: the folder, `initdb` and
//! the server. When this process ends, however it ends, the kernel closes the
//! socket, and the watchdog stops the server and removes the folder. So
//! nothing depends on a destructor that runs: `kill -9` and a
//! [`Server`] in a `static` leave as little behind as a normal drop.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use diesel::{Connection, ConnectionError, PgConnection, RunQueryDsl};
use nix::unistd::{Uid, User};
use url::Url;
use uuid::Uuid;

/// The variable that names a server to use instead of a private one.
const URL_VARIABLE: &str = "TEST_DATABASE_URL";

/// How long `initdb` and the first connection may take together, and how long a
/// restart may take. A start takes about a second; the rest is for a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How long the watchdog may take to stop the server and remove the folder.
/// Longer than the 6 s after which the watchdog kills a server that stays.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// Pause between two attempts to connect to a server that starts.
const READY_POLL: Duration = Duration::from_millis(10);

/// How long to go on copying a template that somebody is connected to. The
/// server itself waits 5 s before it says so, so this is two or three attempts.
const TEMPLATE_PATIENCE: Duration = Duration::from_secs(10);

/// `sun_path` has 108 bytes, the last of which is the terminating zero.
const MAX_SOCKET_PATH: usize = 107;

/// How many lines of a log an error carries.
const TAIL_LINES: usize = 20;

/// The watchdog. Arguments: folder, folder of the server binaries, and
/// `initdb`'s option about fsync (may be empty). It runs in a process group of
/// its own, with the socket to its user as standard input, and as the user that
/// the server is to run as, so that nothing it starts needs another identity.
///
/// It says `failed …` if there is no folder, `initdb STATUS` and `server STATUS`
/// when these end, `stopped` in the middle of a restart. It hears `start` and
/// `restart`; the end of its input is the order to clean up.
const WATCHDOG: &str = r#"
unset SYNC_LOCK_WATCHDOG
# Nobody's Ctrl-C is for us. Subshells inherit this; initdb and postgres set their own handlers.
trap '' HUP INT QUIT TERM PIPE
# The socket moves to 3, because background jobs lose 0. Whatever else
# we inherited may be a pipe that somebody reads to its end.
exec 3<&0 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-
PATH=$PATH:/usr/bin:/bin
folder=$1 bin=$2 sync=$3

say() { echo "$*" >&3; }

# run NAME PROGRAM...: starts a program, and a monitor that reports its end
run() {
    name=$1
    shift
    (
        "$@" </dev/null >>"$folder/$name.log" 2>&1 3>&- &
        echo $! >"$folder/child.pid"
        wait $!
        say "$name $?"
    ) &
    monitor=$!
}

# leaves SIGNAL TRIES: signals the group every 20 ms, because a signal that arrives
# before the program has its handlers is lost; fails if the program stays
leaves() {
    tries=$2
    while kill -0 "$monitor"; do
        [ "$tries" -gt 0 ] || return 1
        tries=$((tries - 1))
        kill -s "$1" -- "-$$"
        sleep 0.02
    done
}

# halt SIGNAL: ends the program, by force after 6 s (postgres gives its own children 5 s)
halt() {
    leaves "$1" 300 || kill -s KILL "$(cat "$folder/child.pid")"
    wait "$monitor"
}

serve() { run server "$bin/postgres" -D "$folder/data"; }

problem=$(mkdir -m 700 "$folder" 2>&1) || { say "failed $problem"; exit 1; }
run initdb "$bin/initdb" -D "$folder/data" -U postgres -A trust --locale=C --encoding=UTF8 $sync
end=TERM
while read -r command; do
    case $command in
        start) end=QUIT; serve ;;
        restart) leaves INT 500; halt QUIT; say stopped; serve ;;
    esac
done

halt "$end"
# Orphans of a killed program may still write for a moment.
tries=250
while [ -e "$folder" ] && [ "$tries" -gt 0 ]; do
    rm -rf "$folder" || sleep 0.02
    tries=$((tries - 1))
done
"#;

/// What a private server may lose when the machine fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The defaults of Postgres: `fsync`, `full_page_writes` and
    /// `synchronous_commit` on. For benches.
    Durable,
    /// All three off: a crash of the server may lose the last commits, a crash
    /// of the machine everything. For tests.
    Fast,
}

/// A server to work on: a private one, or the one `TEST_DATABASE_URL` names.
///
/// Dropping a private server stops it and waits, some 50 ms, until its
/// folder is gone. A server that is never dropped, such as one in a `static`, is
/// stopped when the process ends, without anybody waiting for it.
pub struct Server {
    address: Address,
    private: Option<Private>,
}

impl Server {
    /// The server that `TEST_DATABASE_URL` names if it is set, else a private
    /// one. The durability of a given server is its own affair.
    ///
    /// # Errors
    ///
    /// [`ServerError::Variable`] if the variable is set and empty, otherwise as
    /// [`given`](Self::given) and [`private`](Self::private).
    pub fn from_env(durability: Durability) -> Result<Self, ServerError> {
        match std::env::var(URL_VARIABLE) {
            Ok(url) if url.trim().is_empty() => Err(ServerError::Variable("empty")),
            Ok(url) => Self::given(&url),
            Err(std::env::VarError::NotPresent) => Self::private(durability),
            Err(std::env::VarError::NotUnicode(_)) => Err(ServerError::Variable("not unicode")),
        }
    }

    /// Starts a private server and returns when it accepts connections, after
    /// about a second, at the latest after 30 s.
    ///
    /// It listens on a Unix socket only, trusts everybody who can reach that
    /// socket (the user itself and root), and runs as `postgres` or `nobody`
    /// when the caller is root. Time zone UTC, locale C, encoding UTF-8.
    ///
    /// # Errors
    ///
    /// If the server binaries are missing, or `initdb` or the server fail or
    /// take too long; the error carries the end of their output.
    pub fn private(durability: Durability) -> Result<Self, ServerError> {
        let private = Private::prepare(durability)?;
        let server = Self { address: Address::of_socket(&private.folder)?, private: Some(private) };
        server.launch("start")?;
        Ok(server)
    }

    /// The server at `url`, which must name a database that the user may connect
    /// to in order to create and drop others. Does not connect.
    ///
    /// # Errors
    ///
    /// [`ServerError::Url`] or [`ServerError::UnsuitableUrl`] if `url` cannot be used.
    pub fn given(url: &str) -> Result<Self, ServerError> {
        Ok(Self { address: Address::parse(url.trim())?, private: None })
    }

    /// Whether the server was started by us and ends with us.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.private.is_some()
    }

    /// The URL of a database on this server, for libpq. Contains the password
    /// if the URL of a given server does.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        self.address.of_database(database).to_string()
    }

    /// The server's log so far; `None` where the server is not ours.
    ///
    /// Each line starts with time, `[pid]` and the name of the database.
    pub fn log(&self) -> Option<io::Result<String>> {
        self.private.as_ref().map(Private::log)
    }

    /// Creates a database with a random name: a copy of `template`, or an empty one.
    ///
    /// Any number of databases may be copied from one template at the same
    /// time. Nobody may be connected to the template; a session that is about
    /// to leave is waited for, 10 to 15 s.
    ///
    /// # Errors
    ///
    /// [`ServerError::Connect`] if the server cannot be reached,
    /// [`ServerError::Create`] if it refuses.
    pub fn create_database(&self, template: Option<&Database>) -> Result<Database, ServerError> {
        let name = format!("sync_lock_{}", Uuid::new_v4().simple());
        let template = template.map_or("template0", Database::name);
        let mut connection = self.address.connect().map_err(ServerError::Connect)?;

        let patience = Instant::now() + TEMPLATE_PATIENCE;
        let statement = format!("CREATE DATABASE \"{name}\" TEMPLATE \"{template}\"");
        while let Err(refusal) = diesel::sql_query(&statement).execute(&mut connection) {
            if !template_is_in_use(&refusal) || Instant::now() > patience {
                return Err(ServerError::Create(refusal));
            }
            // A refusal of this kind has already taken the server 5 s.
        }

        Ok(Database { name, address: self.address.clone(), outlives_us: self.private.is_none() })
    }

    /// Stops the private server at once and waits until its folder is gone. A
    /// given server is left alone.
    ///
    /// # Errors
    ///
    /// [`ServerError::Stop`] if the folder is still there after 20 s.
    pub fn stop(mut self) -> Result<(), ServerError> {
        self.private.as_mut().map_or(Ok(()), Private::stop)
    }

    /// Restarts the private server, on the same socket and data, and returns
    /// when it accepts connections again. Sessions are cut off (a fast
    /// shutdown); whatever they have committed stays.
    ///
    /// # Errors
    ///
    /// [`ServerError::NotPrivate`] for a given server; [`ServerError::Start`] or
    /// [`ServerError::Timeout`] if the server does not come back within 30 s.
    pub fn restart(&self) -> Result<(), ServerError> {
        self.launch("restart")
    }

    /// Orders a start and polls until a connection succeeds.
    fn launch(&self, order: &str) -> Result<(), ServerError> {
        let private = self.private.as_ref().ok_or(ServerError::NotPrivate)?;
        let deadline = Instant::now() + START_TIMEOUT;
        let mut watchdog = private.watchdog();
        watchdog.order(order)?;
        if order == "restart" {
            // What is said before this is about the old server.
            while watchdog.hear(deadline)?.ok_or_else(|| private.timeout(None))? != "stopped" {}
        }

        while let Err(refusal) = self.address.connect() {
            let pause = Instant::now() + READY_POLL;
            if let Some(message) = watchdog.hear(pause)? {
                return Err(ServerError::Start { message, output: private.tail("server.log") });
            }
            if Instant::now() > deadline {
                return Err(private.timeout(Some(refusal)));
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("private", &self.is_private()).field("address", &self.address).finish()
    }
}

/// A database that drops itself, and only itself, together with the sessions
/// that are still connected to it (`DROP DATABASE … WITH (FORCE)`, from Postgres 13 on).
///
/// On a given server a database that is never dropped stays there: its name
/// starts with `sync_lock_`.
pub struct Database {
    name: String,
    address: Address,
    outlives_us: bool,
}

impl Database {
    /// `sync_lock_` and 32 hexadecimal digits.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The URL of this database, for libpq. Contains the password if the URL of
    /// a given server does.
    #[must_use]
    pub fn url(&self) -> String {
        self.address.of_database(&self.name).to_string()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // IF EXISTS: a test may have dropped it itself. The name is random and
        // ours, so nobody else has given it to another database.
        let statement = format!("DROP DATABASE IF EXISTS \"{}\" WITH (FORCE)", self.name);
        let connected = self.address.connect().map_err(ServerError::Connect);
        let dropped = connected.and_then(|mut connection| {
            diesel::sql_query(statement).execute(&mut connection).map_err(ServerError::Drop)
        });
        if let (Err(error), true) = (dropped, self.outlives_us) {
            // Not eprintln!, which panics when standard error is closed.
            let _ = writeln!(io::stderr(), "database {} is left behind: {error}", self.name);
        }
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Why there is no server, or no database on it. Never contains a password.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The variable is set to something that cannot be a URL. Unset it to get a
    /// private server.
    #[error("{URL_VARIABLE} is {0}")]
    Variable(&'static str),
    /// The URL of the given server does not parse.
    #[error("the url of the test server is malformed")]
    Url(#[source] url::ParseError),
    /// The URL of the given server parses, but databases cannot be addressed by it.
    #[error("the url of the test server is unsuitable: {0}")]
    UnsuitableUrl(&'static str),
    /// `initdb` and `postgres` were found neither by `pg_config`, nor in
    /// `/usr/lib/postgresql`, nor on `PATH`.
    #[error("no PostgreSQL server binaries (initdb, postgres): apt-get install postgresql")]
    Binaries,
    /// Postgres refuses to run as root, and root has nobody to run it as.
    #[error("root needs a user postgres or nobody to run PostgreSQL as")]
    Unprivileged,
    /// The shell that watches over the server could not be run or spoken to.
    #[error("the watchdog of the private server failed")]
    Watchdog(#[source] io::Error),
    /// The folder of the private server could not be made.
    #[error("the private server has no folder: {0}")]
    Folder(String),
    /// `initdb` failed.
    #[error("initdb failed ({message}):\n{output}")]
    Initdb {
        /// What the watchdog said: `initdb` and its exit status.
        message: String,
        /// The end of its output.
        output: String,
    },
    /// The configuration of the private server could not be written.
    #[error("the private server cannot be configured")]
    Configure(#[source] io::Error),
    /// The server ended before it accepted a connection.
    #[error("the private server did not start ({message}):\n{output}")]
    Start {
        /// What the watchdog said: `server` and its exit status.
        message: String,
        /// The end of its log.
        output: String,
    },
    /// The server accepted no connection in time.
    #[error("the private server was not ready within {} s:\n{output}", START_TIMEOUT.as_secs())]
    Timeout {
        /// The end of the output of `initdb` and of the server's log.
        output: String,
        /// Why the last attempt to connect failed, if it came to that.
        source: Option<ConnectionError>,
    },
    /// The server did not accept a connection.
    #[error("cannot connect to the test server")]
    Connect(#[source] ConnectionError),
    /// The server did not create a database.
    #[error("cannot create a database on the test server")]
    Create(#[source] diesel::result::Error),
    /// The server did not drop a database.
    #[error("cannot drop a database on the test server")]
    Drop(#[source] diesel::result::Error),
    /// Something of the private server is left.
    #[error("the private server left {} behind", .0.display())]
    Stop(PathBuf),
    /// Only a private server can be restarted.
    #[error("the test server is not ours to restart")]
    NotPrivate,
}

/// The URL by which a server is administered; all others are made from it.
#[derive(Clone)]
struct Address(Url);

impl Address {
    fn parse(url: &str) -> Result<Self, ServerError> {
        let url = Url::parse(url).map_err(ServerError::Url)?;
        if !matches!(url.scheme(), "postgres" | "postgresql") || url.cannot_be_a_base() {
            return Err(ServerError::UnsuitableUrl("not postgresql://"));
        }
        if url.query_pairs().any(|(key, _)| key == "dbname") {
            // libpq would prefer it to the path, and every database would be this one.
            return Err(ServerError::UnsuitableUrl("dbname belongs into the path"));
        }
        if url.fragment().is_some() {
            // For libpq `#` is part of a name or a password.
            return Err(ServerError::UnsuitableUrl("# is to be written as %23"));
        }
        Ok(Self(url))
    }

    /// Everything is explicit, so that `PGUSER`, `PGHOST`, `PGPORT` do not
    /// interfere. `localhost` is for parsers that insist on a host, the timeout
    /// (in seconds) for a server that hangs.
    fn of_socket(folder: &Path) -> Result<Self, ServerError> {
        let folder = folder.display();
        Self::parse(&format!("postgresql://postgres@localhost:5432/postgres?host={folder}&connect_timeout=10"))
    }

    fn of_database(&self, database: &str) -> Url {
        let mut url = self.0.clone();
        // Only fails for a URL that cannot be a base, which `parse` refuses.
        if let Ok(mut path) = url.path_segments_mut() {
            path.clear().push(database);
        }
        url
    }

    fn connect(&self) -> Result<PgConnection, ConnectionError> {
        PgConnection::establish(self.0.as_str()).map_err(|error| self.without_secrets(error))
    }

    /// libpq quotes the part of the URL that it does not understand, and that
    /// may be the password.
    fn without_secrets(&self, error: ConnectionError) -> ConnectionError {
        let redacted = |message: String| self.secrets().fold(message, |message, secret| message.replace(secret, "***"));
        match error {
            ConnectionError::BadConnection(message) => ConnectionError::BadConnection(redacted(message)),
            ConnectionError::InvalidConnectionUrl(message) => ConnectionError::InvalidConnectionUrl(redacted(message)),
            other => other,
        }
    }

    /// Passwords as they are spelled in the URL.
    fn secrets(&self) -> impl Iterator<Item = &str> {
        let parameters = self.0.query().unwrap_or_default().split('&');
        parameters
            .filter_map(|parameter| parameter.split_once('='))
            .filter(|(key, _)| key.contains("password"))
            .map(|(_, value)| value)
            .chain(self.0.password())
            .filter(|secret| !secret.is_empty())
    }
}

impl fmt::Debug for Address {
    /// Without credentials and parameters, either of which may hold a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.0.host_str().unwrap_or_default();
        write!(f, "{}://{host}{}", self.0.scheme(), self.0.path())
    }
}

/// The watchdog and the folder it guards.
struct Private {
    folder: PathBuf,
    watchdog: Mutex<Watchdog>,
}

impl Private {
    /// A data folder that only waits for its server to be started.
    fn prepare(durability: Durability) -> Result<Self, ServerError> {
        let binaries = server_binaries().ok_or(ServerError::Binaries)?;
        let user = server_user()?;
        let folder = fresh_folder(user.is_some());
        let watchdog = Watchdog::spawn(&folder, &binaries, user.as_ref(), durability)?;
        let private = Self { folder, watchdog: Mutex::new(watchdog) };

        let deadline = Instant::now() + START_TIMEOUT;
        let message = private.watchdog().hear(deadline)?;
        let message = message.ok_or_else(|| private.timeout(None))?;
        if let Some(problem) = message.strip_prefix("failed ") {
            return Err(ServerError::Folder(problem.to_owned()));
        }
        if message != "initdb 0" {
            let output = private.tail("initdb.log");
            return Err(ServerError::Initdb { message, output });
        }
        private.configure(durability).map_err(ServerError::Configure)?;
        Ok(private)
    }

    /// In the file rather than on the command line, where `ALTER SYSTEM` could
    /// not change it.
    fn configure(&self, durability: Durability) -> io::Result<()> {
        let folder = self.folder.display();
        let mut settings = format!(
            "listen_addresses = ''\n\
             unix_socket_directories = '{folder}'\n\
             port = 5432\n\
             max_connections = 300\n\
             timezone = 'UTC'\n\
             log_timezone = 'UTC'\n\
             lc_messages = 'C'\n\
             log_line_prefix = '%m [%p] %d '\n"
        );
        if durability == Durability::Fast {
            settings += "fsync = off\nfull_page_writes = off\nsynchronous_commit = off\n";
        }
        OpenOptions::new().append(true).open(self.folder.join("data/postgresql.conf"))?.write_all(settings.as_bytes())
    }

    fn log(&self) -> io::Result<String> {
        let log = fs::read(self.folder.join("server.log"))?;
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    fn stop(&mut self) -> Result<(), ServerError> {
        self.watchdog.get_mut().unwrap_or_else(PoisonError::into_inner).dismiss();
        // If the watchdog was killed, nobody else does this. A server without
        // its data folder ends by itself within a minute.
        let _ = fs::remove_dir_all(&self.folder);
        if self.folder.exists() {
            return Err(ServerError::Stop(self.folder.clone()));
        }
        Ok(())
    }

    fn watchdog(&self) -> std::sync::MutexGuard<'_, Watchdog> {
        self.watchdog.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timeout(&self, source: Option<ConnectionError>) -> ServerError {
        let output = self.tail("initdb.log") + "\n" + &self.tail("server.log");
        ServerError::Timeout { output, source }
    }

    /// The last lines of a file in the folder, or why there are none.
    fn tail(&self, file: &str) -> String {
        match fs::read(self.folder.join(file)) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes);
                let lines: Vec<_> = text.lines().collect();
                lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
            }
            Err(error) => format!("({file}: {error})"),
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

/// The shell that runs [`WATCHDOG`], and our end of the socket, whose closing
/// is its order to clean up. The standard library opens the socket with
/// `SOCK_CLOEXEC`, so that no other child holds our end open.
struct Watchdog {
    process: Child,
    socket: BufReader<UnixStream>,
    heard: Vec<u8>,
}

impl Watchdog {
    fn spawn(folder: &Path, binaries: &Path, user: Option<&User>, durability: Durability) -> Result<Self, ServerError> {
        let (ours, theirs) = UnixStream::pair().map_err(ServerError::Watchdog)?;
        let mut command = Command::new("/bin/sh");
        command
            // By the environment, because `ps` prints arguments in full.
            .env("SYNC_LOCK_WATCHDOG", WATCHDOG)
            .args(["-c", r#"eval "$SYNC_LOCK_WATCHDOG""#])
            .arg("sync-lock-pg-watchdog")
            .args([folder, binaries])
            .arg(match durability {
                Durability::Durable => "",
                Durability::Fast => "--no-sync",
            })
            .stdin(OwnedFd::from(theirs))
            // Not ours: a shell that collects our output waits for all who hold it.
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ours may be closed to the server's user, and may be unmounted.
            .current_dir("/")
            .env("LC_ALL", "C")
            .process_group(0);
        for (variable, _) in std::env::vars_os() {
            if variable.as_encoded_bytes().starts_with(b"PG") {
                command.env_remove(variable);
            }
        }
        if let Some(user) = user {
            // The standard library drops root's supplementary groups as well.
            command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        Ok(Self {
            process: command.spawn().map_err(ServerError::Watchdog)?,
            socket: BufReader::new(ours),
            heard: Vec::new(),
        })
    }

    fn order(&mut self, order: &str) -> Result<(), ServerError> {
        writeln!(self.socket.get_mut(), "{order}").map_err(ServerError::Watchdog)
    }

    /// The next message, or nothing if there is none before the deadline.
    fn hear(&mut self, deadline: Instant) -> Result<Option<String>, ServerError> {
        self.allow(deadline).map_err(ServerError::Watchdog)?;
        match self.socket.read_until(b'\n', &mut self.heard) {
            Ok(_) if self.heard.pop_if(|byte| *byte == b'\n').is_some() => {
                let message = String::from_utf8_lossy(&self.heard).into_owned();
                self.heard.clear();
                Ok(Some(message))
            }
            Ok(_) => Err(ServerError::Watchdog(io::ErrorKind::UnexpectedEof.into())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(ServerError::Watchdog(error)),
        }
    }

    /// Orders the clean-up and waits for the watchdog, whose end of the socket
    /// closes with it.
    fn dismiss(&mut self) {
        let _ = self.socket.get_mut().shutdown(Shutdown::Write);
        let _ = self.allow(Instant::now() + STOP_TIMEOUT);
        if self.socket.read_to_end(&mut self.heard).is_ok() {
            let _ = self.process.wait();
        }
    }

    fn allow(&self, deadline: Instant) -> io::Result<()> {
        // Zero would be refused.
        let rest = deadline.saturating_duration_since(Instant::now());
        let rest = rest.max(Duration::from_millis(1));
        self.socket.get_ref().set_read_timeout(Some(rest))
    }
}

/// The folder that has both `initdb` and `postgres`. `pg_config` alone proves
/// nothing: it comes with libpq-dev too.
fn server_binaries() -> Option<PathBuf> {
    let has_both =
        |folder: &PathBuf| folder.is_absolute() && ["initdb", "postgres"].iter().all(|p| folder.join(p).is_file());

    let configured = Command::new("pg_config").arg("--bindir").output().ok();
    let configured = configured.map(|output| PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()));
    if let Some(folder) = configured.filter(has_both) {
        return Some(folder);
    }

    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let newest = versions
        .flatten()
        .filter_map(|entry| Some((version(&entry.file_name())?, entry.path().join("bin"))))
        .filter(|(_, folder)| has_both(folder))
        .max();
    if let Some((_, folder)) = newest {
        return Some(folder);
    }

    std::env::split_paths(&std::env::var_os("PATH")?).find(has_both)
}

/// `9.6` and `17` as numbers: as text, 9 would be the newest.
fn version(folder: &OsStr) -> Option<Vec<u32>> {
    let parts = folder.to_str()?.split('.');
    parts.map(|part| part.parse().ok()).collect()
}

/// Whom root runs the server as; `None` for everybody else.
fn server_user() -> Result<Option<User>, ServerError> {
    if !Uid::effective().is_root() {
        return Ok(None);
    }
    ["postgres", "nobody"]
        .into_iter()
        .find_map(|name| User::from_name(name).ok().flatten())
        .map(Some)
        .ok_or(ServerError::Unprivileged)
}

/// The name of a folder that does not exist yet. The watchdog makes it, so that
/// there is no moment at which it exists and nobody guards it.
fn fresh_folder(for_another_user: bool) -> PathBuf {
    let name = format!("sync-lock-pg-{}", Uuid::new_v4().simple());
    let preferred = fs::canonicalize(std::env::temp_dir()).unwrap_or_else(|_| "/tmp".into());
    let socket = preferred.join(&name).join(".s.PGSQL.5432");
    // Other characters would need one quoting in the URL and another in the configuration.
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/_.-".contains(byte);
    let socket = socket.as_os_str().as_encoded_bytes();
    let usable = socket.len() <= MAX_SOCKET_PATH
        && socket.iter().all(plain)
        && (!for_another_user || is_open_to_all(&preferred));
    if usable { preferred.join(name) } else { Path::new("/tmp").join(name) }
}

/// Whether every user can reach the folder and make another one in it.
fn is_open_to_all(folder: &Path) -> bool {
    let allows =
        |folder: &Path, bits| fs::metadata(folder).is_ok_and(|metadata| metadata.permissions().mode() & bits == bits);
    allows(folder, 0o003) && folder.ancestors().all(|ancestor| allows(ancestor, 0o001))
}

/// SQLSTATE 55006, which diesel does not hand over. A given server that speaks
/// another language is not understood: then its refusal is final.
fn template_is_in_use(error: &diesel::result::Error) -> bool {
    matches!(error, diesel::result::Error::DatabaseError(_, information)
        if information.message().contains("is being accessed by other users"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let parse = |text: &str| version(OsStr::new(text));
        assert!(parse("17") > parse("9.6"));
        assert!(parse("9.6") > parse("9.5"));
        assert_eq!(parse("contrib"), None);
    }
}
