/** What a timeline says about a step, a request or a wait: plain words from a TimelineModel. */

import { bytes, count, duration, percent, plural } from "./format.js";

const ROLES = { prefill: "prefill worker", decode: "decode worker", both: "does both phases" };

/** Lines of text about what lies under the pointer; the first is the title. */
export function describe(model, hit, name) {
  if (!hit) return [];
  if (hit.request) return describeRequest(model, hit, name);
  if (hit.transfer) return describeTransfer(hit.transfer, name);
  if (hit.index >= 0) return describeStep(hit.lane, hit.index, name);
  if (hit.open) return describeOpenStep(hit, name);
  if (hit.lane) {
    const down = hit.lane.states.find((state) => state.t0 <= hit.time && hit.time <= state.t1);
    const role = ROLES[hit.lane.role] ? ` (${ROLES[hit.lane.role]})` : "";
    return [`${hit.lane.label}${role}`, down ? `${down.state}${down.detail ? `: ${down.detail}` : ""}` : "idle: nothing to compute"];
  }
  return [];
}

/** Why nothing came in [t0, t1], as a sentence; "" when nothing is known. */
export function reasonText(model, request, worker, t0, t1, name) {
  const pause = request.pauses.find(({ t0: since, t1: until }) => since < t1 && until > t0);
  if (pause?.rested) return "It is of class batch, and gave way to other requests.";
  if (pause) return pause.swapped ? "It was preempted; its KV cache lay in host memory." : "It was preempted, and computed again.";
  if (request.delivered > t0 && request.delivered <= t1) return `Its KV cache was handed over in ${duration(request.delivered - t0)} of that.`;
  const why = model.reason(request, worker, t0, t1);
  if (!why || why.kind === "unknown") return request.reserved >= t0 && request.reserved < t1 ? "Memory for its KV cache was reserved on the decode worker first." : "";
  const where = model.lanes.get(why.worker)?.label ?? `worker ${why.worker}`;
  if (why.kind === "prefill") return `${where} was computing ${plural(why.tokens, "prompt token")} of ${ofPrompt(why.id, name)}${why.more}.`;
  if (why.kind === "state") return `${where} was ${why.state}.`;
  if (why.kind !== "busy") return "";
  return request.times.length && t0 >= request.times[0] ? `${where} was in a slow step.` : `${where} was writing answers of others.`;
}

/** Engines of others may report what they compute and not for whom. */
const ofPrompt = (id, name) => (id ? name(id) : "unnamed prompts");

const TITLES = { prefill: "Prefill step", decode: "Decode step", mixed: "Mixed step" };

function promptLines(step, name) {
  const prefills = step.prefills || [];
  const lines = prefills.slice(0, 4).map(([id, first, tokens]) => `${ofPrompt(id, name)}: prompt tokens ${count(first)} to ${count(first + tokens)}`);
  return prefills.length > 4 ? [...lines, `and ${prefills.length - 4} more prompts`] : lines;
}

/** A step that is being computed. */
function describeOpenStep({ lane, open, edge }, name) {
  const lines = [`${TITLES[open.phase] ?? open.phase} on ${lane.label}: for ${duration(Math.max(0, edge - open.time_ns))} so far`, ...promptLines(open, name)];
  if (open.num_decodes) lines.push(`${plural(open.num_decodes, "stream")} will get a token`);
  if (open.waiting) lines.push(`${plural(open.waiting, "stream")} wait${open.waiting === 1 ? "s" : ""} for it`);
  if (open.predicted_ns) lines.push(`predicted: ${duration(open.predicted_ns)}`);
  return lines;
}

/** What is being computed that streams feel, as a sentence; "" when there is nothing of so many prompt tokens. */
export function computingText(model, least, name) {
  for (const lane of model.lanes.values()) {
    const [id, , tokens] = [...(lane.open?.prefills || [])].sort((a, b) => b[2] - a[2])[0] ?? [];
    if (!(tokens >= least)) continue;
    const waiting = lane.open.waiting ? ` ${plural(lane.open.waiting, "stream")} wait${lane.open.waiting === 1 ? "s" : ""} for it.` : "";
    return `A long prompt is being computed on ${lane.label}: ${plural(tokens, "token")} of ${name(id)}, predicted to take ${duration(lane.open.predicted_ns)}.${waiting}`;
  }
  return "";
}

function describeStep(lane, index, name) {
  const step = lane.steps[index];
  const lines = [`${TITLES[step.phase] ?? step.phase} on ${lane.label}: ${duration(step.end_ns - step.start_ns)}`, ...promptLines(step, name)];
  if (step.num_decodes) lines.push(`${plural(step.num_decodes, "stream")} got a token (context ${count(step.decode_context)})`);
  if ((step.extra || []).length) {
    const [computed, right] = [1, 2].map((at) => step.extra.reduce((sum, entry) => sum + entry[at], 0));
    lines.push(`${plural(computed, "guessed token")} computed, ${count(right)} right`);
  }
  if (lane.waiting[index]) lines.push(`${plural(lane.waiting[index], "stream")} had to wait for it`);
  if (step.predicted_ns) lines.push(`predicted: ${duration(step.predicted_ns)}`);
  return lines;
}

function describeTransfer(transfer, name) {
  return [
    `KV cache of ${name(transfer.request_id)}`,
    `${bytes(transfer.num_bytes)} in ${duration(transfer.end_ns - transfer.start_ns)}, worker ${transfer.sender} to ${transfer.worker}`,
    `after the end of the prefill: ${duration(transfer.exposed_ns)}`,
  ];
}

function describeRequest(model, hit, name) {
  const { request, time } = hit;
  const lines = [`${name(request.id)}: ${requestSummary(request)}`];
  if (time < request.start) return [...lines, "has not arrived yet"];
  const { times } = request;
  const begun = request.firstChunk || times[0];
  if (request.end && time > request.end) return lines;
  if (request.queued && time >= request.queued && time < (begun || request.last)) lines.push(...describeQueued(model, request, begun || hit.edge, name));
  else if (times.length && time > times[0]) lines.push(...describeDecoding(model, request, hit, name));
  else lines.push(...describePrefill(model, request, time, name));
  if (request.longestGapNs) lines.push(`longest gap between tokens: ${duration(request.longestGapNs)}`);
  return lines.filter(Boolean);
}

function describeQueued(model, request, until, name) {
  const worker = (request.chunks[0] ?? request.open)?.worker ?? request.worker;
  return [`waits in the queue: ${duration(until - request.queued)}`, reasonText(model, request, worker, request.queued, until, name)];
}

/** The gap in which `time` lies: between two tokens, or after the newest. */
function describeDecoding(model, request, { time, edge }, name) {
  const { times } = request;
  const next = times.findIndex((token) => token >= time);
  if (next > 0 && !request.isKnown(next)) return [`not known: records of ${duration(times[next] - times[next - 1])} were lost`];
  const [before, after] = next < 0 ? [times.at(-1), Math.min(request.last, edge)] : [times[next - 1], times[next]];
  const limit = model.limitNs(request.worker);
  const isStall = next > 0 ? request.isStalled(next, model.stall.objectiveNs) : limit && after - before > limit;
  if (!isStall) return [`token ${next < 0 ? times.length : next + 1}, ${duration(after - before)} after the one before`];
  return [`stalled: ${duration(after - before)} without a token`, reasonText(model, request, request.worker, before, after, name)];
}

function describePrefill(model, request, time, name) {
  const chunk = request.chunks.find((part) => part.t0 <= time && time <= part.t1);
  if (chunk) return [`its prompt tokens ${count(chunk.first)} to ${count(chunk.first + chunk.tokens)}: ${duration(chunk.t1 - chunk.t0)}`];
  if (request.open && request.open.t0 <= time) return [`its prompt tokens ${count(request.open.first)} to ${count(request.open.first + request.open.tokens)} are being computed`];
  if (!request.chunks.length) return [];
  const next = request.chunks.find((part) => part.t0 > time);
  const before = request.chunks.findLast((part) => part.t1 <= time);
  return ["waits for its next chunk", before ? reasonText(model, request, before.worker, before.t1, next?.t0 ?? time, name) : ""];
}

/** A few words about a request as a whole. */
export function requestSummary(request) {
  const parts = [];
  if (request.promptTokens) parts.push(`prompt of ${plural(request.promptTokens, "token")}`);
  if (request.cachedTokens) parts.push(`${percent(request.cachedTokens / Math.max(1, request.promptTokens))} of it cached`);
  if (request.times.length) parts.push(plural(request.detail?.num_output_tokens ?? request.times.length, "answer token"));
  if (request.attempts > 1) parts.push(plural(request.attempts, "attempt"));
  return parts.join(", ") || "just arrived";
}
