/** What a timeline knows follows from the records, however they come. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { firstAbove } from "../../../src/diptych/web/static/common/sorted.js";
import { Lane, TimelineModel } from "../../../src/diptych/web/static/common/timeline-model.js";
import { between, forSeeds, inPieces, numbers } from "./random.js";
import { HEADER, history, known, milestone, step } from "./records.js";

function modelOf(pieces, stall) {
  const model = new TimelineModel(stall);
  for (const piece of pieces) model.add(piece);
  return model;
}

test("records in pieces of any length make the same model", () => {
  forSeeds(60, (random) => {
    const records = history(random);
    assert.deepEqual(known(modelOf(inPieces(random, records))), known(modelOf([records])));
  });
});

test("records that are read twice, as after a reconnection, change nothing", () => {
  forSeeds(60, (random) => {
    const records = history(random);
    const seen = between(random, 1, records.length);
    const again = between(random, 0, seen - 1);
    const twice = modelOf([records.slice(0, seen), records.slice(1 + again)]);
    assert.deepEqual(known(twice), known(modelOf([records])));
  });
});

test("every decode step gives a token to each stream of its batch", () => {
  forSeeds(60, (random) => {
    const records = history(random);
    const model = modelOf([records]);
    const wanted = new Map();
    const batches = [new Set(), new Set()];
    const ended = new Map();
    const note = (id, time) => {
      if (!(ended.get(id) < time)) wanted.set(id, (wanted.get(id) ?? new Set()).add(time));
    };
    for (const record of records) {
      if (record.kind === "step") {
        for (const id of record.left ?? []) batches[record.worker].delete(id);
        for (const id of record.joined ?? []) batches[record.worker].add(id);
        const steps = record.num_steps ?? 1;
        for (let at = 1; record.num_decodes && at <= steps; at++) for (const id of batches[record.worker]) note(id, record.start_ns + ((record.end_ns - record.start_ns) * at) / steps);
      } else if (record.what === "first_token") note(record.request_id, record.time_ns);
      else if (record.what === "finished") ended.set(record.request_id, record.time_ns);
    }
    for (const request of model.requests.values()) {
      assert.deepEqual(request.times, [...(wanted.get(request.id) ?? [])].sort((a, b) => a - b), request.id);
    }
  });
});

test("another run of the server begins with nothing", () => {
  const model = modelOf([history(numbers(1))]);
  model.add([{ ...HEADER, run_id: "b" }]);
  assert.equal(model.requests.size, 0);
  assert.deepEqual([...model.lanes.values()].map((lane) => lane.length), [0, 0]);
  assert.equal(model.sequence, 0);
});

const STREAM = [{ ...HEADER, decoding: { 1: ["x"] } }, step(1, 1, 0, 10, 1), step(2, 1, 10, 20, 1), step(3, 1, 20, 30, 1)];
const LOST = { kind: "gap", first: 4, last: 90, decoding: { 1: ["x", "y"] } };

test("a pause of which records were lost is no stall, and the next one is", () => {
  const model = modelOf([[...STREAM, LOST, step(91, 1, 990, 1000, 2), step(92, 1, 1500, 1510, 2)]], { factor: 2, floorNs: 50 });
  const request = model.requests.get("x");
  assert.deepEqual(request.times, [10, 20, 30, 1000, 1510]);
  for (const objective of [0, 100]) assert.deepEqual(request.times.map((_, at) => request.isStalled(at, objective)), [false, false, false, false, true]);
  assert.equal(request.longestGapNs, 510);
  assert.deepEqual(model.requests.get("y").times, [1000, 1510]);
  assert.equal(model.sequence, 92);
});

test("after lost records the batches are those of the gap", () => {
  const model = modelOf([[...STREAM, { ...LOST, decoding: { 0: ["z"] } }, step(91, 1, 990, 1000, 1), step(92, 0, 990, 1000, 1)]]);
  assert.deepEqual(model.requests.get("x").times, [10, 20, 30]);
  assert.deepEqual(model.requests.get("z").times, [1000]);
});

test("a stream that waits for a prompt is counted by the step that it waits for", () => {
  const model = modelOf([[...STREAM, step(4, 1, 30, 400, 0, { prefills: [["p", 0, 512]] }), step(5, 1, 400, 410, 1)]], { factor: 3, floorNs: 0 });
  const lane = model.lanes.get(1);
  assert.deepEqual([...lane.waiting.subarray(0, lane.length)], [0, 0, 0, 1, 0]);
  assert.equal(model.requests.get("x").isStalled(3, 0), true);
  assert.deepEqual(model.reason(model.requests.get("x"), 1, 30, 410), { kind: "prefill", id: "p", tokens: 512, more: "", worker: 1 });
  assert.equal(lane.shares(0, 410).waited, 370);
});

test("why a request got nothing: a worker that was away, one that was busy, and nothing known", () => {
  const model = modelOf([[...STREAM, { kind: "worker", sequence: 4, worker: 1, time_ns: 40, state: "lost", detail: "killed" }, { kind: "worker", sequence: 5, worker: 1, time_ns: 60, state: "ready" }]]);
  const request = model.requests.get("x");
  assert.deepEqual(model.reason(request, 1, 30, 70), { kind: "state", state: "lost", worker: 1 });
  assert.deepEqual(model.reason(request, 1, 5, 25), { kind: "busy", worker: 1 });
  assert.deepEqual(model.reason(request, 1, 70, 90), { kind: "unknown", worker: 1 });
  assert.equal(model.reason(request, 7, 0, 10), null);
});

test("shares of a lane are those of its steps, and add up to the whole time", () => {
  forSeeds(40, (random) => {
    const model = modelOf([history(random)]);
    for (const lane of model.lanes.values()) {
      const t0 = between(random, 0, lane.horizon - 1);
      const t1 = between(random, t0 + 1, lane.horizon + 50);
      const { shares } = lane.shares(t0, t1);
      assert.ok(Math.abs(shares.prefill + shares.decode + shares.mixed + shares.idle - 1) < 1e-9);
      const busy = lane.steps.reduce((sum, { start_ns: start, end_ns: end }) => sum + Math.max(0, Math.min(end, t1) - Math.max(start, t0)), 0);
      assert.ok(Math.abs((1 - shares.idle) * (t1 - t0) - busy) < 1e-6);
    }
  });
});

test("searching by halves finds what searching in order finds", () => {
  forSeeds(300, (random) => {
    const values = Array.from({ length: between(random, 0, 20) }, () => between(random, 0, 9)).sort((a, b) => a - b);
    const end = between(random, 0, values.length);
    const limit = between(random, -1, 10);
    const found = values.slice(0, end).findIndex((value) => value > limit);
    assert.equal(firstAbove(values, limit, end), found < 0 ? end : found);
  });
});

test("the steps of a lane that touch a time are found", () => {
  forSeeds(60, (random) => {
    const lane = new Lane(0);
    let time = 0;
    for (let at = 0; at < between(random, 0, 600); at++) {
      const start = time + between(random, 0, 5);
      time = start + between(random, 1, 5);
      lane.push(step(at, 0, start, time, 1));
    }
    const t0 = between(random, 0, time + 5);
    const t1 = between(random, t0, time + 5);
    const [from, to] = lane.between(t0, t1);
    const touching = lane.steps.filter(({ start_ns: start, end_ns: end }) => end > t0 && start <= t1);
    assert.deepEqual(lane.steps.slice(from, to), touching);
  });
});

test("a long run forgets its oldest steps and the requests that ended with them, never the newest", () => {
  const model = new TimelineModel();
  model.add([HEADER]);
  let sequence = 0;
  for (let at = 0; at < 130_000; at++) {
    const isPrompt = at % 100 === 50;
    model.add([step(++sequence, 0, at * 10, at * 10 + 9, 0, { prefills: isPrompt ? [[`r${at}`, 0, 5]] : [] })]);
    if (isPrompt) model.add([milestone(++sequence, 0, at * 10 + 9, "finished", `r${at}`, { reason: "stop" })]);
  }
  const lane = model.lanes.get(0);
  assert.ok(model.numCells === lane.length && lane.length <= 120_000);
  assert.equal(lane.horizon, 1_299_999);
  assert.ok(model.oldest <= lane.starts[0]);
  assert.ok([...model.requests.values()].every((request) => request.end >= model.oldest));
});

test("a run of many requests keeps those that still run", () => {
  const model = modelOf([[HEADER, milestone(1, 0, 1, "queued", "old")]]);
  for (let at = 2; at < 6000; at += 2) model.add([milestone(at, 0, at, "queued", `r${at}`), milestone(at + 1, 0, at, "finished", `r${at}`)]);
  assert.ok(model.requests.size <= 1500 && model.requests.has("old") && model.requests.has("r5998"));
});
