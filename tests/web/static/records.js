/** Made-up records as `GET /timeline` sends them (docs/api.md): a few workers that prefill, decode, hand over and fail. */

import { between } from "./random.js";

export const HEADER = { kind: "header", version: 1, run_id: "a", unix_ns_at_zero: 0, now_ns: 0, first_sequence: 1, next_sequence: 1, workers: { 0: { state: "ready", role: "prefill" }, 1: { state: "ready", role: "decode" } }, decoding: {} };

/** A step of a worker; more: prefills, joined, left, num_steps. */
export const step = (sequence, worker, start, end, decodes, more = {}) => ({
  kind: "step", sequence, worker, step_id: sequence, start_ns: start, end_ns: end, num_decodes: decodes, decode_context: 9, predicted_ns: 0,
  phase: more.prefills ? (decodes ? "mixed" : "prefill") : "decode", ...more,
});

/** Something that happened to a request. */
export const milestone = (sequence, worker, time, what, id, detail = {}, more = {}) => ({ kind: "request", sequence, worker, time_ns: time, what, request_id: id, detail, ...more });

/** A header and `count` records or so in their order. Steps of two workers; requests that wait, are prefilled, decode and end. */
export function history(random, count = 120) {
  const records = [];
  const clocks = [1, 1];
  const batches = [[], []];
  const joining = [[], []];
  const leaving = [[], []];
  let names = 0;
  const add = (record) => records.push({ ...record, sequence: records.length + 1 });
  while (records.length < count) {
    const worker = between(random, 0, 1);
    const start = clocks[worker] + between(random, 0, 40);
    const end = start + between(random, 1, 300);
    clocks[worker] = end;
    const batch = batches[worker];
    const numSteps = between(random, 1, 3);
    const decodes = random() < 0.7 ? batch.length : 0;
    const changes = { ...(joining[worker].length && { joined: joining[worker] }), ...(leaving[worker].length && { left: leaving[worker] }) };
    [joining[worker], leaving[worker]] = [[], []];
    if (random() < 0.4 || !decodes) {
      const id = `r${names++}`;
      const tokens = between(random, 1, 900);
      add(milestone(0, worker, start, "queued", id, { num_prompt_tokens: tokens }));
      add(step(0, worker, start, end, decodes, { ...changes, prefills: [[id, 0, tokens]] }));
      add(milestone(0, worker, end, "first_token", id));
      batch.push(id);
      joining[worker].push(id);
    } else {
      add(step(0, worker, start, end, decodes, { ...changes, num_steps: numSteps }));
    }
    if (batch.length && random() < 0.25) {
      const [id] = batch.splice(between(random, 0, batch.length - 1), 1);
      if (joining[worker].includes(id)) joining[worker] = joining[worker].filter((other) => other !== id);
      else leaving[worker].push(id);
      add(milestone(0, worker, end, random() < 0.1 ? "preempted" : "finished", id, { reason: "stop", num_cached_tokens: 3 }));
    }
    if (random() < 0.05) add({ kind: "transfer", worker: 1, sender: 0, request_id: `r${between(random, 0, names)}`, start_ns: start, end_ns: end, num_bytes: 9, exposed_ns: 0 });
    if (random() < 0.04) add({ kind: "worker", worker, time_ns: end, state: random() < 0.5 ? "lost" : "ready", detail: "made up" });
  }
  return [HEADER, ...records];
}

/** Everything that a model knows, as plain data. */
export function known(model) {
  const lanes = [...model.lanes.values()].map(({ length, starts, ends, phases, waiting, ...rest }) => ({
    ...rest, columns: [starts, ends, phases, waiting].map((column) => [...column.subarray(0, length)]), batch: [...rest.batch].sort(),
  }));
  const requests = [...model.requests.values()].map((request) => ({ ...request, workers: [...request.workers].sort() }));
  const { header, sequence, oldest, newest } = model;
  return { lanes, requests, header, sequence, oldest, newest };
}
