/** State in the address. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { changedQuery } from "../../../src/diptych/web/static/common/dom.js";
import { between, forSeeds } from "./random.js";

test("a query is changed where it is asked to, and the rest stays", () => {
  assert.equal(changedQuery("?long=512&span=8", { span: 12.8 }), "?long=512&span=12.8");
  assert.equal(changedQuery("?long=512", { long: "" }), "");
  assert.equal(changedQuery("", { name: "a b&c=d" }), "?name=a+b%26c%3Dd");
});

test("what is written into an address is read from it", () => {
  const values = ["", null, undefined, "x", "a b", "?&=#", "ä–日", 0, 12.5];
  forSeeds(200, (random) => {
    const changes = Object.fromEntries(["a", "b", "c"].map((name) => [name, values[between(random, 0, values.length - 1)]]));
    const found = Object.fromEntries(new URLSearchParams(changedQuery("?a=old&z=kept", changes)));
    const wanted = Object.entries({ z: "kept", ...changes }).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    assert.deepEqual(found, Object.fromEntries(wanted.map(([name, value]) => [name, String(value)])));
  });
});
