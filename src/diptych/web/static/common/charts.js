/** Small charts without a library: lines, stacked parts, sparklines, meters. Colours are CSS colours or tokens. */

import { h, show, svg } from "./dom.js";
import { duration, percent, significant } from "./format.js";

const LETTER = 7; // of a label, about
const LINE = 15;
const MARGIN = { left: 54, right: 16, top: 12, bottom: 40 };

/**
 * Ticks of an axis from low to high: 1, 2 or 5 times a power of ten apart; on a logarithmic axis powers of ten, with round
 * numbers between them where few would be left.
 */
export function axisTicks(low, high, log, wanted = 6) {
  if (!Number.isFinite(high - low) || (log && low <= 0)) return [];
  const round = log ? logTicks(low, high, wanted) : [];
  return round.length > 1 ? round : linearTicks(low, high, wanted);
}

function logTicks(low, high, wanted) {
  const ticks = [];
  const decades = Math.log10(high) - Math.log10(low);
  const every = Math.max(1, Math.ceil(decades / (wanted + 1)));
  const units = decades < 0.5 ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8] : decades < 0.8 ? [1, 1.5, 2, 3, 5, 7] : decades < 1.7 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += every) {
    for (const unit of units) if (unit * 10 ** power >= low * (1 - 1e-9) && unit * 10 ** power <= high * (1 + 1e-9)) ticks.push(Number((unit * 10 ** power).toPrecision(3)));
  }
  return ticks;
}

function linearTicks(low, high, wanted) {
  const rough = (high - low) / wanted || 1;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((unit) => unit * base).find((candidate) => candidate >= rough);
  const ticks = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) ticks.push(Number(value.toPrecision(12)));
  return ticks.length > 1 || low >= high ? ticks : linearTicks(low, high, wanted * 2);
}

/**
 * Lines over two axes.
 *   lineChart(element, {title, series: [{name, points: [[x, y]], colour, dashed}], x: {label, log, min, max, format},
 *                       y: {...}, marks: [{x, y, name, colour, minor, below, ring, to}], bands: [{from, to, name, colour}], height})
 * Marks: a ring is hollow, with a dotted line down to the height `to`. Replaces what the element holds. The title is what people hear who do not see it.
 */
export function lineChart(element, { title, series, x, y, marks = [], bands = [], height = 280 }) {
  const width = Math.max(260, element.clientWidth || 560);
  const all = series.flatMap((line) => line.points).concat(marks.map((mark) => [mark.x, mark.y]));
  const across = scale({ ...x, values: all.map((point) => point[0]) }, MARGIN.left, width - MARGIN.right);
  const up = scale({ ...y, values: all.map((point) => point[1]) }, height - MARGIN.bottom, MARGIN.top);
  const root = svg("svg.chart", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const band of bands) {
    const from = across.at(band.from);
    root.append(svg("rect", { x: from, y: MARGIN.top, width: Math.max(0, across.at(band.to) - from), height: height - MARGIN.top - MARGIN.bottom, fill: band.colour, opacity: 0.14 }));
  }
  drawAxes(root, across, up, width, height, x, y);
  for (const line of series) {
    const path = line.points.map(([a, b], at) => `${at ? "L" : "M"}${across.at(a).toFixed(1)} ${up.at(b).toFixed(1)}`).join("");
    root.append(svg("path.line", { d: path, stroke: line.colour, "stroke-dasharray": line.dashed ? "5 4" : null }));
  }
  drawMarks(root, marks, { across, up, width });
  const legend = h("ul.timeline-legend", {}, series.filter((line) => line.name).map((line) => h("li", {}, h("span.swatch", { style: { background: line.colour } }), line.name)));
  show(element, root, series.length > 1 ? legend : null);
  return root;
}

function drawMarks(root, marks, { across, up, width }) {
  const taken = [];
  for (const mark of marks) {
    const [left, top] = [across.at(mark.x), up.at(mark.y)];
    if (mark.to !== undefined) root.append(svg("line", { x1: left, x2: left, y1: top, y2: up.at(mark.to), stroke: mark.colour, "stroke-width": 2, "stroke-dasharray": "2 3" }));
    const fill = mark.ring ? { fill: "var(--surface)", stroke: mark.colour } : { fill: mark.colour, stroke: "var(--surface)" };
    root.append(svg("circle", { cx: left, cy: top, r: mark.minor ? 3.5 : 6, ...fill, "stroke-width": mark.minor && !mark.ring ? 1 : 2 }));
    if (!mark.name) continue;
    const end = left > width * 0.7;
    const from = end ? left - 9 - LETTER * mark.name.length : left + 9;
    let y = mark.below ? top + 18 : top - 10;
    while (taken.some((other) => Math.abs(other.y - y) < LINE && other.from < from + LETTER * mark.name.length && from < other.to)) y += mark.below ? LINE : -LINE;
    taken.push({ y, from, to: from + LETTER * mark.name.length });
    root.append(svg(mark.minor ? "text" : "text.strong", { x: left + (end ? -9 : 9), y, "text-anchor": end ? "end" : "start" }, mark.name));
  }
}

function scale({ values, log = false, min, max }, from, to) {
  const good = values.filter((value) => Number.isFinite(value) && (!log || value > 0));
  let low = min ?? (log ? Math.min(...good) : Math.min(0, ...good));
  let high = max ?? Math.max(...good);
  if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = log ? [1, 10] : [0, 1];
  if (low === high) high = log ? low * 10 : low + 1;
  const place = log ? Math.log10 : (value) => value;
  const share = (value) => (place(Math.max(value, log ? low * 1e-3 : -Infinity)) - place(low)) / (place(high) - place(low));
  return { low, high, log, at: (value) => from + Math.max(-0.2, Math.min(1.2, share(value))) * (to - from) };
}

function drawAxes(root, across, up, width, height, x, y) {
  const bottom = height - MARGIN.bottom;
  const text = (format, value) => (format ?? significant)(value);
  for (const value of axisTicks(across.low, across.high, across.log, Math.max(3, Math.floor(width / 110)))) {
    const left = across.at(value);
    root.append(svg("line.grid-line", { x1: left, x2: left, y1: MARGIN.top, y2: bottom }), svg("text", { x: left, y: bottom + 16, "text-anchor": "middle" }, text(x.format, value)));
  }
  for (const value of axisTicks(up.low, up.high, up.log, Math.max(3, Math.floor(height / 60)))) {
    const top = up.at(value);
    root.append(svg("line.grid-line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: top, y2: top }), svg("text", { x: MARGIN.left - 7, y: top + 4, "text-anchor": "end" }, text(y.format, value)));
  }
  root.append(svg("path.axis", { d: `M${MARGIN.left} ${MARGIN.top}V${bottom}H${width - MARGIN.right}`, fill: "none" }));
  root.append(svg("text", { x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 5, "text-anchor": "middle" }, x.label ?? ""));
  root.append(svg("text", { x: 12, y: (MARGIN.top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(MARGIN.top + bottom) / 2})` }, y.label ?? ""));
}

/** Parts of a whole, one beside the other, with a legend: parts of {name, phase, value}; format: value -> text. */
export function stackedParts(element, parts, { label = "", format = duration } = {}) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const shown = parts.filter((part) => part.value > 0);
  const bar = h("div.stack", { role: "img", "aria-label": `${label}: ${shown.map((part) => `${part.name} ${format(part.value)}`).join(", ")}` },
    shown.map((part) => h(`i.swatch-${part.phase}`, { title: `${part.name}: ${format(part.value)}`, style: { "flex-grow": String(part.value / total), "flex-basis": "0", background: `var(--${part.phase})`, color: `var(--${part.phase}-ink)` } },
      part.value / total > 0.14 ? format(part.value) : "")));
  const legend = h("div.stack-legend", {}, parts.flatMap((part) => [h(`span.swatch.${part.phase}`), h(part.value > 0 ? "span" : "span.muted", {}, part.name), h(part.value > 0 ? "span.number" : "span.number.muted", {}, format(part.value)), h("span.number.muted", {}, total ? percent(part.value / total) : "–")]));
  show(element, bar, legend);
}

/** A line without axes; values: numbers or null. */
export function sparkline(element, values, { colour = "var(--accent)", limit = null, label = "" } = {}) {
  const [width, height] = [120, 28];
  const good = values.filter((value) => value !== null);
  const high = Math.max(limit ?? 0, ...good, 1e-12) * 1.08;
  const at = (value, index) => `${((index / Math.max(1, values.length - 1)) * width).toFixed(1)} ${(height - 2 - (value / high) * (height - 4)).toFixed(1)}`;
  let path = "";
  values.forEach((value, index) => {
    if (value !== null) path += `${path && values[index - 1] !== null ? "L" : "M"}${at(value, index)}`;
  });
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label, class: "sparkline" });
  if (limit !== null) root.append(svg("path", { d: `M0 ${at(limit, 0).split(" ")[1]}H${width}`, stroke: "var(--bad)", "stroke-dasharray": "3 3", "stroke-width": 1, fill: "none" }));
  root.append(svg("path", { d: path, stroke: colour, "stroke-width": 1.6, fill: "none", "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round" }));
  show(element, root);
}

/** A bar from 0 to 1 with its value as text. */
export function meter(share, label) {
  return h("span", { class: "meter", role: "meter", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(share * 100)) }, h("i", { style: { width: `${Math.min(100, share * 100)}%` } }));
}
