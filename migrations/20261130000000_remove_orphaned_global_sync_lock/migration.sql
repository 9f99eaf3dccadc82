-- Removes the row `global` of the retired shared key if nobody holds it any more: no holder, or older than the maximum
-- age. A live row stays and so does every other row. Nothing here raises, because a failed migration would block every
-- later deploy. `sync-lock migrate` passes the configured maximum age in a setting. Otherwise 30 minutes count.
DELETE FROM "sync_lock"
WHERE "id" = 'global'
  AND ("syncRunId" IS NULL
    OR extract(epoch FROM "acquiredAt") < extract(epoch FROM clock_timestamp())
      - CASE WHEN current_setting('sync_lock.max_age_seconds', true) ~ '^[0-9]{1,18}([.][0-9]{1,9})?$'
          THEN current_setting('sync_lock.max_age_seconds', true)::float8 ELSE 1800 END);
