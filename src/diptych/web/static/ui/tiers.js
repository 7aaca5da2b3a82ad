/** The tiers below the KV caches: what they hold, and what they saved. Hidden where there are none. */

import { meter } from "../common/charts.js";
import { $, h, show } from "../common/dom.js";
import { count, percent } from "../common/format.js";

const BYTES_PER_GB = 1e9;

/** Fills its card. tiers: of /ui/state, one entry for each worker that has a tier. */
export function showTiers(tiers) {
  $("#tiers").hidden = !tiers.length;
  show($("#tiers-rows"), tiers.map((tier) => h("tr", {}, h("th", { scope: "row" }, `worker ${tier.worker}`),
    h("td", {}, h("span.kv", {}, meter(tier.host_used, `Host memory of worker ${tier.worker}`), percent(tier.host_used))),
    h("td.number", {}, count(tier.host_hit_tokens)),
    h("td.number", {}, tier.reads_peers ? count(tier.peer_hit_tokens) : "none"),
    h("td.number", {}, count(tier.disk_hit_tokens)), h("td", {}, diskWords(tier)))));
}

function diskWords(tier) {
  if (!tier.had_disk) return "none";
  if (!tier.has_disk) return h("span.pill.bad", {}, "switched off: see the log");
  const lost = tier.missed_blocks ? `, ${count(tier.missed_blocks)} blocks could not be read` : "";
  return `${(tier.disk_bytes / BYTES_PER_GB).toFixed(2)} GB, ${count(tier.disk_blocks)} blocks${tier.loading ? `, ${tier.loading} requests wait` : ""}${lost}`;
}
