/**
 * Steps that are being computed: drawn from their beginning up to now, with the rest of the predicted time as an outline.
 * A worker reports a long step when it begins; a playback shows the step in which its moment lies.
 */

import { duration, short } from "./format.js";

const CALM = matchMedia("(prefers-reduced-motion: reduce)");
const PULSE_MS = 900;

/** Prompt tokens in a step. */
const promptTokens = (step) => (step.prefills || []).reduce((sum, [, , tokens]) => sum + tokens, 0);

/** Paint the open steps of these rows of lanes. at: see drawFrame. */
export function drawOpenSteps(pen, lanes, at) {
  for (const row of lanes) if (row.lane.open && row.lane.open.time_ns < at.t1) drawOpenStep(pen, row, at);
}

function drawOpenStep(pen, row, at) {
  const { open } = row.lane;
  const { x, colours, edge } = at;
  const [y, height] = [row.y - at.top + 1, row.height - 2];
  const left = Math.max(x(open.time_ns), at.gutter);
  const right = Math.min(Math.max(x(Math.max(edge, open.time_ns)), left + 1.5), at.width);
  pen.globalAlpha = CALM.matches || !at.isLive ? 0.88 : 0.78 + 0.22 * Math.sin((performance.now() / PULSE_MS) * 2 * Math.PI);
  pen.fillStyle = colours[open.phase];
  pen.fillRect(left, y, right - left, height);
  pen.globalAlpha = 1;
  if (open.phase === "mixed") {
    pen.fillStyle = colours.patterns.mixed;
    pen.fillRect(left, y, right - left, height);
  }
  drawPrediction(pen, open, [right, y, height], at);
  if (open.waiting) drawWaiting(pen, [left, right, y, height], colours);
  drawWords(pen, open, [left, right, y, height], at);
}

/** From now to the time at which it should end. */
function drawPrediction(pen, open, [left, y, height], { x, width, colours }) {
  const right = Math.min(x(open.time_ns + (open.predicted_ns || 0)), width);
  if (right - left < 3) return;
  pen.strokeStyle = colours[open.phase];
  pen.lineWidth = 1.2;
  pen.setLineDash([4, 3]);
  pen.strokeRect(left, y + 0.6, right - left - 0.6, height - 1.2);
  pen.setLineDash([]);
}

function drawWaiting(pen, [left, right, y, height], colours) {
  const strip = Math.max(3, Math.min(6, height * 0.3));
  pen.fillStyle = colours.surface;
  pen.fillRect(left, y + height - strip, right - left, strip);
  pen.fillStyle = colours.patterns.stalled;
  pen.fillRect(left, y + height - strip, right - left, strip);
}

function drawWords(pen, open, [left, right, y, height], { edge, colours }) {
  if (height < 13) return;
  const tokens = promptTokens(open);
  const time = `${duration(Math.max(0, edge - open.time_ns))}${open.predicted_ns ? ` of ${duration(open.predicted_ns)}` : ""}`;
  pen.font = colours.cellFont;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  const text = [`${tokens ? `${short(tokens)} tokens, ` : ""}${time}`, time].find((words) => pen.measureText(words).width + 12 < right - left);
  if (!text) return;
  pen.fillStyle = colours[`${open.phase}-ink`];
  pen.fillText(text, left + 6, y + height / 2);
}
