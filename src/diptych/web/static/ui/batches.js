/** Batches: how far each is. Hidden where the server takes none, and before there is one. */

import { meter } from "../common/charts.js";
import { $, announce, h, setText, show } from "../common/dom.js";
import { count, duration, percent } from "../common/format.js";
import { getJson, post } from "../common/server.js";

const INTERVAL_MS = 2000;
const MOST = 8;
const OPEN = ["validating", "in_progress", "finalizing", "cancelling"];
const shortName = (id) => id.replace("batch_", "").slice(0, 8);
const MOODS = { completed: "good", failed: "bad", expired: "warn", cancelled: "warn" };

/** Fills its card from /v1/batches: those of the key that the page uses. */
export class BatchCard {
  constructor() {
    this.isServed = false;
    setInterval(() => document.hidden || this.#ask(), INTERVAL_MS);
  }

  /** isServed: of /ui/state. */
  update(isServed) {
    const begins = isServed && !this.isServed;
    this.isServed = isServed;
    if (begins) this.#ask();
  }

  async #ask() {
    if (!this.isServed) return;
    try {
      this.#show((await getJson(`v1/batches?limit=${MOST}`)).data);
    } catch {
      // The pill of the page says that there is no connection.
    }
  }

  #show(batches) {
    $("#batches").hidden = !batches.length;
    const running = batches.filter((batch) => OPEN.includes(batch.status)).length;
    setText($("#batches-words"), running ? `${running} of the latest ${batches.length} run` : "");
    show($("#batches-rows"), batches.map((batch) => this.#row(batch)));
  }

  #row(batch) {
    const { total, completed, failed } = batch.request_counts;
    const share = total ? (completed + failed) / total : 0;
    const isOpen = OPEN.includes(batch.status);
    const left = isOpen ? duration(Math.max(0, batch.expires_at - Date.now() / 1000) * 1e9) : "–";
    const cancel = h("button", { type: "button", "aria-label": `Cancel batch ${shortName(batch.id)}`, onclick: () => this.#cancel(batch.id) }, "Cancel");
    return h("tr", {}, h("th", { scope: "row", title: batch.id }, shortName(batch.id)),
      h("td", {}, h(MOODS[batch.status] ? `span.pill.${MOODS[batch.status]}` : "span.pill", {}, batch.status.replace("_", " "))),
      h("td", {}, h("span.kv", {}, meter(share, `Lines done of batch ${shortName(batch.id)}`), percent(share))),
      h("td.number", {}, `${count(completed + failed)} of ${count(total)}`), h("td.number", {}, count(failed)), h("td.number", {}, left),
      h("td", {}, isOpen && batch.status !== "cancelling" ? cancel : null));
  }

  async #cancel(id) {
    try {
      await post(`v1/batches/${id}/cancel`, {});
      announce(`Batch ${shortName(id)} is being cancelled`);
    } catch (error) {
      announce(error.message);
    }
    this.#ask();
  }
}
