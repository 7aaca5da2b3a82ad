/** Pointers, wheel and keys of a TimelineView: moving, zooming, asking. Owns the tooltip and the keyboard's cursor. */

import { h, show } from "./dom.js";
import { AXIS } from "./timeline-draw.js";

const CLICK_PIXELS = 5;
const TIP_INTERVAL_MS = 120;

export class TimelineInput {
  constructor(view) {
    this.view = view;
    this.pointers = new Map(); // id -> {x, y}
    this.dragging = false;
    this.cursor = null; // {key: of a row, time}
    this.tipAt = null;
    this.tipTime = 0;
    const { canvas } = view;
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("pointerup", (event) => this.#up(event));
    canvas.addEventListener("pointercancel", (event) => this.#forget(event));
    canvas.addEventListener("pointerleave", (event) => this.#leave(event));
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#setCursor(null));
  }

  /** The cursor of the keyboard: a line in its row. */
  drawCursor(pen, t0, t1) {
    const { view, cursor } = this;
    const row = cursor && view.rows.find((candidate) => candidate.key === cursor.key);
    if (!row) return;
    const y = row.y - view.scroller.scrollTop;
    pen.strokeStyle = view.colours.accent;
    pen.lineWidth = 2;
    pen.strokeRect(1, y, view.width - 2, row.height);
    const x = view.gutter + ((cursor.time - t0) / (t1 - t0)) * (view.width - view.gutter);
    if (x > view.gutter && x < view.width) {
      pen.fillStyle = view.colours.accent;
      pen.fillRect(x - 1, y, 2, row.height);
    }
  }

  /** What lies under the pointer changes while the timeline moves. */
  refreshTip() {
    const now = performance.now();
    if (!this.tipAt || now - this.tipTime < TIP_INTERVAL_MS) return;
    this.tipTime = now;
    this.#hover(this.tipAt.x, this.tipAt.y);
  }

  #place(event) {
    const box = this.view.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  #down(event) {
    if (event.button > 0) return;
    this.pointers.set(event.pointerId, this.#place(event));
    this.view.canvas.setPointerCapture(event.pointerId);
    this.begun = { ...this.#place(event), t0: this.view.t0, t1: this.view.t1 };
    this.dragging = false;
    this.pinch = null;
  }

  #move(event) {
    const at = this.#place(event);
    if (!this.pointers.has(event.pointerId)) {
      this.#hover(at.x, at.y);
      return;
    }
    this.pointers.set(event.pointerId, at);
    const { view, begun } = this;
    const scale = (begun.t1 - begun.t0) / (view.width - view.gutter);
    if (this.pointers.size === 2) {
      this.#pinch();
    } else if (this.dragging || Math.abs(at.x - begun.x) > CLICK_PIXELS) {
      this.dragging = true;
      this.#hideTip();
      const shift = (begun.x - at.x) * scale;
      view.setRange(begun.t0 + shift, begun.t1 + shift);
    }
  }

  #pinch() {
    const [first, other] = [...this.pointers.values()];
    const distance = Math.max(12, Math.abs(first.x - other.x));
    const { view } = this;
    this.dragging = true;
    if (this.pinch) {
      const middle = (first.x + other.x) / 2;
      const time = view.t0 + ((middle - view.gutter) / (view.width - view.gutter)) * view.span;
      view.zoom(this.pinch / distance, time);
    }
    this.pinch = distance;
  }

  #up(event) {
    const at = this.#place(event);
    const wasClick = this.pointers.has(event.pointerId) && !this.dragging;
    this.#forget(event);
    if (wasClick) this.#click(at, event.pointerType);
  }

  #forget(event) {
    this.pointers.delete(event.pointerId);
    if (!this.pointers.size) this.dragging = false;
    else this.begun = { ...[...this.pointers.values()][0], t0: this.view.t0, t1: this.view.t1 };
  }

  #leave(event) {
    if (this.pointers.has(event.pointerId)) return;
    this.tipAt = null;
    this.#hideTip();
    this.view.hovered = null;
    this.view.redraw();
  }

  #click(at, kind) {
    const hit = this.view.hit(at.x, at.y);
    if (hit?.row.kind === "title") this.view.toggleRequests();
    else if (hit?.lane && hit.inGutter) this.view.filter(hit.lane.id);
    else if (hit) this.#select(hit);
    if (kind === "touch") this.#hover(at.x, at.y);
  }

  #select(hit) {
    const { view } = this;
    const step = hit.index >= 0 ? hit.lane.steps[hit.index] : hit.open;
    const ofStep = (step?.prefills || [])[0]?.[0];
    const id = hit.transfer?.request_id ?? ofStep;
    const request = hit.request ?? (id === undefined ? undefined : view.model.requests.get(id));
    if (request) view.select(request);
    view.dispatchEvent(new CustomEvent("select", { detail: { ...hit, request } }));
  }

  #hover(x, y) {
    const { view } = this;
    this.tipAt = { x, y };
    const hit = view.hit(x, y);
    const isSame = view.hovered?.row?.key === hit?.row?.key;
    view.hovered = hit;
    if (!isSame) view.redraw();
    view.canvas.style.cursor = hit?.inGutter ? "pointer" : "";
    const lines = hit ? (hit.inGutter && hit.lane ? [hit.lane.label, "Press to see only its requests"] : view.describe(hit)) : [];
    if (lines.length) this.#showTip(lines, x, y);
    else this.#hideTip();
    view.dispatchEvent(new CustomEvent("hover", { detail: hit }));
  }

  #showTip(lines, x, y) {
    const { tip, root, canvas } = this.view;
    const text = lines.join("\n");
    if (tip.dataset.text !== text) {
      tip.dataset.text = text;
      show(tip, lines.map((line, at) => h(at ? "div" : "b", {}, line)));
    }
    tip.hidden = false;
    const box = canvas.getBoundingClientRect();
    const outer = root.getBoundingClientRect();
    const left = box.left - outer.left + x;
    const top = box.top - outer.top + y;
    const right = left + 18 + tip.offsetWidth > outer.width;
    tip.style.left = `${Math.max(0, right ? Math.min(left - tip.offsetWidth - 14, outer.width - tip.offsetWidth) : left + 16)}px`;
    const below = box.top + y + 20 + tip.offsetHeight < innerHeight;
    tip.style.top = `${below ? top + 18 : top - tip.offsetHeight - 12}px`;
  }

  #hideTip() {
    this.view.tip.hidden = true;
  }

  #wheel(event) {
    const { view } = this;
    const at = this.#place(event);
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const time = view.t0 + ((at.x - view.gutter) / (view.width - view.gutter)) * view.span;
      view.zoom(Math.exp(Math.max(-40, Math.min(40, event.deltaY)) * 0.012), time);
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view.pan((event.deltaX || event.deltaY) / (view.width - view.gutter));
    }
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { view } = this;
    const actions = {
      ArrowLeft: () => view.pan(-0.12), ArrowRight: () => view.pan(0.12), "+": () => view.zoom(1 / 1.4), "=": () => view.zoom(1 / 1.4),
      "-": () => view.zoom(1.4), " ": () => view.follow(!view.following), End: () => view.follow(true), Home: () => view.setRange(view.model.oldest, view.model.oldest + view.span),
      0: () => view.fit(), ArrowUp: () => this.#changeRow(-1), ArrowDown: () => this.#changeRow(1), n: () => this.#step(1), p: () => this.#step(-1),
      Enter: () => this.#choose(), Escape: () => this.#setCursor(null),
    };
    const action = actions[event.key] ?? actions[event.key.toLowerCase()];
    if (!action) return;
    event.preventDefault();
    action();
  }

  #changeRow(by) {
    const { view } = this;
    const at = view.rows.findIndex((row) => row.key === this.cursor?.key);
    const row = view.rows[Math.max(0, Math.min(view.rows.length - 1, at < 0 ? 0 : at + by))];
    if (!row) return;
    this.#setCursor({ key: row.key, time: this.cursor?.time ?? view.t1 - view.span / 2 });
    this.#scrollTo(row);
    this.#say(row);
  }

  #scrollTo(row) {
    const { scroller, height } = this.view;
    if (row.y + row.height > scroller.scrollTop + height) scroller.scrollTop = row.y + row.height - height + 4;
    if (row.y < scroller.scrollTop + AXIS) scroller.scrollTop = row.y - AXIS;
  }

  /** To the next or previous part of the row: steps of a lane, tokens of a request. */
  #step(by) {
    const { view } = this;
    const row = view.rows.find((candidate) => candidate.key === this.cursor?.key);
    if (!row || row.kind === "title") return this.#changeRow(0);
    if (view.following) view.follow(false);
    const times = row.lane ? [...row.lane.starts.subarray(0, row.lane.length)] : [...row.request.chunks.map((chunk) => chunk.t0), ...row.request.times];
    const next = by > 0 ? times.find((time) => time > this.cursor.time + 1) : times.findLast((time) => time < this.cursor.time - 1);
    if (next === undefined) {
      view.spoken.textContent = by > 0 ? "nothing after this" : "nothing before this";
      return undefined;
    }
    this.#setCursor({ key: row.key, time: next });
    if (next < view.t0 || next > view.t1) view.setRange(next - view.span / 2, next + view.span / 2);
    return this.#say(row);
  }

  #choose() {
    const { view } = this;
    const row = view.rows.find((candidate) => candidate.key === this.cursor?.key);
    if (row?.kind === "title") view.toggleRequests();
    else if (row) this.#select(this.#hitOf(row));
  }

  #hitOf(row) {
    const { view, cursor } = this;
    const index = row.lane ? row.lane.between(cursor.time, cursor.time)[0] : -1;
    const covers = row.lane && index < row.lane.length && row.lane.starts[index] <= cursor.time;
    const isOpen = row.lane?.open && !covers && row.lane.open.time_ns <= cursor.time;
    return { row, time: cursor.time, edge: view.edge, index: covers ? index : -1, lane: row.lane, request: row.request, ...(isOpen && { open: row.lane.open }) };
  }

  #say(row) {
    const lines = row.kind === "title" ? [row.label] : this.view.describe(this.#hitOf(row));
    this.view.spoken.textContent = lines.join(". ");
  }

  #setCursor(cursor) {
    this.cursor = cursor;
    this.view.redraw();
  }
}
