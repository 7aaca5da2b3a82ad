import { $, h, show as fill } from "../common/dom.js";
import { milliseconds, percent, significant } from "../common/format.js";
import { panel, showFormulas, showNotes } from "./panel.js";
import { Playback, measureTable, requestTabs } from "./playback.js";

let shown = null;
const playback = new Playback(["Two pools", "Chunked workers"], { showRequests: false });
const showRequests = requestTabs(() => [shown.play, shown.together]);

function onState(state) {
  const [prefill, decode] = [Number(state.prefill) || 0, Number(state.decode) || 0];
  const choice = (kill, text) => h("button.small", { type: "button", "aria-pressed": String(state.kill === kill), "data-kill": kill, onclick: () => here.set({ kill }) }, text);
  const focused = document.activeElement?.dataset?.kill;
  fill($("#kill-buttons"), choice("nobody", "nobody"),
    [...Array(prefill).keys()].map((index) => choice(`prefill-${index + 1}`, `prefill ${index + 1}`)),
    [...Array(decode).keys()].map((index) => choice(`decode-${index + 1}`, `decode ${index + 1}`)));
  if (focused !== undefined) $(`[data-kill="${focused}"]`)?.focus();
  $("#kill_ms").closest(".control").hidden = state.kill === "nobody";
}

function draw(data) {
  shown = data;
  playback.load(data.play, data.together);
  showRequests();
  const { apart, together } = data.measures;
  measureTable($("#measures"), ["Two pools", "Chunked workers"], [
    ["Meet both objectives", apart.attainment, together.attainment, percent, false],
    ["Goodput", apart.goodput_rps, together.goodput_rps, (value) => `${significant(value)} per s`, false],
    ["Longest gap in a stream", apart.gap_ms, together.gap_ms, milliseconds],
    ["Longest handoff pause (after the first token)", apart.handoff_ms, together.handoff_ms, milliseconds],
    ["Time per token (TPOT), slowest", apart.tpot_ms, together.tpot_ms, milliseconds],
    ["First token, median", apart.ttft_median_ms, together.ttft_median_ms, milliseconds],
    ["First token, slowest chat", apart.ttft_chat_ms, together.ttft_chat_ms, milliseconds],
    ["First token, slowest document", apart.ttft_document_ms, together.ttft_document_ms, milliseconds],
    ["Answers completed", apart.completed, together.completed, (value) => `${value} of ${apart.requests}`, false],
  ]);
  showNotes(data.notes);
  showFormulas(data);
}

const here = panel({ name: "disaggregated", draw, onState });
