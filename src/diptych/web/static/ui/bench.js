/**
 * `ui?bench=1`: the timeline with made-up records of 64 workers and 10,000 cells, moved for some seconds, and how long
 * its frames took. `workers`, `cells` and `seconds` in the address change it. The result is in `window.benchResult`.
 */

import { $, h, setText } from "../common/dom.js";

/** A small generator that gives the same numbers every time (mulberry32). */
function numbers(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Records as `GET /timeline` sends them: `cells` steps over `workers` workers, the first third prefill workers. */
function madeUpRecords(workers, cells, spanNs) {
  const random = numbers(7);
  const roles = Array.from({ length: workers }, (_, at) => (at < workers / 3 ? "prefill" : "decode"));
  const header = {
    kind: "header", version: 1, run_id: "bench", unix_ns_at_zero: 1.7e18, now_ns: spanNs, first_sequence: 1, next_sequence: 1,
    workers: Object.fromEntries(roles.map((role, at) => [at, { state: "ready", role }])), decoding: {},
  };
  const records = [];
  const perWorker = Math.ceil(cells / workers);
  for (let worker = 0; worker < workers; worker++) {
    let time = 1;
    const typical = spanNs / perWorker;
    for (let step = 0; step < perWorker; step++) {
      const isPrefill = roles[worker] === "prefill";
      const phase = isPrefill ? "prefill" : random() < 0.06 ? "mixed" : "decode";
      const length = typical * (0.4 + random() * (phase === "mixed" ? 1.4 : 0.8));
      const id = `r${worker}-${step >> 3}`;
      records.push({
        kind: "step", worker, step_id: step, start_ns: time, end_ns: time + length, phase, predicted_ns: length, decode_context: 4000,
        num_decodes: isPrefill ? 0 : 8, ...(phase === "decode" ? {} : { prefills: [[id, (step & 7) * 512, 512]] }), ...(step === 0 && !isPrefill ? { joined: Array.from({ length: 4 }, (_, at) => `s${worker}-${at}`) } : {}),
      });
      time += length + (random() < 0.1 ? typical * random() : 0);
    }
  }
  records.sort((a, b) => a.end_ns - b.end_ns).forEach((record, at) => (record.sequence = at + 1));
  return [header, ...records];
}

/** Measure while the view follows, pans and zooms. */
export async function runBench(view, query) {
  view.options.maxHeight = 760;
  const [workers, cells, seconds] = [Number(query.workers) || 64, Number(query.cells) || 10_000, Number(query.seconds) || 6];
  const spanNs = 60e9;
  const begun = performance.now();
  view.options.now = null;
  view.add(madeUpRecords(workers, cells, spanNs));
  const addMs = performance.now() - begun;
  setText($("#connection"), "bench");
  const result = { workers, cells, addMs };
  await measure(view, (share) => pan(view, share, spanNs), 500); // let the browser compile first
  for (const [name, move] of [["whole", whole], ["pan", pan], ["zoom", zoom]]) result[name] = await measure(view, (share) => move(view, share, spanNs), (seconds * 1000) / 3);
  window.benchResult = result;
  $("main").append(h("pre.card", { id: "bench-result" }, JSON.stringify(result, null, 1)));
}

function whole(view, share, spanNs) {
  view.setRange(-spanNs * 0.05 * share, spanNs * (1 + 0.05 * share)); // every cell is in sight, and every frame differs
}

function pan(view, share, spanNs) {
  view.setRange(spanNs * 0.7 * share, spanNs * (0.7 * share + 0.25));
}

function zoom(view, share, spanNs) {
  const half = (spanNs / 2) * 0.002 ** share;
  view.setRange(spanNs / 2 - half, spanNs / 2 + half);
}

/** Frame intervals and drawing times, in milliseconds, while `move(share of the time)` is called before each frame. */
function measure(view, move, lengthMs) {
  return new Promise((resolve) => {
    const intervals = [];
    let first = 0;
    let last = 0;
    view.drawTimes.length = 0;
    const frame = (time) => {
      first ||= time;
      if (last) intervals.push(time - last);
      last = time;
      if (time - first > lengthMs) {
        const draws = [...view.drawTimes].sort((a, b) => a - b);
        intervals.sort((a, b) => a - b);
        const at = (list, share) => Number((list[Math.floor((list.length - 1) * share)] ?? 0).toFixed(2));
        resolve({ fps: Number(((intervals.length * 1000) / (last - first)).toFixed(1)), frameP50: at(intervals, 0.5), frameP95: at(intervals, 0.95), frameMax: at(intervals, 1), drawP50: at(draws, 0.5), drawP95: at(draws, 0.95), drawMax: at(draws, 1) });
        return;
      }
      move((time - first) / lengthMs);
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  });
}
