import { lineChart } from "../common/charts.js";
import { $ } from "../common/dom.js";
import { milliseconds, significant } from "../common/format.js";
import { panel, showFormulas, showNotes } from "./panel.js";
import { Playback, measureTable, requestTabs } from "./playback.js";
import { promptList } from "./prompts.js";

let shown = null;
const playback = new Playback(["As chosen", "Whole prompts"]);
const drawPrompts = promptList(() => here);
const showRequests = requestTabs(() => [shown.play, shown.whole]);

function onState(state) {
  drawPrompts();
  $("#chunk").closest(".control").hidden = state.mode !== "fixed";
  $("#tpot_ms").closest(".control").hidden = state.mode !== "slo";
  for (const name of ["partial", "long_partial"]) $(`#${name}`).closest(".control").hidden = state.mode === "whole";
}

function draw(data, state) {
  shown = data;
  playback.setObjective(data.objective_ns);
  playback.load(data.play, data.whole);
  showRequests();
  const { chosen, whole } = data.measures;
  measureTable($("#measures"), ["As chosen", "Whole prompts"], [
    ["Longest gap of a stream", chosen.gap_ms, whole.gap_ms, milliseconds],
    ["Streams stood still", chosen.stalled_ms, whole.stalled_ms, (ms) => (ms ? milliseconds(ms) : "not at all")],
    ["Time per token (TPOT), slowest stream", chosen.tpot_ms, whole.tpot_ms, milliseconds],
    ["First token of the slowest short prompt", chosen.ttft_short_ms, whole.ttft_short_ms, milliseconds],
    ["First token of the slowest long prompt", chosen.ttft_long_ms, whole.ttft_long_ms, milliseconds],
    ["Everything is done after", chosen.end_ms, whole.end_ms, milliseconds],
  ]);
  drawCurve(data, state);
  showNotes(data.notes);
  showFormulas(data);
}

function drawCurve(data, state) {
  const line = (name, key, colour, dashed) => ({ name, colour, dashed, points: data.curve.filter((point) => point[key] !== null).map((point) => [point.chunk, point[key]]) });
  $("#curve").closest("section").hidden = !data.curve.length;
  if (!data.curve.length) return;
  lineChart($("#curve"), {
    title: `Longest gap of a stream and time to first token by chunk size: with ${data.curve[0].chunk} tokens the gap is ${milliseconds(data.curve[0].gap_ms)}, with ${data.curve.at(-1).chunk} tokens ${milliseconds(data.curve.at(-1).gap_ms)}`,
    series: [line("longest gap of a stream", "gap_ms", "var(--stalled)"), line("first token, long prompt", "ttft_long_ms", "var(--prefill)"), line("first token, short prompt", "ttft_short_ms", "var(--transfer)", true)],
    marks: state.mode === "fixed" && data.measures.chosen.gap_ms ? [{ x: Number(state.chunk), y: data.measures.chosen.gap_ms, colour: "var(--stalled)", name: "" }] : [],
    x: { label: "tokens of a step at most", log: true, format: (value) => value.toLocaleString("en-GB") },
    y: { label: "milliseconds", log: true, format: significant },
  });
}

const here = panel({ name: "chunked", draw, onState });
addEventListener("resize", () => shown && drawCurve(shown, here.state()));
