/**
 * Two runs side by side. Reads the records of `diptych bench` and `diptych simulate` (JSON lines) and the object that
 * `diptych simulate --json` prints. Everything stays in this page. It opens with an example, which makes place for the first
 * file that is loaded.
 */

import { lineChart } from "../common/charts.js";
import { $, announce, h, queryState, setQueryState, show } from "../common/dom.js";
import { count, milliseconds, percent, significant } from "../common/format.js";
import { themeButton } from "../common/theme.js";
import { attainment, cumulative, distribution, readRun, span } from "./runs.js";

const runs = { a: null, b: null };
const COLOURS = { a: "var(--accent)", b: "var(--stalled)" };
const objectives = $("#objectives");
let example = null; // what is shown until a file is loaded: {objectives, runs}

function asked() {
  const { ttft_ms: ttft, tpot_ms: tpot, kind } = Object.fromEntries(new FormData(objectives));
  return { ttft: ttft === "" ? null : Number(ttft), tpot: tpot === "" ? null : Number(tpot), kind };
}

async function load(side, file) {
  leaveExample();
  let problem = "";
  try {
    runs[side] = readRun(await file.text(), file.name);
  } catch (error) {
    runs[side] = null;
    problem = `${file.name}: ${error.message}`;
  }
  showFile(side, problem);
  showRuns();
  if (runs[side]) announce(`${runs[side].name} is loaded.`);
}

/** Beside the button that loads it: which run it is, or why it is none. */
function showFile(side, problem = "") {
  const run = runs[side];
  const about = $(`#about-${side}`);
  about.className = problem ? "small note bad" : "small";
  about.textContent = problem || (run ? `${run.name}: ${count(run.size)} requests${run.rows ? "" : " (summary only, without single requests)"}.` : "Nothing loaded.");
}

function showRuns() {
  const kinds = [...new Set(Object.values(runs).flatMap((loaded) => loaded?.rows?.map((row) => row.kind) ?? []))].filter(Boolean).sort();
  const chosen = asked().kind;
  show($("#kind"), [h("option", { value: "" }, "all"), ...kinds.map((kind) => h("option", { value: kind }, kind))]);
  if (kinds.includes(chosen)) $("#kind").value = chosen;
  draw();
}

async function showExample() {
  const wanted = (example = {});
  const reply = await fetch("static/compare/example.json");
  if (!reply.ok) return;
  const found = await reply.json();
  if (example !== wanted) return; // a file was loaded meanwhile
  example = found;
  for (const side of Object.keys(runs)) {
    const { name, records } = example.runs[side];
    runs[side] = readRun(JSON.stringify(records), name);
    showFile(side);
  }
  for (const [name, value] of Object.entries(example.objectives)) objectives.elements[name].value ||= value;
  $("#example").hidden = false;
  showRuns();
}

/** A file of the reader's takes its place, with its objectives where they were left as they are. */
function leaveExample() {
  if (!example) return;
  for (const [name, value] of Object.entries(example.objectives ?? {})) if (objectives.elements[name].value === String(value) && !queryState()[name]) objectives.elements[name].value = "";
  example = null;
  $("#example").hidden = true;
  for (const side of Object.keys(runs)) {
    runs[side] = null;
    showFile(side);
  }
}

/** File names without their endings, where that leaves two names. */
function titles(shown) {
  const bare = shown.map(([, run]) => run.name.replace(/\.(jsonl?|ndjson)$/, ""));
  return new Set(bare).size === shown.length ? bare : shown.map(([, run]) => run.name);
}

function draw() {
  const shown = Object.entries(runs).filter(([, run]) => run);
  $("#comparison").hidden = !shown.length;
  if (!shown.length) return;
  const { ttft, tpot, kind } = asked();
  const views = shown.map(([side, run], at) => ({ side, name: titles(shown)[at], run, rows: run.rows?.filter((row) => !kind || row.kind === kind) ?? null }));
  drawSummary(views, { ttft, tpot });
  const curves = [["ttft", "milliseconds to the first token"], ["tpot", "milliseconds per token"], ["gap", "milliseconds"], ["e2e", "milliseconds end to end"]];
  for (const [key, label] of curves) {
    const lines = views.filter((view) => view.rows).map((view) => ({ name: view.name, colour: COLOURS[view.side], points: cumulative(view.rows.map((row) => row[key])) })).filter((line) => line.points.length > 1);
    const box = $(`#cdf-${key}`);
    box.closest("section").hidden = !lines.length;
    if (!lines.length) continue;
    const limit = { ttft, tpot }[key];
    lineChart(box, {
      title: `Share of the requests by ${label}: ${lines.map((line) => `${line.name}: half within ${significant(line.points[Math.floor(line.points.length / 2)][0])}`).join("; ")}`,
      series: limit ? [...lines, { name: "objective", colour: "var(--muted)", dashed: true, points: [[limit, 0], [limit, 1]] }] : lines,
      x: { label, log: true }, y: { label: "share of the requests", min: 0, max: 1, format: percent }, height: 240,
    });
  }
  drawAttainment(views, { ttft, tpot });
}

function drawSummary(views, wanted) {
  const all = views.map((view) => (view.rows ? { ...distribution(view.rows), ...span(view.rows), attainment: attainment(view.rows, wanted, 1) } : summaryOf(view.run, wanted)));
  const spread = (name, key) => ["p50", "p90", "p99"].map((at) => [`${name}, ${at}`, (side) => side[key]?.[at] ?? null, milliseconds, true]);
  const rows = [
    ["Requests", (side) => side.requests ?? null, count, null], ["Completed", (side) => side.completed ?? null, count, null],
    ["Meet their objectives", (side) => side.attainment ?? null, percent, false],
    ["Goodput", (side) => (side.attainment === null || !side.seconds ? side.goodput ?? null : (side.attainment * side.requests) / side.seconds), (value) => `${significant(value)} per s`, false],
    ["Answer tokens a second", (side) => side.tokensPerSecond ?? null, significant, false],
    ...spread("First token", "ttft"), ...spread("Per token", "tpot"), ...spread("Between tokens", "itl"), ...spread("Longest gap", "gap"), ...spread("End to end", "e2e"),
  ];
  const body = rows.map(([name, value, text, less]) => {
    const values = all.map(value);
    if (values.every((found) => found === null)) return null;
    const [a, b] = values;
    const same = values.length === 2 && a !== null && b !== null && (text(a) === text(b) || Math.abs(b / a - 1) < 0.0005);
    const better = same || less === null || values.length < 2 || a === null || b === null || a === b ? -1 : (a < b) === less ? 0 : 1;
    const change = same ? h("td.number.muted.change", {}, "same") : values.length === 2 && a !== null && b !== null && a ? h("td.number.muted.change", {}, `${b >= a ? "+" : "−"}${percent(Math.abs(b / a - 1))}`) : values.length === 2 ? h("td.change") : null;
    return h("tr", {}, h("th", { scope: "row" }, name), values.map((found, at) => h(at === better ? "td.number.better" : "td.number", {}, found === null ? "–" : text(found))), change);
  });
  show($("#summary"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span.visually-hidden", {}, "Figure")), views.map((view) => h("th.number", { scope: "col" }, h(`span.swatch.run-${view.side}`), ` ${view.name}`)), views.length === 2 ? h("th.number.change", { scope: "col" }, "second against first (−: less)") : null)), h("tbody", {}, body.filter(Boolean)));
}

/** A summary was judged by the objectives of its own run: nobody knows how many would meet others. */
function summaryOf({ summary }, { ttft, tpot }) {
  return ttft === null && tpot === null ? summary : { ...summary, attainment: null, goodput: null };
}

function drawAttainment(views, wanted) {
  const section = $("#attainment").closest("section");
  const lines = views.filter((view) => view.rows?.length && (wanted.ttft !== null || wanted.tpot !== null)).map((view) => ({
    name: view.name, colour: COLOURS[view.side],
    points: Array.from({ length: 61 }, (_, at) => 0.25 * 16 ** (at / 60)).map((scale) => [scale, attainment(view.rows, wanted, scale)]),
  }));
  section.hidden = !lines.length;
  if (!lines.length) return;
  lineChart($("#attainment"), { title: "Share of the requests that meet the objectives, scaled", series: lines, x: { label: "objectives times", log: true, min: 0.25, max: 4 }, y: { label: "meet both", min: 0, max: 1, format: percent }, height: 240 });
}

for (const side of ["a", "b"]) {
  const [input, drop] = [$(`#file-${side}`), $(`#drop-${side}`)];
  input.addEventListener("change", () => input.files[0] && load(side, input.files[0]));
  for (const kind of ["dragover", "dragenter"]) drop.addEventListener(kind, (event) => (event.preventDefault(), drop.classList.add("over")));
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files[0]) load(side, event.dataTransfer.files[0]);
  });
}
objectives.addEventListener("input", () => {
  const { ttft_ms, tpot_ms } = Object.fromEntries(new FormData(objectives));
  setQueryState({ ttft_ms, tpot_ms });
  draw();
});
objectives.addEventListener("submit", (event) => event.preventDefault());
const given = queryState();
for (const name of ["ttft_ms", "tpot_ms"]) if (given[name]) objectives.elements[name].value = given[name];
addEventListener("resize", draw);
themeButton($("#theme"));
showExample();
