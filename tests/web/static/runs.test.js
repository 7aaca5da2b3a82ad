/** Runs are read from what the tools write, and judged as the tools judge them. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { attainment, cumulative, distribution, readRun, span } from "../../../src/diptych/web/static/compare/runs.js";
import { between, forSeeds, shuffled } from "./random.js";

const record = (more = {}) => ({ arrival_s: 1, ttft_s: 0.2, tpot_s: 0.01, e2e_s: 1.5, output_tokens: 10, reason: "stop", slo_met: true, ...more });
const lines = (...records) => records.map((found) => JSON.stringify(found)).join("\n");
const rowsOf = (...records) => readRun(lines(...records), "x").rows;

test("lines, a list and an object of records are the same run", () => {
  const records = [record(), record({ arrival_s: 2, kind: "chat" })];
  const wanted = readRun(lines(...records), "x");
  for (const text of [`\n${lines(...records)}\n\n`, lines(...records).replace("\n", "\r\n"), JSON.stringify(records), JSON.stringify({ records }), JSON.stringify({ requests: records })]) assert.deepEqual(readRun(text, "x"), wanted);
  assert.deepEqual([wanted.size, wanted.summary, wanted.rows[1].kind, wanted.rows[0].ttft], [2, null, "chat", 200]);
});

test("a file of a single record is a run of one request", () => {
  assert.equal(readRun(JSON.stringify(record()), "x").rows.length, 1);
});

test("a summary is read from the object of a simulation and from its own", () => {
  const summary = { num_requests: 7, num_completed: 6, ttft_ms: { p50: 1 }, tpot_ms: { p50: 2 }, e2e_ms: { p50: 3 }, attainment: 0.5, goodput_rps: 2, output_tokens_per_s: 9 };
  for (const whole of [summary, { summary, settings: {} }, { mode: "run", summary }]) {
    const run = readRun(JSON.stringify(whole), "x");
    assert.deepEqual([run.rows, run.size, run.summary.attainment, run.summary.ttft, run.summary.itl], [null, 7, 0.5, { p50: 1 }, null]);
  }
});

test("what is no run is refused in words", () => {
  const refusals = [
    ["  ", "empty"], ["null", "neither records"], ["5", "neither records"], ["{}", "neither records"], ["[]", "no request"], ['{"records": []}', "no request"], ['{"a": 1}\nno json', "line 2 is no JSON"],
    ['[{"a": 1}]', "record 1 has no arrival_s"], ["[null]", "record 1 has no arrival_s"], ['{"mode": "rates", "points": []}', "several runs"],
  ];
  for (const [text, words] of refusals) assert.throws(() => readRun(text, "x"), (error) => error.message.includes(words), text);
});

test("a request meets objectives by its times, and one that failed or got no token meets none", () => {
  const rows = rowsOf(record(), record({ ttft_s: 0.5 }), record({ tpot_s: null }), record({ ttft_s: null, tpot_s: null, output_tokens: 0 }), record({ reason: "error" }));
  assert.equal(attainment(rows, { ttft: 200, tpot: 10 }, 1), 2 / 5);
  assert.equal(attainment(rows, { ttft: 200, tpot: null }, 2.5), 3 / 5);
  assert.equal(attainment(rows, { ttft: null, tpot: 5 }, 1), 2 / 5);
  assert.equal(attainment([], { ttft: 1, tpot: 1 }, 1), null);
});

test("without objectives the records say which were met", () => {
  assert.equal(attainment(rowsOf(record(), record({ slo_met: false }), record({ slo_met: null })), { ttft: null, tpot: null }, 1), 0.5);
  assert.equal(attainment(rowsOf(record({ slo_met: null })), { ttft: null, tpot: null }, 1), null);
});

test("looser objectives are met by as many or more", () => {
  forSeeds(100, (random) => {
    const rows = rowsOf(...Array.from({ length: 20 }, () => record({ ttft_s: random(), tpot_s: random() < 0.1 ? null : random() / 10 })));
    const scales = [0.25, 0.5, 1, 2, 4].map((scale) => attainment(rows, { ttft: 300, tpot: 30 }, scale));
    assert.deepEqual(scales, [...scales].sort((a, b) => a - b));
  });
});

test("percentiles are those of the tools: linear between the closest ranks", () => {
  const rows = rowsOf(...[0.1, 0.2, 0.3, 0.4].map((ttft_s) => record({ ttft_s })), record({ ttft_s: 9, outcome: "failed" }));
  const found = distribution(rows);
  assert.deepEqual([found.requests, found.completed], [5, 4]);
  assert.ok(Math.abs(found.ttft.p50 - 250) < 1e-9 && Math.abs(found.ttft.p90 - 370) < 1e-9);
  assert.equal(found.gap, null);
});

test("the order of records does not matter", () => {
  forSeeds(50, (random) => {
    const records = Array.from({ length: between(random, 1, 30) }, () => record({ ttft_s: random(), e2e_s: 1 + random(), arrival_s: random() * 9 }));
    const [inOrder, mixed] = [rowsOf(...records), rowsOf(...shuffled(random, records))];
    assert.deepEqual(distribution(inOrder), distribution(mixed));
    assert.deepEqual(span(inOrder), span(mixed));
    assert.deepEqual(cumulative(inOrder.map(({ ttft }) => ttft)), cumulative(mixed.map(({ ttft }) => ttft)));
  });
});

test("a curve of shares rises from the least value to the largest", () => {
  forSeeds(100, (random) => {
    const values = Array.from({ length: between(random, 1, 400) }, () => random() * 100 + 1e-6);
    const points = cumulative([...values, null, 0]);
    assert.deepEqual([points[0], points.at(-1)], [[Math.min(...values), 0], [Math.max(...values), 1]]);
    assert.ok(points.every(([value, share], at) => !at || (value >= points[at - 1][0] && share > points[at - 1][1])));
    assert.ok(points.length <= 201);
  });
  assert.deepEqual(cumulative([null, 0]), []);
});

test("a run lasts to its last end, and counts tokens of complete answers", () => {
  assert.deepEqual(span(rowsOf(record(), record({ arrival_s: 8, e2e_s: 2, output_tokens: 90, reason: "length" }), record({ reason: "error" }))), { seconds: 10, tokensPerSecond: 10 });
  assert.deepEqual(span([]), { seconds: 0, tokensPerSecond: null });
});
