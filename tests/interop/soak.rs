//! Four processes of each side contend for a minute, are killed now and then, and are judged by a trigger.
//!
//! A process of ours is this test program, started again with [`WORKER`] set. Every process has a name of its own, which
//! the trigger reads from the session, so that the log tells who held what and who took it.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::{Double, Text};
use serde_json::json;
use sync_lock::{Job, Lease, LeaseAttempt, LockKey, RunReport, Settings, SyncLock, SyncType};

use crate::peer::Peer;
use crate::support::{TestDatabase, key, seconds};

const DURATION: Duration = Duration::from_mins(1);
const MAX_AGE: f64 = 2.0;
const EACH: usize = 4;

/// Set in a process of ours: the seed of what it does. `DATABASE_URL` says where.
const WORKER: &str = "SYNC_LOCK_INTEROP_WORKER";

/// The judge sees every change as the server makes it. `lost` is what holders of ours say of leases that they lost, and
/// `killed` what the test says of processes, each by the server's clock.
const TRIGGER: &str = r#"
    CREATE TABLE judged (n serial, at timestamptz, op text, key text, who text, old_holder text, new_holder text,
      old_at timestamptz);
    CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO judged (at, op, key, who, old_holder, new_holder, old_at) VALUES (clock_timestamp(), TG_OP,
          coalesce(NEW."id", OLD."id"), current_setting('application_name'), OLD."syncRunId", NEW."syncRunId", OLD."acquiredAt");
        RETURN NULL;
    END $$;
    CREATE TRIGGER judge AFTER INSERT OR UPDATE OR DELETE ON "sync_lock" FOR EACH ROW EXECUTE FUNCTION judge();
    CREATE TABLE lost (holder text, trusted_ago float8, at timestamptz DEFAULT clock_timestamp());
    CREATE TABLE killed (who text, at timestamptz)"#;

/// Who claimed a row, and every hold that somebody else ended: by a takeover, or as a groomer that deletes a stale row.
const VIEWS: &str = r"
    CREATE VIEW claims AS SELECT * FROM judged WHERE op <> 'DELETE' AND new_holder IS DISTINCT FROM old_holder;
    CREATE VIEW displaced AS
      SELECT d.key, d.at, d.who AS by, c.who AS holder, d.old_holder AS run, extract(epoch FROM d.at - d.old_at)::float8 AS age
      FROM judged d JOIN claims c ON c.new_holder = d.old_holder
      WHERE (d.op = 'UPDATE' AND d.new_holder <> d.old_holder) OR (d.op = 'DELETE' AND d.who <> c.who)";

fn jobs() -> [Job; 4] {
    [
        key("soak").recorded_as("soak").expect("a job"),
        SyncType::Manual.into(),
        SyncType::Reconcile.into(),
        LockKey::GROOMER.into(),
    ]
}

/// Not a test: what a process of ours does until it is killed.
#[test]
#[ignore = "a worker process of the test below"]
fn contend() {
    let Ok(seed) = std::env::var(WORKER) else { return };
    let settings = Settings::from_env().unwrap().with_max_age(seconds(MAX_AGE));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let locks = SyncLock::new(&settings).unwrap();
        let mut random = fastrand::Rng::with_seed(seed.parse().unwrap());
        let jobs = jobs();
        // Long after it should have been killed.
        let end = Instant::now() + 2 * DURATION;
        while Instant::now() < end {
            match locks.lease(jobs[random.usize(..jobs.len())].clone()).await {
                Ok(LeaseAttempt::Leased(lease)) => {
                    let hold = Duration::from_secs_f64(random.f64() * 2.0 * MAX_AGE);
                    if let Some(trusted_ago) = trusted_for(&lease, hold).await {
                        let mut conn = settings.connect().unwrap();
                        let insert = diesel::sql_query("INSERT INTO lost VALUES ($1, $2)");
                        let insert = insert.bind::<Text, _>(lease.run_id().as_str());
                        insert.bind::<Double, _>(trusted_ago.as_secs_f64()).execute(&mut conn).unwrap();
                    }
                    lease.complete(&RunReport::default()).await.unwrap();
                }
                Ok(LeaseAttempt::Conflict { .. }) => tokio::time::sleep(Duration::from_millis(random.u64(..20))).await,
                Err(error) => panic!("{error}"),
            }
        }
    });
}

/// Holds a lease for that long. Of a lease that was lost: how long ago it was last known to be held.
async fn trusted_for(lease: &Lease, hold: Duration) -> Option<Duration> {
    let (end, mut trusted) = (Instant::now() + hold, Instant::now());
    while Instant::now() < end {
        let now = Instant::now();
        if lease.is_lost() {
            return Some(trusted.elapsed());
        }
        trusted = now;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    None
}

/// The database's URL for a process of that name.
fn url_for(database: &TestDatabase, name: &str) -> String {
    let mut url = url::Url::parse(&database.url()).unwrap();
    url.query_pairs_mut().append_pair("application_name", name);
    url.to_string()
}

fn kill(database: &TestDatabase, name: &str, kill: impl FnOnce()) {
    let insert = diesel::sql_query("INSERT INTO killed VALUES ($1, clock_timestamp())").bind::<Text, _>(name);
    insert.execute(&mut database.connect()).unwrap();
    kill();
}

/// Processes of ours, one after the other, until the time is over. Each is killed.
fn ours(database: &TestDatabase, slot: usize, end: Instant) {
    let mut random = fastrand::Rng::with_seed(slot as u64);
    for life in 0.. {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        let name = format!("rust-{slot}-{life}");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "soak::contend", "--ignored"]).env(WORKER, random.u64(..).to_string());
        command.env("DATABASE_URL", url_for(database, &name)).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        std::thread::sleep(left.min(Duration::from_millis(random.u64(2000..8000))));
        kill(database, &name, || child.kill().unwrap());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(9), "{name} ended itself\n{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// Peers, one after the other, until the time is over. Each is killed. Hands out what their calls threw.
fn theirs(database: &TestDatabase, slot: usize, end: Instant) -> BTreeMap<String, usize> {
    let mut random = fastrand::Rng::with_seed(100 + slot as u64);
    let keys: Vec<_> = jobs().iter().map(|job| job.key().to_string()).collect();
    let mut threw = BTreeMap::new();
    for life in 0.. {
        if Instant::now() >= end {
            break;
        }
        let name = format!("peer-{slot}-{life}");
        let mut peer = Peer::with(&url_for(database, &name), 0).expect("it was there before");
        peer.send(&json!({ "do": "contend", "keys": keys, "seconds": 120, "seed": random.u32(..), "maxAgeMs": MAX_AGE * 1000.0 }));
        let left = end.saturating_duration_since(Instant::now());
        std::thread::sleep(left.min(Duration::from_millis(random.u64(4000..12000))));
        kill(database, &name, || peer.kill());
        for line in peer.rest() {
            let what = line["threw"].as_str().map_or_else(|| line.to_string(), str::to_owned);
            *threw.entry(what).or_default() += 1;
        }
    }
    threw
}

#[test]
fn four_of_each_contend_for_a_minute_with_crashes_and_only_slow_peers_are_displaced() {
    let database = TestDatabase::new();
    if Peer::beside(&database).is_none() {
        return;
    }
    database.execute(TRIGGER);
    database.execute(VIEWS);
    let end = Instant::now() + DURATION;
    let threw = std::thread::scope(|scope| {
        let database = &database;
        let peers: Vec<_> = (0..EACH).map(|slot| scope.spawn(move || theirs(database, slot, end))).collect();
        for slot in 0..EACH {
            scope.spawn(move || ours(database, slot, end));
        }
        let mut threw: BTreeMap<String, usize> = BTreeMap::new();
        for (what, times) in peers.into_iter().flat_map(|thread| thread.join().unwrap()) {
            *threw.entry(what).or_default() += times;
        }
        threw
    });

    let count = |sql: &str| database.count(&format!("SELECT count(*) FROM {sql}"));
    let displaced = |of: &str, by: &str| count(&format!("displaced WHERE holder LIKE '{of}-%' AND by LIKE '{by}-%'"));
    let tally = format!(
        "claims: {} of ours, {} of peers; displaced: ours by ours {}, ours by peers {}, peers by ours {}, peers by peers {}; leases lost {}; killed {}; peers threw {threw:?}",
        count("claims WHERE who LIKE 'rust-%'"),
        count("claims WHERE who LIKE 'peer-%'"),
        displaced("rust", "rust"),
        displaced("rust", "peer"),
        displaced("peer", "rust"),
        displaced("peer", "peer"),
        count("lost"),
        count("killed"),
    );
    println!("{tally}");
    let live = format!("displaced WHERE age <= {MAX_AGE}");
    assert_eq!(count(&live), 0, "displaced before the maximum age was over\n{tally}\n{:?}", show(&database, &live));
    // A holder of ours is displaced when it was killed, or when it knew that it had lost its lease.
    let alive = r"displaced d WHERE holder LIKE 'rust-%'
        AND NOT EXISTS (SELECT 1 FROM killed k WHERE k.who = d.holder AND k.at < d.at)
        AND NOT EXISTS (SELECT 1 FROM lost l WHERE l.holder = d.run AND l.at - make_interval(secs => l.trusted_ago) < d.at)";
    assert_eq!(
        count(alive),
        0,
        "runs of ours that went on beside their successor\n{tally}\n{:?}",
        show(&database, alive)
    );
    let allowed = |what: &str| what.ends_with(": P2028") || what == "groomer: P2002";
    assert!(threw.keys().all(|what| allowed(what)), "{tally}");
    let enough = displaced("rust", "rust") + displaced("rust", "peer") > 0
        && displaced("peer", "rust") > 0
        && count("claims WHERE who LIKE 'peer-%'") > 10
        && count("claims WHERE who LIKE 'rust-%'") > 10;
    assert!(enough, "too little happened: {tally}");
}

/// Rows of a judgement, for people.
fn show(database: &TestDatabase, rows: &str) -> Vec<String> {
    #[derive(QueryableByName)]
    struct Row {
        #[diesel(sql_type = Text)]
        text: String,
    }
    let sql = format!("SELECT row_to_json(x)::text AS text FROM (SELECT * FROM {rows}) x LIMIT 20");
    let rows: Vec<Row> = diesel::sql_query(sql).load(&mut database.connect()).unwrap();
    rows.into_iter().map(|row| row.text).collect()
}
