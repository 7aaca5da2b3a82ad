import { lineChart } from "../common/charts.js";
import { $, h, show } from "../common/dom.js";
import { bytes, milliseconds, percent, significant } from "../common/format.js";
import { Flow } from "./flow.js";
import { panel, showFormulas, showNotes } from "./panel.js";

const flops = (value) => (value >= 1e12 ? `${significant(value / 1e12)}T` : value >= 1e9 ? `${significant(value / 1e9)}G` : significant(value));
const ROWS = [
  ["Tokens in the step", (phase) => phase.tokens.toLocaleString("en-GB")],
  ["Calculations", (phase) => `${flops(phase.flop).replace(/(\D?)$/, " $1")}FLOP`],
  ["Bytes from memory", (phase) => bytes(phase.bytes)],
  ["Intensity", (phase) => `${significant(phase.intensity)} FLOP/B`],
  ["Arithmetic alone would take", (phase) => milliseconds(phase.compute_ms)],
  ["Memory alone would take", (phase) => milliseconds(phase.memory_ms)],
  ["Limited by", (phase) => (phase.bound === "compute" ? "arithmetic" : "memory")],
  ["The step takes", (phase) => milliseconds(phase.step_ms)],
  ["Share of the peak arithmetic", (phase) => percent(phase.share_of_peak)],
  ["Share of the memory bandwidth", (phase) => percent(phase.share_of_bandwidth)],
  ["Tokens a second", (phase) => Math.round(phase.tokens_per_s).toLocaleString("en-GB")],
];
let shown = null;
const flow = new Flow($("#flow"));

/** A step as a ring on the roof, where it could be, and a point below it, where it was measured. */
function measured({ phase, intensity, attainable }, { flop, step_ms: step }) {
  const colour = `var(--${phase})`;
  const reached = flop / (step / 1e3);
  return [{ x: intensity, y: attainable, colour, ring: true, to: reached }, { x: intensity, y: reached, colour, name: `${phase}: ${percent(reached / attainable)}`, below: true }];
}

function draw(data) {
  shown = data;
  const { roof, points, phases, series } = data;
  const [low, lowest] = roof.line[0];
  lineChart($("#roof"), {
    title: `Roofline: ridge at ${significant(roof.ridge)} FLOP per byte; prefill at ${significant(phases.prefill.intensity)}, decode at ${significant(phases.decode.intensity)}`,
    series: [
      { name: "the most that is possible", colour: "var(--text)", points: roof.line },
      { name: "ridge", colour: "var(--muted)", dashed: true, points: [[roof.ridge, lowest], roof.line[1]] },
    ],
    marks: [
      { x: roof.ridge, y: roof.peak, colour: "var(--muted)", name: `ridge: ${significant(roof.ridge)}`, minor: true, below: true },
      ...points.filter((point) => point.part !== "whole step").map((point) => ({ x: point.intensity, y: point.attainable, colour: `var(--${point.phase})`, minor: true, ring: true })),
      ...points.filter((point) => point.part === "whole step").flatMap((point) => measured(point, phases[point.phase])),
    ],
    x: { label: "calculations per byte (FLOP/B)", log: true, min: low, max: roof.line.at(-1)[0] },
    y: { label: "FLOP/s", log: true, min: lowest, max: roof.peak * 3, format: flops },
    height: 330,
  });
  show($("#phases"), ROWS.map(([name, text]) => h("tr", {}, h("th", { scope: "row" }, name), h("td.number", {}, text(phases.prefill)), h("td.number", {}, text(phases.decode)))));
  lineChart($("#throughput"), {
    title: "Tokens a second against tokens in a step, for prefill and decode",
    series: ["prefill", "decode"].map((phase) => ({ name: phase, colour: `var(--${phase})`, points: series[phase].map((point) => [point.tokens, point.tokens_per_s]) })),
    marks: ["prefill", "decode"].map((phase) => ({ x: phases[phase].tokens, y: phases[phase].tokens_per_s, colour: `var(--${phase})`, name: "" })),
    x: { label: "tokens in the step", log: true },
    y: { label: "tokens a second", log: true, format: (value) => (value < 1000 ? String(value) : `${value / 1000}k`) },
  });
  flow.setTimes({ prefill: phases.prefill.step_ms, decode: phases.decode.step_ms, tokens: phases.prefill.tokens, batch: phases.decode.tokens });
  showNotes(data.notes);
  showFormulas(data);
}

panel({ name: "phases", draw });
addEventListener("resize", () => shown && draw(shown));
