/** How much longer streams wait for a token while somebody's prompt is computed: the factor that the page shows. */

import { firstAbove } from "../common/sorted.js";

export const MIN_TOKENS = 64; // of a prefill that counts
const MIN_GAPS = 20;
const MAX_REQUESTS = 24;

/**
 * Compares gaps between tokens in [t0, t1] of a TimelineModel: those that touch a prefill of another request anywhere on
 * the server, and all others; gaps in which a worker was gone or records were lost are left out. Returns the 99th percentile of the
 * former in the stream that waits longest, that of the others in all streams, and their ratio, {busyNs, quietNs, factor}, or null when
 * one of the two is not known.
 */
export function interference(model, t0, t1) {
  const prefills = prefillSpans(model, t0, t1);
  const quiet = [];
  let busyNs = 0; // in the stream that waits longest: beside a worker that prefills, others may not feel it
  const outages = [...model.lanes.values()].flatMap((lane) => lane.states);
  const requests = [...model.requests.values()].filter((request) => request.times.length > 8 && request.last >= t0 && request.start <= t1);
  for (const request of requests.slice(-MAX_REQUESTS)) {
    const { times } = request;
    const busy = [];
    for (let at = Math.max(2, firstAbove(times, t0)); at < times.length && times[at] <= t1; at++) {
      const [from, to] = [times[at - 1], times[at]];
      if (!request.isKnown(at) || outages.some((outage) => outage.t0 < to && outage.t1 > from)) continue;
      (touches(prefills, from, to, request.id) ? busy : quiet).push(to - from);
    }
    if (busy.length) busyNs = Math.max(busyNs, percentile99(busy));
  }
  if (quiet.length < MIN_GAPS || !busyNs) return null;
  const quietNs = percentile99(quiet);
  return { quietNs, busyNs, factor: busyNs / quietNs };
}

const percentile99 = (values) => values.sort((a, b) => a - b)[Math.ceil(values.length * 0.99) - 1];

/** Prefill steps by when they began: {from, to, ids, reach}. reach: the latest end of this one and all before it. */
function prefillSpans(model, t0, t1) {
  const spans = [];
  for (const lane of model.lanes.values()) {
    const [from, to] = lane.between(t0, t1);
    for (let at = from; at < to; at++) {
      const chunks = lane.steps[at].prefills ?? [];
      if (chunks.reduce((sum, chunk) => sum + chunk[2], 0) < MIN_TOKENS) continue;
      spans.push({ from: lane.starts[at], to: lane.ends[at], ids: chunks.map(([id]) => id) });
    }
  }
  spans.sort((a, b) => a.from - b.from);
  let reach = 0;
  for (const span of spans) span.reach = reach = Math.max(reach, span.to);
  return spans;
}

/** Whether a prefill of another request than `id` overlaps with (from, to). */
function touches(spans, from, to, id) {
  let at = spans.length;
  for (let low = 0; low < at;) {
    const middle = (low + at) >> 1;
    if (spans[middle].from >= to) at = middle;
    else low = middle + 1;
  }
  while (--at >= 0 && spans[at].reach > from) if (spans[at].to > from && spans[at].ids.some((other) => other !== id)) return true;
  return false;
}
