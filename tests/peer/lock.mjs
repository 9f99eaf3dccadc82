// The lock as the TypeScript module of the replicas takes it, in our own words, through Prisma Client.
//
// It is a peer to test against, with the module's ways kept as they are: it reads the clock of its own process, it sends
// one statement after the other, it looks first and writes later, and nothing is renewed.

/** Which row a run of each type takes. */
export const KEYS = {
  scheduled: "issue-sync",
  manual: "issue-sync",
  automation: "automation",
  "pr-followup": "pr-followup",
  reconcile: "reconcile",
  "stale-work": "stale-work",
};

const DEFAULT_MAX_AGE_MS = 30 * 60 * 1000;

/** `DISPATCH_SYNC_LOCK_MAX_AGE_MS`, as carelessly as the module reads it: `1e6` is 1 ms and `30m` is 30 ms. */
export function maxAgeFromEnv(env = process.env) {
  const ms = Number.parseInt(env.DISPATCH_SYNC_LOCK_MAX_AGE_MS ?? "", 10);
  return ms > 0 ? ms : DEFAULT_MAX_AGE_MS;
}

/** Undoes the transaction of a claim that lost, and never leaves this file. */
class LostRace extends Error {}

/**
 * Claims the key of a sync type. Newer versions of the module know more types, so a type it does not know is its own key.
 * Answers `{ locked: true, runId }` or `{ locked: false }`.
 */
export async function acquire(prisma, syncType, { key = KEYS[syncType] ?? syncType, maxAgeMs = maxAgeFromEnv() } = {}) {
  const staleBefore = new Date(Date.now() - maxAgeMs);
  const seen = await prisma.syncLock.findUnique({ where: { id: key } });
  if (seen?.syncRunId && seen.acquiredAt >= staleBefore) return { locked: false };

  try {
    return await prisma.$transaction(async (tx) => {
      const run = await tx.issueSyncRun.create({ data: { status: "running", syncType } });
      const mine = { syncRunId: run.id, acquiredAt: new Date() };
      const takeOver = async () => {
        const free = [{ syncRunId: null }, { acquiredAt: { lt: staleBefore } }];
        return (await tx.syncLock.updateMany({ where: { id: key, OR: free }, data: mine })).count === 1;
      };
      const insert = async () =>
        (await tx.syncLock.createMany({ data: [{ id: key, ...mine }], skipDuplicates: true })).count === 1;
      // An insert that did nothing met a row; it may be free by now.
      if ((await takeOver()) || (await insert()) || (await takeOver())) return { locked: true, runId: run.id };
      throw new LostRace();
    });
  } catch (error) {
    if (error instanceof LostRace) return { locked: false };
    throw error;
  }
}

/** Frees whatever a run holds, and says whether that was anything. */
export async function release(prisma, runId) {
  return (await prisma.syncLock.deleteMany({ where: { syncRunId: runId } })).count > 0;
}

/** Finishes a run's record if it is still running, and says whether it was. */
export async function complete(prisma, runId, { reposFetched = 0, syncedCount = 0, notes = null } = {}) {
  const data = { status: "completed", reposFetched, syncedCount, notes, completedAt: new Date() };
  return (await prisma.issueSyncRun.updateMany({ where: { id: runId, status: "running" }, data })).count > 0;
}

export async function fail(prisma, runId, errorMessage) {
  const data = { status: "failed", errorMessage, completedAt: new Date() };
  return (await prisma.issueSyncRun.updateMany({ where: { id: runId, status: "running" }, data })).count > 0;
}

/** The groomer's row. Its older versions call it stale after the maximum age and never renew it. */
export const GROOMER = { key: "groomer", staleMs: 90_000, renewMs: 30_000 };

/**
 * Claims the groomer's row for a token: reads it, deletes it if it is stale, and creates it. There is no transaction, and
 * the loser of a race gets Prisma's P2002.
 */
export async function acquireGroomer(prisma, { token = crypto.randomUUID(), staleMs = GROOMER.staleMs } = {}) {
  const staleBefore = new Date(Date.now() - staleMs);
  const seen = await prisma.syncLock.findUnique({ where: { id: GROOMER.key } });
  if (seen?.syncRunId) {
    if (seen.acquiredAt >= staleBefore) return { locked: false };
    const stale = { id: GROOMER.key, syncRunId: seen.syncRunId, acquiredAt: { lt: staleBefore } };
    await prisma.syncLock.deleteMany({ where: stale });
  }
  await prisma.syncLock.create({ data: { id: GROOMER.key, syncRunId: token, acquiredAt: new Date() } });
  return { locked: true, runId: token };
}

/** Renews the groomer's row by key and token, and says whether it was still there. */
export async function renewGroomer(prisma, token) {
  const mine = { id: GROOMER.key, syncRunId: token };
  return (await prisma.syncLock.updateMany({ where: mine, data: { acquiredAt: new Date() } })).count > 0;
}

/** Renews until the returned function is called. */
export function keepGroomer(prisma, token, { renewMs = GROOMER.renewMs, failed = () => {} } = {}) {
  const timer = setInterval(() => renewGroomer(prisma, token).catch(failed), renewMs);
  return () => clearInterval(timer);
}
