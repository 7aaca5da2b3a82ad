/**
 * One request of a timeline: when it waited, was computed, moved and got tokens. No DOM here. Times are nanoseconds.
 */

const MAX_TOKENS = 40_000;
const STALLED = 1;

export class TimelineRequest {
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
    this.transfers = [];
    this.times = []; // of tokens
    this.flags = []; // STALLED: the gap before this token was too long when it came
    this.longestGapNs = 0;
    this.reserved = 0;
    this.delivered = 0;
    this.pauses = []; // {t0, t1, swapped}
    this.detail = null; // of finished
    this.attempts = 1;
  }

  /** The first moment that is known of it. */
  get start() {
    return this.queued || this.chunks[0]?.t0 || this.times[0] || this.end || Infinity;
  }

  /** The last one; Infinity while it runs. */
  get last() {
    return this.end || Infinity;
  }

  /** When some of it was first computed; 0: not yet. */
  get firstChunk() {
    return this.chunks[0]?.t0 || 0;
  }

  chunk(step, first, tokens) {
    this.chunks.push({
      t0: step.start_ns, t1: step.end_ns, first, tokens, worker: step.worker, mixed: step.phase === "mixed",
    });
    this.workers.add(step.worker);
    if (!this.times.length || step.end_ns > this.times.at(-1)) this.worker = step.worker;
  }

  token(time, worker, limitNs) {
    const times = this.times;
    if (this.end && time > this.end) return;
    this.workers.add(worker);
    this.worker = worker;
    const before = times.at(-1) ?? 0;
    if (before >= time) {
      this.#insert(time);
      return;
    }
    const gap = before ? time - before : 0;
    if (gap > this.longestGapNs) this.longestGapNs = gap;
    times.push(time);
    this.flags.push(limitNs && gap > limitNs ? STALLED : 0);
    if (times.length > MAX_TOKENS) {
      times.splice(0, MAX_TOKENS / 2);
      this.flags.splice(0, MAX_TOKENS / 2);
    }
  }

  milestone(record, limitNs) {
    const { what, time_ns: time, worker, detail = {} } = record;
    this.workers.add(worker);
    const attempt = (record.epoch || 0) + 1;
    if (attempt > this.attempts) Object.assign(this, { attempts: attempt, end: 0, detail: null }); // what ended was the one before
    if (what === "queued") {
      if (!this.queued || time < this.queued) this.queued = time;
      if (!this.promptTokens) this.promptTokens = detail.num_prompt_tokens || 0; // later attempts count answer tokens too
      if (this.worker < 0) this.worker = worker;
    } else if (what === "first_token") {
      if (!this.firstToken) this.firstToken = time;
      this.#insertFirst(time, worker, limitNs);
    } else if (what === "handoff_reserved") {
      this.reserved = time;
      if (!this.queued || time < this.queued) this.queued = time; // the worker that will decode it hears of it first
    } else if (what === "handoff_delivered") {
      this.delivered = time;
      this.worker = worker;
    } else if (what === "preempted") this.pauses.push({ t0: time, t1: Infinity, swapped: Boolean(detail.swapped) });
    else if (what === "resumed" || what === "admitted") {
      const open = this.pauses.at(-1);
      if (open && open.t1 === Infinity) open.t1 = time;
      this.cachedTokens = Math.max(this.cachedTokens, detail.num_cached_tokens || 0);
    } else if (what === "finished" && attempt === this.attempts) {
      this.end = time;
      this.detail = detail;
      if (!this.promptTokens) this.promptTokens = detail.num_prompt_tokens || 0;
      this.cachedTokens = detail.num_cached_tokens ?? this.cachedTokens;
    }
  }

  /** Whether the gap before token `at` is a stall under these rules. */
  isStalled(at, objectiveNs) {
    if (!at) return false;
    return objectiveNs ? this.times[at] - this.times[at - 1] > objectiveNs : this.flags[at] === STALLED;
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

  /** The token that a prefill gives; it may be read after younger ones, for workers report in portions. */
  #insertFirst(time, worker, limitNs) {
    if (!this.times.length || time > this.times.at(-1)) this.token(time, worker, limitNs);
    else this.#insert(time, limitNs);
  }

  #insert(time, limitNs = 0) {
    const times = this.times;
    let at = times.length;
    while (at && times[at - 1] > time) at--;
    if (times[at - 1] === time) return;
    times.splice(at, 0, time);
    this.flags.splice(at, 0, 0);
    const gap = times[at + 1] - time;
    if (at === 0 && gap > this.longestGapNs) this.longestGapNs = gap;
    if (limitNs) this.flags[at + 1] = gap > limitNs ? STALLED : 0;
  }
}
