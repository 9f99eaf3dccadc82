//! A `PgBouncer` in transaction mode in front of the private server.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use diesel::prelude::*;

use super::{TestDatabase, poll, server};

pub struct PgBouncer {
    child: Child,
    folder: PathBuf,
    port: u16,
}

impl PgBouncer {
    /// `None`, and a loud word, where there is none to start.
    pub fn start(database: &TestDatabase, pool_size: u32) -> Option<Self> {
        let program = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer"];
        let program = program.into_iter().find(|path| std::path::Path::new(path).exists());
        let (Some(program), true) = (program, server().is_private()) else {
            let required = std::env::var_os("SYNC_LOCK_REQUIRE_ALL").is_some() && server().is_private();
            assert!(!required, "PgBouncer is required and not installed: apt-get install pgbouncer");
            super::skipped("no PgBouncer in front of a private server here (apt-get install pgbouncer)");
            return None;
        };
        let socket = url::Url::parse(&database.url()).expect("a URL");
        let socket =
            socket.query_pairs().find(|(name, _)| name == "host").expect("the folder of a socket").1.into_owned();
        // PgBouncer refuses to run as root, so it runs as whoever owns the server.
        let owner = fs::metadata(&socket).expect("the server's folder");
        let port = TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().expect("an address").port();
        let folder = std::env::temp_dir().join(format!("sync-lock-pgbouncer-{port}-{}", std::process::id()));
        fs::create_dir(&folder).expect("a folder");
        std::os::unix::fs::chown(&folder, Some(owner.uid()), Some(owner.gid()))
            .expect("a folder for the server's user");
        let ini = folder.join("pgbouncer.ini");
        let settings = format!(
            "[databases]\n* = host={socket} port=5432 user=postgres\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = transaction\ndefault_pool_size = {pool_size}\nmax_client_conn = 200\n"
        );
        fs::write(&ini, settings).expect("its settings");
        let mut command = Command::new(program);
        command.arg("-q").arg(&ini).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if nix::unistd::geteuid().is_root() {
            command.uid(owner.uid()).gid(owner.gid());
        }
        let child = command.spawn().expect("PgBouncer starts");
        let bouncer = Self { child, folder, port };
        poll("PgBouncer", || PgConnection::establish(&bouncer.url(database, "")).is_ok());
        Some(bouncer)
    }

    /// The URL of the database through the pooler, with more parameters.
    pub fn url(&self, database: &TestDatabase, parameters: &str) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/{}?{parameters}", self.port, database.name())
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}
