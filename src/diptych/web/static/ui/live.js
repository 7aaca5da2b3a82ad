/** The live page: connects the timeline, the numbers and the buttons to this server. */

import { $, announce, h, queryState, setQueryState, setText, show } from "../common/dom.js";
import { count, duration, shortId, significant } from "../common/format.js";
import { EventStream } from "../common/stream.js";
import { themeButton } from "../common/theme.js";
import { computingText } from "../common/timeline-words.js";
import { TimelineView } from "../common/timeline.js";
import { Admin } from "./admin.js";
import { BatchCard } from "./batches.js";
import { Chat } from "./chat.js";
import { DiagnosisCard } from "./diagnosis.js";
import { MIN_TOKENS, interference } from "./interference.js";
import { MissCard } from "./misses.js";
import { Tiles, showRequest, showRequests, showWorkers } from "./panels.js";
import { PlanCard } from "./plan.js";
import { Readers } from "./readers.js";
import { Sender } from "./sender.js";
import { ShapeSwitch } from "./shape.js";
import { showTiers } from "./tiers.js";
import { ServerError, getJson, hasKey, headers, setKey } from "../common/server.js";

const LAG_NS = 450e6; // workers report every 200 ms, the stream every 100 ms
const AHEAD = 0.12; // of the timeline's width is for what is predicted
const FIRST_RECORDS = 6000;
const STATE_INTERVAL_MS = 1000;
const PANEL_INTERVAL_MS = 300;
const VERDICT_SPAN_NS = 20e9;
const LONG_CHOICES = [512, 1024, 2048, 4096, 8192, 16384];
const STREAMS = 4;
const STALL_FLOOR_NS = 50e6; // shorter pauses are noise of the machine, and nobody sees them

const query = queryState();
const clock = { now: 0, at: 0, runs: false };
let state = null; // of /ui/state
let shownWorkers = "";
let since = null;
let attempts = 0; // to connect

const sender = new Sender({ onChange: () => onSent(), onProblem: showProblem });
const readers = new Readers(sender, () => view.model.stall.objectiveNs / 1e6);
const chat = new Chat(sender);
const view = new TimelineView($("#timeline"), {
  label: "Timeline of this server", lagNs: LAG_NS, aheadShare: AHEAD, spanNs: (Number(query.span) || 8) * 1e9, clock: true, stall: { floorNs: STALL_FLOOR_NS }, minRequestRows: 6,
  showRequests: query.requests !== "0", now: () => now(), name: nameOf,
});
const tiles = new Tiles($("#tiles"));
const planCard = new PlanCard();
const missCard = new MissCard(nameOf);
const batchCard = new BatchCard();
const diagnosisCard = new DiagnosisCard(() => ({ ttft: objective("ttft"), gap: objective("gap") }));
const admin = new Admin(() => pollState());
const shapes = new ShapeSwitch((worker, body) => admin.changeWorker(worker, body));
const stream = new EventStream({
  url: () => (since === null ? "timeline" : `timeline?since=${since}`), headers,
  onEvent: ({ data }) => onRecords(JSON.parse(data)), onState: onConnection,
});

function now() {
  if (!clock.now) return null;
  return clock.now + (clock.runs ? (performance.now() - clock.at) * 1e6 : 0);
}

function nameOf(id) {
  const request = view.model.requests.get(id);
  return (request && sender.nameOf(request)) || sender.names.get(id) || shortId(id);
}

function onRecords(records) {
  for (const record of records) if (record.kind === "header") Object.assign(clock, { now: record.now_ns, at: performance.now(), runs: true });
  view.add(records);
}

async function connect() {
  const attempt = ++attempts;
  stream.stop();
  onConnection("connecting");
  since = null;
  stream.lastId = "";
  try {
    const { header } = await getJson("timeline/records?limit=1");
    since = Math.max(header.first_sequence - 1, header.next_sequence - FIRST_RECORDS);
  } catch (error) {
    if (attempt !== attempts) return; // another key was given meanwhile
    if (error instanceof ServerError && error.status === 401) {
      onConnection("denied");
      return;
    }
    if (error instanceof ServerError) showProblem(error.message);
  }
  if (attempt === attempts) stream.start();
}

function onConnection(name, detail) {
  const words = {
    connecting: ["connecting", "warn"], open: ["live", "good"], denied: ["needs an API key", "bad"], stopped: ["stopped", ""],
    waiting: [`reconnecting in ${significant((detail ?? 0) / 1000, 2)} s`, "warn"],
  };
  const [text, mood] = words[name];
  const pill = $("#connection");
  if (name === "stopped") return;
  if (name === "connecting" && pill.textContent.startsWith("reconnecting")) return;
  setText(pill, name === "open" && state && state.state !== "ready" ? state.state : text);
  pill.className = `pill ${mood}`;
  if (name !== "open" && clock.runs) Object.assign(clock, { now: now(), runs: false });
  if (name === "denied") askForKey();
  $("#key-button").hidden = !(hasKey() || name === "denied");
}

function askForKey() {
  const dialog = $("#key-dialog");
  if (!dialog.open) dialog.showModal();
  $("#key-input").focus();
}

async function pollState() {
  if (stream.state === "denied" || document.hidden) return;
  const key = headers().Authorization;
  try {
    state = await getJson("ui/state");
  } catch (error) {
    if (error instanceof ServerError && error.status === 401 && key === headers().Authorization) onConnection("denied");
    return; // the pill says that there is no connection; the next poll tries again
  }
  sender.model = state.model;
  onState();
}

function onState() {
  const { model } = state;
  setText($("#model"), model.name);
  $("#model").title = model.description;
  document.title = `${model.name}: live – Diptych`;
  if (stream.state === "open") onConnection("open");
  shapes.update(state, admin.isOpen);
  chat.update(model, state.state === "ready");
  fillLongChoices();
  applyObjectives();
  tiles.update(state, { ttft: objective("ttft") || state.objectives.ttft_ms, gap: objective("gap") || state.objectives.tpot_ms });
  showWorkers($("#workers"), state);
  planCard.update(state.plan);
  missCard.update(state.explains_misses, state.admin);
  showTiers(state.tiers);
  batchCard.update(state.has_batches);
  setText($("#queued"), state.queued ? `${count(state.queued)} requests wait for a worker` : "");
  updateButtons();
  const workers = JSON.stringify([state.admin, ...state.workers.map(({ worker, role, state: phase, computes_on: units }) => [worker, role, phase, units])]);
  if (workers !== shownWorkers) admin.refresh(state.admin);
  shownWorkers = workers;
}

function fillLongChoices() {
  const select = $("#long-tokens");
  const most = Math.min(state.model.max_model_len ?? 512, state.model.kv_capacity_tokens ?? Infinity) - 16;
  const fitting = LONG_CHOICES.filter((tokens) => tokens <= most);
  const choices = fitting.length ? fitting : [Math.max(16, most)];
  const key = choices.join();
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  const wanted = Number(query.long) || Math.min(2048, choices.at(-1));
  show(select, choices.map((tokens) => h("option", { value: String(tokens), selected: tokens === wanted }, `${count(tokens)} tokens`)));
  if (!choices.includes(wanted)) select.value = String(choices.at(-1));
}

function objective(name) {
  const value = Number($(`#${name}-objective`).value);
  return Number.isFinite(value) && value > 0 ? value : 0;
}

function applyObjectives() {
  const [ttft, gap] = [objective("ttft"), objective("gap")];
  sender.objectives = { ...(ttft && { ttft_slo_ms: ttft }), ...(gap && { tpot_slo_ms: gap }) };
  const limit = gap || state?.objectives.tpot_ms || 0;
  if (view.model.stall.objectiveNs !== limit * 1e6) view.setStall({ objectiveNs: limit * 1e6 });
}

function onSent() {
  updateButtons();
  readers.update();
}

function updateButtons() {
  const ready = state?.state === "ready";
  for (const name of ["streams", "long", "short"]) $(`#send-${name}`).disabled = !ready;
  $("#stop").disabled = !sender.running.size;
}

function showProblem(text) {
  const note = $("#problem");
  setText(note, text);
  note.hidden = !text;
}

function showVerdict() {
  const edge = Math.min(view.following ? view.edge : view.t1, view.model.newest);
  const span = view.following ? VERDICT_SPAN_NS : Math.max(VERDICT_SPAN_NS, view.span);
  const found = interference(view.model, edge - span, edge);
  const value = $("#verdict-value");
  const words = $("#verdict-words");
  const computing = view.following ? computingText(view.model, MIN_TOKENS, nameOf) : "";
  if (!found) {
    const streams = [...view.model.requests.values()].some((request) => !request.end && request.times.length);
    setText(value, "–");
    value.className = "verdict-value";
    setText(words, computing || (streams ? "Streams run undisturbed. Now send a long prompt." : "Interference: how much longer streams wait while a prompt is computed."));
    return;
  }
  const shown = Math.max(1, found.factor);
  setText(value, `${shown < 10 ? shown.toFixed(1) : significant(shown)}×`);
  value.className = `verdict-value ${shown < 2 ? "good" : shown > 4 ? "bad" : ""}`;
  setText(words, computing || `gap between tokens (p99): ${duration(found.busyNs)} while a prompt is computed, in the stream that waits longest; ${duration(found.quietNs)} else`);
}

function updatePanels() {
  if (document.hidden) return;
  const model = view.model;
  if (view.selected && model.requests.get(view.selected.id) !== view.selected) view.selected = null;
  showRequest($("#request"), $("#request-name"), view, view.selected ?? newest(model), sender);
  showRequests($("#requests"), model, view.selected, nameOf, (request) => view.select(request));
  showVerdict();
}

function newest(model) {
  let best = null;
  for (const request of model.requests.values()) if (request.queued && (!best || request.queued > best.queued)) best = request;
  return best;
}

async function downloadPerfetto() {
  const button = $("#perfetto");
  button.disabled = true;
  try {
    const reply = await fetch("timeline/perfetto", { headers: headers() });
    if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
    const address = URL.createObjectURL(await reply.blob());
    const link = h("a", { href: address, download: "diptych-timeline.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
    announce("The trace was downloaded. Open it at ui.perfetto.dev.");
  } catch (error) {
    showProblem(`Perfetto: ${error.message}`);
  } finally {
    button.disabled = false;
  }
}

function onClick(id, action) {
  $(id).addEventListener("click", () => {
    showProblem("");
    action();
  });
}

function bindControls() {
  themeButton($("#theme"));
  onClick("#send-streams", () => sender.streams(STREAMS));
  onClick("#send-long", () => sender.long(Number($("#long-tokens").value)));
  onClick("#send-short", () => sender.short());
  onClick("#stop", () => sender.stop());
  onClick("#perfetto", downloadPerfetto);
  onClick("#key-button", askForKey);
  for (const name of ["ttft", "gap"]) {
    const input = $(`#${name}-objective`);
    input.value = query[name] ?? "";
    input.addEventListener("input", () => {
      setQueryState({ [name]: objective(name) || "" });
      applyObjectives();
    });
  }
  $("#long-tokens").addEventListener("change", (event) => setQueryState({ long: event.target.value }));
  $("#key-form").addEventListener("submit", (event) => {
    if (event.submitter?.value !== "cancel") {
      setKey($("#key-input").value);
      $("#key-input").value = "";
      connect();
      pollState();
    }
  });
  let saving = 0;
  view.addEventListener("range", () => {
    clearTimeout(saving);
    saving = setTimeout(() => setQueryState({ span: Number((view.span / 1e9).toPrecision(3)) }), 300);
  });
  view.buttons.requests.addEventListener("click", () => setQueryState({ requests: view.showRequests ? "" : "0" }));
  document.addEventListener("visibilitychange", () => !document.hidden && pollState());
  addEventListener("online", () => stream.retry());
}

bindControls();
updateButtons();
if (query.bench) {
  const { runBench } = await import("./bench.js");
  runBench(view, query);
} else {
  connect();
  pollState();
  diagnosisCard.ask(false);
  setInterval(pollState, STATE_INTERVAL_MS);
  setInterval(updatePanels, PANEL_INTERVAL_MS);
}
window.diptych = { view, sender, stream };
