/**
 * Plays what a panel simulated on the shared timeline: records are given to it up to the moment that is shown. Of two runs
 * one lies above the other, on one time axis.
 *
 *   const playback = new Playback();          // or new Playback(["In chunks", "Whole prompts"])
 *   playback.load(data.play);                 // header, lanes, records, requests, end_ns; as many as there are runs
 */

import { $, h, setText, show } from "../common/dom.js";
import { duration, milliseconds } from "../common/format.js";
import { TimelineView } from "../common/timeline.js";

const MARGIN = 0.015;
const HEIGHTS = { single: 0.7, pair: 0.42 }; // of the window

/** One run on a timeline of its own. */
class Run {
  constructor(element, options) {
    this.view = new TimelineView(element, { ...options, name: (id) => id, now: () => this.time || null });
    this.time = 0;
    this.given = 0;
    this.records = [];
  }

  load(play) {
    this.play = play;
    this.records = play.records;
    this.ends = this.records.map((record) => record.end_ns ?? record.time_ns);
    this.#clear();
  }

  seek(time) {
    this.time = time;
    if (this.given && this.ends[this.given - 1] > time) this.#clear();
    let last = this.given;
    while (last < this.records.length && this.ends[last] <= time) last++;
    if (last > this.given) this.view.add(this.records.slice(this.given, last));
    this.given = last;
    this.view.setOpen(this.#openSteps());
  }

  /** The ends of all steps, in order of time. */
  get steps() {
    return this.records.flatMap((record, index) => (record.kind === "step" ? [this.ends[index]] : []));
  }

  /** The step that ended at this moment, in words; "" when none did. */
  wordsAt(time) {
    const step = this.records.findLast((record) => record.kind === "step" && record.end_ns === time);
    if (!step) return "";
    const lane = this.play.lanes.find(({ id }) => id === step.worker).label;
    const parts = [];
    for (const [name, , tokens] of step.prefills ?? []) parts.push(`${tokens.toLocaleString("en-GB")} prompt tokens of ${name}`);
    if (step.num_decodes) parts.push(`a token for ${step.num_decodes === 1 ? "one stream" : `${step.num_decodes} streams`}`);
    return `Step ${step.step_id + 1} of ${lane}, ${duration(step.end_ns - step.start_ns)}: ${parts.join(", and ")}.`;
  }

  #clear() {
    const { t0, t1 } = this.view;
    this.view.clear();
    this.view.setLanes(this.play.lanes);
    this.view.add([{ ...this.play.header, now_ns: 0 }]);
    this.view.setRange(t0, t1);
    this.given = 0;
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
}

export class Playback {
  /** titles: of two runs that are compared; without them there is one. showRequests: a row for each request. */
  constructor(titles = null, { showRequests = true } = {}) {
    const maxHeight = Math.round(Math.max(300, Math.min(700, innerHeight * (titles ? HEIGHTS.pair : HEIGHTS.single))));
    const room = $("#timeline");
    this.runs = (titles ?? [""]).map((title, index) => {
      const place = h("div.run", {}, title ? h("h3", {}, title) : null);
      room.append(place);
      return new Run(place, { label: title || "What happens", tools: !index, maxHeight, showRequests });
    });
    [this.first] = this.runs;
    this.titles = titles;
    this.first.view.buttons.pause.hidden = true;
    this.time = 0;
    this.end = 0;
    this.playing = false;
    this.range = $("#seek");
    this.#bind();
  }

  /** Show other runs, whole, in the order of their titles. */
  load(...plays) {
    this.pause();
    this.runs.forEach((run, index) => run.load(plays[index]));
    this.end = Math.max(...plays.map((play) => play.end_ns));
    this.seek(this.end);
    for (const { view } of this.runs) view.setRange(-this.end * MARGIN, this.end * (1 + MARGIN));
  }

  /** The longest gap between tokens that is fine; 0: none is asked for. */
  setObjective(ns) {
    for (const { view } of this.runs) view.setStall({ objectiveNs: ns });
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
    const steps = this.runs.flatMap((run) => run.steps).sort((a, b) => a - b);
    const next = direction > 0 ? steps.find((at) => at > this.time) : steps.findLast((at) => at < this.time);
    this.seek(next ?? (direction > 0 ? this.end : 0));
    const index = this.runs.findIndex((run) => run.wordsAt(this.time));
    const words = index < 0 ? "Nothing has happened yet." : this.runs[index].wordsAt(this.time);
    this.say(this.titles && index >= 0 ? `${this.titles[index]}: ${words.charAt(0).toLowerCase()}${words.slice(1)}` : words);
    $("#said").setAttribute("aria-live", "polite");
  }

  seek(time) {
    this.time = Math.min(this.end, Math.max(0, time));
    for (const run of this.runs) run.seek(this.time);
    this.range.value = String(this.end ? Math.round((this.time / this.end) * 1000) : 0);
    this.range.setAttribute("aria-valuetext", duration(this.time));
    setText($("#clock"), `${(this.time / 1e6).toFixed(1)} ms`);
    this.say("");
  }

  say(text) {
    setText($("#said"), text);
  }

  #bind() {
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
    for (const { view } of this.runs) {
      const others = this.runs.filter((run) => run.view !== view).map((run) => run.view);
      view.addEventListener("range", ({ detail: { t0, t1 } }) => others.forEach((other) => (other.t0 !== t0 || other.t1 !== t1) && other.setRange(t0, t1)));
      view.addEventListener("requests", ({ detail: { on } }) => others.forEach((other) => other.showRequests !== on && other.toggleRequests(on)));
    }
  }

  #frame(now) {
    if (!this.playing) return;
    const speed = Number($("#speed").value);
    this.seek(this.time + (now - this.before) * 1e6 * speed);
    this.before = now;
    if (this.time >= this.end) this.pause();
    else requestAnimationFrame((later) => this.#frame(later));
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

/** Buttons that choose of which of two runs the requests are listed. Returns what draws them anew. */
export function requestTabs(runs) {
  const buttons = [$("#show-chosen"), $("#show-other")];
  let shown = 0;
  const choose = (index) => {
    shown = index;
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(at === index)));
    requestTable($("#requests"), runs()[index].requests);
  };
  buttons.forEach((button, index) => button.addEventListener("click", () => choose(index)));
  return () => choose(shown);
}
