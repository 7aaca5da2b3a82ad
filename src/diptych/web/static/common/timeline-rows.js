/**
 * Cells of many lanes as rows of pixels: every lane is one row of a small picture, stretched to its height. What it costs
 * depends on the pixels of the screen, not on the number of cells.
 */

const NUM_PHASES = 3;

/** [r, g, b] of a CSS colour. */
function channels(pen, colour) {
  pen.fillStyle = "#000";
  pen.fillStyle = colour;
  const hex = /^#([0-9a-f]{6})$/.exec(pen.fillStyle)?.[1] ?? "808080";
  return [0, 2, 4].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

export class CellRows {
  constructor(canvas = document.createElement("canvas")) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.weights = new Float32Array(0);
  }

  /** Colours are looked up again when the theme changes. phases: CSS colours in the order of PHASES. */
  setColours(phases, idle) {
    this.phases = phases.map((colour) => channels(this.pen, colour));
    this.idle = channels(this.pen, idle);
  }

  /** A picture of so many rows, each `width` device pixels wide. */
  begin(width, rows) {
    this.width = width;
    if (this.canvas.width !== width || this.canvas.height < rows) {
      this.canvas.width = width;
      this.canvas.height = Math.max(rows, 1);
      this.image = this.pen.createImageData(width, Math.max(rows, 1));
      this.pixels = new Uint32Array(this.image.data.buffer);
      this.weights = new Float32Array(width * NUM_PHASES);
    }
    this.used = rows;
  }

  /** Start a row: no cell yet. */
  clearRow() {
    this.weights.fill(0);
  }

  /** A cell from `left` to `right`, in device pixels of the row. */
  add(phase, left, right) {
    const { weights, width } = this;
    const from = Math.max(0, left);
    const to = Math.min(width, right);
    if (to <= from) return;
    const first = Math.floor(from);
    const last = Math.min(width - 1, Math.floor(to));
    if (first === last) {
      weights[first * NUM_PHASES + phase] += to - from;
      return;
    }
    weights[first * NUM_PHASES + phase] += first + 1 - from;
    for (let at = first + 1; at < last; at++) weights[at * NUM_PHASES + phase] = 1;
    weights[last * NUM_PHASES + phase] += to - last;
  }

  /** Each pixel gets the phase that covers most of it, over the idle colour as far as nothing covers it. */
  endRow(row) {
    const { weights, width, pixels, phases, idle } = this;
    const offset = row * width;
    for (let at = 0, place = 0; at < width; at++, place += NUM_PHASES) {
      const a = weights[place];
      const b = weights[place + 1];
      const c = weights[place + 2];
      const share = Math.min(1, a + b + c);
      const colour = phases[a >= b ? (a >= c ? 0 : 2) : b >= c ? 1 : 2];
      const rest = 1 - share;
      pixels[offset + at] = (255 << 24) | ((colour[2] * share + idle[2] * rest) << 16) | ((colour[1] * share + idle[1] * rest) << 8) | (colour[0] * share + idle[0] * rest);
    }
  }

  /** All rows are there. */
  finish() {
    if (this.used) this.pen.putImageData(this.image, 0, 0, 0, 0, this.width, this.used);
  }

  /** Paint a row, stretched. */
  paint(pen, row, x, y, width, height) {
    pen.drawImage(this.canvas, 0, row, this.width, 1, x, y, width, height);
  }
}
