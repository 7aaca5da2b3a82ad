/** What limits this server now: one sentence, the waterfalls of TTFT and ITL, the causes, and advice on request. */

import { $, announce, h, setText, show } from "../common/dom.js";
import { duration, percent, plural } from "../common/format.js";
import { ServerError, getJson } from "../common/server.js";

const INTERVAL_MS = 10_000;
const NAMES = { ttft: "First token", itl: "Between tokens" };
const LEAST_SHARE = 0.005;
const seconds = (value) => duration(value * 1e9);
const signed = (value) => `${value >= 0 ? "−" : "+"}${seconds(Math.abs(value))}`;

/** Fills its card from /diagnosis. objectives(): {ttft, gap} in ms, 0: those of the server. */
export class DiagnosisCard {
  constructor(objectives) {
    this.objectives = objectives;
    this.asking = false;
    $("#diagnosis-simulate").addEventListener("click", () => this.ask(true));
    setInterval(() => document.hidden || this.ask(false), INTERVAL_MS);
  }

  async ask(advice) {
    if (this.asking) return;
    this.asking = true;
    const button = $("#diagnosis-simulate");
    button.disabled = true;
    if (advice) setText(button, "Simulating …");
    try {
      const found = await getJson(`diagnosis?${this.#query(advice)}`);
      this.#show(found);
      if (advice) this.#showAdvice(found);
    } catch (error) {
      const isRefused = error instanceof ServerError && (advice || error.status === 409); // 409: engines without metrics
      if (isRefused) setText($("#diagnosis-sentence"), error.message);
    } finally {
      this.asking = false;
      button.disabled = false;
      setText(button, "Simulate advice");
    }
  }

  #query(advice) {
    const { ttft, gap } = this.objectives();
    const parts = [ttft && `ttft=${ttft}ms`, gap && `tpot=${gap}ms`].filter(Boolean);
    return new URLSearchParams({ ...(parts.length ? { slo: parts.join(",") } : {}), ...(advice ? { advice: "1" } : {}) });
  }

  #show(found) {
    const mood = { healthy: "good", limited: "bad" }[found.verdict] ?? "warn";
    const verdict = $("#diagnosis-verdict");
    setText(verdict, found.verdict);
    verdict.className = `pill ${mood}`;
    setText($("#diagnosis-sentence"), found.sentence);
    const missed = found.miss_share === null ? "" : `, ${percent(found.miss_share)} missed their objectives`;
    setText($("#diagnosis-about"), `${plural(found.num_requests, "request")}${missed}`);
    show($("#diagnosis-causes"), found.causes.length ? causes(found.causes) : null);
    show($("#diagnosis-waterfalls"), Object.entries(found.attribution).map(([name, fall]) => waterfall(NAMES[name], fall)));
    $("#diagnosis-simulate").hidden = !found.causes.length;
    const names = found.causes.map((cause) => cause.cause).join();
    if (names !== this.advised) show($("#diagnosis-advice")); // it was for other causes
  }

  #showAdvice(found) {
    this.advised = found.causes.map((cause) => cause.cause).join();
    const given = found.causes.flatMap((cause) => cause.advice.map((advice) => ({ ...advice, cause: cause.cause })));
    show($("#diagnosis-advice"), given.length ? given.map(adviceRow) : h("p.muted.small", {}, "No setting of this server is known to change these causes."));
    announce(given.length ? `${plural(given.length, "setting")} simulated.` : "No advice.");
  }
}

function causes(found) {
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Cause"), h("th.number", { scope: "col" }, "Per request"), h("th.number", { scope: "col" }, "Of the misses")));
  const rows = found.map((cause) => h("tr", { title: `${cause.symptom}. ${cause.evidence}; not if ${cause.counter_evidence}.` }, h("th", { scope: "row" }, cause.cause.replaceAll("_", " ")),
    h("td.number", {}, seconds(cause.seconds_per_request)), h("td.number", {}, cause.share_of_misses === null ? "–" : percent(cause.share_of_misses))));
  return h("table", {}, head, h("tbody", {}, rows));
}

/** Bars that begin where the one before ends. */
function waterfall(name, fall) {
  let passed = 0;
  const rows = fall.parts.filter((part) => part.seconds >= LEAST_SHARE * fall.mean_s).map((part) => {
    const [left, width] = [passed / fall.mean_s, part.seconds / fall.mean_s];
    passed += part.seconds;
    return h("div.fall", { title: part.account }, h("span", {}, part.words),
      h("span.fall-track", { "aria-hidden": "true" }, h("i", { style: { "margin-left": percentOf(left), width: percentOf(width) } })),
      h("span.number", {}, seconds(part.seconds)));
  });
  return h("div.falls", {}, h("h3.small", {}, `${name}: ${seconds(fall.mean_s)} on average`), rows);
}

const percentOf = (share) => `${Math.max(0, Math.min(100, share * 100)).toFixed(2)}%`;

function adviceRow(advice) {
  const { gain } = advice;
  const saved = gain ? `first token ${signed(gain.ttft_seconds)}, rest of the answer ${signed(gain.decode_seconds)}` : "not simulated";
  const met = gain && gain.attainment_before !== null ? `; objectives met ${percent(gain.attainment_before)} → ${percent(gain.attainment_after)}` : "";
  const next = advice.next_step ? ` Next: ${advice.next_step}.` : "";
  return h("details", {}, h("summary", {}, h("code", {}, advice.option), ` ${saved}${met}`),
    h("p.small", {}, `${advice.words}, against ${advice.cause.replaceAll("_", " ")}. It costs ${advice.costs}. Refuted if ${advice.refuted_by}.${next}`));
}
