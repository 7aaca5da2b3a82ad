/** How much longer streams wait for a token while somebody's prompt is computed: the factor that the page shows. */

import { firstAbove } from "../common/timeline-model.js";

const MIN_TOKENS = 64; // of a prefill that counts
const MIN_GAPS = 20;
const MAX_REQUESTS = 24;

/**
 * Compares gaps between tokens in [t0, t1] of a TimelineModel: those that touch a prefill of another request anywhere on
 * the server, and all others; gaps in which a worker was gone are left out. Returns the 99th percentiles of both and
 * their ratio, {busyNs, quietNs, factor}, or null when one of the two is not known.
 */
export function interference(model, t0, t1) {
  const prefills = prefillSpans(model, t0, t1);
  const quiet = [];
  const busy = [];
  const outages = [...model.lanes.values()].flatMap((lane) => lane.states);
  const requests = [...model.requests.values()].filter((one) => one.times.length > 8 && one.last >= t0 && one.start <= t1);
  for (const request of requests.slice(-MAX_REQUESTS)) {
    const { times } = request;
    for (let at = Math.max(2, firstAbove(times, t0)); at < times.length && times[at] <= t1; at++) {
      const [from, to] = [times[at - 1], times[at]];
      if (outages.some((one) => one.t0 < to && one.t1 > from)) continue;
      (touches(prefills, from, to, request.id) ? busy : quiet).push(to - from);
    }
  }
  if (quiet.length < MIN_GAPS || !busy.length) return null;
  const [busyNs, quietNs] = [percentile99(busy), percentile99(quiet)];
  return { quietNs, busyNs, factor: busyNs / quietNs };
}

const percentile99 = (values) => values.sort((a, b) => a - b)[Math.ceil(values.length * 0.99) - 1];

function prefillSpans(model, t0, t1) {
  const spans = [];
  for (const lane of model.lanes.values()) {
    const [from, to] = lane.between(t0, t1);
    for (let at = from; at < to; at++) {
      const chunks = lane.steps[at].prefills;
      if (!chunks) continue;
      const tokens = chunks.reduce((sum, chunk) => sum + chunk[2], 0);
      if (tokens >= MIN_TOKENS) spans.push({ from: lane.starts[at], to: lane.ends[at], id: chunks[0][0] });
    }
  }
  return spans.sort((a, b) => a.from - b.from);
}

function touches(spans, from, to, id) {
  let low = 0;
  let high = spans.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (spans[middle].from >= to) high = middle;
    else low = middle + 1;
  }
  for (let at = low - 1; at >= Math.max(0, low - 6); at--) if (spans[at].to > from && spans[at].id !== id) return true;
  return false;
}
