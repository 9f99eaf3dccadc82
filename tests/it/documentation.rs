//! The documents name tests and files that exist, and their SQL does what they say.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use sync_lock::blocking::{acquire_lock, complete_run, inspect, release_lock};
use sync_lock::migrate::{Migration, migrate};
use sync_lock::{MaxAge, RunId, RunReport, SyncType};

use crate::support::{Role, TestDatabase, won};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The tests of a source file.
fn tests_in(file: &str) -> BTreeSet<String> {
    let (mut tests, mut marked) = (BTreeSet::new(), false);
    for line in read(file).lines().map(str::trim) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            marked = true;
        } else if let Some((_, rest)) = line.split_once("fn ").filter(|_| marked) {
            tests.extend(rest.split(['(', '<']).next().map(str::to_owned));
            marked = false;
        }
    }
    tests
}

/// What stands in backticks: every second piece.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The guarantees, one a list item, each with what follows its `Tests:`.
fn guarantees(document: &str) -> Vec<(&str, Option<&str>)> {
    let (_, rest) = document.split_once("\n## What is guaranteed\n").expect("the section of the guarantees");
    let (section, _) = rest.split_once("\n## ").expect("the section after it");
    let items = section.split("\n- ").skip(1).map(|item| item.split("\n\n").next().unwrap_or(item));
    items.map(|item| item.split_once("Tests:").map_or((item, None), |(text, tests)| (text, Some(tests)))).collect()
}

#[test]
fn every_guarantee_names_tests_that_exist() {
    let document = read("docs/guarantees.md");
    let mut problems = Vec::new();
    let guarantees = guarantees(&document);
    for (guarantee, tests) in &guarantees {
        let title = guarantee.lines().next().unwrap_or_default();
        let (mut file, mut known, mut named) = ("no file", BTreeSet::new(), 0);
        for word in quoted(tests.unwrap_or_default()) {
            if Path::new(word).extension().is_some_and(|extension| extension == "rs") {
                (file, known) = (word, tests_in(word));
            } else if known.contains(word) {
                named += 1;
            } else {
                problems.push(format!("{title}: there is no test {word} in {file}"));
            }
        }
        if named == 0 {
            problems.push(format!("{title}: no test is named"));
        }
    }
    assert!(guarantees.len() > 20, "the document is not read as it is written: {guarantees:?}");
    assert_eq!(problems, Vec::<String>::new());
}

#[test]
fn every_link_between_the_documents_leads_to_a_file_and_a_heading() {
    let folder = fs::read_dir(root().join("docs")).expect("the documents");
    let names = folder.map(|entry| PathBuf::from("docs").join(entry.expect("a document").file_name()));
    let documents = names.filter(|name| name.extension().is_some_and(|extension| extension == "md"));
    for document in documents.chain([PathBuf::from("README.md")]) {
        let text = read(&document);
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.contains("://") {
                continue;
            }
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = if file.is_empty() { document.clone() } else { document.with_file_name(file) };
            assert!(root().join(&file).exists(), "{}: {target}", document.display());
            if !heading.is_empty() {
                let anchors: Vec<_> = read(&file).lines().filter(|line| line.starts_with('#')).map(anchor).collect();
                assert!(anchors.contains(&heading.to_owned()), "{}: {target} of {anchors:?}", document.display());
            }
        }
    }
}

/// The anchor of a heading as GitHub makes it.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
    text.chars().filter(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '_')).collect()
}

/// The first SQL of the operations page that holds a text.
fn sql_with(text: &str) -> String {
    let page = read("docs/operations.md");
    let mut blocks = page.split("```sql\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.find(|block| block.contains(text)).unwrap_or_else(|| panic!("no SQL with {text}")).to_owned()
}

/// A connection of a role that has what the page grants to a role of that name.
fn connect_with_grants(database: &TestDatabase, role: &Role<'_>, name: &str) -> PgConnection {
    let grants = sql_with(&format!("TO {name}")).replace(name, &format!("\"{}\"", role.name));
    database.execute(&grants.replace("DATABASE dispatch", &format!("DATABASE \"{}\"", database.name())));
    PgConnection::establish(&role.url()).expect("a connection of the role")
}

#[test]
fn the_grants_of_the_operations_page_suffice_for_the_application() {
    let database = TestDatabase::new();
    let role = Role::new(&database);
    let mut conn = connect_with_grants(&database, &role, "dispatch_app");
    let crashed = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    database.back_date(3600.0);
    let run = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    assert_eq!(database.run(&crashed).status, "failed");
    assert_eq!(inspect(&mut conn, MaxAge::DEFAULT).unwrap().len(), 1);
    assert!(complete_run(&mut conn, &run, &RunReport::default()).unwrap());
    assert!(release_lock(&mut conn, &run).unwrap());
}

#[test]
fn the_grants_of_the_operations_page_suffice_for_migrate() {
    let database = TestDatabase::new();
    let role = Role::new(&database);
    let mut conn = connect_with_grants(&database, &role, "dispatch_deploy");
    database.plant("global", None, 5.0);
    assert!(migrate(&mut conn, &Migration::new(MaxAge::DEFAULT)).unwrap().removed.is_some());
    assert_eq!(database.keys_held(), Vec::<String>::new());
}

#[test]
fn the_sql_for_a_stuck_lock_frees_the_row_that_was_seen_and_no_other() {
    let database = TestDatabase::new();
    let mut conn = database.connect();
    let stuck = won(acquire_lock(&mut conn, SyncType::Reconcile, MaxAge::DEFAULT).unwrap());
    let other = won(acquire_lock(&mut conn, SyncType::Scheduled, MaxAge::DEFAULT).unwrap());
    let page = sql_with(r"\set key");
    // psql's own lines are not for the server.
    let sql = page.lines().filter(|line| !line.trim().starts_with('\\')).collect::<Vec<_>>().join("\n");
    let mut delete = |holder: &RunId| {
        let sql = sql.replace(":'key'", "'reconcile'").replace(":'holder'", &format!("'{holder}'"));
        conn.batch_execute(&sql).unwrap();
        database.keys_held()
    };
    assert_eq!(delete(&other), ["issue-sync", "reconcile"], "a holder of another key");
    assert_eq!(database.run(&other).status, "running");
    assert_eq!(delete(&stuck), ["issue-sync"]);
    let closed = database.run(&stuck);
    assert_eq!((closed.status.as_str(), closed.completed), ("failed", true));
    assert_eq!(database.run(&other).status, "running");
}

#[test]
fn the_sql_of_the_operations_page_runs() {
    let database = TestDatabase::new();
    database.plant("groomer", None, 5.0);
    database.plant("reconcile", Some("peer"), 5.0);
    database.execute(&sql_with("'groomer'"));
    assert_eq!(database.keys_held(), ["reconcile"]);
    database.execute(&sql_with("pg_locks"));
    database.execute(&sql_with("SELECT * FROM"));
}
