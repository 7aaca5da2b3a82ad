import { $, announce, h, show } from "../common/dom.js";
import { milliseconds, percent, significant } from "../common/format.js";
import { readLines } from "../common/stream.js";
import { accept, errorOf, get, panel, query, refuse, showMachine } from "./panel.js";

const NAMES = { unified: "Unified", chunked: "Chunked", split: "Two pools" };
let asking = null;
let answered = null; // the question that is answered on the page

const usd = (value) => (value === null ? "–" : `$${significant(value)}`);

async function run() {
  asking?.abort();
  const mine = (asking = new AbortController());
  const [bar, text, results] = [$("#progress"), $("#progress-text"), $("#results")];
  bar.hidden = false;
  bar.removeAttribute("value");
  text.textContent = "starting";
  results.setAttribute("aria-busy", "true");
  try {
    const asked = query();
    const reply = await get("choose", asked, mine.signal);
    if (!reply.ok) {
      refuse(errorOf(reply, await reply.json()));
      text.textContent = "";
      return;
    }
    accept();
    let isDone = false;
    await readLines(reply.body, (event) => {
      isDone ||= event.kind !== "progress";
      if (event.error) {
        refuse(event.error);
        text.textContent = "";
        return;
      }
      if (event.kind === "progress") {
        bar.value = event.done / event.total;
        text.textContent = `${event.done} of ${event.total}: ${event.text}`;
        return;
      }
      answered = asked;
      draw(event);
      text.textContent = `${event.requests} requests a simulation`;
      announce(event.recommendation.title);
      results.setAttribute("aria-busy", "false");
      results.dataset.state = asked;
    });
    if (!isDone) refuse({ message: "The guide ended before the simulations did." });
  } catch (error) {
    if (error.name === "AbortError") return;
    refuse({ message: "The guide does not answer. Is it still running?" });
    throw error;
  } finally {
    if (mine === asking) bar.hidden = true;
  }
}

function draw({ shapes, recommendation, machine, target }) {
  const { title, reasons, serve, serve_note: note, simulate, shape, holds } = recommendation;
  $("#recommendation").className = `card ${holds ? "holds" : "fails"}`;
  $("#recommendation-title").textContent = title;
  show($("#reasons"), h("ul", {}, reasons.map((text) => h("li", {}, text))),
    h("h3", {}, "Start it"), command(serve), h("p.small.muted", {}, note),
    h("details", {}, h("summary", {}, "Simulate it at length, with a report"), command(simulate)));
  const most = Math.max(...shapes.map((result) => result.capacity_rps), 1e-9);
  show($("#shapes"), shapes.map((result) => h(`article.card.shape${result.shape === shape ? ".chosen" : ""}`, { "aria-label": NAMES[result.shape] },
    h("div.card-head", {}, h("h2", {}, NAMES[result.shape]), result.shape === shape ? h("span.pill.good", {}, "recommended") : null),
    h("p.muted", {}, result.words),
    h("div.big", {}, percent(result.attainment), h("small", {}, " meet both objectives")),
    h("div.attained", { role: "img", "aria-label": `${percent(result.attainment)} of the requests; ${percent(target)} are wanted` }, h("i", { style: { width: `${result.attainment * 100}%` } }), h("b", { style: { left: `${target * 100}%` } })),
    h("dl.figures", {}, figure("Goodput", `${significant(result.goodput_rps)} per s`), figure("Holds up to", capacity(result), result.capacity_rps / most), figure("Per 1,000 good", usd(result.usd_per_thousand_good)), figure("GPUs per hour", usd(result.usd_per_hour)),
      figure("TTFT p50/p90", both(result.ttft_ms)), figure("TPOT p50/p90", both(result.tpot_ms)), figure("ITL p99", milliseconds(result.itl_p99_ms)),
      figure("Miss TTFT", percent(result.late_share)), figure("Miss TPOT", percent(result.slow_share))),
    busy(result))));
  showMachine(machine);
}

const both = ({ p50, p90 }) => (p90 !== null && p90 < 1000 ? `${significant(p50)} / ${significant(p90)} ms` : `${milliseconds(p50)} / ${milliseconds(p90)}`);

const capacity = (result) => (result.capacity_rps ? `${result.holds_more ? "more than " : ""}${significant(result.capacity_rps)} per s` : "nothing found");

function figure(name, text, share = null) {
  return [h("dt", {}, name), h("dd", {}, text, share === null ? null : h("span.bar-cell", { "aria-hidden": "true" }, h("i", { style: { width: `${share * 100}%` } })))];
}

function busy(result) {
  const parts = ["prefill", "mixed", "decode", "idle"].map((phase) => [phase, result.busy[phase]]).filter(([, share]) => share > 0.004);
  return h("div", {}, h("div.small.muted", {}, "What the workers did"), h("div.stack", { role: "img", "aria-label": parts.map(([phase, share]) => `${phase} ${percent(share)}`).join(", ") },
    parts.map(([phase, share]) => h("i", { title: `${phase} ${percent(share)}`, style: { "flex-grow": String(share), "flex-basis": "0", background: `var(--${phase})`, color: `var(--${phase}-ink)` } }, share > 0.14 ? percent(share) : ""))),
    h("ul.timeline-legend.small", { "aria-hidden": "true" }, parts.map(([phase]) => h("li", {}, h(`span.swatch.${phase}`), phase))));
}

function command(text) {
  return h("div.command", {}, h("code", { tabindex: "0" }, text), h("button.small", { type: "button", "aria-label": "Copy the command", onclick: (event) => copy(event.currentTarget, text) }, "Copy"));
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it"; // no permission, or no secure context
  }
  setTimeout(() => (button.textContent = "Copy"), 1600);
}

/** The answer to the default question, which was computed in advance. */
async function example() {
  const reply = await fetch("../static/guide/choose-example.json");
  const event = reply.ok ? await reply.json() : null;
  if (!event || query()) return; // something else is asked for by now
  answered = "";
  draw(event);
  $("#progress-text").textContent = `computed in advance, ${event.requests} requests a simulation`;
}

const asksAtOnce = Boolean(location.search);
panel({ name: "choose", draw: () => {}, live: false, onTry: run, onState: () => $("#results").classList.toggle("stale", answered !== null && query() !== answered) });
$("#form").addEventListener("submit", run);
if (asksAtOnce) run();
else example();
