/** What the node scripts of this folder share: as calls.py. */

import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

export const { CLIENTS_URL: ROOT, CLIENTS_MODEL: MODEL, CLIENTS_KEY: KEY } = process.env;
export const URL = `${ROOT}/v1`;
export const QUESTION = "Return the sum of two numbers";
export const TOO_LONG = "word ".repeat(20_000);
export const ENDLESS = 7_000;
const ABORT_MS = 1_000;

/** Make calls, [name, function] each, in their order. */
export async function run(calls) {
  for (const [call, make] of calls) {
    const begin = performance.now();
    let outcome = "ok";
    try {
      await make();
    } catch (error) {
      outcome = `${error.name}: ${error.message}`.slice(0, 600);
    }
    console.log(JSON.stringify({ call, outcome, s: Math.round(performance.now() - begin) / 1000 }));
  }
}

/** The fields that every schema here asks for. */
export function expectChoice(fields) {
  assert(["red", "green", "blue"].includes(fields?.colour), JSON.stringify(fields));
  assert(Number.isInteger(fields.count) && fields.count >= 0 && fields.count <= 9, JSON.stringify(fields));
}

async function numRunning() {
  const reply = await fetch(`${ROOT}/metrics`, { headers: { authorization: `Bearer ${KEY}` } });
  const lines = (await reply.text()).split("\n");
  const found = lines.filter((line) => line.startsWith("vllm:num_requests_running"));
  return found.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

/** A request runs, or will soon; the client leaves it, and the server notices. */
export async function expectAbort(leave) {
  for (let tries = 0; !(await numRunning()); tries += 1) {
    assert(tries < 50, "the request does not run");
    await sleep(20);
  }
  leave();
  const until = performance.now() + ABORT_MS;
  while (await numRunning()) {
    assert(performance.now() < until, `the request still runs ${ABORT_MS} ms after the client left`);
    await sleep(20);
  }
}
