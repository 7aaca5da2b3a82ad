/** What the timeline says about the place that is pointed at. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { TimelineModel } from "../../../src/diptych/web/static/common/timeline-model.js";
import { describe, reasonText, requestSummary } from "../../../src/diptych/web/static/common/timeline-words.js";
import { between, forSeeds } from "./random.js";
import { HEADER, history, milestone, step } from "./records.js";

const NAME = (id) => id;

/** A request that queues behind another prompt, is prefilled in two chunks, handed over, decodes, stalls and ends. */
function story() {
  const model = new TimelineModel({ objectiveNs: 60 });
  model.add([
    HEADER,
    step(1, 0, 50, 300, 0, { prefills: [["y", 0, 512]] }),
    milestone(2, 0, 110, "queued", "x", { num_prompt_tokens: 64 }),
    step(3, 0, 300, 400, 0, { prefills: [["x", 0, 32]] }),
    step(4, 0, 420, 500, 0, { prefills: [["x", 32, 32]] }),
    milestone(5, 0, 500, "first_token", "x"),
    { kind: "transfer", sequence: 6, worker: 1, sender: 0, request_id: "x", start_ns: 400, end_ns: 540, num_bytes: 2e6, exposed_ns: 40 },
    milestone(7, 1, 540, "handoff_delivered", "x"),
    step(8, 1, 540, 550, 1, { joined: ["x"] }),
    step(9, 1, 550, 700, 0, { prefills: [["z", 0, 100]] }),
    step(10, 1, 700, 710, 1, { predicted_ns: 12 }),
    milestone(11, 1, 720, "finished", "x", { reason: "stop", num_output_tokens: 3, num_cached_tokens: 16 }),
  ]);
  return { model, request: model.requests.get("x") };
}

test("a request is followed from its arrival to its end", () => {
  const { model, request } = story();
  const said = (time) => describe(model, { request, time, edge: 800 }, NAME).slice(1);
  const longest = "longest gap between tokens: 160 ns";
  assert.deepEqual(said(90), ["has not arrived yet"]);
  assert.deepEqual(said(200), ["waits in the queue: 190 ns", "Worker 0 · prefill was computing 512 prompt tokens of y.", longest]);
  assert.deepEqual(said(350), ["its prompt tokens 0 to 32: 100 ns", longest]);
  assert.deepEqual(said(410), ["waits for its next chunk", longest]);
  assert.deepEqual(said(545), ["token 2, 50 ns after the one before", longest]);
  assert.deepEqual(said(600), ["stalled: 160 ns without a token", "Worker 1 · decode was computing 100 prompt tokens of z.", longest]);
  assert.deepEqual(said(900), []);
  assert.equal(describe(model, { request, time: 600 }, NAME)[0], "x: prompt of 64 tokens, 25 % of it cached, 3 answer tokens");
});

test("of lost records nothing is claimed", () => {
  const { model, request } = story();
  request.end = 0;
  model.add([{ kind: "gap", first: 12, last: 20, decoding: { 1: ["x"] } }, step(21, 1, 2000, 2010, 1)]);
  assert.deepEqual(describe(model, { request, time: 1500, edge: 2010 }, NAME)[1], "not known: records of 1.3 µs were lost");
});

test("guessed tokens of a step are counted, and those that were right", () => {
  const { model } = story();
  model.add([{ ...step(12, 1, 2000, 2010, 1), extra: [["x", 5, 3, 0], ["y", 2, 0, 0]] }]);
  const lane = [...model.lanes.values()][1];
  const lines = describe(model, { lane, index: lane.steps.length - 1 }, NAME);
  assert.ok(lines.includes("7 guessed tokens computed, 3 right"), lines.join("; "));
});

test("a step, a transfer, a worker that is away and an idle one are named", () => {
  const { model } = story();
  const [first, second] = model.lanes.values();
  assert.deepEqual(describe(model, { lane: first, index: 0 }, NAME), ["Prefill step on Worker 0 · prefill: 250 ns", "y: prompt tokens 0 to 512"]);
  assert.deepEqual(describe(model, { lane: second, index: 2 }, NAME).slice(1), ["1 stream got a token (context 9)", "predicted: 12 ns"]);
  assert.deepEqual(describe(model, { lane: second, index: 1 }, NAME).at(-1), "1 stream had to wait for it");
  assert.deepEqual(describe(model, { transfer: second.transfers[0] }, NAME), ["KV cache of x", "2 MB in 140 ns, worker 0 to 1", "after the end of the prefill: 40 ns"]);
  assert.deepEqual(describe(model, { lane: second, index: -1, time: 5 }, NAME), ["Worker 1 · decode (decode worker)", "idle: nothing to compute"]);
  second.setState("lost", 800, "killed");
  assert.deepEqual(describe(model, { lane: second, index: -1, time: 900 }, NAME)[1], "lost: killed");
  assert.deepEqual(describe(model, null, NAME), []);
});

test("why a request waited", () => {
  const { model, request } = story();
  const why = (from, to) => reasonText(model, request, 1, from, to, NAME);
  assert.equal(why(500, 545), "Its KV cache was handed over in 40 ns of that.");
  request.pauses.push({ t0: 560, t1: 600, swapped: true });
  assert.equal(why(550, 700), "It was preempted; its KV cache lay in host memory.");
  request.pauses[0].swapped = false;
  assert.equal(why(550, 700), "It was preempted, and computed again.");
  assert.equal(reasonText(model, request, 1, 905, 910, NAME), "");
});

test("a request of which nothing is known has just arrived", () => {
  const { model } = story();
  assert.equal(requestSummary(model.request("new")), "just arrived");
});

test("whatever is pointed at, something is said that can be read", () => {
  forSeeds(40, (random) => {
    const model = new TimelineModel({ objectiveNs: between(random, 0, 1) * 200 });
    model.add(history(random));
    for (const request of model.requests.values()) {
      const lines = describe(model, { request, time: between(random, 0, model.newest + 50), edge: model.newest }, NAME);
      assert.ok(lines.length && lines.every((line) => line && !/undefined|NaN|null|Infinity|–/.test(line)), lines.join(" | "));
    }
    for (const lane of model.lanes.values()) {
      for (let index = 0; index < lane.length; index++) {
        const lines = describe(model, { lane, index }, NAME);
        assert.ok(lines.every((line) => !/undefined|NaN|null|Infinity|–/.test(line)), lines.join(" | "));
      }
    }
  });
});

test("prompts that an engine does not name are steps' and no requests", () => {
  const model = new TimelineModel();
  model.add([HEADER, step(1, 0, 50, 300, 2, { prefills: [["", 0, 512], ["", 0, 511]] })]);
  assert.equal(model.requests.size, 0);
  const lines = describe(model, { lane: model.lanes.get(0), index: 0 }, NAME);
  assert.deepEqual(lines.filter((line) => line.startsWith("unnamed")), ["unnamed prompts: prompt tokens 0 to 512", "unnamed prompts: prompt tokens 0 to 511"]);
});
