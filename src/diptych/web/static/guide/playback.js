/**
 * Plays what a panel simulated on the shared timeline: records are given to it up to the moment that is shown.
 *
 *   const playback = new Playback();
 *   playback.load(data.play);    // header, lanes, records, requests, end_ns
 */

import { $, h, setText, show } from "../common/dom.js";
import { duration, milliseconds } from "../common/format.js";
import { TimelineView } from "../common/timeline.js";

const MARGIN = 0.015;

export class Playback {
  constructor() {
    this.view = new TimelineView($("#timeline"), { label: "What happens", name: (id) => id, now: () => this.time || null, maxHeight: Math.max(420, Math.min(700, innerHeight * 0.82)), tools: true });
    this.view.buttons.pause.hidden = true;
    this.records = [];
    this.given = 0;
    this.time = 0;
    this.end = 0;
    this.playing = false;
    this.range = $("#seek");
    $("#play").addEventListener("click", () => this.toggle());
    $("#to-start").addEventListener("click", () => this.seek(0));
    $("#to-end").addEventListener("click", () => this.seek(this.end));
    $("#step-on").addEventListener("click", () => this.step(1));
    $("#step-back").addEventListener("click", () => this.step(-1));
    this.range.addEventListener("input", () => this.seek((Number(this.range.value) / 1000) * this.end));
    document.addEventListener("keydown", (event) => {
      if (event.target.closest("input, select, textarea, button, canvas") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === ".") this.step(1);
      else if (event.key === ",") this.step(-1);
    });
  }

  /** Show another run, whole. */
  load(play) {
    this.pause();
    this.play = play;
    this.records = play.records;
    this.ends = this.records.map((record) => record.end_ns ?? record.time_ns);
    this.end = play.end_ns;
    this.#clear();
    this.seek(this.end);
    this.view.setRange(-this.end * MARGIN, this.end * (1 + MARGIN));
  }

  toggle() {
    if (this.playing) this.pause();
    else this.start();
  }

  start() {
    if (this.time >= this.end) this.seek(0);
    this.playing = true;
    setText($("#play"), "❚❚ Pause");
    this.before = performance.now();
    requestAnimationFrame((now) => this.#frame(now));
  }

  pause() {
    this.playing = false;
    setText($("#play"), "▶ Play");
  }

  /** To the end of the next step that anybody finished, or back to the one before. */
  step(direction) {
    this.pause();
    const steps = this.records.flatMap((record, index) => (record.kind === "step" ? [this.ends[index]] : []));
    const next = direction > 0 ? steps.find((at) => at > this.time) : steps.findLast((at) => at < this.time);
    this.seek(next ?? (direction > 0 ? this.end : 0));
    const found = this.records.findLast((record) => record.kind === "step" && record.end_ns === this.time);
    this.say(found ? this.#words(found) : "Nothing has happened yet.");
    $("#said").setAttribute("aria-live", "polite");
  }

  seek(time) {
    this.time = Math.min(this.end, Math.max(0, time));
    if (this.given && this.ends[this.given - 1] > this.time) this.#clear();
    let last = this.given;
    while (last < this.records.length && this.ends[last] <= this.time) last++;
    if (last > this.given) this.view.add(this.records.slice(this.given, last));
    this.given = last;
    this.view.setOpen(this.#openSteps());
    this.range.value = String(this.end ? Math.round((this.time / this.end) * 1000) : 0);
    this.range.setAttribute("aria-valuetext", duration(this.time));
    setText($("#clock"), `${(this.time / 1e6).toFixed(1)} ms`);
    this.say("");
  }

  /** Of each worker, the step in which this moment lies, as it is reported when it begins. */
  #openSteps() {
    const open = new Map();
    for (let index = this.given; index < this.records.length && open.size < this.play.lanes.length; index++) {
      const { kind, worker, start_ns, end_ns, ...step } = this.records[index];
      if (kind === "step" && start_ns < this.time && !open.has(worker)) open.set(worker, { ...step, kind: "step_begun", worker, time_ns: start_ns, predicted_ns: end_ns - start_ns });
    }
    return [...open.values()];
  }

  say(text) {
    setText($("#said"), text);
  }

  #clear() {
    const { t0, t1 } = this.view;
    this.view.clear();
    this.view.setLanes(this.play.lanes);
    this.view.add([{ ...this.play.header, now_ns: 0 }]);
    this.view.setRange(t0, t1);
    this.given = 0;
  }

  #frame(now) {
    if (!this.playing) return;
    const speed = Number($("#speed").value);
    this.seek(this.time + (now - this.before) * 1e6 * speed);
    this.before = now;
    if (this.time >= this.end) this.pause();
    else requestAnimationFrame((later) => this.#frame(later));
  }

  #words(step) {
    const lane = this.play.lanes.find((lane_) => lane_.id === step.worker).label;
    const parts = [];
    for (const [name, , tokens] of step.prefills ?? []) parts.push(`${tokens.toLocaleString("en-GB")} prompt tokens of ${name}`);
    if (step.num_decodes) parts.push(`a token for ${step.num_decodes === 1 ? "one stream" : `${step.num_decodes} streams`}`);
    return `Step ${step.step_id + 1} of ${lane}, ${duration(step.end_ns - step.start_ns)}: ${parts.join(", and ")}.`;
  }
}

/** The requests of a run as a table. */
export function requestTable(element, requests) {
  const heads = ["Request", "Prompt", "Answer", "Queue", "Prefill", "First token", "Per token", "Longest gap", "Stood still"];
  const rows = requests.map((request) => h("tr", {}, h("th", { scope: "row" }, request.name), [
    request.prompt_tokens.toLocaleString("en-GB"), request.output_tokens, milliseconds(request.queue_ms), milliseconds(request.prefill_ms), milliseconds(request.ttft_ms),
    milliseconds(request.tpot_ms), milliseconds(request.longest_gap_ms), request.stalled_ms ? milliseconds(request.stalled_ms) : "–",
  ].map((text) => h("td.number", {}, String(text)))));
  show(element, h("table.requests", {}, h("thead", {}, h("tr", {}, heads.map((text, at) => h(at ? "th.number" : "th", { scope: "col" }, text)))), h("tbody", {}, rows)));
}

/** Two runs side by side: rows of [name, first, second, text -> string, is smaller better]. */
export function measureTable(element, [first, second], rows) {
  show(element, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span.visually-hidden", {}, "Measure")), h("th.number", { scope: "col" }, first), h("th.number", { scope: "col" }, second))),
    h("tbody", {}, rows.filter(([, a, b]) => a !== null || b !== null).map(([name, a, b, text, less = true]) => {
      const better = a !== null && b !== null && a !== b ? (a < b) === less : null;
      return h("tr", {}, h("th", { scope: "row" }, name), h(better === true ? "td.number.better" : "td.number", {}, a === null ? "–" : text(a)), h(better === false ? "td.number.better" : "td.number", {}, b === null ? "–" : text(b)));
    }))));
}

/** Buttons that choose which of two runs is played. */
export function twoRuns(playback, runs) {
  const buttons = [$("#show-chosen"), $("#show-other")];
  let shown = 0;
  const choose = (index) => {
    shown = index;
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(at === index)));
    playback.load(runs()[index]);
    requestTable($("#requests"), runs()[index].requests);
  };
  buttons.forEach((button, index) => button.addEventListener("click", () => choose(index)));
  return () => choose(shown);
}
