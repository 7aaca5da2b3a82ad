/** The places of a slider. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { nearestStop, stopsOf } from "../../../src/diptych/web/static/guide/stops.js";
import { between, forSeeds, ofAnySize } from "./random.js";

test("a slider goes from its least to its largest value, rising, with whole numbers where only those are taken", () => {
  forSeeds(300, (random) => {
    const whole = random() < 0.5;
    const log = random() < 0.5;
    const low = whole ? between(random, log ? 1 : 0, 50) : Number(ofAnySize(random, -3, 2).toPrecision(3));
    const high = whole ? low + between(random, 1, 100_000) : Number((low * ofAnySize(random, 0.5, 4)).toPrecision(3));
    const stops = stopsOf(low, high, whole, log);
    const words = `${low} to ${high}: ${stops.slice(0, 5).join(" ")} ... ${stops.at(-1)}`;
    assert.ok(Math.abs(stops[0] / low - 1) < 1e-3 || stops[0] === low, words);
    assert.ok(Math.abs(stops.at(-1) / high - 1) < 1e-3, words);
    assert.ok(stops.every((stop, at) => !at || stop > stops[at - 1]), words);
    assert.ok(stops.length <= 1001, words);
    if (whole && log) assert.ok(stops.every(Number.isInteger), words);
  });
});

test("powers of two are on the slider of tokens", () => {
  const stops = stopsOf(16, 32_768, true, true);
  for (let power = 4; power <= 15; power++) assert.ok(stops.includes(2 ** power));
});

test("a number moves its slider to the nearest place", () => {
  forSeeds(200, (random) => {
    const stops = stopsOf(1, between(random, 2, 5000), true, random() < 0.5);
    const value = between(random, -5, 6000);
    const found = nearestStop(stops, value);
    const nearest = Math.min(...stops.map((stop) => Math.abs(stop - value)));
    assert.equal(Math.abs(stops[found] - value), nearest);
    assert.equal(stops[nearestStop(stops, stops[found])], stops[found]);
  });
});
