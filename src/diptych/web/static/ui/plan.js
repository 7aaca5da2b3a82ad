/** Why the fleet changed, or did not: the planner's last decisions, with what each had simulated. */

import { $, h, setText, show } from "../common/dom.js";
import { percent, significant } from "../common/format.js";

const VERDICTS = { change: ["Changed", "good"], advise: ["Would change (--plan advise)", "warn"], keep: ["Kept", "good"], hold: ["No judgement", "warn"] };
const SHOWN = 10;

/** Fills its card from /ui/state; the card is hidden where there is no planner. */
export class PlanCard {
  constructor() {
    this.newest = -1;
  }

  /** Draw anew only when there is another decision, so that what a reader has opened stays open. */
  update(plan) {
    $("#plan").hidden = plan === null;
    if (plan === null) return;
    setText($("#plan-mode"), plan.mode === "auto" ? "It changes roles, shapes and cores by itself (--plan auto)" : "It only advises (--plan advise)");
    const newest = plan.decisions.length ? plan.decisions[0].number : 0;
    if (newest === this.newest) return;
    this.newest = newest;
    const rows = plan.decisions.slice(0, SHOWN).map(decisionRow);
    show($("#plan-decisions"), rows.length ? rows : h("p.muted", {}, "No decision yet: it looks every five seconds."));
  }
}

function decisionRow(decision) {
  const [words, mood] = VERDICTS[decision.verdict];
  const at = new Date(Date.now() - decision.age_s * 1000).toLocaleTimeString();
  const change = decision.chosen === decision.present ? decision.present : `${decision.present} → ${decision.chosen}`;
  const load = `${significant(decision.rate)} requests/s, ${significant(decision.forecast)} expected${decision.is_closed_loop ? " (arrivals follow completions: not extrapolated)" : ""}`;
  return h("details", {}, h("summary", {}, `${at} `, h(`span.pill.${mood}`, {}, words), ` ${change}`),
    h("p.small", {}, `${decision.reason}. ${load}.`),
    decision.candidates.length ? h("div.scroll-x", { tabindex: "0", role: "region", "aria-label": "Simulated configurations" }, candidates(decision.candidates)) : null);
}

function candidates(simulated) {
  const head = h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Configuration"), ...["Goodput", "Attainment"].map((name) => h("th.number", { scope: "col" }, name))));
  const rows = simulated.map((candidate) => h("tr", {}, h("th", { scope: "row" }, candidate.layout),
    h("td.number", {}, `${significant(candidate.goodput_rps)} /s`), h("td.number", {}, percent(candidate.attainment))));
  return h("table", {}, head, h("tbody", {}, rows));
}
