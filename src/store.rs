//! All SQL: one function a statement, each with the invariant it keeps.
//!
//! Two rules hold everywhere. Age is judged by `clock_timestamp()` at the moment a row is looked at, never by the
//! client's clock and never by the start of a transaction. And no statement depends on whether a timestamp column has a
//! time zone: `extract(epoch …)` and `date_part('epoch', …)` read both kinds as UTC, and `stamp!` writes the column's own
//! kind.
//!
//! A run record is looked up by its id: `"status" || '' = 'running'` keeps the planner from the index on the status, by which
//! it would read every record that says so, and after a bad night or before the first ANALYZE that may be thousands.
//!
//! diesel caches a statement by its text and so prepares it once per connection. The values are bound once, in a `WITH`
//! item that nothing refers to, so that the text may name them `$1`, `$2`, … as often as it likes.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{Array, BigInt, Bool, Double, Nullable, Text};

use crate::config::MaxAge;
use crate::key::{Job, LockKey};
use crate::run::{Ending, RunId};

/// How long a statement waits for a row or an uncommitted key of another transaction. Longer than a healthy transaction
/// of a peer holds one, shorter than anybody notices.
pub(crate) const LOCK_WAIT: Duration = Duration::from_millis(200);

/// [`LOCK_WAIT`] as Postgres reads it.
const LOCK_WAIT_MS: &str = "200";

/// "Now" by the database's clock, in the type of the given column.
macro_rules! stamp {
    ($table:literal, $column:literal) => {
        stamp!($table, $column, "extract(epoch FROM clock_timestamp())")
    };
    ($table:literal, $column:literal, $epoch:literal) => {
        concat!(
            "coalesce((NULL::\"",
            $table,
            "\").\"",
            $column,
            "\", 'epoch') + make_interval(secs => (",
            $epoch,
            ")::float8)"
        )
    };
}

/// Remembers the caller's own `lock_timeout` before a statement sets one for itself. A statement that joins it cannot
/// set first and remember later.
macro_rules! bounded {
    () => {
        "before AS MATERIALIZED (SELECT current_setting('lock_timeout') AS lock_timeout)"
    };
}

/// Puts the caller's own `lock_timeout` back: inside a transaction the setting would stay until its end. Comes last in a
/// `SELECT`, when everything that sets it has run.
macro_rules! restored {
    () => {
        "set_config('lock_timeout', (SELECT lock_timeout FROM before), true) IS NOT NULL"
    };
}

/// The answer to a claim.
#[expect(clippy::struct_excessive_bools, reason = "the columns of a row")]
#[derive(Clone, Debug, PartialEq, Queryable)]
pub(crate) struct Claim {
    pub(crate) won: bool,
    /// There was no row before.
    pub(crate) fresh: bool,
    /// Of a win: whom it displaced. Of a loss: who holds the key.
    pub(crate) holder: Option<String>,
    /// Of a win: how old the displaced row was. Of a loss: how old the holder's row is. In seconds; not finite if the
    /// row's stamp is not.
    pub(crate) age: Option<f64>,
    /// When our own row was stamped, in microseconds since 1970.
    pub(crate) at_micros: Option<i64>,
    /// The displaced run's record may still say `running`.
    pub(crate) displaced_open: bool,
    /// The caller's `lock_timeout` is what it was.
    _restored: bool,
}

/// What became of one lease at a renewal.
#[derive(Clone, Debug, PartialEq, Queryable)]
pub(crate) struct Renewal {
    pub(crate) run_id: String,
    pub(crate) renewed: bool,
    /// The row is the lease's, renewed or only locked by somebody.
    pub(crate) ours: bool,
    pub(crate) holder: Option<String>,
}

/// What became of a run that ended.
#[expect(clippy::struct_excessive_bools, reason = "the columns of a row")]
#[derive(Clone, Copy, Debug, Queryable)]
pub(crate) struct Ended {
    /// Its record says so now.
    pub(crate) recorded: bool,
    /// Its row is free now.
    pub(crate) freed: bool,
    /// Its record had said just that before: the answer to the same statement was lost.
    pub(crate) before: bool,
    /// The caller's `lock_timeout` is what it was.
    _restored: bool,
}

/// A run's end in the columns of its record.
struct RecordedEnd {
    status: &'static str,
    repos_fetched: Option<i64>,
    synced_count: Option<i64>,
    notes: Option<String>,
    error: Option<String>,
}

impl RecordedEnd {
    fn of(ending: &Ending) -> Self {
        match ending {
            Ending::Completed(report) => Self {
                status: "completed",
                repos_fetched: Some(report.repos_fetched.into()),
                synced_count: Some(report.synced_count.into()),
                notes: report.notes.as_deref().map(storable),
                error: None,
            },
            Ending::Failed(message) => Self {
                status: "failed",
                repos_fetched: None,
                synced_count: None,
                notes: None,
                error: Some(storable(message)),
            },
        }
    }

    /// Its columns in the order in which they are declared.
    fn binds(&self) -> [Bind<'_>; 5] {
        [
            Bind::Text(self.status),
            Bind::MaybeWhole(self.repos_fetched),
            Bind::MaybeWhole(self.synced_count),
            Bind::MaybeText(self.notes.as_deref()),
            Bind::MaybeText(self.error.as_deref()),
        ]
    }
}

/// A row of `sync_lock` as it stands.
#[derive(Clone, Debug, PartialEq, Queryable)]
pub(crate) struct Row {
    pub(crate) key: String,
    pub(crate) holder: Option<String>,
    /// Microseconds since 1970; none for an infinite stamp.
    pub(crate) at_micros: Option<i64>,
    /// Seconds; not finite if the stamp is not.
    pub(crate) age: f64,
}

/// The statements, for tables that the search path finds or that are in a schema of their own. A schema is written into
/// the text, because behind a pooler a connection keeps no search path.
#[derive(Clone, Debug, Default)]
pub(crate) struct Store {
    /// Quoted, with the dot: what is put before the name of a table.
    prefix: Option<Arc<str>>,
}

impl Store {
    /// For the tables in a schema, or for those that the search path finds.
    pub(crate) fn new(schema: Option<&str>) -> Self {
        Self { prefix: schema.map(|schema| format!("{}.", quoted(schema)).into()) }
    }

    fn prefix(&self) -> &str {
        self.prefix.as_deref().unwrap_or_default()
    }

    fn statement<'a, Row>(&self, text: &'static str, binds: &'a [Bind<'a>]) -> Statement<'a, Row> {
        let text = match self.prefix() {
            "" => Cow::Borrowed(text),
            prefix => ["sync_lock", "IssueSyncRun"]
                .iter()
                .fold(text.to_owned(), |text, table| {
                    text.replace(&format!("\"{table}\""), &format!("{prefix}\"{table}\""))
                })
                .into(),
        };
        Statement { text, binds, row: PhantomData }
    }

    /// Claims the job's key for a run. Invariants: it wins only over no row, a row without a holder, or a row older than
    /// the maximum age; exactly one of any number of contenders wins; a loser against a committed live row writes nothing;
    /// a winner's run record and the end of the displaced run's record commit with the row or not at all.
    ///
    /// `SKIP LOCKED` lets it pass a row that somebody is changing. Only an uncommitted insert of the same key can make it
    /// wait, for [`LOCK_WAIT`]; the caller's own `lock_timeout` is put back afterwards.
    ///
    /// The displaced run's record is looked up only if there is a displaced run: as a join, every claim could read all
    /// records.
    pub(crate) fn claim(
        &self,
        conn: &mut PgConnection,
        job: &Job,
        run_id: &RunId,
        max_age: MaxAge,
    ) -> QueryResult<Claim> {
        const SQL: &str = concat!(
            r#", "#,
            bounded!(),
            r#",
            cur AS (
              SELECT "id", "syncRunId", extract(epoch FROM "acquiredAt") AS at FROM "sync_lock"
              WHERE "id" = $1 AND ("syncRunId" IS NULL
                OR extract(epoch FROM "acquiredAt") < extract(epoch FROM clock_timestamp()) - $4)
              FOR NO KEY UPDATE SKIP LOCKED),
            taken AS (
              UPDATE "sync_lock" l SET "syncRunId" = $2, "acquiredAt" = "#,
            stamp!("sync_lock", "acquiredAt"),
            r#"
              FROM cur WHERE l."id" = cur."id"
              RETURNING false AS fresh, extract(epoch FROM l."acquiredAt") AS at, cur."syncRunId" AS prev, cur.at AS prev_at),
            made AS (
              INSERT INTO "sync_lock" ("id", "syncRunId", "acquiredAt")
              SELECT $1, $2, "#,
            stamp!("sync_lock", "acquiredAt"),
            r#"
              FROM before
              WHERE NOT EXISTS (SELECT 1 FROM "sync_lock" WHERE "id" = $1) AND set_config('lock_timeout', $5, true) IS NOT NULL
              ON CONFLICT ("id") DO NOTHING
              RETURNING true AS fresh, extract(epoch FROM "acquiredAt") AS at, NULL::text AS prev, NULL::numeric AS prev_at),
            won AS (SELECT * FROM taken UNION ALL SELECT * FROM made),
            run AS (
              INSERT INTO "IssueSyncRun" ("id", "status", "syncType", "startedAt")
              SELECT $2, 'running', $3, "#,
            stamp!("IssueSyncRun", "startedAt", "won.at"),
            r#"
              FROM won WHERE $3::text IS NOT NULL),
            displaced AS (
              SELECT r."id" FROM won, LATERAL (
                SELECT "id" FROM "IssueSyncRun" WHERE "id" = won.prev AND "status" || '' = 'running'
                FOR NO KEY UPDATE SKIP LOCKED) r),
            closed AS (
              UPDATE "IssueSyncRun" r SET "status" = 'failed', "errorMessage" = 'lock taken over by run ' || $2,
                "completedAt" = "#,
            stamp!("IssueSyncRun", "completedAt"),
            r#"
              FROM displaced WHERE r."id" = displaced."id" RETURNING 1)
            SELECT w.fresh IS NOT NULL, coalesce(w.fresh, false),
              CASE WHEN w.fresh IS NULL THEN c."syncRunId" ELSE w.prev END,
              (CASE WHEN w.fresh IS NULL THEN extract(epoch FROM clock_timestamp()) - extract(epoch FROM c."acquiredAt")
                ELSE w.at - w.prev_at END)::float8,
              (coalesce(w.at, CASE WHEN c."syncRunId" = $2 THEN extract(epoch FROM c."acquiredAt") END) * 1000000)::bigint,
              w.prev IS NOT NULL AND NOT EXISTS (SELECT 1 FROM closed) AND coalesce(
                (SELECT r."status" = 'running' FROM "IssueSyncRun" r WHERE r."id" = w.prev), $3::text IS NOT NULL), "#,
            restored!(),
            r#"
            FROM (SELECT) one LEFT JOIN won w ON true
              LEFT JOIN "sync_lock" c ON w.fresh IS NULL AND c."id" = $1"#
        );
        let max_age = max_age.duration().as_secs_f64();
        let binds = [
            Bind::Text(job.key().as_str()),
            Bind::Text(run_id.as_str()),
            Bind::MaybeText(job.sync_type()),
            Bind::Float(max_age),
            Bind::Text(LOCK_WAIT_MS),
        ];
        self.statement::<(Bool, Bool, Nullable<Text>, Nullable<Double>, Nullable<BigInt>, Bool, Bool)>(SQL, &binds)
            .get_result(conn)
    }

    /// Who has a key, and how old its row is in seconds; `None` where a claim would find no holder. Invariant: it reads, and
    /// takes no row lock, and it judges nothing: a row that is not too old by now is one that a claim would lose against.
    /// `date_part` gives a float right away; the numeric of `extract` takes longer.
    pub(crate) fn look(&self, conn: &mut PgConnection, key: &LockKey) -> QueryResult<Option<(String, f64)>> {
        const SQL: &str = r#" SELECT "syncRunId", date_part('epoch', clock_timestamp()) - date_part('epoch', "acquiredAt")
            FROM "sync_lock" WHERE "id" = $1 AND "syncRunId" IS NOT NULL"#;
        self.statement::<(Text, Double)>(SQL, &[Bind::Text(key.as_str())]).get_result(conn).optional()
    }

    /// Closes the record of a run that was displaced. Invariant: it neither waits for a record that somebody else is
    /// changing nor touches one that is no longer `running`.
    pub(crate) fn close_displaced(&self, conn: &mut PgConnection, displaced: &str, by: &RunId) -> QueryResult<bool> {
        const SQL: &str = concat!(
            r#", displaced AS (
              SELECT "id" FROM "IssueSyncRun" WHERE "id" = $1 AND "status" || '' = 'running' FOR NO KEY UPDATE SKIP LOCKED),
            closed AS (
              UPDATE "IssueSyncRun" r SET "status" = 'failed', "errorMessage" = 'lock taken over by run ' || $2,
                "completedAt" = "#,
            stamp!("IssueSyncRun", "completedAt"),
            r#"
              FROM displaced WHERE r."id" = displaced."id" RETURNING 1)
            SELECT EXISTS (SELECT 1 FROM closed)"#
        );
        self.statement::<Bool>(SQL, &[Bind::Text(displaced), Bind::Text(by.as_str())]).get_result(conn)
    }

    /// Frees whatever a run holds. Invariant: it deletes by run id alone, so it cannot free a row of another run, and it
    /// deletes, so no row without a holder is left that a peer could not insert over.
    pub(crate) fn release(&self, conn: &mut PgConnection, run_id: &RunId) -> QueryResult<bool> {
        const SQL: &str = concat!(
            ", ",
            bounded!(),
            r#",
            freed AS (
              DELETE FROM "sync_lock" USING before
              WHERE "syncRunId" = $1 AND set_config('lock_timeout', $2, true) IS NOT NULL RETURNING 1)
            SELECT EXISTS (SELECT 1 FROM freed), "#,
            restored!()
        );
        let binds = [Bind::Text(run_id.as_str()), Bind::Text(LOCK_WAIT_MS)];
        let (freed, _restored) = self.statement::<(Bool, Bool)>(SQL, &binds).get_result::<(bool, bool)>(conn)?;
        Ok(freed)
    }

    /// Renews leases, given as keys and run ids, and says what became of each. Invariant: a row is renewed only by key and run
    /// id together, and never inserted; `SKIP LOCKED` keeps one locked row from holding up the others and two processes from
    /// waiting for each other.
    ///
    /// Which rows were renewed is looked up by `IN`, which hashes them: a join compares every lease with every other.
    pub(crate) fn renew(&self, conn: &mut PgConnection, keys: &[&str], run_ids: &[&str]) -> QueryResult<Vec<Renewal>> {
        const SQL: &str = concat!(
            r#", mine AS (
              SELECT l."id" FROM unnest($1, $2) AS u(k, r) JOIN "sync_lock" l ON l."id" = u.k AND l."syncRunId" = u.r
              FOR NO KEY UPDATE OF l SKIP LOCKED),
            beat AS (
              UPDATE "sync_lock" l SET "acquiredAt" = "#,
            stamp!("sync_lock", "acquiredAt"),
            r#"
              FROM mine WHERE l."id" = mine."id" RETURNING l."id", l."syncRunId")
            SELECT u.r, (u.k, u.r) IN (SELECT "id", "syncRunId" FROM beat), (c."syncRunId" = u.r) IS TRUE, c."syncRunId"
            FROM unnest($1, $2) AS u(k, r) LEFT JOIN "sync_lock" c ON c."id" = u.k"#
        );
        let binds = [Bind::Texts(keys), Bind::Texts(run_ids)];
        self.statement::<(Text, Bool, Bool, Nullable<Text>)>(SQL, &binds).get_results(conn)
    }

    /// Who holds a key: nobody, if it is free or an orphan. Invariant: it reads, and takes no row lock.
    pub(crate) fn holder(&self, conn: &mut PgConnection, key: &LockKey) -> QueryResult<Option<String>> {
        const SQL: &str = r#" SELECT "syncRunId" FROM "sync_lock" WHERE "id" = $1"#;
        self.statement::<Nullable<Text>>(SQL, &[Bind::Text(key.as_str())])
            .get_result(conn)
            .optional()
            .map(Option::flatten)
    }

    /// Locks a lease's row until the end of the transaction, by renewing it, and says whether it was still there. Invariant:
    /// between this statement and the commit nobody can take the row over. A holder that vanishes before its commit is
    /// ended by the server after five seconds, and its transaction with it.
    pub(crate) fn fence(&self, conn: &mut PgConnection, key: &LockKey, run_id: &RunId) -> QueryResult<bool> {
        const SQL: &str = concat!(
            r#", fenced AS (
              UPDATE "sync_lock" SET "acquiredAt" = "#,
            stamp!("sync_lock", "acquiredAt"),
            r#"
              WHERE "id" = $1 AND "syncRunId" = $2 AND set_config('lock_timeout', '500', true) IS NOT NULL
                AND set_config('idle_in_transaction_session_timeout', '5000', true) IS NOT NULL RETURNING 1)
            SELECT EXISTS (SELECT 1 FROM fenced)"#
        );
        self.statement::<Bool>(SQL, &[Bind::Text(key.as_str()), Bind::Text(run_id.as_str())]).get_result(conn)
    }

    /// Frees the row of a run and writes the end into its record; says whether a record changed and whether a row was freed.
    /// Invariant: both or none, any number of times; a run that no longer holds its row is recorded as failed, whatever it
    /// thinks of itself.
    pub(crate) fn finish_and_release(
        &self,
        conn: &mut PgConnection,
        key: &LockKey,
        run_id: &RunId,
        ending: &Ending,
    ) -> QueryResult<Ended> {
        const SQL: &str = concat!(
            ", ",
            bounded!(),
            r#",
            freed AS (
              DELETE FROM "sync_lock" USING before
              WHERE "id" = $1 AND "syncRunId" = $2 AND set_config('lock_timeout', $8, true) IS NOT NULL RETURNING 1),
            done AS (
              UPDATE "IssueSyncRun" SET "status" = CASE WHEN EXISTS (SELECT 1 FROM freed) THEN $3 ELSE 'failed' END,
                "reposFetched" = coalesce($4::int, "reposFetched"), "syncedCount" = coalesce($5::int, "syncedCount"),
                "notes" = coalesce($6, "notes"), "errorMessage" = CASE WHEN EXISTS (SELECT 1 FROM freed) THEN $7
                  ELSE coalesce($7, 'the lease was lost before the run ended') END,
                "completedAt" = "#,
            stamp!("IssueSyncRun", "completedAt"),
            r#"
              FROM before
              WHERE "id" = $2 AND "status" || '' = 'running' AND set_config('lock_timeout', $8, true) IS NOT NULL RETURNING 1)
            SELECT EXISTS (SELECT 1 FROM done), EXISTS (SELECT 1 FROM freed),
              EXISTS (SELECT 1 FROM "IssueSyncRun" WHERE "id" = $2 AND "status" = $3 AND "errorMessage" IS NOT DISTINCT FROM $7), "#,
            restored!()
        );
        let end = RecordedEnd::of(ending);
        let [status, repos_fetched, synced_count, notes, error] = end.binds();
        let binds = [
            Bind::Text(key.as_str()),
            Bind::Text(run_id.as_str()),
            status,
            repos_fetched,
            synced_count,
            notes,
            error,
            Bind::Text(LOCK_WAIT_MS),
        ];
        self.statement::<(Bool, Bool, Bool, Bool)>(SQL, &binds).get_result(conn)
    }

    /// Frees a key if that run still holds it, and closes the run's record. Invariant: a row in other hands stays.
    pub(crate) fn force_release(&self, conn: &mut PgConnection, key: &str, holder: &RunId) -> QueryResult<bool> {
        let ending = Ending::Failed("the lock was force-released by an operator".to_owned());
        self.finish_and_release(conn, &LockKey::from_row(key.to_owned()), holder, &ending).map(|ended| ended.freed)
    }

    /// Writes the end of a run into its record. Invariant: only a record that is still `running` changes.
    pub(crate) fn finish(&self, conn: &mut PgConnection, run_id: &RunId, ending: &Ending) -> QueryResult<bool> {
        const SQL: &str = concat!(
            ", ",
            bounded!(),
            r#",
            done AS (
              UPDATE "IssueSyncRun" SET "status" = $2, "reposFetched" = coalesce($3::int, "reposFetched"),
                "syncedCount" = coalesce($4::int, "syncedCount"), "notes" = coalesce($5, "notes"),
                "errorMessage" = coalesce($6, "errorMessage"), "completedAt" = "#,
            stamp!("IssueSyncRun", "completedAt"),
            r#"
              FROM before
              WHERE "id" = $1 AND "status" || '' = 'running' AND set_config('lock_timeout', $7, true) IS NOT NULL RETURNING 1)
            SELECT EXISTS (SELECT 1 FROM done), "#,
            restored!()
        );
        let end = RecordedEnd::of(ending);
        let [status, repos_fetched, synced_count, notes, error] = end.binds();
        let binds =
            [Bind::Text(run_id.as_str()), status, repos_fetched, synced_count, notes, error, Bind::Text(LOCK_WAIT_MS)];
        let (recorded, _restored) = self.statement::<(Bool, Bool)>(SQL, &binds).get_result::<(bool, bool)>(conn)?;
        Ok(recorded)
    }

    /// Lists the rows by key. Invariant: it reads, and takes no row lock.
    pub(crate) fn rows(&self, conn: &mut PgConnection) -> QueryResult<Vec<Row>> {
        const SQL: &str = r#", one AS (SELECT extract(epoch FROM clock_timestamp()) AS now)
            SELECT "id", "syncRunId",
              CASE WHEN isfinite("acquiredAt") THEN (extract(epoch FROM "acquiredAt") * 1000000)::bigint END,
              (one.now - extract(epoch FROM "acquiredAt"))::float8
            FROM one, "sync_lock" ORDER BY "id""#;
        self.statement::<(Text, Nullable<Text>, Nullable<BigInt>, Double)>(SQL, &[]).get_results(conn)
    }

    /// What a claim needs and does not find, as privilege and object; an object without a privilege does not exist.
    /// Invariant: it only reads the catalog, so any role may ask.
    pub(crate) fn obstacles(&self, conn: &mut PgConnection) -> QueryResult<Vec<(Option<String>, String)>> {
        const SQL: &str = r", need(tab, privileges) AS (
              VALUES ('sync_lock', ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']),
                ('IssueSyncRun', ARRAY['SELECT', 'INSERT', 'UPDATE'])),
            found AS (SELECT need.*, to_regclass($1 || quote_ident(tab)) AS oid FROM need),
            hidden AS (
              SELECT found.tab, n.nspname FROM found JOIN pg_class c ON c.relname = found.tab
                JOIN pg_namespace n ON n.oid = c.relnamespace AND NOT has_schema_privilege(n.oid, 'USAGE')
              WHERE found.oid IS NULL)
            SELECT 'USAGE', 'SCHEMA ' || quote_ident(nspname) FROM hidden
            UNION ALL
            SELECT NULL, tab FROM found WHERE oid IS NULL AND tab NOT IN (SELECT tab FROM hidden)
            UNION ALL
            SELECT privilege, 'TABLE ' || quote_ident(tab) FROM found, unnest(privileges) privilege
            WHERE NOT has_table_privilege(oid, privilege)";
        self.statement::<(Nullable<Text>, Text)>(SQL, &[Bind::Text(self.prefix())]).get_results(conn)
    }

    /// Whether no two rows of a table can have the same `id`, which the claim's `ON CONFLICT` builds on. Invariant: it only
    /// reads the catalog.
    pub(crate) fn has_key(&self, conn: &mut PgConnection, table: &str) -> QueryResult<bool> {
        const SQL: &str = r" SELECT EXISTS (
            SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
            WHERE i.indrelid = to_regclass($2 || quote_ident($1)) AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
              AND i.indnkeyatts = 1 AND a.attname = 'id')";
        self.statement::<Bool>(SQL, &[Bind::Text(table), Bind::Text(self.prefix())]).get_result(conn)
    }

    /// The columns of a table, as name and type. Empty if there is no such table. Invariant: it only reads the catalog.
    pub(crate) fn columns(&self, conn: &mut PgConnection, table: &str) -> QueryResult<Vec<(String, String)>> {
        const SQL: &str = r", one AS (SELECT to_regclass($2 || quote_ident($1)) AS oid)
            SELECT a.attname::text, format_type(a.atttypid, NULL)
            FROM one JOIN pg_attribute a ON a.attrelid = one.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum";
        self.statement::<(Text, Text)>(SQL, &[Bind::Text(table), Bind::Text(self.prefix())]).get_results(conn)
    }
}

/// Whether a table of that name is in the search path. Invariant: it only reads the catalog.
pub(crate) fn table_exists(conn: &mut PgConnection, table: &str) -> QueryResult<bool> {
    const SQL: &str = " SELECT to_regclass(quote_ident($1)) IS NOT NULL";
    Statement::<Bool>::new(SQL, &[Bind::Text(table)]).get_result(conn)
}

/// What the migration needs and the role does not have, as privilege and object. Invariant: it only reads the catalog.
/// diesel creates its bookkeeping table with IF NOT EXISTS, which asks for CREATE even where the table is there.
pub(crate) fn migration_obstacles(conn: &mut PgConnection) -> QueryResult<Vec<(String, String)>> {
    const SQL: &str = r", need(tab, privileges) AS (
          VALUES ('sync_lock', ARRAY['SELECT', 'UPDATE', 'DELETE']),
            ('__diesel_schema_migrations', ARRAY['SELECT', 'INSERT']))
        SELECT 'CREATE', 'SCHEMA ' || quote_ident(current_schema()) WHERE NOT has_schema_privilege(current_schema(), 'CREATE')
        UNION ALL
        SELECT privilege, 'TABLE ' || quote_ident(tab) FROM need, unnest(privileges) privilege
        WHERE NOT has_table_privilege(to_regclass(quote_ident(tab)), privilege)";
    Statement::<(Text, Text)>::new(SQL, &[]).get_results(conn)
}

/// Sets a setting until the end of the transaction. Invariant: nothing of it is left on the connection afterwards.
pub(crate) fn set_local(conn: &mut PgConnection, setting: &str, value: &str) -> QueryResult<()> {
    const SQL: &str = " SELECT set_config($1, $2, true)";
    Statement::<Text>::new(SQL, &[Bind::Text(setting), Bind::Text(value)]).get_result::<String>(conn).map(drop)
}

/// Makes a transaction find the tables in a schema. Invariant: as for [`set_local`], so it works through a pooler.
pub(crate) fn set_schema(conn: &mut PgConnection, schema: &str) -> QueryResult<()> {
    set_local(conn, "search_path", &quoted(schema))
}

fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// What matters of a server, and of the way to it.
#[cfg_attr(not(feature = "cli"), expect(dead_code, reason = "only the doctor asks for all of it"))]
#[derive(Clone, Debug, Queryable)]
pub(crate) struct Server {
    /// As in `150004` for 15.4.
    pub(crate) version: i64,
    /// What a session of this role starts with; diesel sets its own to UTC.
    pub(crate) time_zone: String,
    pub(crate) read_only: bool,
    /// Seconds since 1970.
    pub(crate) clock: f64,
    /// The port that the server listens on; none for a socket.
    pub(crate) port: Option<i64>,
}

impl Server {
    /// Whether peers that write their times without a zone are understood, and understand ours.
    pub(crate) fn speaks_utc(&self) -> bool {
        matches!(self.time_zone.as_str(), "UTC" | "Etc/UTC" | "GMT" | "Etc/GMT" | "Universal" | "Zulu")
    }

    pub(crate) fn warn_of_time_zone(&self) {
        if !self.speaks_utc() {
            tracing::warn!(
                time_zone = self.time_zone,
                "the time zone of the database is not UTC: rows of TypeScript replicas land hours off, see `sync-lock doctor`"
            );
        }
    }
}

/// Asks a server what it is. Invariant: it only reads settings, so any role may ask.
pub(crate) fn server(conn: &mut PgConnection) -> QueryResult<Server> {
    const SQL: &str = " SELECT current_setting('server_version_num')::bigint,
          (SELECT reset_val FROM pg_settings WHERE name = 'TimeZone'),
          pg_is_in_recovery() OR current_setting('default_transaction_read_only')::bool,
          extract(epoch FROM clock_timestamp())::float8, inet_server_port()::bigint";
    Statement::<(BigInt, Text, Bool, Double, Nullable<BigInt>)>::new(SQL, &[]).get_result(conn)
}

/// Waits for the migration lock. Invariant: it ends with the transaction, so it works through a pooler and no killed
/// process can leave it behind.
pub(crate) fn lock_migrations(conn: &mut PgConnection) -> QueryResult<()> {
    const SQL: &str = ", one AS (SELECT pg_advisory_xact_lock(hashtextextended($1, 0))) SELECT count(*) FROM one";
    Statement::<BigInt>::new(SQL, &[Bind::Text("sync-lock migrate")]).get_result::<i64>(conn).map(drop)
}

/// Locks diesel's bookkeeping until the end of the transaction. Invariant: it only takes the lock that writing to the
/// table takes.
pub(crate) fn lock_bookkeeping(conn: &mut PgConnection) -> QueryResult<()> {
    conn.batch_execute("LOCK TABLE __diesel_schema_migrations IN ROW EXCLUSIVE MODE")
}

/// Locks the leftover shared row and shows it. Invariant: while the transaction lasts, the row that was shown is the
/// row that the cleanup meets.
pub(crate) fn lock_legacy_row(conn: &mut PgConnection) -> QueryResult<Option<Row>> {
    const SQL: &str = r#", row AS (SELECT * FROM "sync_lock" WHERE "id" = $1 FOR UPDATE)
        SELECT "id", "syncRunId",
          CASE WHEN isfinite("acquiredAt") THEN (extract(epoch FROM "acquiredAt") * 1000000)::bigint END,
          (extract(epoch FROM clock_timestamp()) - extract(epoch FROM "acquiredAt"))::float8
        FROM row"#;
    let binds = [Bind::Text(crate::key::LEGACY_KEY)];
    Statement::<(Text, Nullable<Text>, Nullable<BigInt>, Double)>::new(SQL, &binds).get_result(conn).optional()
}

/// The conditional DELETE of the migration, which both migration tools run.
pub(crate) const CLEANUP: &str = include_str!("../migrations/20261130000000_remove_orphaned_global_sync_lock/up.sql");

/// The two tables, for a database that Prisma will never manage.
pub(crate) const BOOTSTRAP: &str = include_str!("bootstrap.sql");

/// A value of a statement.
enum Bind<'a> {
    Text(&'a str),
    Texts(&'a [&'a str]),
    MaybeText(Option<&'a str>),
    MaybeWhole(Option<i64>),
    Float(f64),
}

/// A statement as diesel runs and caches it: `text` follows the `WITH` item that binds the values.
struct Statement<'a, Row> {
    text: Cow<'static, str>,
    binds: &'a [Bind<'a>],
    row: PhantomData<Row>,
}

impl<'a, Row> Statement<'a, Row> {
    /// For tables that the search path finds.
    fn new(text: &'static str, binds: &'a [Bind<'a>]) -> Self {
        Store::default().statement(text, binds)
    }
}

/// Cached by text and not by type: two statements may share a type.
impl<Row> QueryId for Statement<'_, Row> {
    type QueryId = ();
    const HAS_STATIC_QUERY_ID: bool = false;
}

impl<Row> Query for Statement<'_, Row> {
    type SqlType = Row;
}

impl<Row> RunQueryDsl<PgConnection> for Statement<'_, Row> {}

impl<Row> QueryFragment<Pg> for Statement<'_, Row> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        // Without a value there is still a `WITH` item, so that every text may go on with a comma.
        out.push_sql(if self.binds.is_empty() { "WITH p AS (SELECT 1" } else { "WITH p AS (SELECT " });
        for (index, bind) in self.binds.iter().enumerate() {
            if index > 0 {
                out.push_sql(", ");
            }
            match bind {
                Bind::Text(value) => {
                    out.push_bind_param::<Text, _>(*value)?;
                    out.push_sql("::text");
                }
                Bind::Texts(values) => {
                    out.push_bind_param::<Array<Text>, [&str]>(values)?;
                    out.push_sql("::text[]");
                }
                Bind::MaybeText(value) => {
                    out.push_bind_param::<Nullable<Text>, _>(value)?;
                    out.push_sql("::text");
                }
                Bind::MaybeWhole(value) => {
                    out.push_bind_param::<Nullable<BigInt>, _>(value)?;
                    out.push_sql("::bigint");
                }
                Bind::Float(value) => {
                    out.push_bind_param::<Double, _>(value)?;
                    out.push_sql("::float8");
                }
            }
        }
        out.push_sql(")");
        out.push_sql(&self.text);
        Ok(())
    }
}

/// Postgres text cannot hold a NUL. The words around it are worth more than the character.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
