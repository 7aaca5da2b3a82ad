/** The time axis: ticks at round times, written so that neighbours differ. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { clockText, ticks } from "../../../src/diptych/web/static/common/timeline-axis.js";
import { between, forSeeds, ofAnySize } from "./random.js";

test("ticks lie in the range, evenly, as many as there is room for", () => {
  forSeeds(500, (random) => {
    const pixels = between(random, 200, 1500);
    const span = ofAnySize(random, 4.5, 12.5);
    const t0 = ofAnySize(random, 3, 13);
    const found = ticks(t0, t0 + span, pixels, null, 0);
    const room = pixels / (pixels < 420 ? 60 : 110);
    assert.ok(found.length <= room + 1, `${found.length} ticks in ${pixels} pixels`);
    assert.ok(found.length >= Math.floor(room / 3.1), `${found.length} ticks in ${pixels} pixels`);
    assert.ok(found.every(({ time }) => time >= t0 - 1 && time <= t0 + span + 1));
    const steps = found.slice(1).map(({ time }, at) => time - found[at].time);
    assert.ok(steps.every((step) => Math.abs(step / steps[0] - 1) < 1e-6));
  });
});

test("times count from the origin", () => {
  assert.deepEqual(ticks(1e9, 1.5e9, 550, null, 1e9).map(({ text }) => text), ["0 ms", "100 ms", "200 ms", "300 ms", "400 ms", "500 ms"]);
  assert.deepEqual(ticks(0.9e9, 1.1e9, 220, null, 1e9).map(({ text }) => text), ["-100 ms", "0 ms", "100 ms"]);
});

const DAY = 19_000 * 86_400e9; // some midnight (UTC)

test("clock times of ticks are round and differ from each other", () => {
  forSeeds(300, (random) => {
    const zero = DAY + between(random, 0, 86_399) * 1e9 + between(random, 0, 999) * 1e6;
    const span = ofAnySize(random, 5, 11);
    const found = ticks(1e9, 1e9 + span, 900, zero);
    assert.equal(new Set(found.map(({ text }) => text)).size, found.length, found.map(({ text }) => text).join(" "));
    assert.ok(found.every(({ text }) => /^\d\d:\d\d:\d\d(\.\d{1,6})?$/.test(text)));
  });
});

test("a clock time has the decimals that its step needs, and no second is lost by rounding", () => {
  const seconds = (text) => text.slice(6);
  assert.equal(seconds(clockText(DAY + 5e9, 1e9)), "05");
  assert.equal(seconds(clockText(DAY + 5.2e9, 2e8)), "05.2");
  assert.equal(seconds(clockText(DAY + 5.25e9, 5e7)), "05.25");
  assert.equal(seconds(clockText(DAY + 5.000004e9, 1e3)), "05.000004");
  assert.equal(seconds(clockText(DAY + 5.97e9, 2e8)), "06.0");
  assert.equal(seconds(clockText(DAY + 59.97e9, 2e8)), "00.0");
});
