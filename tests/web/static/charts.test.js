/** Ticks of charts. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { axisTicks } from "../../../src/diptych/web/static/common/charts.js";
import { between, forSeeds, ofAnySize } from "./random.js";

for (const log of [false, true]) {
  test(`a${log ? " logarithmic" : "n even"} axis has ticks in its range, rising, and neither too few nor too many`, () => {
    forSeeds(2000, (random) => {
      const low = ofAnySize(random, -3, 9);
      const high = low * (1.02 + ofAnySize(random, -2, log ? 6 : 2));
      const wanted = between(random, 3, 10);
      const found = axisTicks(low, high, log, wanted);
      const words = `${low} to ${high}, ${wanted} wanted: ${found.join(" ")}`;
      assert.ok(found.length >= 2 && found.length <= Math.max(16, 2 * wanted + 2), words);
      assert.ok(found.every((tick) => tick >= low * (1 - 1e-6) && tick <= high * (1 + 1e-6)), words);
      assert.ok(found.every((tick, at) => !at || tick > found[at - 1]), words);
    });
  });
}

test("an axis from zero begins with zero", () => {
  forSeeds(300, (random) => assert.equal(axisTicks(0, ofAnySize(random, -3, 9), false)[0], 0));
});

test("what cannot be drawn has no ticks", () => {
  assert.deepEqual([axisTicks(NaN, 1, false), axisTicks(0, Infinity, false), axisTicks(0, 10, true), axisTicks(-1, 10, true)], [[], [], [], []]);
});

test("ticks over many decades are powers of ten", () => {
  assert.deepEqual(axisTicks(1, 1e6, true), [1, 10, 100, 1000, 1e4, 1e5, 1e6]);
  assert.deepEqual(axisTicks(1, 50, true), [1, 2, 5, 10, 20, 50]);
  assert.deepEqual(axisTicks(3.1, 3.9, true), axisTicks(3.1, 3.9, false));
});
