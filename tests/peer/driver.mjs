// The peer as a child process: one JSON object a line on standard input, one answer a line on standard output.
//
//   node driver.mjs [--clock-offset MILLISECONDS] [--schema NAME]        DATABASE_URL says where
//
// {"do": "acquire", "syncType": "manual", "key": …, "maxAgeMs": …}    → {"ok": {"locked": true, "runId": "…"}}
// {"do": "release" | "complete" | "fail" | "renewGroomer", "runId": "…", …} → {"ok": true}
// {"do": "acquireGroomer", "staleMs": …, "renewMs": …}               → as acquire; with renewMs it goes on renewing
// {"do": "contend", "keys": […], "maxAgeMs": …, "seconds": …, "seed": …}   → {"ok": {"claims": …, "wins": …, "errors": {…}}}
//
// What Prisma throws comes back as {"error": {"code": "P2028", "message": "…"}}. The first line is {"ready": true}. The
// end of the input ends the process.
import readline from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";

const { values: options } = parseArgs({ options: { "clock-offset": { type: "string" }, schema: { type: "string" } } });
const offset = Number(options["clock-offset"] ?? 0);
if (offset !== 0) {
  // Everything in this process, Prisma's own defaults too, reads a clock that is wrong by this much.
  const Right = Date;
  globalThis.Date = class Date extends Right {
    constructor(...given) {
      if (given.length > 0) super(...given);
      else super(Right.now() + offset);
    }
    static now() {
      return Right.now() + offset;
    }
  };
}

const lock = await import("./lock.mjs");
const { PrismaPg } = await import("@prisma/adapter-pg");
const { PrismaClient } = (await import("@prisma/client")).default;

const say = (answer) => process.stdout.write(`${JSON.stringify(answer)}\n`);
const adapter = new PrismaPg({ connectionString: process.env.DATABASE_URL, max: 2 }, { schema: options.schema });
const prisma = new PrismaClient({ adapter, errorFormat: "minimal" });
const keepers = new Map();

const commands = {
  acquire: ({ syncType, key, maxAgeMs }) => lock.acquire(prisma, syncType, { key, maxAgeMs }),
  async release({ runId }) {
    keepers.get(runId)?.();
    keepers.delete(runId);
    return lock.release(prisma, runId);
  },
  complete: ({ runId, ...report }) => lock.complete(prisma, runId, report),
  fail: ({ runId, errorMessage }) => lock.fail(prisma, runId, errorMessage),
  async acquireGroomer({ staleMs, renewMs }) {
    const answer = await lock.acquireGroomer(prisma, { staleMs });
    if (answer.locked && renewMs) keepers.set(answer.runId, lock.keepGroomer(prisma, answer.runId, { renewMs }));
    return answer;
  },
  renewGroomer: ({ runId }) => lock.renewGroomer(prisma, runId),
  contend,
};

/** Claims random keys, holds each for a random time up to twice the maximum age, and releases it. Every error is counted. */
async function contend({ keys, maxAgeMs, seconds, seed }) {
  const random = mulberry32(seed);
  const told = { claims: 0, wins: 0, errors: {} };
  const end = Date.now() + seconds * 1000;
  const attempt = async (key, call) => {
    try {
      return await call();
    } catch (error) {
      const what = `${key}: ${error.code ?? error.message}`;
      told.errors[what] = (told.errors[what] ?? 0) + 1;
      say({ threw: what });
      return { locked: false };
    }
  };
  while (Date.now() < end) {
    const key = keys[Math.floor(random() * keys.length)];
    const groomer = key === lock.GROOMER.key;
    told.claims += 1;
    const answer = await attempt(key, () =>
      groomer
        ? lock.acquireGroomer(prisma, { staleMs: maxAgeMs })
        : lock.acquire(prisma, key, { key, maxAgeMs }),
    );
    if (!answer.locked) {
      await sleep(random() * 20);
      continue;
    }
    told.wins += 1;
    await sleep(random() * 2 * maxAgeMs);
    if (!groomer) await attempt(key, () => lock.complete(prisma, answer.runId));
    await attempt(key, () => lock.release(prisma, answer.runId));
  }
  return told;
}

/** A small random generator with a seed. */
function mulberry32(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

await prisma.$connect();
say({ ready: true });
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { do: command, ...input } = JSON.parse(line);
  try {
    say({ ok: await commands[command](input) });
  } catch (error) {
    say({ error: { code: error.code ?? null, message: error.message } });
  }
}
process.exit(0);
