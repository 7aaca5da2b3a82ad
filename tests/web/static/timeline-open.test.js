/** A step that is being computed is known from its beginning, and forgotten when it ends in any way. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { TimelineModel } from "../../../src/diptych/web/static/common/timeline-model.js";
import { computingText, describe } from "../../../src/diptych/web/static/common/timeline-words.js";
import { HEADER, milestone, step } from "./records.js";

const NAME = (id) => id.toUpperCase();
const MS = 1e6;
const begun = (sequence, more = {}) => ({ kind: "step_begun", sequence, worker: 0, step_id: 9, time_ns: 100 * MS, phase: "prefill", num_decodes: 0, predicted_ns: 400 * MS, prefills: [["long", 0, 2048]], ...more });

/** Two streams that decode on worker 0, and a long prompt that arrives. */
function modelWith(...records) {
  const model = new TimelineModel();
  model.add([{ ...HEADER, decoding: { 0: ["a", "b"] } }, milestone(1, 0, 99 * MS, "queued", "long", { num_prompt_tokens: 2048 }), ...records]);
  return model;
}

test("a prompt is being computed from the beginning of its step", () => {
  const model = modelWith(begun(2));
  const lane = model.lanes.get(0);
  assert.deepEqual([lane.open.phase, lane.open.waiting], ["prefill", 2]);
  const request = model.requests.get("long");
  assert.equal(request.firstChunk, 100 * MS);
  assert.deepEqual(request.breakdown(300 * MS).map(({ ns }) => ns / MS), [1, 200, 0]);
  assert.equal(computingText(model, 64, NAME), "A long prompt is being computed on Worker 0 · prefill: 2,048 tokens of LONG, predicted to take 400 ms. 2 streams wait for it.");
  assert.equal(computingText(model, 4096, NAME), "");
  assert.deepEqual(model.reason({ id: "a" }, 0, 90 * MS, 300 * MS), { kind: "prefill", id: "long", tokens: 2048, more: "", worker: 0 });
  assert.equal(model.reason({ id: "a" }, 0, 10 * MS, 90 * MS).kind, "unknown");
  assert.deepEqual(lane.shares(0, 400 * MS, 300 * MS).shares.prefill, 0.5);
  assert.deepEqual(describe(model, { lane, open: lane.open, index: -1, edge: 300 * MS }, NAME), [
    "Prefill step on Worker 0 · prefill: for 200 ms so far", "LONG: prompt tokens 0 to 2,048", "2 streams wait for it", "predicted: 400 ms",
  ]);
});

test("it is over with its step, with a loss of the worker, and where records are missing", () => {
  const ends = [
    step(3, 0, 100 * MS, 480 * MS, 0, { step_id: 9, prefills: [["long", 0, 2048]] }),
    { kind: "worker", sequence: 3, worker: 0, time_ns: 200 * MS, state: "lost" },
    { kind: "gap", first: 3, last: 8, decoding: {} },
  ];
  for (const end of ends) {
    const model = modelWith(begun(2), end);
    assert.equal(model.lanes.get(0).open, null, end.kind);
    assert.equal(model.requests.get("long").open, null, end.kind);
    assert.equal(computingText(model, 64, NAME), "");
  }
});

test("a step of another worker, or a worker that drains, does not end it", () => {
  for (const other of [step(3, 1, 100 * MS, 120 * MS, 1), { kind: "worker", sequence: 3, worker: 0, time_ns: 200 * MS, state: "draining" }]) {
    assert.equal(modelWith(begun(2), other).lanes.get(0).open.step_id, 9);
  }
});

test("a playback says itself which steps are being computed", () => {
  const model = modelWith(begun(2));
  model.setOpen([begun(undefined, { worker: 1, prefills: [], phase: "decode", num_decodes: 2 })]);
  assert.equal(model.lanes.get(0).open, null);
  assert.deepEqual([model.lanes.get(1).open.phase, model.lanes.get(1).open.waiting], ["decode", 0]);
  model.setOpen([]);
  assert.equal(model.lanes.get(1).open, null);
});
