/** Numbers as people read them. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, count, duration, milliseconds, percent, plural, short, shortId, significant } from "../../../src/diptych/web/static/common/format.js";
import { forSeeds, ofAnySize } from "./random.js";

const DASH = "–";
const UNITS = { ns: 1, "µs": 1e3, ms: 1e6, s: 1e9 };

/** The number that a text stands for. */
const read = (text) => Number(text.replaceAll(",", ""));

/** The nanoseconds that a duration stands for. */
function nanoseconds(text) {
  const long = /^(\d+) min (\d+) s$/.exec(text);
  if (long) return (Number(long[1]) * 60 + Number(long[2])) * 1e9;
  const [, value, unit] = /^([\d.,]+) (ns|µs|ms|s)$/.exec(text);
  return read(value) * UNITS[unit];
}

test("three digits are kept, and never an exponent", () => {
  forSeeds(2000, (random) => {
    const value = ofAnySize(random, -9, 12);
    const text = significant(value);
    assert.match(text, /^[\d,]+(\.\d*[1-9])?$/);
    assert.ok(Math.abs(read(text) / value - 1) <= 0.005 + 1e-9, `${value} is written ${text}`);
  });
});

test("a negative number is written like its opposite", () => {
  forSeeds(300, (random) => {
    const value = ofAnySize(random, -6, 9);
    assert.equal(significant(-value), `-${significant(value)}`);
    assert.equal(duration(-value), `-${duration(value)}`);
  });
});

test("numbers that round up to the next digit have no empty places", () => {
  assert.deepEqual([0.9999, 9.999, 99.96, 999.96].map((value) => significant(value)), ["1", "10", "100", "1,000"]);
  assert.deepEqual([0, 1e-7, 1e-15, 0.1 + 0.2].map((value) => significant(value)), ["0", "0.0000001", "0", "0.3"]);
});

test("a duration is within half a percent of what it stands for, and below a thousand of its unit", () => {
  forSeeds(2000, (random) => {
    const ns = ofAnySize(random, -0.5, 13);
    const text = duration(ns);
    assert.ok(Math.abs(nanoseconds(text) / ns - 1) <= 0.0051, `${ns} is written ${text}`);
    assert.ok(text.includes("min") || read(text.split(" ")[0]) < 1000, text);
    assert.doesNotMatch(text, / 60 s/);
  });
});

test("longer durations are never written as shorter ones", () => {
  forSeeds(1000, (random) => {
    const ns = ofAnySize(random, 0, 13);
    assert.ok(nanoseconds(duration(ns * (1 + random()))) >= nanoseconds(duration(ns)));
  });
});

test("what is not known is a dash", () => {
  for (const value of [null, undefined, NaN, Infinity]) {
    assert.equal(duration(value), DASH);
    assert.equal(milliseconds(value), DASH);
    assert.equal(percent(value), DASH);
  }
  assert.equal(significant(NaN), DASH);
});

test("milliseconds are durations", () => {
  assert.deepEqual([0, 0.0005, 1.5, 1500, 200_000].map(milliseconds), ["0 ms", "500 ns", "1.5 ms", "1.5 s", "3 min 20 s"]);
});

test("bytes and large counts change their unit before they have four digits", () => {
  forSeeds(1000, (random) => {
    const value = Math.round(ofAnySize(random, 0, 14.9));
    assert.ok(read(bytes(value).split(" ")[0]) < 1000, bytes(value));
    const text = short(value % 999_000_000);
    assert.ok(text.endsWith("M") || text.endsWith("k") ? read(text.slice(0, -1)) < 1000 : read(text) < 10_000, text);
  });
  assert.deepEqual([0, 999, 999_999, 671_088_640, 1.5e12].map(bytes), ["0 B", "999 B", "1 MB", "671 MB", "1.5 TB"]);
  assert.deepEqual([9999, 12_345, 999_950, 3.4e6].map(short), ["9,999", "12.3k", "1M", "3.4M"]);
});

test("shares keep a digit while they are small", () => {
  assert.deepEqual([0, 0.001, 0.0994, 0.0996, 0.5, 1].map(percent), ["0 %", "0.1 %", "9.9 %", "10 %", "50 %", "100 %"]);
});

test("one thing and many have their words", () => {
  assert.deepEqual([plural(0, "token"), plural(1, "token"), plural(1234, "token")], ["0 tokens", "1 token", "1,234 tokens"]);
  assert.equal(count(1234567), "1,234,567");
});

test("an id is as short as tells it from others", () => {
  assert.equal(shortId("chatcmpl-0123456789abcdef"), "012345");
  assert.equal(shortId("cmpl-0123456789abcdef-3"), "012345-3");
  assert.equal(shortId("long 1"), "long 1");
});
