//! What the benches measure and the public API does not offer alone. Not part of the public promise.

use diesel::prelude::*;

use crate::store::Store;

/// How many leases the heartbeat renews by one statement.
pub const CHUNK: usize = crate::heartbeat::CHUNK;

/// One renewal statement of the heartbeat, for leases given as keys and run ids. Says how many it renewed.
///
/// # Errors
///
/// What diesel says.
pub fn renew(conn: &mut PgConnection, keys: &[&str], run_ids: &[&str]) -> QueryResult<usize> {
    let renewals = Store::default().renew(conn, keys, run_ids)?;
    Ok(renewals.iter().filter(|renewal| renewal.renewed).count())
}
