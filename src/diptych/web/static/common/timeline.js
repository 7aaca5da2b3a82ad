/**
 * The timeline: lanes of workers and of requests on a canvas, to look at, move in and ask.
 *
 *   const view = new TimelineView(element, {label: "Timeline", now: () => nanoseconds});
 *   view.setLanes([{id: 0, label: "0 prefill", role: "prefill"}]);
 *   view.add(records);          // as GET /timeline sends them (docs/api.md)
 *   view.addEventListener("select", (event) => event.detail.request);
 *
 * Owns what part of the time is shown and the drawing loop. The model is in timeline-model.js, the painting in
 * timeline-draw.js, pointers and keys in timeline-input.js, the words in timeline-words.js.
 */

import { h, setText, show } from "./dom.js";
import { duration, percent, shortId } from "./format.js";
import { firstAbove } from "./sorted.js";
import { onThemeChange } from "./theme.js";
import { ticks } from "./timeline-axis.js";
import { AXIS, drawFrame, palette } from "./timeline-draw.js";
import { TimelineInput } from "./timeline-input.js";
import { PHASES, TimelineModel } from "./timeline-model.js";
import { CellRows } from "./timeline-rows.js";
import { describe } from "./timeline-words.js";

const LEGEND = [
  ["prefill", "prefill"], ["decode", "decode"], ["mixed", "both in one step"], ["transfer", "KV transfer"],
  ["idle", "idle or waiting"], ["stalled", "stalled stream"],
];
const LETTERS = { prefill: "P", decode: "D", both: "W" };
const MIN_SPAN_NS = 20_000;
const MAX_SPAN_NS = 6 * 3600e9;
const REQUEST_ROW = 16;
const TITLE_ROW = 24;
const MAX_REQUEST_ROWS = 64;
const NARROW = 620;

/**
 * Options: label; now: () => nanoseconds of the records' clock (without it, following shows the newest record); lagNs:
 * how far behind `now` what is known ends; aheadShare: how much of the width is left for what is predicted; spanNs: the
 * time that is shown at first; name: request id -> text;
 * stall: see TimelineModel; clock: show the time of day (needs a header record); showRequests; minRequestRows;
 * maxHeight: in pixels, then it scrolls; tools: false leaves out the buttons and the legend.
 * Events: hover, select (detail: {request, lane, index, transfer, time}), range (detail: {t0, t1, following}),
 * requests (detail: {on}).
 */
export class TimelineView extends EventTarget {
  constructor(container, options = {}) {
    super();
    this.options = {
      label: "Timeline", lagNs: 0, spanNs: 10e9, name: shortId, showRequests: true, minRequestRows: 0, maxHeight: 620,
      clock: false, tools: true, aheadShare: 0, ...options,
    };
    this.model = new TimelineModel(this.options.stall);
    this.span = this.options.spanNs;
    this.t1 = 0;
    this.following = true;
    this.rows = [];
    this.slots = []; // the requests that have a row, in its order: rows keep their places while one is in sight
    this.filterLane = null;
    this.selected = null; // a TimelineRequest
    this.hovered = null;
    this.showRequests = this.options.showRequests;
    this.cells = new CellRows();
    this.drawTimes = []; // milliseconds of the newest frames
    this.numFrames = 0;
    this.#build(container);
    this.input = new TimelineInput(this);
    this.#observe();
    this.redraw();
  }

  get t0() {
    return this.t1 - this.span;
  }

  /** The right edge of what can be known: now, or the newest record. */
  get edge() {
    const now = this.options.now?.();
    return now ? now - this.options.lagNs : this.model.newest;
  }

  /** The right edge while it follows. */
  get #followed() {
    return this.edge + this.options.aheadShare * this.span;
  }

  setLanes(lanes) {
    this.model.setLanes(lanes);
    this.redraw();
  }

  add(records) {
    this.model.add(records);
    this.redraw();
  }

  /** The steps that are being computed; see TimelineModel. */
  setOpen(records) {
    this.model.setOpen(records);
    this.redraw();
  }

  clear() {
    this.model.clear();
    Object.assign(this, { slots: [], selected: null, hovered: null, filterLane: null });
    this.redraw();
  }

  /** What counts as stalled: {objectiveNs, factor, floorNs}. */
  setStall(rules) {
    Object.assign(this.model.stall, rules);
    this.redraw();
  }

  setRange(t0, t1) {
    if (!Number.isFinite(t1 - t0)) return; // nothing is held yet
    this.span = Math.min(MAX_SPAN_NS, Math.max(MIN_SPAN_NS, t1 - t0));
    this.t1 = t1;
    this.#setFollowing(false);
    this.#ranged();
  }

  follow(on = true) {
    if (on && this.spanBefore) this.span = this.spanBefore;
    this.spanBefore = null;
    if (on || this.following) this.t1 = this.#followed;
    this.#setFollowing(on);
    this.#ranged();
  }

  /** Everything that is held. */
  fit() {
    const { oldest, newest } = this.model;
    if (oldest >= newest) return;
    const margin = (newest - oldest) * 0.02;
    const before = this.spanBefore ?? this.span; // to follow with it again
    this.setRange(oldest - margin, newest + margin);
    this.spanBefore = before;
  }

  /** factor < 1 comes nearer. `at`: the time that stays in its place (while following: the right edge). */
  zoom(factor, at = null) {
    const span = Math.min(MAX_SPAN_NS, Math.max(MIN_SPAN_NS, this.span * factor));
    if (!this.following) {
      const fixed = at ?? this.t1 - this.span / 2;
      this.t1 = fixed + ((this.t1 - fixed) * span) / this.span;
    }
    this.span = span;
    this.spanBefore = null;
    this.#ranged();
  }

  /** By a share of what is shown; it stops following. */
  pan(share) {
    this.setRange(this.t0 + share * this.span, this.t1 + share * this.span);
  }

  select(request) {
    this.selected = request;
    this.redraw();
  }

  toggleRequests(on = !this.showRequests) {
    this.showRequests = on;
    this.buttons.requests?.setAttribute("aria-pressed", String(on));
    this.dispatchEvent(new CustomEvent("requests", { detail: { on } }));
    this.redraw();
  }

  /** Only requests that touched this lane; null: all. */
  filter(lane) {
    this.filterLane = this.filterLane === lane ? null : lane;
    this.slots = [];
    this.redraw();
  }

  redraw() {
    this.dirty = true;
    if (!this.frame) this.frame = requestAnimationFrame((time) => this.#tick(time));
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    this.resizing.disconnect();
    clearInterval(this.tableTimer);
    this.root.remove();
    this.destroyed = true;
  }

  /** What lies at a point of the canvas, in CSS pixels: {row, lane, index, transfer, request, time}, or null. */
  hit(x, y) {
    const top = this.scroller.scrollTop;
    const row = y > AXIS ? this.rows.find((candidate) => y + top >= candidate.y && y + top < candidate.y + candidate.height) : null;
    if (!row) return null;
    const scale = this.span / (this.width - this.gutter);
    const time = this.shownT0 + (x - this.gutter) * scale;
    const found = { row, time, index: -1, edge: this.edge, inGutter: x < this.gutter, ...(row.lane && { lane: row.lane }), ...(row.request && { request: row.request }) };
    if (row.kind !== "lane" || found.inGutter) return found;
    const near = 3 * scale;
    if (y + top < row.y + 8) found.transfer = row.lane.transfers.findLast((transfer) => transfer.start_ns - near <= time && time <= transfer.end_ns + near);
    const { lane } = row;
    const index = firstAbove(lane.ends, time - near / 3, lane.length);
    if (index < lane.length && lane.starts[index] <= time + near / 3) found.index = index;
    else if (lane.open && lane.open.time_ns <= time && time <= Math.max(this.edge, lane.open.time_ns + (lane.open.predicted_ns || 0))) found.open = lane.open;
    return found;
  }

  /** Lines of text about it. */
  describe(hit) {
    if (hit?.row?.kind === "title") return ["Requests", "Press to show or hide them"];
    return describe(this.model, hit, this.options.name);
  }

  #build(container) {
    const { label, tools } = this.options;
    this.canvas = h("canvas", { tabindex: "0", role: "application", "aria-roledescription": "timeline", "aria-label": `${label}. Arrow keys left and right move, plus and minus zoom, up and down choose a row, N and P go through its parts, Space pauses, End follows.` });
    this.spacer = h("div", { "aria-hidden": "true" });
    this.scroller = h("div.timeline-scroll", {}, this.canvas, this.spacer);
    this.tip = h("div.timeline-tip", { hidden: true, "aria-hidden": "true" });
    this.spoken = h("div.visually-hidden", { "aria-live": "polite" });
    this.buttons = {};
    const button = (name, text, about, action, more = {}) => (this.buttons[name] = h("button.small", { type: "button", title: about, "aria-label": about, onclick: action, ...more }, text));
    const controls = tools && h("div.row", { role: "group", "aria-label": `${label}: what is shown` },
      button("pause", "❚❚ Pause", "Pause", () => this.follow(!this.following)),
      button("out", "−", "Zoom out", () => this.zoom(1.6)), button("in", "+", "Zoom in", () => this.zoom(1 / 1.6)),
      button("fit", "All", "Show all that is held", () => this.fit()),
      button("requests", "Requests", "Show a row for each request", () => this.toggleRequests(), { "aria-pressed": String(this.showRequests) }));
    const legend = tools && h("ul.timeline-legend", { "aria-label": "Legend" }, LEGEND.map(([phase, text]) => h("li", {}, h(`span.swatch.${phase}`), text)));
    this.tableBody = h("tbody");
    const heads = ["Worker", "State", "Prefill", "Decode", "Both", "Idle", "Streams waited"];
    this.details = h("details", { ontoggle: () => this.#fillTable() }, h("summary", {}, "As a table"),
      h("div.scroll-x", { tabindex: "0", role: "region", "aria-label": `${label} as a table` }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((text, at) => h(at > 1 ? "th.number" : "th", { scope: "col" }, text)))), this.tableBody)));
    this.root = h("div.timeline", {}, tools && h("div.timeline-tools", {}, controls, legend), this.scroller, this.tip, this.spoken, this.details);
    container.append(this.root);
    this.pen = this.canvas.getContext("2d", { alpha: false });
    this.tableTimer = setInterval(() => this.#fillTable(), 1000);
  }

  #observe() {
    this.resizing = new ResizeObserver(() => this.#measure());
    this.resizing.observe(this.scroller);
    this.scroller.addEventListener("scroll", () => this.redraw(), { passive: true });
    onThemeChange(() => {
      this.colours = null;
      this.redraw();
    });
    this.#measure();
  }

  #measure() {
    const width = this.scroller.clientWidth;
    if (!width) return;
    this.width = width;
    this.isNarrow = width < NARROW;
    this.gutter = this.isNarrow ? 98 : 150;
    this.resized = true;
    this.redraw();
  }

  #tick() {
    this.frame = 0;
    if (this.destroyed) return;
    const moves = this.following && Boolean(this.options.now);
    if (this.dirty || moves) {
      this.dirty = false;
      const begun = performance.now();
      this.#draw();
      this.drawTimes.push(performance.now() - begun);
      if (this.drawTimes.length > 600) this.drawTimes.shift();
      this.numFrames++;
    }
    if (moves || this.dirty) this.frame = this.frame || requestAnimationFrame(() => this.#tick());
  }

  #draw() {
    if (!this.width) return;
    if (this.following) this.t1 = this.#followed;
    this.#layOut();
    const ratio = Math.min(2, devicePixelRatio || 1);
    const height = Math.min(this.contentHeight, this.options.maxHeight);
    if (this.resized || height !== this.height || ratio !== this.ratio) this.#resize(height, ratio);
    this.colours ??= this.#palette(ratio);
    this.shownT0 = this.t0;
    const clock = this.options.clock && this.model.header ? this.model.header.unix_ns_at_zero : null;
    const { width, gutter, rows, colours, t0, t1, fonts } = this;
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawFrame(this.pen, this.model, {
      t0, t1, width, height, gutter, ratio, shown: rows, rows: this.cells, colours, fonts, edge: Math.max(this.edge, this.model.newest), top: this.scroller.scrollTop, isLive: this.following && Boolean(this.options.now),
      ticks: ticks(t0, t1, width - gutter, clock, this.options.origin ?? 0),
      hoveredRow: rows.find((row) => row.key === this.hovered?.row?.key), selectedRow: rows.find((row) => row.request && row.request === this.selected),
    });
    this.input.drawCursor(this.pen, t0, t1);
    if (this.hovered && !this.input.dragging) this.input.refreshTip();
  }

  #layOut() {
    const lanes = [...this.model.lanes.values()];
    const rows = [];
    let y = AXIS;
    const room = this.options.maxHeight * (this.showRequests ? 0.62 : 1) - AXIS;
    const height = Math.max(9, Math.min(30, Math.floor(room / Math.max(1, lanes.length))));
    for (const lane of lanes) {
      const label = this.isNarrow && !lane.name ? `${LETTERS[lane.role] ?? "W"}${lane.id}` : lane.label;
      rows.push({ kind: "lane", key: lane, lane, label, y, height });
      y += height;
    }
    if (this.showRequests && lanes.length) y = this.#layOutRequests(rows, y);
    this.rows = rows;
    this.contentHeight = y + 4;
  }

  #layOutRequests(rows, top) {
    const { t0, t1, slots, filterLane } = this;
    const isShown = (request) => request.start <= t1 && request.last >= t0 && (filterLane === null || request.workers.has(filterLane));
    const kept = slots.filter((request) => isShown(request) && this.model.requests.get(request.id) === request);
    const placed = new Set(kept);
    let total = kept.length;
    for (const request of this.model.requests.values()) {
      if (placed.has(request) || !isShown(request)) continue;
      total++;
      if (kept.length < MAX_REQUEST_ROWS) kept.push(request);
    }
    this.slots = kept;
    const of = filterLane === null ? "" : ` on ${filterLane}`;
    rows.push({ kind: "title", key: "title", label: this.isNarrow ? `Req. ${total}` : `Requests${of}: ${total}`, y: top, height: TITLE_ROW });
    let y = top + TITLE_ROW;
    for (const request of kept) {
      rows.push({ kind: "request", key: request, request, label: this.options.name(request.id), y, height: REQUEST_ROW });
      y += REQUEST_ROW;
    }
    return Math.max(y, top + TITLE_ROW + this.options.minRequestRows * REQUEST_ROW);
  }

  #resize(height, ratio) {
    this.resized = false;
    Object.assign(this, { height, ratio });
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.scroller.style.maxHeight = `${this.options.maxHeight}px`;
    this.colours = null;
    this.#setSpacer();
  }

  #setSpacer() {
    this.spacer.style.height = `${Math.max(0, this.contentHeight - this.height)}px`;
  }

  #palette(ratio) {
    const family = getComputedStyle(document.body).fontFamily;
    this.fonts = { lane: `600 12px ${family}`, title: `600 12px ${family}`, small: `11px ${family}`, tiny: `9px ${family}` };
    const colours = { ...palette(this.pen, ratio), cellFont: `600 10.5px ${family}` };
    this.cells.setColours(PHASES.map((phase) => colours[phase]), colours["idle-lane"]);
    return colours;
  }

  #setFollowing(on) {
    this.following = on;
    if (this.buttons.pause) {
      setText(this.buttons.pause, on ? "❚❚ Pause" : "▶ Follow");
      this.buttons.pause.setAttribute("aria-label", on ? "Pause" : "Follow what happens");
      this.buttons.pause.title = on ? "Pause" : "Follow what happens";
    }
    this.redraw();
  }

  #ranged() {
    this.redraw();
    this.dispatchEvent(new CustomEvent("range", { detail: { t0: this.t0, t1: this.t1, following: this.following } }));
  }

  #fillTable() {
    if (!this.details.open) return;
    show(this.tableBody, [...this.model.lanes.values()].map((lane) => {
      const { shares, waited } = lane.shares(this.t0, this.t1, this.edge);
      const cells = [shares.prefill, shares.decode, shares.mixed, shares.idle].map((share) => h("td.number", {}, percent(share)));
      return h("tr", {}, h("th", { scope: "row" }, lane.label), h("td", {}, lane.state), cells, h("td.number", {}, waited ? duration(waited) : "–"));
    }));
  }
}
