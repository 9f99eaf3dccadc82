//! `DATABASE_URL` in Prisma's dialect, turned into what libpq takes.
//!
//! libpq refuses half of Prisma's parameters and prints parts of a URL it cannot read, so the URL is never handed to it:
//! a maintained parser takes it apart and libpq gets quoted keywords.

use std::fmt;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

/// What counts where the URL does not say: five seconds for connecting to one address, because a dead host must not hold
/// a job's start for the minutes that TCP allows, and keepalives that end a wait on a vanished server about as soon.
const DEFAULTS: [(&str, &str); 6] = [
    ("connect_timeout", "5"),
    ("keepalives_idle", "2"),
    ("keepalives_interval", "1"),
    ("keepalives_count", "3"),
    ("tcp_user_timeout", "4000"),
    ("fallback_application_name", "sync-lock"),
];

/// A file that does not exist. With `sslmode=require` libpq verifies all the same if a root certificate lies in its
/// default place.
const NO_ROOT_CERTIFICATE: &str = "/nonexistent/sync-lock-verifies-nothing";

/// What libpq takes under the same name and with the same meaning.
const LIBPQ: [&str; 22] = [
    "host",
    "hostaddr",
    "port",
    "user",
    "password",
    "dbname",
    "application_name",
    "channel_binding",
    "gssencmode",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "passfile",
    "sslcert",
    "sslcrl",
    "sslkey",
    "sslpassword",
    "sslrootcert",
    "sslsni",
    "target_session_attrs",
    "tcp_user_timeout",
];

/// A parsed connection string. `Debug` shows host and database, never user or password.
#[derive(Clone)]
pub(crate) struct DatabaseUrl {
    /// libpq keywords. Holds the password: for libpq only.
    pub(crate) conninfo: String,
    /// Prisma's `connection_limit`.
    pub(crate) connection_limit: Option<u32>,
    /// Prisma's `pool_timeout`; zero means the default bound of a call.
    pub(crate) pool_timeout: Option<Duration>,
    /// Prisma's `socket_timeout`: the bound of a call of the handle; zero means that the default counts.
    pub(crate) socket_timeout: Option<Duration>,
    /// Where the tables are, unless the search path finds them.
    pub(crate) schema: Option<String>,
    /// Whether prepared statements must not outlive a transaction (`pgbouncer=true`, `statement_cache_size=0`).
    pub(crate) unprepared: bool,
    /// The TCP port that is dialled, if it is one.
    pub(crate) port: Option<u16>,
    target: String,
}

impl DatabaseUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, InvalidDatabaseUrl> {
        let text = text.trim();
        if text.is_empty() {
            return Err(InvalidDatabaseUrl::Empty);
        }
        let Parts { rest, hosts, path } = Parts::of(text);
        let url = Url::parse(&rest).map_err(InvalidDatabaseUrl::Unreadable)?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(InvalidDatabaseUrl::Scheme);
        }
        let mut libpq = Conninfo::default();
        for (name, value) in DEFAULTS {
            libpq.set(name, value);
        }
        libpq.set_hosts(hosts)?;
        libpq.set("user", &decode("user", url.username())?);
        if let Some(password) = url.password() {
            libpq.set("password", &decode("password", password)?);
        }
        libpq.set("dbname", &decode("database", path)?);

        let mut parsed = Self {
            conninfo: String::new(),
            connection_limit: None,
            pool_timeout: None,
            socket_timeout: None,
            schema: None,
            unprepared: false,
            port: None,
            target: String::new(),
        };
        let parameters: Vec<_> = url.query_pairs().collect();
        for (index, (name, value)) in parameters.iter().enumerate() {
            if parameters.iter().take(index).any(|(earlier, _)| earlier == name) {
                return Err(InvalidDatabaseUrl::Twice(name.to_string()));
            }
            if value.contains('\0') {
                return Err(InvalidDatabaseUrl::Value { name: name.to_string(), expected: "text without a NUL" });
            }
            parsed.parameter(&mut libpq, name, value)?;
        }
        libpq.settle_tls()?;
        if !libpq.has("host") && !libpq.has("hostaddr") {
            return Err(InvalidDatabaseUrl::NoHost);
        }
        parsed.target = format!("{} on {}", libpq.shown("dbname"), libpq.shown("host"));
        parsed.port = match libpq.shown("host") {
            socket if socket.starts_with('/') => None,
            _ if libpq.has("port") => libpq.shown("port").parse().ok(),
            _ => Some(5432),
        };
        parsed.conninfo = libpq.text();
        Ok(parsed)
    }

    fn parameter(&mut self, libpq: &mut Conninfo, name: &str, value: &str) -> Result<(), InvalidDatabaseUrl> {
        let odd = |expected| InvalidDatabaseUrl::Value { name: name.to_owned(), expected };
        let whole = || value.parse::<u32>().map_err(|_| odd("a whole number"));
        let seconds = || value.parse::<u32>().map_err(|_| odd("a whole number of seconds"));
        match name {
            "connection_limit" => {
                let limit = whole()?;
                if limit == 0 {
                    return Err(odd("a whole number of 1 or more"));
                }
                self.connection_limit = Some(limit);
            }
            "pool_timeout" => self.pool_timeout = Some(Duration::from_secs(seconds()?.into())),
            "socket_timeout" => self.socket_timeout = Some(Duration::from_secs(seconds()?.into())),
            // Zero is no limit to Prisma. Nothing waits without a limit here, so the default counts.
            "connect_timeout" if seconds()? == 0 => {}
            "connect_timeout" => libpq.set(name, &seconds()?.to_string()),
            "pgbouncer" => self.unprepared |= value.parse::<bool>().map_err(|_| odd("true or false"))?,
            "statement_cache_size" => self.unprepared |= whole()? == 0,
            "schema" if value.is_empty() => return Err(odd("the name of a schema")),
            "schema" => self.schema = Some(value.to_owned()),
            "sslmode" => match value {
                "no-verify" | "disable" | "allow" | "prefer" | "require" | "verify-ca" | "verify-full" => {
                    libpq.sslmode = Some(value.to_owned());
                }
                _ => return Err(odd("disable, allow, prefer, require, verify-ca, verify-full or no-verify")),
            },
            "sslaccept" => match value {
                "strict" => libpq.strict = Some(true),
                "accept_invalid_certs" => libpq.strict = Some(false),
                _ => return Err(odd("strict or accept_invalid_certs")),
            },
            "options" => libpq.set(name, value),
            "sslidentity" => {
                return Err(InvalidDatabaseUrl::Unsupported {
                    name: name.to_owned(),
                    instead: "libpq reads no PKCS 12 archive: give sslcert and sslkey in PEM",
                });
            }
            "single_use_connections" => {
                return Err(InvalidDatabaseUrl::Unsupported {
                    name: name.to_owned(),
                    instead: "a connection for each statement is never wanted here: remove it",
                });
            }
            _ if LIBPQ.contains(&name) => libpq.set(name, value),
            _ => return Err(InvalidDatabaseUrl::Unknown(name.to_owned())),
        }
        Ok(())
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DatabaseUrl").field(&self.target).finish()
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.target)
    }
}

/// The connection string cannot be used. No message repeats any part of it but the name of a parameter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDatabaseUrl {
    /// Nothing, or only white space.
    #[error("it is empty: set it to postgresql://user:password@host:5432/database")]
    Empty,
    /// Not a URL. A raw `@`, `/`, `#` or `%` in the password must be percent-encoded.
    #[error(
        "it is not a URL: write postgresql://user:password@host:5432/database, with special characters percent-encoded"
    )]
    Unreadable(#[source] url::ParseError),
    /// A URL of something else.
    #[error("it does not start with postgresql:// or postgres://")]
    Scheme,
    /// A percent-encoded part that is not UTF-8, or holds a NUL.
    #[error("its {0} is not valid text: percent-encode it as UTF-8")]
    Text(&'static str),
    /// The same parameter twice.
    #[error("its parameter {0:?} is given twice: keep one")]
    Twice(String),
    /// A parameter that neither libpq nor Prisma knows. Names are in lower case.
    #[error("its parameter {0:?} is unknown: correct its name or remove it")]
    Unknown(String),
    /// A parameter of Prisma's that cannot be honoured.
    #[error("its parameter {name:?} is not supported: {instead}")]
    Unsupported {
        /// The parameter.
        name: String,
        /// What to do instead.
        instead: &'static str,
    },
    /// Two parameters that exclude each other.
    #[error("its parameters sslmode and sslaccept contradict each other: keep one")]
    Contradiction,
    /// No host, neither before the path nor as a parameter. libpq would go wherever the environment says.
    #[error("it names no host: write postgresql://user:password@host:5432/database, or add ?host=/folder of a socket")]
    NoHost,
    /// A parameter with a value that it cannot have.
    #[error("its parameter {name:?} must be {expected}")]
    Value {
        /// The parameter.
        name: String,
        /// What it takes.
        expected: &'static str,
    },
}

/// A URL without what a URL parser would change or refuse.
struct Parts<'a> {
    /// The URL with a host that any parser takes, and without a path.
    rest: String,
    /// Several, or none after a user, or the folder of a socket.
    hosts: &'a str,
    /// The database, in which a parser would take `.` for a folder.
    path: &'a str,
}

impl<'a> Parts<'a> {
    fn of(text: &'a str) -> Self {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Self { rest: text.to_owned(), hosts: "", path: "" };
        };
        let (location, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
        let (authority, path) = location.split_at(location.find('/').unwrap_or(location.len()));
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let at = if user.is_empty() { "" } else { "@" };
        Self { rest: format!("{scheme}://{user}{at}host/{query}"), hosts, path: path.trim_start_matches('/') }
    }
}

fn decode(part: &'static str, text: &str) -> Result<String, InvalidDatabaseUrl> {
    let decoded = percent_decode_str(text).decode_utf8().map_err(|_| InvalidDatabaseUrl::Text(part))?;
    if decoded.contains('\0') {
        return Err(InvalidDatabaseUrl::Text(part));
    }
    Ok(decoded.into_owned())
}

/// libpq's keywords in the making.
#[derive(Default)]
struct Conninfo {
    keywords: Vec<(String, String)>,
    sslmode: Option<String>,
    /// Prisma's `sslaccept`.
    strict: Option<bool>,
}

impl Conninfo {
    /// Sets a keyword; a later value replaces an earlier one, as libpq lets parameters replace the parts of a URL.
    fn set(&mut self, name: &str, value: &str) {
        if value.is_empty() {
            return;
        }
        self.keywords.retain(|(known, _)| known != name);
        self.keywords.push((name.to_owned(), value.to_owned()));
    }

    /// From `host`, `host:port`, `[::1]:port`, or several of them with commas in between.
    fn set_hosts(&mut self, hosts: &str) -> Result<(), InvalidDatabaseUrl> {
        let (mut names, mut ports) = (Vec::new(), Vec::new());
        for host in hosts.split(',') {
            let (name, port) = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
                Some((name, rest)) => (name, rest.strip_prefix(':').unwrap_or(rest)),
                None => host.split_once(':').unwrap_or((host, "")),
            };
            if !port.is_empty() && port.parse::<u16>().is_err() {
                return Err(InvalidDatabaseUrl::Unreadable(url::ParseError::InvalidPort));
            }
            names.push(decode("host", name)?);
            ports.push(port);
        }
        self.set("host", &names.join(","));
        if ports.iter().any(|port| !port.is_empty()) {
            self.set("port", &ports.join(","));
        }
        Ok(())
    }

    /// libpq knows `require`, which verifies nothing, and `verify-full`; Prisma says the same in other words.
    fn settle_tls(&mut self) -> Result<(), InvalidDatabaseUrl> {
        let mode = match (self.sslmode.as_deref(), self.strict) {
            (Some("no-verify" | "disable"), Some(true)) | (Some("verify-ca" | "verify-full"), Some(false)) => {
                return Err(InvalidDatabaseUrl::Contradiction);
            }
            (Some("no-verify"), _) | (Some("require"), Some(false)) => {
                self.set("sslrootcert", NO_ROOT_CERTIFICATE);
                Some("require")
            }
            (Some("verify-ca"), Some(true)) => Some("verify-ca"),
            (_, Some(true)) => Some("verify-full"),
            (mode, _) => mode,
        };
        if let Some(mode) = mode.map(str::to_owned) {
            self.set("sslmode", &mode);
        }
        Ok(())
    }

    fn has(&self, name: &str) -> bool {
        self.keywords.iter().any(|(known, _)| known == name)
    }

    fn shown(&self, name: &str) -> &str {
        self.keywords.iter().find(|(known, _)| known == name).map_or("the default", |(_, value)| value)
    }

    fn text(&self) -> String {
        let quoted = self.keywords.iter().map(|(name, value)| {
            let value = value.replace('\\', "\\\\").replace('\'', "\\'");
            format!("{name}='{value}'")
        });
        quoted.collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// What libpq reads, without what counts in any case, or the error.
    fn read(url: &str) -> Result<Vec<(String, String)>, InvalidDatabaseUrl> {
        let conninfo = DatabaseUrl::parse(url)?.conninfo;
        let defaults = DEFAULTS.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Ok(keywords(&conninfo).into_iter().filter(|keyword| !defaults.contains(keyword)).collect())
    }

    /// Reads keywords as libpq's documentation says it does.
    fn keywords(conninfo: &str) -> Vec<(String, String)> {
        let mut characters = conninfo.chars().peekable();
        let mut found = Vec::new();
        while characters.peek().is_some() {
            let name: String = characters.by_ref().take_while(|c| *c != '=').collect();
            assert_eq!(characters.next(), Some('\''), "{conninfo}");
            let mut value = String::new();
            loop {
                match characters.next().expect("a closing quote") {
                    '\'' => break,
                    '\\' => value.push(characters.next().expect("an escaped character")),
                    other => value.push(other),
                }
            }
            found.push((name, value));
            assert!(matches!(characters.next(), None | Some(' ')), "{conninfo}");
        }
        found
    }

    #[track_caller]
    fn assert_read(url: &str, expected: &[(&str, &str)]) {
        let mut found = read(url).unwrap_or_else(|error| panic!("{url}: {error}"));
        let mut expected: Vec<_> =
            expected.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected, "{url}");
    }

    #[test]
    fn a_plain_url_becomes_quoted_keywords() {
        assert_read(
            r"postgresql://dispatch:s%40fe'%5C@db.internal:6432/app?connect_timeout=3",
            &[
                ("connect_timeout", "3"),
                ("host", "db.internal"),
                ("port", "6432"),
                ("user", "dispatch"),
                ("password", r"s@fe'\"),
                ("dbname", "app"),
            ],
        );
        assert_read(" postgres://h/app \n", &[("host", "h"), ("dbname", "app")]);
    }

    #[test]
    fn hosts_may_be_several_and_of_every_kind() {
        assert_read("postgresql://[::1]/app", &[("host", "::1"), ("dbname", "app")]);
        assert_read("postgresql://[::1]:5433/app", &[("host", "::1"), ("port", "5433"), ("dbname", "app")]);
        assert_read("postgresql://a:1,b,[::1]:3/app", &[("host", "a,b,::1"), ("port", "1,,3"), ("dbname", "app")]);
        assert_read(
            "postgresql://a,b/app?target_session_attrs=read-write",
            &[("host", "a,b"), ("dbname", "app"), ("target_session_attrs", "read-write")],
        );
        for socket in
            ["me@localhost/app?host=/run/pg", "me@/app?host=/run/pg", "me@%2Frun%2Fpg/app", "me@/app?host=%2Frun%2Fpg"]
        {
            let url = format!("postgresql://{socket}");
            assert_read(&url, &[("user", "me"), ("dbname", "app"), ("host", "/run/pg")]);
        }
        for nowhere in ["postgresql:///app", "postgresql://me@/app", "postgresql://me:hunter2@/app?schema=x"] {
            assert_eq!(read(nowhere), Err(InvalidDatabaseUrl::NoHost), "{nowhere}");
        }
    }

    #[test]
    fn a_database_may_have_any_name() {
        for (path, name) in [(".", "."), ("..", ".."), ("%2E", "."), ("a%2Fb", "a/b"), ("a/b", "a/b"), ("%20", " ")] {
            assert_read(&format!("postgresql://h/{path}?connect_timeout=0"), &[("host", "h"), ("dbname", name)]);
        }
        assert_read("postgresql://h", &[("host", "h")]);
        assert_read("postgresql://h?application_name=x", &[("host", "h"), ("application_name", "x")]);
    }

    #[test]
    fn prismas_parameters_go_where_they_belong() {
        let url =
            "postgresql://h/db?connection_limit=7&pool_timeout=20&socket_timeout=9&pgbouncer=true&schema=my%20jobs";
        let url = DatabaseUrl::parse(url).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(url.connection_limit, Some(7));
        assert_eq!(url.pool_timeout, Some(Duration::from_secs(20)));
        assert_eq!(url.socket_timeout, Some(Duration::from_secs(9)));
        assert_eq!(url.schema.as_deref(), Some("my jobs"));
        assert!(url.unprepared);
        assert!(!url.conninfo.contains("options"), "a pooler refuses start-up options");
        let unprepared =
            |parameter| DatabaseUrl::parse(&format!("postgresql://h/db?{parameter}")).map(|url| url.unprepared);
        assert_eq!(unprepared("statement_cache_size=0"), Ok(true));
        assert_eq!(unprepared("statement_cache_size=100"), Ok(false));
        assert_eq!(unprepared("pgbouncer=false"), Ok(false));
        assert_read("postgresql://h/db?connect_timeout=0", &[("host", "h"), ("dbname", "db")]);
    }

    #[test]
    fn tls_is_settled_in_libpqs_words() {
        let tls = |parameters: &str| {
            let found: HashMap<_, _> = read(&format!("postgresql://h/db?{parameters}"))?.into_iter().collect();
            let value = |name| found.get(name).cloned().unwrap_or_default();
            Ok((value("sslmode"), value("sslrootcert")))
        };
        let says = |mode: &str, root: &str| Ok((mode.to_owned(), root.to_owned()));
        assert_eq!(tls("sslmode=require"), says("require", ""));
        assert_eq!(tls("sslmode=no-verify"), says("require", NO_ROOT_CERTIFICATE));
        assert_eq!(tls("sslmode=no-verify&sslrootcert=/ca.pem"), says("require", NO_ROOT_CERTIFICATE));
        assert_eq!(tls("sslmode=require&sslaccept=accept_invalid_certs"), says("require", NO_ROOT_CERTIFICATE));
        assert_eq!(tls("sslmode=require&sslaccept=strict&sslrootcert=/ca.pem"), says("verify-full", "/ca.pem"));
        assert_eq!(tls("sslaccept=strict"), says("verify-full", ""));
        assert_eq!(tls("sslaccept=accept_invalid_certs"), says("", ""));
        assert_eq!(tls("sslmode=disable&sslaccept=strict"), Err(InvalidDatabaseUrl::Contradiction));
        assert_eq!(tls("sslmode=verify-full&sslaccept=accept_invalid_certs"), Err(InvalidDatabaseUrl::Contradiction));
    }

    #[test]
    fn a_parameter_that_cannot_be_used_is_named() {
        for (parameters, name) in [
            ("conection_limit=3", "conection_limit"),
            ("Schema=x", "Schema"),
            ("connection_limit=0", "connection_limit"),
            ("connection_limit=many", "connection_limit"),
            ("connection_limit=-1", "connection_limit"),
            ("connection_limit=", "connection_limit"),
            ("connect_timeout=3.5", "connect_timeout"),
            ("pool_timeout=10s", "pool_timeout"),
            ("socket_timeout=1e3", "socket_timeout"),
            ("schema=", "schema"),
            ("schema=a%00b", "schema"),
            ("sslmode=on", "sslmode"),
            ("sslaccept=maybe", "sslaccept"),
            ("sslidentity=/x.p12", "sslidentity"),
            ("single_use_connections=true", "single_use_connections"),
            ("pgbouncer=1", "pgbouncer"),
            ("schema=a&schema=b", "schema"),
            ("schema=a&connection_limit=3&schema=a", "schema"),
        ] {
            let message = read(&format!("postgresql://me:hunter2@h/db?{parameters}")).unwrap_err().to_string();
            assert!(message.contains(&format!("{name:?}")) && !message.contains("hunter2"), "{parameters}: {message}");
        }
    }

    #[test]
    fn no_error_and_no_debug_shows_the_password() {
        for url in [
            "postgresql://me:hunter2@h:notaport/db",
            "postgresql://me:hunter2@[::1/db",
            "postgresql://me:hunter2@h:99999/db",
            "mysql://me:hunter2@h/db",
            "prisma+postgresql://me:hunter2@h/db",
            "hunter2",
            "postgresql://me:hunter2%FF@h/db",
            "postgresql://me:hunter2%00@h/db",
            "postgresql://me:hunter2@h/db?x=1",
            "postgresql://me:pass@hunter2@h/db",
            "postgresql://me:hunter2@h/db",
        ] {
            let shown = match DatabaseUrl::parse(url) {
                Ok(parsed) => format!("{parsed:?} {parsed}"),
                Err(error) => format!("{error} {error:?}"),
            };
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }

    fn encoded(text: &str) -> String {
        percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
    }

    proptest! {
        #[test]
        fn whatever_is_percent_encoded_reaches_libpq_unchanged(
            user in "[^\0]{1,20}", password in "[^\0]{1,20}", database in "[^\0/]{1,20}",
            host in "[a-z][a-z0-9.-]{0,20}", application in "[^\0]{1,20}",
        ) {
            let url = format!(
                "postgresql://{}:{}@{host}/{}?application_name={}",
                encoded(&user), encoded(&password), encoded(&database), encoded(&application),
            );
            let found: HashMap<_, _> = read(&url).unwrap().into_iter().collect();
            for (name, value) in [
                ("user", &user), ("password", &password), ("dbname", &database), ("host", &host),
                ("application_name", &application),
            ] {
                prop_assert_eq!(found.get(name), Some(value));
            }
        }

        #[test]
        fn no_text_makes_it_panic_and_no_error_repeats_a_secret(
            before in ".{0,20}", after in ".{0,20}", scheme in "postgres(ql)?|mysql|.{0,5}",
        ) {
            let url = format!("{scheme}://{before}:hunter2secret{after}");
            if let Err(error) = DatabaseUrl::parse(&url) {
                let repeats = format!("{error} {error:?}").contains("hunter2secret");
                // A parameter's name is repeated, and only there is it no secret.
                prop_assert!(!repeats || before.contains('?'), "{error}");
            }
        }
    }
}
