/** Reading the records of a run, and the statistics of a list of requests. Times are milliseconds here. */

const PERCENTILES = [50, 90, 99];

/** A run from a file's text: {name, size, rows, summary}. rows: null when the file holds a summary only. */
export function readRun(text, name) {
  const trimmed = text.trim();
  if (!trimmed) throw new Error("the file is empty");
  const whole = wholeOf(trimmed);
  if (whole === undefined) return fromRecords(trimmed.split("\n").map(parsed).filter((record) => record !== undefined), name);
  if (Array.isArray(whole)) return fromRecords(whole, name);
  return whole === null || whole.arrival_s === undefined ? fromObject(whole ?? {}, name) : fromRecords([whole], name);
}

/** The file as one JSON value; undefined when it is none (records have a line each). */
function wholeOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function parsed(line, index) {
  if (!line.trim()) return undefined;
  try {
    return JSON.parse(line);
  } catch {
    throw new Error(`line ${index + 1} is no JSON`);
  }
}

function fromRecords(records, name) {
  if (!records.length) throw new Error("it holds no request");
  return { name, size: records.length, rows: records.map(row), summary: null };
}

function fromObject(whole, name) {
  const records = whole.records ?? whole.requests;
  if (Array.isArray(records)) return fromRecords(records, name);
  if (whole.mode && whole.mode !== "run") throw new Error("it holds several runs; load the records of one of them");
  const found = whole.summary ?? whole;
  if (!found.ttft_ms || !found.tpot_ms) throw new Error("neither records of requests nor the summary of a run");
  const summary = {
    requests: found.num_requests, completed: found.num_completed, attainment: found.attainment ?? null, goodput: found.goodput_rps ?? null, seconds: 0,
    tokensPerSecond: found.output_tokens_per_s, ttft: found.ttft_ms, tpot: found.tpot_ms, e2e: found.e2e_ms, itl: found.itl_ms ?? null, gap: null,
  };
  return { name, size: found.num_requests ?? 0, rows: null, summary };
}

function row(record, index) {
  if (typeof record !== "object" || record === null || record.arrival_s === undefined) throw new Error(`record ${index + 1} has no arrival_s: it is no record of a request`);
  const ms = (value) => (value === null || value === undefined ? null : value * 1000);
  const completed = record.outcome ? record.outcome === "completed" : ["stop", "length"].includes(record.reason);
  return { kind: record.kind ?? "", arrival: ms(record.arrival_s), ttft: ms(record.ttft_s), tpot: ms(record.tpot_s), e2e: ms(record.e2e_s), gap: ms(record.longest_gap_s), tokens: record.output_tokens ?? 0, met: record.slo_met ?? null, completed };
}

/** p50, p90 and p99 of each time, by linear interpolation between the closest ranks. */
export function distribution(rows) {
  const done = rows.filter((request) => request.completed);
  const spread = (key) => {
    const ordered = done.map((request) => request[key]).filter((value) => value !== null).sort((a, b) => a - b);
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
  const end = rows.reduce((most, request) => Math.max(most, request.arrival + (request.e2e ?? 0)), 0);
  const seconds = end / 1000;
  return { seconds, tokensPerSecond: seconds ? rows.reduce((sum, request) => sum + (request.completed ? request.tokens : 0), 0) / seconds : null };
}

/**
 * The share that meets both objectives times ``scale``; without objectives, what the records say (null: nothing). A request
 * that got no token has missed its first; one that got a single token has no pace to miss.
 */
export function attainment(rows, { ttft, tpot }, scale) {
  if (ttft === null && tpot === null) {
    const judged = rows.filter((request) => request.met !== null);
    return judged.length ? judged.filter((request) => request.met).length / judged.length : null;
  }
  const met = rows.filter((request) => request.completed && (ttft === null || (request.ttft !== null && request.ttft <= ttft * scale)) && (tpot === null || request.tpot === null || request.tpot <= tpot * scale));
  return rows.length ? met.length / rows.length : null;
}

/** [value, share at most that], at 200 points. */
export function cumulative(values) {
  const ordered = values.filter((value) => value !== null && value > 0).sort((a, b) => a - b);
  if (!ordered.length) return [];
  const points = Math.min(200, ordered.length);
  return Array.from({ length: points + 1 }, (_, index) => [at(ordered, index / points), index / points]);
}
