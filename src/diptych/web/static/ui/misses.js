/** Why prompts were computed that a cache could have held. Hidden where the server does not explain misses. */

import { meter } from "../common/charts.js";
import { $, h, setText, show } from "../common/dom.js";
import { count, percent, shortId } from "../common/format.js";
import { ServerError, getJson } from "../common/server.js";

const INTERVAL_MS = 2000;
const SHOWN = 6;
const NAMES = {
  new: "new text", differs: "computed again behind a change", repeated: "repeated text", block_rounding: "rest of a block",
  evicted: "evicted", worker_lost: "worker lost", routed_elsewhere: "cached on another worker", other_salt: "other cache_salt",
  being_computed: "being computed elsewhere", not_kept: "not kept", cache_not_read: "cache not read",
};
const REASONS = { ...NAMES, differs: "differs", never_seen: "never seen", none: "all found" };

/** Fills the card, asking at most every two seconds. nameOf: of a request, by its id. */
export class MissCard {
  constructor(nameOf) {
    this.nameOf = nameOf;
    this.askedAt = -Infinity;
  }

  /** is: of /ui/state, whether misses are explained; access: how /admin answers this page. */
  async update(is, access) {
    const card = $("#misses");
    card.hidden = !is;
    if (!is || performance.now() - this.askedAt < INTERVAL_MS) return;
    this.askedAt = performance.now();
    try {
      this.#show(await this.#ask(access));
    } catch (error) {
      if (!(error instanceof ServerError) && !(error instanceof TypeError)) throw error;
    }
  }

  #ask(access) {
    return getJson(`${access === "open" ? "admin/" : ""}cache/misses?limit=${SHOWN}`);
  }

  #show(found) {
    setText($("#misses-words"), found.words[0] ?? "No prompt yet.");
    show($("#misses-places"), found.words.slice(1).map((words) => h("p.why", {}, words)));
    const total = Object.values(found.computed).reduce((sum, tokens) => sum + tokens, 0);
    show($("#misses-causes"), Object.entries(found.computed).map(([cause, tokens]) => h("tr", {}, h("th", { scope: "row" }, NAMES[cause] ?? cause),
      h("td", {}, h("span.kv", {}, meter(tokens / total, NAMES[cause] ?? cause), percent(tokens / total))), h("td.number", {}, count(tokens)))));
    show($("#misses-recent"), found.recent.map((miss) => h("tr", {}, h("td", {}, this.nameOf(miss.request_id)), h("td", {}, REASONS[miss.reason] ?? miss.reason),
      h("td.number", {}, miss.first_token === null ? "–" : count(miss.first_token)), h("td.number", {}, `${count(miss.cached_tokens)} of ${count(miss.prompt_tokens)}`), h("td", {}, this.#why(miss)))),
    found.recent.length ? null : h("tr", {}, h("td", { colspan: "5", class: "muted" }, "None yet.")));
  }

  #why(miss) {
    if (miss.text) return `${miss.text.kind ? `${miss.text.kind}: ` : ""}“${miss.text.was}” → “${miss.text.now}”`;
    if (miss.evicted_for) return `for ${this.nameOf(miss.evicted_for)}`;
    if (miss.cached_on_workers.length) return `worker ${miss.cached_on_workers.join(", ")}`;
    return miss.nearest_request ? `nearest: ${shortId(miss.nearest_request)}` : "";
  }
}
