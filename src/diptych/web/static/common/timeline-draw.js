/**
 * Draws a TimelineModel on a canvas: cells of steps, states, transfers, requests and the time axis. Reads, never changes.
 * Cells go through timeline-rows.js, so that ten thousand of them cost no more than a hundred.
 */

import { firstAbove } from "./sorted.js";
import { drawOpenSteps } from "./timeline-open.js";
import { PHASES } from "./timeline-model.js";
import { colours as resolved } from "./theme.js";
import { short } from "./format.js";

export const AXIS = 24;
const MIXED = PHASES.indexOf("mixed");
const NAMES = ["prefill", "decode", "mixed", "transfer", "idle", "stalled"];
const INKS = NAMES.map((name) => `${name}-ink`);
const GROUNDS = ["text", "muted", "line", "surface", "sunken", "accent", "accent-soft", "bad", "idle-lane"];

/** The colours of the theme that is shown now, and the patterns that tell phases apart without colour. */
export function palette(context, ratio) {
  const colours = resolved([...NAMES, ...INKS, ...GROUNDS]);
  const pattern = (draw, size = 6) => {
    const tile = document.createElement("canvas");
    tile.width = tile.height = size * ratio;
    const pen = tile.getContext("2d");
    pen.scale(ratio, ratio);
    draw(pen, size);
    const made = context.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(1 / ratio));
    return made;
  };
  const stripes = (pen, size, colour, width) => {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    for (const shift of [-size, 0, size]) pen.moveTo(shift, size), pen.lineTo(shift + size, 0);
    pen.stroke();
  };
  colours.patterns = {
    mixed: pattern((pen, size) => stripes(pen, size, mix(colours.surface, 0.42), 2)),
    transfer: pattern((pen) => {
      pen.fillStyle = mix(colours.surface, 0.75);
      pen.fillRect(1, 1, 1.6, 1.6);
      pen.fillRect(4, 4, 1.6, 1.6);
    }),
    stalled: pattern((pen, size) => {
      pen.fillStyle = mix(colours.stalled, 0.22);
      pen.fillRect(0, 0, size, size);
      stripes(pen, size, colours.stalled, 1.3);
      pen.translate(size, 0);
      pen.scale(-1, 1);
      stripes(pen, size, colours.stalled, 1.3);
    }),
    down: pattern((pen, size) => stripes(pen, size, colours.line, 1.5)),
  };
  return colours;
}

const mix = (colour, alpha) => `color-mix(in srgb, ${colour} ${alpha * 100}%, transparent)`;

/**
 * One frame. view: {t0, t1, width, height, gutter, ratio, top (scrolled by), shown (rows), rows (CellRows), colours,
 * fonts, ticks, edge, isLive, hoveredRow, selectedRow}.
 */
export function drawFrame(pen, model, view) {
  const { width, height, gutter, colours, top, t0, t1 } = view;
  const scale = (width - gutter) / (t1 - t0);
  const at = { ...view, scale, x: (time) => gutter + (time - t0) * scale };
  pen.fillStyle = colours.surface;
  pen.fillRect(0, 0, width, height);
  const shown = view.shown.filter((row) => row.y + row.height > top + AXIS && row.y < top + height);
  pen.save();
  pen.beginPath();
  pen.rect(gutter, AXIS, width - gutter, height - AXIS);
  pen.clip();
  drawGrid(pen, at, height);
  drawLanes(pen, shown.filter((row) => row.kind === "lane"), at);
  for (const row of shown) if (row.kind === "request") drawRequest(pen, model, row, at);
  drawTransfers(pen, model, shown, at);
  drawAhead(pen, at, height);
  pen.restore();
  drawGutter(pen, shown, at, height);
  drawAxis(pen, at);
}

function drawGrid(pen, at, height) {
  pen.fillStyle = at.colours.line;
  pen.globalAlpha = 0.55;
  for (const { time } of at.ticks) pen.fillRect(Math.round(at.x(time)), AXIS, 1, height);
  pen.globalAlpha = 1;
}

/** What has not happened yet lies behind a line. */
function drawAhead(pen, at, height) {
  const left = at.x(at.edge);
  if (!at.isLive || left > at.width - 2) return;
  pen.globalAlpha = 0.45;
  pen.fillStyle = at.colours.surface;
  pen.fillRect(left, AXIS, at.width - left, height);
  pen.globalAlpha = 1;
  pen.fillStyle = at.colours.muted;
  pen.fillRect(Math.round(left), AXIS, 1, height);
}

function drawAxis(pen, at) {
  const { colours, width, gutter } = at;
  pen.fillStyle = colours.surface;
  pen.fillRect(0, 0, width, AXIS);
  pen.fillStyle = colours.line;
  pen.fillRect(0, AXIS - 1, width, 1);
  pen.fillStyle = colours.muted;
  pen.font = at.fonts.small;
  pen.textBaseline = "middle";
  pen.textAlign = "center";
  for (const { time, text } of at.ticks) {
    const x = at.x(time);
    const half = pen.measureText(text).width / 2;
    if (x - half > gutter - 4 && x + half < width - 2) pen.fillText(text, x, AXIS / 2);
  }
}

function drawLanes(pen, lanes, at) {
  const { rows: cells, colours, ratio } = at;
  const span = at.width - at.gutter;
  cells.begin(Math.max(1, Math.round(span * ratio)), lanes.length);
  const marks = { labels: [], mixed: [] };
  lanes.forEach((row, number) => fillRow(cells, number, row, at, marks));
  cells.finish();
  pen.imageSmoothingEnabled = false;
  lanes.forEach((row, number) => cells.paint(pen, number, at.gutter, row.y - at.top + 1, span, row.height - 2));
  pen.fillStyle = colours.patterns.mixed;
  for (const [left, right, y, height] of marks.mixed) pen.fillRect(left, y, right - left, height);
  drawOpenSteps(pen, lanes, at);
  for (const row of lanes) drawOverlays(pen, row, at);
  drawLabels(pen, marks.labels, colours);
}

function fillRow(cells, number, row, at, marks) {
  const { lane } = row;
  const { t0, t1, x, ratio, gutter } = at;
  const y = row.y - at.top + 1;
  const height = row.height - 2;
  const [from, to] = lane.between(t0, t1);
  cells.clearRow();
  for (let index = from; index < to; index++) {
    const left = x(lane.starts[index]);
    const right = x(lane.ends[index]);
    const wide = right - left;
    const phase = lane.phases[index];
    const gap = wide > 5 ? 1 : wide > 2 ? 0.35 : 0; // between cells, where there is room for it
    cells.add(phase, (left - gutter) * ratio, (right - gap - gutter) * ratio);
    if (phase === MIXED && wide > 5) marks.mixed.push([left, right - gap, y, height]);
    if (wide > 34 && height >= 13) marks.labels.push([lane.steps[index], phase, Math.max(left, gutter), Math.min(right, at.width), y + height / 2]);
  }
  cells.endRow(number);
}

function drawOverlays(pen, row, at) {
  const { lane } = row;
  const y = row.y - at.top + 1;
  const height = row.height - 2;
  const { t0, t1, x, colours } = at;
  const [from, to] = lane.between(t0, t1);
  const strip = Math.max(3, Math.min(6, height * 0.3));
  let start = -1;
  let end = -1;
  pen.fillStyle = colours.patterns.stalled;
  const flush = () => {
    if (start >= 0 && end - start > 0.4) {
      pen.fillStyle = colours.surface;
      pen.fillRect(start, y + height - strip, end - start, strip);
      pen.fillStyle = end - start > 4 ? colours.patterns.stalled : colours.stalled;
      pen.fillRect(start, y + height - strip, end - start, strip);
    }
    start = -1;
  };
  for (let index = from; index < to; index++) {
    if (!lane.waiting[index]) {
      flush();
      continue;
    }
    if (start < 0) start = x(lane.starts[index]);
    end = x(lane.ends[index]);
  }
  flush();
  for (const { t0: since, t1: until, state } of lane.states) {
    if (since > t1 || until < t0) continue;
    const left = Math.max(x(since), at.gutter);
    const right = Math.min(until === Infinity ? at.width : x(until), at.width);
    pen.fillStyle = colours.surface;
    pen.fillRect(left, y, right - left, height);
    pen.fillStyle = colours.patterns.down;
    pen.fillRect(left, y, right - left, height);
    if (right - left > 50 && height >= 13) {
      pen.font = at.fonts.small;
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      const wide = pen.measureText(state).width + 10;
      pen.fillStyle = colours.surface;
      pen.fillRect(left + 4, y + 1, wide, height - 2);
      pen.fillStyle = state === "lost" ? colours.bad : colours.muted;
      pen.fillText(state, left + 9, y + height / 2);
    }
  }
}

function drawLabels(pen, labels, colours) {
  pen.font = colours.cellFont;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const [step, phase, left, right, y] of labels) {
    const tokens = (step.prefills || []).reduce((sum, chunk) => sum + chunk[2], 0);
    const text = phase === 0 ? short(tokens) : phase === 1 ? `${step.num_decodes}×` : `${short(tokens)} + ${step.num_decodes}×`;
    if (text.length * 6.6 + 6 > right - left) continue;
    pen.fillStyle = colours[INKS[phase]];
    pen.fillText(text, (left + right) / 2, y);
  }
}

function drawRequest(pen, model, row, at) {
  const { request } = row;
  const y = row.y - at.top + 2;
  const height = row.height - 4;
  const middle = y + height / 2;
  const { x, t0, t1, colours } = at;
  const horizon = Math.min(request.end || at.edge, t1);
  const start = Math.max(x(request.start), at.gutter);
  if (row === at.selectedRow) {
    pen.fillStyle = colours.accent;
    pen.globalAlpha = 0.13;
    pen.fillRect(at.gutter, row.y - at.top, at.width, row.height);
    pen.globalAlpha = 1;
  }
  pen.fillStyle = colours.muted;
  pen.globalAlpha = 0.75;
  pen.fillRect(start, middle - 0.75, Math.max(0, x(horizon) - start), 1.5);
  pen.globalAlpha = 1;
  for (const chunk of request.chunks) {
    if (chunk.t0 > t1 || chunk.t1 < t0) continue;
    pen.fillStyle = colours.prefill;
    pen.fillRect(x(chunk.t0), y, Math.max(1, x(chunk.t1) - x(chunk.t0) - 0.5), height);
  }
  if (request.open && request.open.t0 < t1) {
    pen.fillStyle = colours.prefill;
    pen.globalAlpha = 0.7;
    pen.fillRect(x(request.open.t0), y, Math.max(1, x(horizon) - x(request.open.t0)), height);
    pen.globalAlpha = 1;
  }
  if (request.delivered > request.firstToken && request.firstToken) {
    const left = x(request.firstToken);
    pen.fillStyle = colours.transfer;
    pen.fillRect(left, y, Math.max(1.5, x(request.delivered) - left), height);
  }
  drawTokens(pen, model, request, at, y, height, horizon);
  if (request.queued && request.queued > t0) {
    pen.fillStyle = colours.text;
    pen.fillRect(x(request.queued) - 1, y, 2, height);
  }
  if (request.end && request.end < t1) {
    const failed = !["stop", "length"].includes(request.detail?.reason);
    pen.fillStyle = failed ? colours.bad : colours.text;
    pen.fillRect(x(request.end), y, 2, height);
  }
}

function drawTokens(pen, model, request, at, y, height, horizon) {
  const { times } = request;
  const { x, t0, t1, colours, scale } = at;
  const objective = model.stall.objectiveNs;
  let index = Math.max(1, firstAbove(times, t0));
  let left = times.length ? x(times[index - 1]) : 0;
  const inset = height > 8 ? 2 : 0;
  pen.fillStyle = colours.decode;
  const stalls = [];
  const flush = (right) => {
    if (right > left) pen.fillRect(left, y + inset, Math.max(right - left, 1), height - 2 * inset);
  };
  for (; index < times.length && times[index - 1] <= t1; index++) {
    if (!request.isStalled(index, objective)) continue;
    flush(x(times[index - 1]));
    stalls.push([x(times[index - 1]), x(times[index])]);
    left = x(times[index]);
  }
  if (times.length) flush(Math.min(x(times[Math.min(index, times.length) - 1]), at.width));
  const newest = times.at(-1);
  const limit = model.limitNs(request.worker);
  if (newest && !request.end && limit && horizon - newest > limit) stalls.push([x(newest), x(horizon)]);
  for (const [from, to] of stalls) {
    pen.fillStyle = colours.surface;
    pen.fillRect(from, y, to - from, height);
    pen.fillStyle = to - from > 3 ? colours.patterns.stalled : colours.stalled;
    pen.fillRect(from, y, Math.max(1, to - from), height);
  }
  const typical = times.length > 1 ? (newest - times[0]) / (times.length - 1) : 0;
  if (typical * scale < 5) return;
  pen.fillStyle = colours["decode-ink"];
  for (let tick = firstAbove(times, t0); tick < times.length && times[tick] <= t1; tick++) pen.fillRect(x(times[tick]) - 0.5, y + inset, 1, height - 2 * inset);
}

function drawTransfers(pen, model, shown, at) {
  const { x, t0, t1, colours } = at;
  const rows = new Map(shown.filter((row) => row.kind === "lane").map((row) => [row.lane.id, row]));
  for (const row of rows.values()) {
    const all = row.lane.transfers;
    const y = row.y - at.top + 1;
    const strip = Math.max(3, Math.min(6, row.height * 0.28));
    let links = 0;
    for (let index = all.length - 1; index >= 0 && links < 300; index--) {
      const transfer = all[index];
      if (transfer.end_ns < t0 - 60e9) break;
      if (transfer.start_ns > t1 || transfer.end_ns < t0) continue;
      const left = x(transfer.start_ns);
      const right = Math.max(x(transfer.end_ns), left + 2.5);
      pen.fillStyle = colours.transfer;
      pen.fillRect(left, y, right - left, strip);
      const sender = rows.get(transfer.sender);
      if (!sender || sender === row) continue;
      links++;
      const from = sender.y < row.y ? sender.y - at.top + sender.height - 1 : sender.y - at.top + 1;
      const to = sender.y < row.y ? y : y + row.height - 2;
      pen.strokeStyle = colours.transfer;
      pen.lineWidth = 1.5;
      pen.beginPath();
      pen.moveTo(right, from);
      pen.lineTo(right, to);
      pen.stroke();
    }
  }
}

function drawGutter(pen, shown, at, height) {
  const { colours, gutter, top, fonts } = at;
  pen.fillStyle = colours.surface;
  pen.fillRect(0, AXIS, gutter, height);
  pen.fillStyle = colours.line;
  pen.fillRect(gutter - 1, AXIS, 1, height);
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  for (const row of shown) {
    const y = row.y - top;
    if (row === at.selectedRow) {
      pen.fillStyle = colours["accent-soft"];
      pen.fillRect(0, y, gutter - 1, row.height);
      pen.fillStyle = colours.accent;
      pen.fillRect(0, y, 3, row.height);
    } else if (row === at.hoveredRow && row.kind !== "title") {
      pen.fillStyle = colours.sunken;
      pen.fillRect(0, y, gutter - 1, row.height);
    }
    pen.font = row.kind === "lane" ? fonts.lane : row.kind === "title" ? fonts.title : fonts.small;
    if (row.height < 11) pen.font = fonts.tiny;
    pen.fillStyle = row.kind === "lane" ? (row.lane.state === "lost" ? colours.bad : colours.text) : colours.muted;
    pen.fillText(clip(pen, row.label, gutter - 16), 8, y + row.height / 2 + 0.5);
  }
}

const clipped = new Map();

function clip(pen, text, width) {
  const key = `${pen.font}|${width}|${text}`;
  let found = clipped.get(key);
  if (found === undefined) {
    found = text;
    while (found.length > 1 && pen.measureText(found).width > width) found = `${found.replace(/…$/, "").slice(0, -1)}…`;
    if (clipped.size > 2000) clipped.clear();
    clipped.set(key, found);
  }
  return found;
}
