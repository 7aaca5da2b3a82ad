/** The numbers, the workers and the request of the live page: data in, elements out. */

import { meter, sparkline, stackedParts } from "../common/charts.js";
import { $, h, setText, show } from "../common/dom.js";
import { bytes, count, duration, milliseconds, percent, plural, significant } from "../common/format.js";
import { reasonText, requestSummary } from "../common/timeline-words.js";

const HISTORY = 60;
const TILES = [
  ["goodput", "Goodput", "Requests per second that met their objectives"],
  ["ttft", "First token", "Time to first token, median"],
  ["itl", "Between tokens", "Time between two tokens of a stream, median"],
  ["tpot", "Per token", "Mean time per token of a request, median"],
  ["tokens", "Throughput", "Tokens written per second"],
  ["kv", "KV cache", "Share of the KV cache in use, mean of all workers"],
];

const purpose = (tile) => TILES.find(([name]) => name === tile)[2];

/** The row of tiles. */
export class Tiles {
  constructor(element) {
    this.parts = {};
    this.histories = {};
    for (const [name, title, about] of TILES) {
      const parts = { value: h("span.value", {}, "–"), about: h("span.about", {}, " "), more: h("span.about", {}, " "), line: h("div", {}) };
      this.parts[name] = parts;
      this.histories[name] = [];
      element.append(h("div.card.tile", { title: about, id: `tile-${name}` }, h("span.name", {}, title), parts.value, parts.about, parts.more, parts.line));
    }
  }

  update(state, objectives) {
    const { window: recent } = state;
    const met = recent.attainment;
    this.#set("goodput", rate(met === null ? recent.requests_per_s : recent.goodput_per_s), met === null ? "no objectives set" : `${percent(met)} met their objectives`, met === null ? "set them above" : `${significant(recent.requests_per_s ?? 0)} requests/s ended`, met === null ? recent.requests_per_s : recent.goodput_per_s);
    setText($("#tile-goodput .name"), met === null ? "Requests" : "Goodput");
    if (met !== null) this.#judge("goodput", met >= 0.9);
    this.#latency("ttft", recent.ttft, objectives.ttft);
    this.#latency("itl", recent.itl, objectives.gap);
    this.#latency("tpot", recent.tpot, objectives.gap);
    const handoffs = recent.handoffs ? `${plural(recent.handoffs, "handoff")}${recent.kv_bytes_per_s ? `, ${bytes(recent.kv_bytes_per_s)}/s` : ""}` : `${significant(recent.prompt_tokens_per_s ?? 0)} prompt tokens/s`;
    const { learned, static: fixed } = state.length_errors;
    if (learned) $("#tile-tokens").title = `${purpose("tokens")}. Expected lengths of answers are off by ${percent(learned)}; 256 tokens for each would be by ${percent(fixed)}`;
    this.#set("tokens", rate(recent.output_tokens_per_s, "tok/s"), handoffs, recent.handoff ? `handoff pause ${milliseconds(recent.handoff.p50_ms).replace(" ", "\u00a0")}` : " ", recent.output_tokens_per_s);
    const workers = state.workers.filter((worker) => worker.is_up);
    const usage = workers.length ? workers.reduce((sum, worker) => sum + worker.kv_usage, 0) / workers.length : 0;
    const hits = state.phases.map((phase) => phase.cache_hits).filter((share) => share !== null);
    this.#set("kv", percent(usage), hits.length ? `prefix found: ${percent(Math.max(...hits))}` : "no prefix looked up yet", `${count(state.open_requests)} open, ${count(state.queued)} queued`, usage);
  }

  #latency(name, found, objective) {
    const parts = found ? [`p90 ${milliseconds(found.p90_ms)}`, `p99 ${milliseconds(found.p99_ms)}`].map((text) => text.replaceAll(" ", "\u00a0")) : ["nothing yet"];
    this.#set(name, found ? milliseconds(found.p50_ms) : "–", parts.join(" · "), objective ? `≤ ${milliseconds(objective)}`.replaceAll(" ", "\u00a0") : found ? `longest ${milliseconds(found.max_ms)}` : " ", found?.p99_ms ?? null, objective);
    if (found && objective) this.#judge(name, found.p99_ms <= objective);
  }

  #set(name, value, about, more, spark, limit = null) {
    const parts = this.parts[name];
    const [number, unit] = /^([\d.,–]+)\s*(.*)$/.exec(value)?.slice(1) ?? [value, ""];
    if (parts.value.dataset.text !== value) show(parts.value, number, unit && h("small", {}, ` ${unit}`));
    parts.value.dataset.text = value;
    setText(parts.about, about);
    setText(parts.more, more);
    parts.about.className = parts.more.className = "about";
    const history = this.histories[name];
    history.push(spark ?? null);
    if (history.length > HISTORY) history.shift();
    sparkline(parts.line, history, { limit: limit && history.some((past) => past > limit / 3) ? limit : null, label: `${TILES.find(([tile]) => tile === name)[1]} over the last minute` });
  }

  #judge(name, good) {
    const { about, more } = this.parts[name];
    (name === "goodput" ? about : more).className = `about ${good ? "good" : "bad"}`;
    if (name !== "goodput") setText(more, `${more.textContent} ${good ? "met" : "missed"} at p99`);
  }
}

const rate = (value, unit = "/s") => (value === null ? "–" : `${significant(value)} ${unit}`);

/** Rows of the table of workers; a row for a phase that has more than one. */
export function showWorkers(body, state) {
  const rows = [];
  for (const phase of state.phases) {
    if (state.phases.length > 1 && phase.workers > 1) rows.push(workerRow(`All ${phase.workers}: ${phase.role}`, `${phase.up} up`, phase, "", "phase"));
    for (const member of state.workers.filter((worker) => worker.role === phase.role)) {
      rows.push(workerRow([member.worker, member.role, member.computes_on].filter((part) => part !== "").join(" · "), member.state, member, count(member.restarts)));
    }
  }
  show(body, rows);
}

function workerRow(name, state, worker, restarts, kind = "") {
  const mood = state === "ready" || state.endsWith("up") ? "good" : state === "lost" ? "bad" : "warn";
  return h(kind ? `tr.${kind}` : "tr", {}, h("th", { scope: "row" }, name), h("td", {}, h(`span.pill.${mood}`, {}, state)),
    ...[worker.waiting, worker.prefilling, worker.decoding].map((value) => h("td.number", {}, count(value))),
    h("td", {}, h("span.kv", {}, meter(worker.kv_usage, `KV cache of ${name}`), percent(worker.kv_usage))),
    h("td.number", {}, percent(worker.cache_hits)), h("td.number", {}, restarts));
}

/** The newest requests, each a button that selects it. */
export function showRequests(body, model, selected, nameOf, onSelect) {
  const newest = [...model.requests.values()].filter((request) => Number.isFinite(request.start)).sort((a, b) => b.start - a.start).slice(0, 8);
  const focused = document.activeElement?.dataset?.request;
  show(body, newest.map((request) => h(request === selected ? "tr.selected" : "tr", {},
    h("td", {}, h("button.link", { type: "button", "data-request": request.id, onclick: () => onSelect(request) }, nameOf(request.id))),
    h("td.number", {}, request.promptTokens ? count(request.promptTokens) : "–"), h("td.number", {}, count(request.detail?.num_output_tokens ?? request.times.length)),
    h("td.number", {}, duration(request.ttftNs)), h("td.number", {}, request.longestGapNs ? duration(request.longestGapNs) : "–"), h("td", {}, stateOf(request)))),
  newest.length ? null : h("tr", {}, h("td", { colspan: "6", class: "muted" }, "None yet: send one above.")));
  if (focused) body.querySelector(`[data-request="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

function stateOf(request) {
  if (request.end) return { stop: "done", length: "done", abort: "stopped", error: "failed" }[request.detail?.reason] ?? request.detail?.reason ?? "done";
  if (request.times.length) return "decoding";
  return request.firstChunk ? "prefilling" : "queued";
}

/** Where the time of one request went. */
export function showRequest(element, title, view, request, sender) {
  if (!request) {
    setText(title, "");
    show(element, h("p.muted", {}, "Send a prompt, or press on a request in the timeline."));
    return;
  }
  const { model } = view;
  const name = view.options.name;
  setText(title, `${name(request.id)}: ${requestSummary(request)}`);
  const edge = Math.max(view.edge, model.newest);
  const parts = request.breakdown(edge).map((part) => ({ ...part, value: part.ns }));
  const bars = [];
  for (const [words, part] of [["Until its first token", parts.filter(({ ttft }) => ttft)], ["From there to its end", parts.filter(({ ttft }) => !ttft)]]) {
    if (!part.length) continue;
    const bar = h("div", {});
    stackedParts(bar, part, { label: words });
    const total = part.reduce((sum, piece) => sum + piece.ns, 0);
    const isOpen = part[0].ttft ? request.ttftNs === null : !request.end;
    bars.push(h("p.request-part", {}, `${words}: `, h("b", {}, duration(total)), isOpen ? " so far" : ""), bar);
  }
  const lines = [];
  if (request.queued && request.firstChunk - request.queued > 5e6) lines.push(why(`It waited ${duration(request.firstChunk - request.queued)} for its turn`, reasonText(model, request, (request.chunks[0] ?? request.open).worker, request.queued, request.firstChunk, name)));
  const stall = longestStall(request);
  if (stall && model.limitNs(request.worker) && stall.t1 - stall.t0 > model.limitNs(request.worker)) {
    lines.push(why(`Longest gap between tokens: ${duration(stall.t1 - stall.t0)}`, reasonText(model, request, request.worker, stall.t0, stall.t1, name)));
  }
  if (request.detail?.message) lines.push(h("p.note.bad", {}, request.detail.message));
  const text = sender.texts.get(request.id);
  show(element, bars, lines, text ? h("pre.answer", { tabindex: "0", role: "region", "aria-label": "The answer" }, text) : null);
}

const why = (what, reason) => h("p.why", {}, h("b", {}, `${what}. `), reason);

function longestStall(request) {
  const { times } = request;
  let best = 0;
  for (let at = 1; at < times.length; at++) if (times[at] - times[at - 1] > times[best] - times[best - 1] || !best) best = at;
  return best ? { t0: times[best - 1], t1: times[best] } : null;
}
