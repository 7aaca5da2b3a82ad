/** Cells as pixels. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { CellRows } from "../../../src/diptych/web/static/common/timeline-rows.js";
import { between, forSeeds } from "./random.js";

const COLOURS = ["#0a0000", "#000a00", "#00000a"];
const IDLE = "#646464";

/** A canvas that keeps what is put on it. */
function canvas() {
  const pen = {
    createImageData: (width, height) => ({ data: new Uint8ClampedArray(width * height * 4) }),
    putImageData(image) {
      pen.shown = new Uint8ClampedArray(image.data);
    },
  };
  return { width: 0, height: 0, getContext: () => pen, pen };
}

function drawn(width, rows) {
  const surface = canvas();
  const cells = new CellRows(surface);
  cells.setColours(COLOURS, IDLE);
  cells.begin(width, rows.length);
  rows.forEach((row, number) => {
    cells.clearRow();
    for (const [phase, left, right] of row) cells.add(phase, left, right);
    cells.endRow(number);
  });
  cells.finish();
  return Array.from({ length: rows.length }, (_, row) => Array.from({ length: width }, (__, x) => [...surface.pen.shown.subarray((row * width + x) * 4, (row * width + x) * 4 + 4)]));
}

test("a pixel has the phase that covers most of it, over idle where nothing does", () => {
  const [row] = drawn(4, [[[0, 0, 1], [1, 1.25, 2], [2, 2.9, 3.2], [0, 3.2, 3.9]]]);
  const wanted = [[10, 0, 0, 255], [25, 32.5, 25, 255], [90, 90, 91, 255], [19, 10, 10, 255]];
  row.forEach((pixel, x) => pixel.forEach((value, channel) => assert.ok(Math.abs(value - wanted[x][channel]) <= 1, `pixel ${x}: ${pixel}`)));
});

test("every pixel is between idle and the colours of the cells on it, and rows do not touch", () => {
  forSeeds(100, (random) => {
    const width = between(random, 1, 40);
    const cells = [];
    for (let at = -2; at < width + 2;) {
      const right = at + random() * 4;
      if (random() < 0.7) cells.push([between(random, 0, 2), at, right]);
      at = right;
    }
    const [first, middle, last] = drawn(width, [[], cells, []]);
    const idle = Array.from({ length: width }, () => [100, 100, 100, 255]);
    assert.deepEqual([first, last], [idle, idle]);
    for (let x = 0; x < width; x++) {
      const covered = cells.reduce((sum, [, left, right]) => sum + Math.max(0, Math.min(right, x + 1) - Math.max(left, x)), 0);
      const [red, green, blue, alpha] = middle[x];
      const channels = [red, green, blue];
      assert.equal(alpha, 255);
      assert.ok(Math.min(...channels) >= Math.floor(100 * (1 - covered)) - 1 && Math.max(...channels) <= 100, `${channels} where ${covered} is covered`);
      if (covered > 0.01) assert.ok(Math.min(...channels) < 100);
    }
  });
});
