/** Reading the records of a run, and the statistics of a list of requests. Times are milliseconds here. */

const PERCENTILES = [50, 90, 99];

/** A run from a file's text: {name, size, rows, summary}. rows: null when the file holds a summary only. */
export function readRun(text, name) {
  const trimmed = text.trim();
  if (!trimmed) throw new Error("the file is empty");
  let whole = null;
  try {
    whole = JSON.parse(trimmed);
  } catch {
    whole = null; // several lines: one object each
  }
  if (whole && !Array.isArray(whole) && whole.arrival_s === undefined) return fromObject(whole, name);
  const found = Array.isArray(whole) ? whole : whole ? [whole] : trimmed.split("\n").map((line, index) => parsed(line, index)).filter(Boolean);
  return { name, size: found.length, rows: found.map((one, index) => row(one, index)), summary: null };
}

function parsed(line, index) {
  if (!line.trim()) return null;
  try {
    return JSON.parse(line);
  } catch {
    throw new Error(`line ${index + 1} is no JSON`);
  }
}

function fromObject(whole, name) {
  const records = whole.records ?? whole.requests;
  if (Array.isArray(records)) return { name, size: records.length, rows: records.map((one, index) => row(one, index)), summary: null };
  if (whole.mode && whole.mode !== "run") throw new Error("it holds several runs; load the records of one of them");
  const one = whole.summary ?? whole;
  if (!one.ttft_ms || !one.tpot_ms) throw new Error("neither records of requests nor the summary of a run");
  const summary = {
    requests: one.num_requests, completed: one.num_completed, attainment: one.attainment ?? null, goodput: one.goodput_rps ?? null, seconds: 0,
    tokensPerSecond: one.output_tokens_per_s, ttft: one.ttft_ms, tpot: one.tpot_ms, e2e: one.e2e_ms, itl: one.itl_ms ?? null, gap: null,
  };
  return { name, size: one.num_requests ?? 0, rows: null, summary };
}

function row(one, index) {
  if (typeof one !== "object" || one === null || one.arrival_s === undefined) throw new Error(`record ${index + 1} has no arrival_s: it is no record of a request`);
  const ms = (value) => (value === null || value === undefined ? null : value * 1000);
  const completed = one.outcome ? one.outcome === "completed" : ["stop", "length"].includes(one.reason);
  return { kind: one.kind ?? "", arrival: ms(one.arrival_s), ttft: ms(one.ttft_s), tpot: ms(one.tpot_s), e2e: ms(one.e2e_s), gap: ms(one.longest_gap_s), tokens: one.output_tokens ?? 0, met: one.slo_met ?? null, completed };
}

/** p50, p90 and p99 of each time, by linear interpolation between the closest ranks. */
export function distribution(rows) {
  const done = rows.filter((one) => one.completed);
  const spread = (key) => {
    const ordered = done.map((one) => one[key]).filter((value) => value !== null).sort((a, b) => a - b);
    return ordered.length ? Object.fromEntries(PERCENTILES.map((percent) => [`p${percent}`, at(ordered, percent / 100)])) : null;
  };
  return { requests: rows.length, completed: done.length, ttft: spread("ttft"), tpot: spread("tpot"), e2e: spread("e2e"), gap: spread("gap") };
}

function at(ordered, share) {
  const place = share * (ordered.length - 1);
  const low = Math.floor(place);
  return ordered[low] + (ordered[Math.min(low + 1, ordered.length - 1)] - ordered[low]) * (place - low);
}

/** Seconds from the start of the run to its last end, as the tools count them, and answer tokens a second. */
export function span(rows) {
  if (!rows.length) return { seconds: 0, tokensPerSecond: null };
  const end = rows.reduce((most, one) => Math.max(most, one.arrival + (one.e2e ?? 0)), 0);
  const seconds = end / 1000;
  return { seconds, tokensPerSecond: seconds ? rows.reduce((sum, one) => sum + (one.completed ? one.tokens : 0), 0) / seconds : null };
}

/** The share that meets both objectives times ``scale``; without objectives, what the records say (null: nothing). */
export function attainment(rows, { ttft, tpot }, scale) {
  if (ttft === null && tpot === null) {
    const judged = rows.filter((one) => one.met !== null);
    return judged.length ? judged.filter((one) => one.met).length / judged.length : null;
  }
  const met = rows.filter((one) => one.completed && (ttft === null || one.ttft <= ttft * scale) && (tpot === null || one.tpot === null || one.tpot <= tpot * scale));
  return rows.length ? met.length / rows.length : null;
}

/** [value, share at most that], at 200 points. */
export function cumulative(values) {
  const ordered = values.filter((value) => value !== null && value > 0).sort((a, b) => a - b);
  if (!ordered.length) return [];
  const points = Math.min(200, ordered.length);
  return Array.from({ length: points + 1 }, (_, index) => [at(ordered, index / points), index / points]);
}
