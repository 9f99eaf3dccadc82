// The TypeScript peer's lock under load: node peer.mjs WORKERS, with DATABASE_URL. It says `ready` and its versions, takes orders such as
// {"keys": ["a"], "milliseconds": 400} on standard input, one a line, and answers each with what every worker took its
// time for, in microseconds. All workers share this process and one Prisma Client, as in the application.
import { createRequire } from "node:module";
import readline from "node:readline";
import * as lock from "../tests/peer/lock.mjs";

const require = createRequire(new URL("../tests/peer/package.json", import.meta.url));
const { PrismaPg } = require("@prisma/adapter-pg");
const { PrismaClient } = require("@prisma/client");

const workers = Number(process.argv[2]);
const adapter = new PrismaPg({ connectionString: process.env.DATABASE_URL, max: workers });
const prisma = new PrismaClient({ adapter, errorFormat: "minimal" });

async function work(key, start, end) {
  const times = { acquire: [], lose: [], release: [], cycle: [], seconds: 0 };
  let first = null;
  for (;;) {
    const begun = performance.now();
    const answer = await lock.acquire(prisma, "bench", { key });
    const answered = performance.now();
    if (answer.locked && !(await lock.release(prisma, answer.runId))) throw new Error(`${key} was not ours`);
    const freed = performance.now();
    if (begun >= start) {
      first ??= begun;
      (answer.locked ? times.acquire : times.lose).push((answered - begun) * 1000);
      if (answer.locked) {
        times.release.push((freed - answered) * 1000);
        times.cycle.push((freed - begun) * 1000);
      }
    }
    if (freed >= end) {
      times.seconds = first === null ? 0 : (freed - first) / 1000;
      return times;
    }
  }
}

await prisma.$connect();
const { version } = require("@prisma/client/package.json");
console.log(`ready, Node ${process.versions.node}, Prisma Client ${version}`);
for await (const line of readline.createInterface({ input: process.stdin })) {
  const { keys, milliseconds } = JSON.parse(line);
  const start = performance.now() + milliseconds / 5;
  console.log(JSON.stringify(await Promise.all(keys.map((key) => work(key, start, start + milliseconds)))));
}
process.exit(0);
