/** One request of a timeline: its tokens in any order, and where its time went. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { TimelineRequest } from "../../../src/diptych/web/static/common/timeline-request.js";
import { between, forSeeds, shuffled } from "./random.js";
import { milestone, step } from "./records.js";

function requestOf(times, limitNs) {
  const request = new TimelineRequest("x");
  for (const time of times) request.token(time, 0, limitNs);
  return request;
}

test("tokens that are read in another order give the same stream", () => {
  forSeeds(400, (random) => {
    const times = [...new Set(Array.from({ length: between(random, 1, 25) }, () => between(random, 1, 400)))].sort((a, b) => a - b);
    const limit = between(random, 0, 60);
    const wanted = requestOf(times, limit);
    const found = requestOf(shuffled(random, [...times, ...times.slice(0, 3)]), limit);
    assert.deepEqual(found.times, times);
    assert.deepEqual(found.flags, wanted.flags);
    assert.equal(found.longestGapNs, Math.max(0, ...times.slice(1).map((time, at) => time - times[at])));
    assert.deepEqual(times.map((_, at) => found.isStalled(at, 30)), times.map((time, at) => at > 0 && time - times[at - 1] > 30));
  });
});

test("a token that is read late and lies in a lost part leaves that part unknown", () => {
  const request = requestOf([10, 20], 5);
  request.lose();
  for (const time of [100, 50]) request.token(time, 0, 5);
  assert.deepEqual(request.times, [10, 20, 50, 100]);
  assert.deepEqual(request.times.map((_, at) => request.isKnown(at)), [true, true, false, false]);
  assert.equal(request.longestGapNs, 10);
});

test("nothing is lost of a request that has no token yet", () => {
  const request = new TimelineRequest("x");
  request.lose();
  for (const time of [10, 90]) request.token(time, 0, 20);
  assert.deepEqual([request.isKnown(0), request.isStalled(1, 0)], [true, true]);
});

test("tokens after the end of an attempt are not its own", () => {
  const request = requestOf([10], 0);
  request.milestone(milestone(1, 0, 20, "finished", "x", { reason: "stop" }), 0);
  request.token(30, 0, 0);
  assert.deepEqual([request.times, request.last], [[10], 20]);
});

test("a request that is tried again goes on, and the end of its first attempt no longer counts", () => {
  const request = requestOf([10], 0);
  request.milestone(milestone(1, 0, 20, "finished", "x", { reason: "error" }), 0);
  request.milestone(milestone(2, 1, 25, "queued", "x", { num_prompt_tokens: 8 }, { epoch: 1 }), 0);
  request.milestone(milestone(3, 0, 26, "finished", "x", { reason: "error" }), 0); // of the first attempt, read late
  assert.deepEqual([request.attempts, request.end, request.detail], [2, 0, null]);
  request.token(30, 1, 0);
  request.milestone(milestone(4, 1, 40, "finished", "x", { reason: "stop" }, { epoch: 1 }), 0);
  assert.deepEqual([request.end, request.detail.reason, request.times], [40, "stop", [10, 30]]);
});

test("a pause lasts until the request is resumed", () => {
  const request = new TimelineRequest("x");
  request.milestone(milestone(1, 0, 5, "preempted", "x", { swapped: true }), 0);
  assert.deepEqual(request.pauses, [{ t0: 5, t1: Infinity, swapped: true }]);
  request.milestone(milestone(2, 0, 9, "resumed", "x", { num_cached_tokens: 64 }), 0);
  assert.deepEqual([request.pauses[0].t1, request.cachedTokens], [9, 64]);
});

test("a milestone that nobody knows changes nothing but the worker", () => {
  const request = new TimelineRequest("x");
  request.milestone(milestone(1, 3, 5, "__proto__", "x"), 0);
  assert.deepEqual([[...request.workers], request.queued, request.end], [[3], 0, 0]);
});

/** A request whose prompt ran in chunks with pauses between them. */
function prefilled(random) {
  const request = new TimelineRequest("x");
  request.milestone(milestone(1, 0, 100, "queued", "x", { num_prompt_tokens: 500 }), 0);
  let time = 100 + between(random, 0, 50);
  for (let at = 0; at < between(random, 1, 4); at++) {
    const end = time + between(random, 1, 80);
    request.chunk(step(at, 0, time, end, 0, { prefills: [] }), at * 100, 100);
    time = end + between(random, 0, 40);
  }
  const ready = request.chunks.at(-1).t1;
  request.milestone(milestone(2, 0, ready, "first_token", "x"), 0);
  return { request, ready };
}

test("the parts of an open request add up to the time since it came", () => {
  forSeeds(300, (random) => {
    const { request, ready } = prefilled(random);
    if (random() < 0.5) request.milestone(milestone(3, 1, ready + between(random, 0, 30), "handoff_delivered", "x"), 0);
    const now = ready + between(random, 40, 200);
    const parts = request.breakdown(now);
    const sum = (some) => some.reduce((total, part) => total + part.ns, 0);
    assert.ok(parts.every((part) => part.ns >= 0), JSON.stringify(parts));
    assert.equal(sum(parts), now - 100);
    assert.equal(sum(parts.filter((part) => part.ttft)), request.ttftNs);
  });
});

test("the parts of a request that has ended are what the server counted, to the nanosecond", () => {
  forSeeds(300, (random) => {
    const { request, ready } = prefilled(random);
    const detail = { reason: "stop", queue_ns: between(random, 0, 60), prefill_ns: between(random, 1, 300), handoff_ns: between(random, 0, 9), decode_ns: between(random, 0, 500) };
    request.milestone(milestone(4, 0, ready + 500, "finished", "x", detail), 0);
    const parts = request.breakdown(ready + 900);
    assert.ok(parts.every((part) => part.ns >= 0));
    assert.equal(parts.reduce((total, part) => total + part.ns, 0), detail.queue_ns + detail.prefill_ns + detail.handoff_ns + detail.decode_ns);
    assert.equal(request.ttftNs, detail.queue_ns + detail.prefill_ns);
  });
});
