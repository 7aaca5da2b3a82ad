/** How much longer streams wait while a prompt is computed. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { TimelineModel } from "../../../src/diptych/web/static/common/timeline-model.js";
import { interference } from "../../../src/diptych/web/static/ui/interference.js";
import { between, forSeeds } from "./random.js";
import { HEADER, step } from "./records.js";

/** Steps of a decode worker with one stream and of many prefill workers whose prompts overlap. */
function overlapping(random) {
  const records = [];
  for (let worker = 1; worker <= 12; worker++) {
    let time = between(random, 0, 3000);
    while (time < 4000) {
      const end = time + between(random, 5, random() < 0.2 ? 900 : 60);
      records.push(step(0, worker, time, end, 0, { prefills: [[`p${worker}-${time}`, 0, between(random, 1, 200)]] }));
      time = end + between(random, 0, 500);
    }
  }
  for (let time = 0; time < 4000;) {
    const end = time + between(random, 5, 20);
    records.push(step(0, 0, time, end, 1));
    time = end;
  }
  records.sort((a, b) => a.end_ns - b.end_ns).forEach((record, at) => {
    record.sequence = at + 1;
  });
  const model = new TimelineModel();
  model.add([{ ...HEADER, decoding: { 0: ["x"] } }, ...records]);
  return { model, records };
}

const p99 = (values) => [...values].sort((a, b) => a - b)[Math.ceil(values.length * 0.99) - 1];

test("every gap is told apart by every prefill beside it, however many overlap", () => {
  forSeeds(80, (random) => {
    const { model, records } = overlapping(random);
    const prefills = records.filter(({ prefills: chunks }) => chunks?.[0][2] >= 64);
    const { times } = model.requests.get("x");
    const [busy, quiet] = [[], []];
    for (let at = 2; at < times.length; at++) {
      const touches = prefills.some(({ start_ns: from, end_ns: to }) => from < times[at] && to > times[at - 1]);
      (touches ? busy : quiet).push(times[at] - times[at - 1]);
    }
    const found = interference(model, 0, 1e9);
    if (quiet.length < 20 || !busy.length) assert.equal(found, null);
    else assert.deepEqual(found, { busyNs: p99(busy), quietNs: p99(quiet), factor: p99(busy) / p99(quiet) });
  });
});

/** A worker with stream x: 40 gaps of 10, then what `more` does. */
function quietThen(more) {
  const model = new TimelineModel();
  const steps = Array.from({ length: 40 }, (_, at) => step(at + 1, 0, at * 10, at * 10 + 10, 1));
  model.add([{ ...HEADER, decoding: { 0: ["x"] } }, ...steps, ...more]);
  return interference(model, 0, 1e9);
}

test("a long prompt of another request counts, a short one and the stream's own do not", () => {
  const behind = (id, tokens) => quietThen([step(41, 0, 400, 500, 0, { prefills: [[id, 0, tokens]] }), step(42, 0, 500, 510, 1)]);
  assert.deepEqual(behind("p", 512), { quietNs: 10, busyNs: 110, factor: 11 });
  assert.equal(behind("p", 8), null);
  assert.equal(behind("x", 512), null);
  const together = quietThen([step(41, 0, 400, 500, 0, { prefills: [["x", 0, 64], ["p", 0, 64]] }), step(42, 0, 500, 510, 1)]);
  assert.equal(together.factor, 11);
});

test("the stream that waits longest counts, not those beside it on other workers", () => {
  const model = new TimelineModel();
  const steps = [];
  for (let at = 0; at < 60; at++) {
    for (const worker of [0, 1]) {
      const isPrompt = worker === 0 && at >= 40 && at < 55;
      if (worker === 0 && at === 40) steps.push(step(0, 0, 400, 550, 0, { prefills: [["p", 0, 512]] }));
      if (!isPrompt) steps.push(step(0, worker, at * 10, at * 10 + 10, 1));
    }
  }
  steps.sort((a, b) => a.end_ns - b.end_ns).forEach((record, at) => (record.sequence = at + 1));
  model.add([{ ...HEADER, decoding: { 0: ["x"], 1: ["y"] } }, ...steps]);
  assert.deepEqual(interference(model, 0, 1e9), { quietNs: 10, busyNs: 160, factor: 16 });
});

test("gaps of an outage and of lost records are nobody's", () => {
  const prompt = step(41, 0, 400, 420, 1, { prefills: [["p", 0, 512]] });
  const away = [{ kind: "worker", sequence: 42, worker: 0, time_ns: 430, state: "lost" }, { kind: "worker", sequence: 43, worker: 0, time_ns: 900, state: "ready" }];
  assert.equal(quietThen([prompt, ...away, step(44, 0, 900, 1000, 1)]).busyNs, 20);
  const lost = { kind: "gap", first: 42, last: 50, decoding: { 0: ["x"] } };
  assert.equal(quietThen([prompt, lost, step(51, 0, 900, 1000, 1)]).quietNs, 10);
});
