//! 64 contenders for half a minute, judged by a trigger.

use std::thread::sleep;
use std::time::{Duration, Instant};

use sync_lock::blocking::{acquire_lock, complete_run, release_lock};
use sync_lock::{Acquisition, LockKey, RunReport};

use crate::support::{TestDatabase, key, race, seconds};

const CONTENDERS: usize = 64;
const KEYS: usize = 8;
const DURATION: Duration = Duration::from_secs(30);
const MAX_AGE: f64 = 0.040;

/// The judge: it sees every change as the server makes it.
const TRIGGER: &str = r#"
    CREATE TABLE judged (op text, old_holder text, new_holder text, old_at timestamptz, new_at timestamptz);
    CREATE FUNCTION judge() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        INSERT INTO judged VALUES (TG_OP, OLD."syncRunId", NEW."syncRunId", OLD."acquiredAt", NEW."acquiredAt");
        RETURN NULL;
    END $$;
    CREATE TRIGGER judge AFTER INSERT OR UPDATE OR DELETE ON "sync_lock" FOR EACH ROW EXECUTE FUNCTION judge()"#;

#[test]
fn sixty_four_contenders_for_half_a_minute_never_take_over_a_live_row() {
    let database = TestDatabase::new();
    database.execute(TRIGGER);
    let keys: Vec<LockKey> = (0..KEYS).map(|index| key(&format!("job-{index}"))).collect();
    let end = Instant::now() + DURATION;
    let tallies = race(&database, CONTENDERS, |index, conn| {
        let mut random = fastrand::Rng::with_seed(index as u64);
        let (mut wins, mut takeovers, mut freed) = (0_i64, 0_i64, 0_i64);
        while Instant::now() < end {
            let job = keys[random.usize(..KEYS)].clone().recorded_as("soak").unwrap();
            match acquire_lock(conn, job, seconds(MAX_AGE)).expect("an answer") {
                Acquisition::Locked { run_id, displaced, .. } => {
                    wins += 1;
                    takeovers += i64::from(displaced.is_some());
                    // Some finish in time, some are too slow, and one in four crashes.
                    sleep(Duration::from_secs_f64(random.f64() * 2.0 * MAX_AGE));
                    if random.u8(..4) > 0 {
                        complete_run(conn, &run_id, &RunReport::default()).expect("an answer");
                        freed += i64::from(release_lock(conn, &run_id).expect("an answer"));
                    }
                }
                Acquisition::Conflict { .. } => sleep(Duration::from_millis(random.u64(..4))),
            }
        }
        (wins, takeovers, freed)
    });
    let sum = |pick: fn(&(i64, i64, i64)) -> i64| tallies.iter().map(pick).sum::<i64>();
    let (wins, takeovers, freed) = (sum(|t| t.0), sum(|t| t.1), sum(|t| t.2));

    let judged = |condition: &str| database.count(&format!("SELECT count(*) FROM judged WHERE {condition}"));
    assert!(
        takeovers > 200 && freed > 200,
        "too little happened: {wins} wins, {takeovers} takeovers, {freed} releases"
    );
    assert_eq!(judged("op = 'UPDATE'"), takeovers);
    assert_eq!(judged("op <> 'DELETE'"), wins);
    assert_eq!(judged("op = 'DELETE'"), freed);
    let live = format!("op = 'UPDATE' AND new_at - old_at <= interval '{MAX_AGE} s'");
    assert_eq!(judged(&live), 0, "takeovers of a live row, of {takeovers}");
    assert_eq!(database.count(r#"SELECT count(*) FROM "IssueSyncRun""#), wins);
    let unclosed = r#"SELECT count(*) FROM judged JOIN "IssueSyncRun" r ON r."id" = old_holder
        WHERE op = 'UPDATE' AND r."status" = 'running'"#;
    assert_eq!(database.count(unclosed), 0, "displaced runs that still say running, of {takeovers}");
    database.assert_no_server_errors();
}
