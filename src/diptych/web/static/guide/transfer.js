import { $, h, show } from "../common/dom.js";
import { bytes, milliseconds, percent, significant } from "../common/format.js";
import { panel, showFormulas, showTiles } from "./panel.js";

function onState(state) {
  $("input[name=kv_heads]").closest(".control").hidden = state.attention !== "gqa";
  $("#chunk").closest(".control").hidden = state.streamed !== "on";
}

function draw(data, state) {
  const { size, times } = data;
  showTiles([
    { name: "KV cache", value: bytes(size.cache_bytes), about: `${size.width.toLocaleString("en-GB")} numbers a token and layer` },
    { name: "On the wire", value: bytes(size.wire_bytes), about: size.wire_bytes < size.cache_bytes ? `${percent(size.wire_bytes / size.cache_bytes)} of it` : state.codec === "none" ? "as it is" : `as it is: ${state.codec.toUpperCase()} would not make it smaller` },
    { name: "The transfer alone", value: milliseconds(times.transfer_ms), about: `the prefill takes ${milliseconds(times.prefill_ms)}` },
    { name: "Left after the prefill", value: milliseconds(times.exposed_ms), about: `a decode step takes ${milliseconds(times.decode_step_ms)}`, tone: data.verdict.level === "good" ? "good" : "bad" },
  ]);
  drawWay(data);
  drawWays(data, state);
  $("#verdict").className = `note ${data.verdict.level}`;
  $("#verdict").textContent = data.verdict.text;
  showFormulas(data);
  drawLinks(data);
}

/** Two bars over one time axis: chunks being computed, chunks on their way; and a decode step to compare with. */
function drawWay({ chunks, times }) {
  const end = Math.max(...chunks.map((chunk) => chunk.arrived_ms), times.prefill_ms + times.decode_step_ms);
  const place = (from, to, kind, title) => h(`i.${kind}`, { title, style: { left: `${(from / end) * 100}%`, width: `${Math.max(0.25, ((to - from) / end) * 100)}%` } });
  const sent = chunks.map((chunk, index) => {
    return place(chunk.sending_ms, chunk.arrived_ms, "transfer", `chunk ${index + 1}: ${milliseconds(chunk.arrived_ms - chunk.sending_ms)}`);
  });
  const computed = chunks.map((chunk, index) => place(index ? chunks[index - 1].computed_ms : 0, chunk.computed_ms, "prefill", `chunk ${index + 1}: ${milliseconds(chunk.computed_ms - (index ? chunks[index - 1].computed_ms : 0))}`));
  const row = (name, cells) => h("div.way-row", {}, h("span.small.muted", {}, name), h("div.way-bar", {}, cells));
  const label = `The prefill ends after ${milliseconds(times.prefill_ms)}, the last chunk arrives ${milliseconds(times.exposed_ms)} later; a decode step takes ${milliseconds(times.decode_step_ms)}.`;
  show($("#way"), h("div", { role: "img", "aria-label": label },
    row("computed", computed), row("sent", sent),
    row("left", [place(times.prefill_ms, times.prefill_ms + times.exposed_ms, "stalled", `left: ${milliseconds(times.exposed_ms)}`)]),
    row("a decode step", [place(times.prefill_ms, times.prefill_ms + times.decode_step_ms, "decode", `decode step: ${milliseconds(times.decode_step_ms)}`)])),
  h("p.small.muted.way-axis", { "aria-hidden": "true" }, h("span", {}, "0"), h("span", {}, milliseconds(end))));
}

const CODECS = { none: "as they are", int8: "INT8", int4: "INT4" };

function drawWays({ ways }, { codec, streamed }) {
  const cell = (way, ms, isStreamed) => h(way.codec === codec && (streamed === "on") === isStreamed ? "td.number.chosen-way" : "td.number", {}, milliseconds(ms));
  show($("#ways"), h("table", {}, h("thead", {}, h("tr", {}, ["On the wire", "Bytes", "Left, sent as computed", "Left, all at the end"].map((text, at) => h(at ? "th.number" : "th", { scope: "col" }, text)))),
    h("tbody", {}, ways.map((way) => h("tr", {}, h("th", { scope: "row" }, CODECS[way.codec]), h("td.number", {}, bytes(way.wire_bytes)), cell(way, way.streamed_ms, true), cell(way, way.at_end_ms, false))))));
}

function drawLinks(data) {
  const most = Math.log(Math.max(...data.links.map((link) => link.usable_ms)) / 0.01);
  show($("#links"), h("table", {}, h("thead", {}, h("tr", {}, ["Link", "In practice", "Transfer", "On paper", "Transfer", "Decode steps"].map((text, at) => h(at ? "th.number" : "th", { scope: "col" }, text)))),
    h("tbody", {}, data.links.map((link) => h("tr", {}, h("th", { scope: "row" }, link.text),
      h("td.number", {}, `${significant(link.usable / 1e9)} GB/s`),
      h("td.number", {}, milliseconds(link.usable_ms)),
      h("td.number", {}, link.paper ? `${significant(link.paper / 1e9)} GB/s` : "–"),
      h("td.number", {}, milliseconds(link.paper_ms)),
      h("td.number", {}, h("span.bar-cell", {}, h("i", { style: { width: `${Math.max(2, (Math.log(link.usable_ms / 0.01) / most) * 100)}%` } })), significant(link.decode_steps)))))));
}

panel({ name: "transfer", draw, onState });
