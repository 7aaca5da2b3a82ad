/** Which shape a fleet has, and what is ordered to give it another one. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { changesTo, shapeOf } from "../../../src/diptych/web/static/ui/shape.js";

const fleet = (...workers) => workers.map(([role, shape, state = "ready"], worker) => ({ worker, role, shape, state }));

test("a fleet with workers of one phase has two pools, else it is how it schedules", () => {
  assert.equal(shapeOf(fleet(["prefill", "chunked"], ["decode", "chunked"])), "pools");
  assert.equal(shapeOf(fleet(["both", "chunked"], ["both", "chunked"])), "chunked");
  assert.equal(shapeOf(fleet(["both", "unified"])), "unified");
  assert.equal(shapeOf(fleet(["both", "unified"], ["decode", "chunked", "stopped"])), "unified");
});

test("whatever is ordered first, both phases always have a worker", () => {
  const can = (workers, phase) => workers.some(({ role }) => role === phase || role === "both");
  const starts = [fleet(["both", "unified"], ["both", "unified"]), fleet(["prefill", "chunked"], ["decode", "chunked"]), fleet(["prefill", "chunked"], ["prefill", "chunked"], ["decode", "chunked"])];
  for (const start of starts) {
    for (const shape of ["unified", "chunked", "pools"]) {
      const workers = start.map((worker) => ({ ...worker }));
      for (const { worker, ...change } of changesTo(shape, workers)) {
        Object.assign(workers[worker], change);
        assert.ok(can(workers, "prefill") && can(workers, "decode"), `${shape} of ${JSON.stringify(start)}`);
      }
      assert.equal(shapeOf(workers), shape);
    }
  }
});

test("a worker that was stopped is left alone", () => {
  const workers = fleet(["both", "chunked"], ["both", "chunked", "stopped"], ["both", "chunked"]);
  assert.deepEqual(changesTo("pools", workers).map(({ worker, role }) => [worker, role]), [[2, "decode"], [0, "prefill"]]);
});
