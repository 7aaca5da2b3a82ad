/**
 * One request of a timeline: when it waited, was computed, moved and got tokens. No DOM here. Times are nanoseconds.
 */

import { firstAbove } from "./sorted.js";

const MAX_TOKENS = 40_000;
const STALLED = 1;
const UNKNOWN = 2;

export class TimelineRequest {
  #isBroken = false; // the next gap is UNKNOWN

  constructor(id) {
    this.id = id;
    this.queued = 0; // when a worker first heard of it; 0: not known (it is older than what was read)
    this.firstToken = 0;
    this.end = 0;
    this.promptTokens = 0;
    this.cachedTokens = 0;
    this.worker = -1; // that decodes it, or computes its prompt until then
    this.workers = new Set();
    this.chunks = []; // {t0, t1, first, tokens, worker, mixed}
    this.open = null; // the chunk that is being computed: {t0, first, tokens, worker}
    this.transfers = [];
    this.times = []; // of tokens
    this.flags = []; // of the gap before this token. STALLED: too long when it came. UNKNOWN: records of it were lost
    this.longestGapNs = 0;
    this.reserved = 0;
    this.delivered = 0;
    this.pauses = []; // {t0, t1, swapped, rested}
    this.detail = null; // of finished
    this.attempts = 1;
  }

  /** The first moment that is known of it. */
  get start() {
    return this.queued || this.firstChunk || this.times[0] || this.end || Infinity;
  }

  /** The last one; Infinity while it runs. */
  get last() {
    return this.end || Infinity;
  }

  /** When some of it was first computed; 0: not yet. */
  get firstChunk() {
    return this.chunks[0]?.t0 || this.open?.t0 || 0;
  }

  chunk(step, first, tokens) {
    this.chunks.push({
      t0: step.start_ns, t1: step.end_ns, first, tokens, worker: step.worker, mixed: step.phase === "mixed",
    });
    this.workers.add(step.worker);
    if (!this.times.length || step.end_ns > this.times.at(-1)) this.worker = step.worker;
  }

  /** A token; it may be read after younger ones, for workers report in portions. limitNs: what gap is too long; 0: none. */
  token(time, worker, limitNs) {
    if (this.end && time > this.end) return;
    this.workers.add(worker);
    const { times, flags } = this;
    if (times.length && time <= times.at(-1)) {
      this.#insert(time, limitNs);
      return;
    }
    this.worker = worker;
    times.push(time);
    flags.push(this.#isBroken ? UNKNOWN : 0);
    this.#isBroken = false;
    this.#judge(times.length - 1, limitNs);
    if (times.length > MAX_TOKENS) {
      times.splice(0, MAX_TOKENS / 2);
      flags.splice(0, MAX_TOKENS / 2);
      flags[0] = 0;
    }
  }

  /** Records were lost: what came between its newest token and the next is not known. */
  lose() {
    this.#isBroken = this.times.length > 0;
  }

  milestone(record, limitNs) {
    this.workers.add(record.worker);
    const attempt = (record.epoch || 0) + 1;
    if (attempt > this.attempts) Object.assign(this, { attempts: attempt, end: 0, detail: null }); // what ended was the one before
    if (record.what !== "finished" || attempt === this.attempts) MILESTONES[record.what]?.(this, record, record.detail ?? {}, limitNs);
  }

  /** Whether the gap before token `at` is a stall under these rules. */
  isStalled(at, objectiveNs) {
    if (!at || !this.isKnown(at)) return false;
    return objectiveNs ? this.times[at] - this.times[at - 1] > objectiveNs : this.flags[at] === STALLED;
  }

  /** Whether no token can have come in the gap before token `at`. */
  isKnown(at) {
    return this.flags[at] !== UNKNOWN;
  }

  /**
   * Where its time went until the first token and after it: [{name, phase, ns}], in order, as far as it is known. Of a
   * request that has ended, as the server counted it: the parts sum to its total, exactly.
   */
  breakdown(now) {
    if (this.#isCounted) return this.#counted(this.detail);
    const token = this.firstToken || this.times[0] || 0;
    const known = Math.min(this.end || now, now);
    const parts = [];
    if (this.queued) {
      const begun = this.firstChunk || token || known;
      const ready = token || known;
      let own = 0;
      for (const chunk of this.chunks) own += Math.max(0, Math.min(chunk.t1, ready) - Math.max(chunk.t0, begun));
      if (this.open) own += Math.max(0, ready - Math.max(this.open.t0, begun));
      own = Math.min(own, ready - begun);
      parts.push({ name: "Waiting in the queue", phase: "idle", ns: begun - this.queued, ttft: true });
      parts.push({ name: "Computing the prompt", phase: "prefill", ns: own, ttft: true });
      parts.push({ name: "Waiting between its chunks", phase: "stalled", ns: ready - begun - own, ttft: true });
    }
    if (token) {
      const handoff = this.detail?.handoff_ns ?? Math.max(0, this.delivered - token);
      parts.push({ name: "Handing over the KV cache", phase: "transfer", ns: Math.min(handoff, known - token), ttft: false });
      parts.push({ name: "Decoding", phase: "decode", ns: Math.max(0, known - token - handoff), ttft: false });
    }
    return parts;
  }

  get #isCounted() {
    return this.detail?.decode_ns !== undefined && this.attempts === 1;
  }

  #counted({ queue_ns: queue, prefill_ns: prefill, handoff_ns: handoff, decode_ns: decode }) {
    let own = 0;
    const ready = this.firstToken || this.end;
    for (const chunk of this.chunks) own += Math.max(0, Math.min(chunk.t1, ready) - chunk.t0);
    own = this.chunks.length ? Math.min(own, prefill) : prefill;
    return [
      { name: "Waiting in the queue", phase: "idle", ns: queue, ttft: true },
      { name: "Computing the prompt", phase: "prefill", ns: own, ttft: true },
      { name: "Waiting between its chunks", phase: "stalled", ns: prefill - own, ttft: true },
      { name: "Handing over the KV cache", phase: "transfer", ns: handoff, ttft: false },
      { name: "Decoding", phase: "decode", ns: decode, ttft: false },
    ];
  }

  /** Time to the first token, from its arrival at a worker; null while there is none. */
  get ttftNs() {
    if (this.firstToken && this.#isCounted) return this.detail.queue_ns + this.detail.prefill_ns;
    return this.firstToken && this.queued ? this.firstToken - this.queued : null;
  }

  #insert(time, limitNs) {
    const { times, flags } = this;
    const at = firstAbove(times, time);
    if (times[at - 1] === time) return;
    const split = at && this.isKnown(at) ? times[at] - times[at - 1] : 0;
    times.splice(at, 0, time);
    flags.splice(at, 0, at && !this.isKnown(at) ? UNKNOWN : 0);
    if (split && split === this.longestGapNs) this.longestGapNs = this.#longest();
    this.#judge(at, limitNs);
    this.#judge(at + 1, limitNs);
  }

  /** Take in the gap before token `at`. */
  #judge(at, limitNs) {
    if (!at || !this.isKnown(at)) return;
    const gap = this.times[at] - this.times[at - 1];
    if (gap > this.longestGapNs) this.longestGapNs = gap;
    this.flags[at] = limitNs && gap > limitNs ? STALLED : 0;
  }

  #longest() {
    let longest = 0;
    for (let at = 1; at < this.times.length; at++) {
      if (this.isKnown(at)) longest = Math.max(longest, this.times[at] - this.times[at - 1]);
    }
    return longest;
  }
}

/** What each milestone of a request's records says: (request, record, its detail, limit of a gap). */
const MILESTONES = {
  __proto__: null,
  queued(request, { time_ns: time, worker }, detail) {
    if (!request.queued || time < request.queued) request.queued = time;
    if (!request.promptTokens) request.promptTokens = detail.num_prompt_tokens || 0; // later attempts count answer tokens too
    if (request.worker < 0) request.worker = worker;
  },
  first_token(request, { time_ns: time, worker }, detail, limitNs) {
    if (!request.firstToken) request.firstToken = time;
    request.token(time, worker, limitNs);
  },
  handoff_reserved(request, { time_ns: time }) {
    request.reserved = time;
    if (!request.queued || time < request.queued) request.queued = time; // the worker that will decode it hears of it first
  },
  handoff_delivered(request, { time_ns: time, worker }) {
    request.delivered = time;
    request.worker = worker;
  },
  preempted(request, { time_ns: time }, detail) {
    endPause(request, { time_ns: time }, {}); // it may have rested
    request.pauses.push({ t0: time, t1: Infinity, swapped: Boolean(detail.swapped) });
  },
  rested(request, { time_ns: time }) {
    request.pauses.push({ t0: time, t1: Infinity, rested: true });
  },
  resumed: endPause,
  admitted: endPause,
  finished(request, { time_ns: time }, detail) {
    request.end = time;
    request.detail = detail;
    if (!request.promptTokens) request.promptTokens = detail.num_prompt_tokens || 0;
    request.cachedTokens = detail.num_cached_tokens ?? request.cachedTokens;
  },
};

function endPause(request, { time_ns: time }, detail) {
  const open = request.pauses.at(-1);
  if (open && open.t1 === Infinity) open.t1 = time;
  request.cachedTokens = Math.max(request.cachedTokens, detail.num_cached_tokens || 0);
}
