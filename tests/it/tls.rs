//! With, without and against certificates.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use sync_lock::private_server::{Durability, Server};
use sync_lock::{ConnectError, LockError, Settings};

use crate::support::{expect_exit, holds, sync_lock};

/// An address of this machine that no other server listens on.
const ADDRESS: &str = "127.53.68.1";

/// A key and a certificate that signs itself, for the address.
fn certificate(folder: &Path, name: &str) -> Option<(PathBuf, PathBuf)> {
    let (key, certificate) = (folder.join(format!("{name}.key")), folder.join(format!("{name}.crt")));
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", &format!("/CN={name}")]);
    openssl
        .args(["-addext", &format!("subjectAltName=IP:{ADDRESS}"), "-keyout"])
        .arg(&key)
        .arg("-out")
        .arg(&certificate);
    openssl.output().is_ok_and(|output| output.status.success()).then_some((key, certificate))
}

fn connect(parameters: &str) -> Result<PgConnection, LockError> {
    Settings::new(&format!("postgresql://postgres:hunter2@{ADDRESS}/postgres?{parameters}")).unwrap().connect()
}

#[track_caller]
fn refused(parameters: &str) {
    let error = connect(parameters).map(drop).expect_err(parameters);
    assert!(matches!(error, LockError::Unreachable(ConnectError::Refused(_))), "{parameters}: {error:?}");
    assert!(!format!("{error:?}").contains("hunter2"));
}

#[track_caller]
fn encrypted(parameters: &str) {
    let mut conn = connect(parameters).unwrap_or_else(|error| panic!("{parameters}: {error:?}"));
    let ssl = "SELECT ssl AS holds FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    assert!(holds(&mut conn, ssl), "{parameters}");
}

#[test]
fn tls_is_demanded_verified_and_left_unverified_as_the_url_says() {
    let server = Server::private(Durability::Fast).unwrap();
    let url = url::Url::parse(&server.url("postgres")).unwrap();
    let folder = PathBuf::from(url.query_pairs().find(|(name, _)| name == "host").unwrap().1.into_owned());
    let Some((key, ours)) = certificate(&folder, "server") else {
        assert!(std::env::var_os("SYNC_LOCK_REQUIRE_ALL").is_none(), "openssl is required: apt-get install openssl");
        crate::support::skipped("no openssl to make a certificate with (apt-get install openssl)");
        return;
    };
    let (_, stranger) = certificate(&folder, "stranger").unwrap();
    let owner = fs::metadata(&folder).unwrap();
    for file in [&key, &ours, &stranger] {
        chown(file, Some(owner.uid()), Some(owner.gid())).unwrap();
    }
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let admin = |sql: &str| PgConnection::establish(&server.url("postgres")).unwrap().batch_execute(sql).unwrap();
    admin(&format!("ALTER SYSTEM SET listen_addresses = '{ADDRESS}'"));
    admin(
        "DO $$ BEGIN EXECUTE format('COPY (VALUES (%L), (%L)) TO %L', 'local all all trust', 'host all all 127.0.0.0/8 trust',
           current_setting('hba_file')); END $$",
    );
    server.restart().unwrap();

    refused("sslmode=require");
    refused("sslmode=verify-full");
    connect("sslmode=prefer").expect("without TLS where none is demanded");
    let mut command = sync_lock(&format!("postgresql://postgres@{ADDRESS}/postgres?sslmode=require"), &["status"]);
    let (_, stderr) = expect_exit(&mut command, 78);
    assert!(stderr.contains("SSL"), "{stderr}");

    admin("ALTER SYSTEM SET ssl = on");
    admin(&format!("ALTER SYSTEM SET ssl_cert_file = '{}'", ours.display()));
    admin(&format!("ALTER SYSTEM SET ssl_key_file = '{}'", key.display()));
    server.restart().unwrap();

    let (ours, stranger) = (ours.display(), stranger.display());
    encrypted("sslmode=require");
    encrypted("sslmode=no-verify");
    encrypted(&format!("sslmode=no-verify&sslrootcert={stranger}"));
    encrypted(&format!("sslmode=verify-full&sslrootcert={ours}"));
    encrypted(&format!("sslmode=require&sslaccept=strict&sslrootcert={ours}"));
    encrypted("sslmode=require&sslaccept=accept_invalid_certs");
    refused("sslmode=verify-full");
    refused(&format!("sslmode=verify-full&sslrootcert={stranger}"));
    refused(&format!("sslaccept=strict&sslrootcert={stranger}"));
    refused("sslmode=verify-full&sslrootcert=/nowhere/root.crt");
}
