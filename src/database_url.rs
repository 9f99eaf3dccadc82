//! `DATABASE_URL` in Prisma's dialect, turned into what libpq takes.
//!
//! libpq refuses half of Prisma's parameters and prints parts of a URL it cannot read, so the URL is never handed to it:
//! a maintained parser takes it apart and libpq gets quoted keywords.

use std::fmt;
use std::fmt::Write as _;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use url::Url;

/// Seconds that libpq may spend on connecting to one address, where the URL does not say. A dead host must not hold a
/// job's start for the minutes that TCP allows.
const CONNECT_TIMEOUT_SECONDS: u32 = 5;

/// Keepalives that end a wait on a vanished server after about five seconds.
const KEEPALIVE: &str = "keepalives_idle=2 keepalives_interval=1 keepalives_count=3 tcp_user_timeout=4000";

/// A parsed connection string. `Debug` shows host and database, never user or password.
#[derive(Clone)]
pub(crate) struct DatabaseUrl {
    /// libpq keywords. Holds the password: for libpq only.
    pub(crate) conninfo: String,
    /// Prisma's `connection_limit`.
    pub(crate) connection_limit: Option<u32>,
    /// Prisma's `pool_timeout`; zero means no limit.
    pub(crate) pool_timeout: Option<Duration>,
    /// Whether prepared statements must not outlive a transaction (`pgbouncer=true`, `statement_cache_size=0`).
    pub(crate) unprepared: bool,
    target: String,
}

impl DatabaseUrl {
    pub(crate) fn parse(text: &str) -> Result<Self, InvalidDatabaseUrl> {
        let text = text.trim();
        if text.is_empty() {
            return Err(InvalidDatabaseUrl::Empty);
        }
        let url = Url::parse(&with_host(text)).map_err(InvalidDatabaseUrl::Unreadable)?;
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(InvalidDatabaseUrl::Scheme);
        }
        let mut libpq = Conninfo::default();
        let host = decode("host", url.host_str().unwrap_or_default())?;
        libpq.set("host", host.trim_start_matches('[').trim_end_matches(']'));
        if let Some(port) = url.port() {
            libpq.set("port", &port.to_string());
        }
        libpq.set("user", &decode("user", url.username())?);
        if let Some(password) = url.password() {
            libpq.set("password", &decode("password", password)?);
        }
        let database = decode("database", url.path().trim_start_matches('/'))?;
        libpq.set("dbname", &database);

        let mut parsed = Self {
            conninfo: String::new(),
            connection_limit: None,
            pool_timeout: None,
            unprepared: false,
            target: String::new(),
        };
        let mut seen: Vec<String> = Vec::new();
        for (name, value) in url.query_pairs() {
            if seen.iter().any(|earlier| *earlier == name) {
                return Err(InvalidDatabaseUrl::Twice(name.into_owned()));
            }
            parsed.parameter(&mut libpq, &name, &value)?;
            seen.push(name.into_owned());
        }
        if !libpq.has("connect_timeout") {
            libpq.set("connect_timeout", &CONNECT_TIMEOUT_SECONDS.to_string());
        }
        parsed.target = format!("{} on {}", libpq.shown("dbname"), libpq.shown("host"));
        parsed.conninfo = format!("{} {KEEPALIVE}", libpq.text());
        Ok(parsed)
    }

    fn parameter(&mut self, libpq: &mut Conninfo, name: &str, value: &str) -> Result<(), InvalidDatabaseUrl> {
        let odd = |expected| InvalidDatabaseUrl::Value { name: name.to_owned(), expected };
        let whole = || value.parse::<u32>().map_err(|_| odd("a whole number"));
        match name {
            "connection_limit" => {
                let limit = whole()?;
                if limit == 0 {
                    return Err(odd("a whole number of 1 or more"));
                }
                self.connection_limit = Some(limit);
            }
            "pool_timeout" => self.pool_timeout = Some(Duration::from_secs(whole()?.into())),
            "connect_timeout" => libpq.set(name, &whole()?.to_string()),
            "socket_timeout" => libpq.option("statement_timeout", &format!("{}s", whole()?)),
            "pgbouncer" => self.unprepared |= value.parse::<bool>().map_err(|_| odd("true or false"))?,
            "statement_cache_size" => self.unprepared |= whole()? == 0,
            "schema" if value.is_empty() => return Err(odd("the name of a schema")),
            "schema" if value == "public" => {}
            "schema" => libpq.option("search_path", &format!("\"{}\"", value.replace('"', "\"\""))),
            "sslmode" => match value {
                "no-verify" => libpq.set(name, "require"),
                "disable" | "allow" | "prefer" | "require" | "verify-ca" | "verify-full" => libpq.set(name, value),
                _ => return Err(odd("disable, allow, prefer, require, verify-ca, verify-full or no-verify")),
            },
            "options" => libpq.raw_option(value),
            "host"
            | "application_name"
            | "sslrootcert"
            | "sslkey"
            | "sslcert"
            | "target_session_attrs"
            | "channel_binding"
            | "user"
            | "password"
            | "port"
            | "dbname" => libpq.set(name, value),
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
    /// A parameter that neither libpq nor Prisma nor this crate knows, or one that is not supported.
    #[error("its parameter {0:?} is not supported: remove it")]
    Unknown(String),
    /// A parameter with a value that it cannot have.
    #[error("its parameter {name:?} must be {expected}")]
    Value {
        /// The parameter.
        name: String,
        /// What it takes.
        expected: &'static str,
    },
}

/// libpq and Prisma allow `user@/database?host=…`; a URL parser wants a host after a user.
fn with_host(text: &str) -> String {
    match text.split_once("://") {
        Some((scheme, rest)) => {
            let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
            match rest.get(..end).filter(|authority| authority.ends_with('@')) {
                Some(authority) => format!("{scheme}://{authority}localhost{}", &rest[end..]),
                None => text.to_owned(),
            }
        }
        None => text.to_owned(),
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
    options: String,
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

    fn has(&self, name: &str) -> bool {
        self.keywords.iter().any(|(known, _)| known == name)
    }

    fn shown(&self, name: &str) -> &str {
        self.keywords.iter().find(|(known, _)| known == name).map_or("the default", |(_, value)| value)
    }

    fn option(&mut self, name: &str, value: &str) {
        let escaped = value.replace('\\', "\\\\").replace(' ', "\\ ");
        self.raw_option(&format!("-c {name}={escaped}"));
    }

    fn raw_option(&mut self, text: &str) {
        if !self.options.is_empty() {
            self.options.push(' ');
        }
        self.options.push_str(text);
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let options = ("options".to_owned(), self.options.clone());
        for (name, value) in self.keywords.iter().chain((!self.options.is_empty()).then_some(&options)) {
            let quoted = value.replace('\\', "\\\\").replace('\'', "\\'");
            // Writing to a String cannot fail.
            let _ = write!(text, "{name}='{quoted}' ");
        }
        text.truncate(text.trim_end().len());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conninfo(url: &str) -> String {
        DatabaseUrl::parse(url).map_or_else(|e| format!("error: {e}"), |url| url.conninfo.replace(KEEPALIVE, "…"))
    }

    #[test]
    fn a_plain_url_becomes_quoted_keywords() {
        assert_eq!(
            conninfo("postgresql://dispatch:s%40fe'%5C@db.internal:6432/app?connect_timeout=3"),
            r"host='db.internal' port='6432' user='dispatch' password='s@fe\'\\' dbname='app' connect_timeout='3' …"
        );
        assert_eq!(conninfo("postgres://[::1]/app"), "host='::1' dbname='app' connect_timeout='5' …");
    }

    #[test]
    fn a_socket_folder_is_taken_from_the_host_parameter_or_the_host() {
        let expected = "user='me' dbname='app' host='/run/pg' connect_timeout='5' …";
        assert_eq!(conninfo("postgresql://me@localhost/app?host=/run/pg"), expected);
        assert_eq!(conninfo("postgresql://me@/app?host=/run/pg"), expected);
        assert_eq!(
            conninfo("postgresql://me@%2Frun%2Fpg/app"),
            "host='/run/pg' user='me' dbname='app' connect_timeout='5' …"
        );
    }

    #[test]
    fn prismas_parameters_go_where_they_belong() {
        let url = DatabaseUrl::parse(
            "postgresql://h/db?connection_limit=7&pool_timeout=20&pgbouncer=true&sslmode=no-verify&schema=my%20jobs",
        );
        let url = url.unwrap_or_else(|e| unreachable!("{e}"));
        assert_eq!(url.connection_limit, Some(7));
        assert_eq!(url.pool_timeout, Some(Duration::from_secs(20)));
        assert!(url.unprepared);
        assert!(url.conninfo.contains("sslmode='require'"), "{}", url.conninfo);
        assert!(url.conninfo.contains(r#"options='-c search_path="my\\ jobs"'"#), "{}", url.conninfo);
    }

    #[test]
    fn a_parameter_that_cannot_be_used_is_named() {
        for (url, name) in [
            ("postgresql://h/db?conection_limit=3", "conection_limit"),
            ("postgresql://h/db?connection_limit=0", "connection_limit"),
            ("postgresql://h/db?connection_limit=many", "connection_limit"),
            ("postgresql://h/db?schema=", "schema"),
            ("postgresql://h/db?sslmode=on", "sslmode"),
            ("postgresql://h/db?pgbouncer=1", "pgbouncer"),
            ("postgresql://h/db?schema=a&schema=b", "schema"),
        ] {
            let message = conninfo(url);
            assert!(message.starts_with("error: ") && message.contains(name), "{url}: {message}");
        }
    }

    #[test]
    fn no_error_and_no_debug_shows_the_password() {
        for url in [
            "postgresql://me:hunter2@h:notaport/db",
            "postgresql://me:hunter2@[::1/db",
            "mysql://me:hunter2@h/db",
            "hunter2",
            "postgresql://me:hunter2%FF@h/db",
            "postgresql://me:hunter2@h/db?x=1",
            "postgresql://me:hunter2@h/db",
        ] {
            let shown = match DatabaseUrl::parse(url) {
                Ok(parsed) => format!("{parsed:?} {parsed}"),
                Err(e) => format!("{e} {e:?}"),
            };
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }
}
