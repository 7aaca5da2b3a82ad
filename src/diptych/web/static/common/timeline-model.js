/**
 * What a timeline knows: lanes of workers with their steps, and requests with their tokens, built from the records of
 * `GET /timeline` (docs/api.md) in their order. No DOM here. Times are nanoseconds of the records' own clock.
 */

import { firstAbove } from "./sorted.js";
import { TimelineRequest } from "./timeline-request.js";

export const PHASES = ["prefill", "decode", "mixed"];
const MAX_CELLS = 120_000;
const MAX_REQUESTS = 1500;
const RECENT_STEPS = 64;

/** One worker: its steps as columns, its states and its decode batch. */
export class Lane {
  constructor(id, label = "", role = "") {
    this.id = id;
    this.name = label; // given from outside; "": made of id and role
    this.role = role;
    this.state = "ready";
    this.states = []; // {t0, t1 (Infinity while it lasts), state, detail}: only those in which it does not serve
    this.length = 0;
    this.starts = new Float64Array(256);
    this.ends = new Float64Array(256);
    this.phases = new Uint8Array(256);
    this.waiting = new Uint16Array(256); // streams that got no token from a step without decodes
    this.steps = [];
    this.transfers = []; // that arrived here
    this.batch = new Set();
    this.open = null; // the step that is being computed: {time_ns, predicted_ns, step_id, phase, prefills, num_decodes, waiting}
    this.pure = []; // durations of the newest steps that only decoded
    this.typicalNs = 0; // their median
  }

  get label() {
    return this.name || (this.role && this.role !== "both" ? `Worker ${this.id} · ${this.role}` : `Worker ${this.id}`);
  }

  push(record) {
    if (this.length === this.starts.length) this.#grow();
    const at = this.length++;
    this.starts[at] = record.start_ns;
    this.ends[at] = record.end_ns;
    this.phases[at] = Math.max(0, PHASES.indexOf(record.phase));
    this.waiting[at] = record.num_decodes ? 0 : this.batch.size;
    this.steps.push(record);
    if (record.phase === "decode") this.#learn((record.end_ns - record.start_ns) / (record.num_steps || 1));
  }

  /** Forget the older half. */
  halve() {
    const keep = this.length >> 1;
    for (const name of ["starts", "ends", "phases", "waiting"]) this[name].copyWithin(0, this.length - keep, this.length);
    this.steps.splice(0, this.length - keep);
    this.length = keep;
    const since = this.starts[0] ?? 0;
    this.transfers = this.transfers.filter((transfer) => transfer.end_ns >= since);
    this.states = this.states.filter((state) => state.t1 >= since);
  }

  /** The last moment that is known of. */
  get horizon() {
    return this.length ? this.ends[this.length - 1] : 0;
  }

  /** The indices [from, to) of steps that touch [t0, t1]. */
  between(t0, t1) {
    return [firstAbove(this.ends, t0, this.length), firstAbove(this.starts, t1, this.length)];
  }

  /**
   * What it did in [t0, t1]: shares of the time by phase and idle, and how long streams waited for steps without them.
   * now: until when a step that is being computed counts.
   */
  shares(t0, t1, now = 0) {
    const sums = [0, 0, 0];
    let waited = 0;
    const [from, to] = this.between(t0, t1);
    for (let at = from; at < to; at++) {
      const time = Math.min(this.ends[at], t1) - Math.max(this.starts[at], t0);
      sums[this.phases[at]] += time;
      if (this.waiting[at]) waited += time;
    }
    const open = this.open ? Math.min(now, t1) - Math.max(this.open.time_ns, t0) : 0;
    if (open > 0) {
      sums[Math.max(0, PHASES.indexOf(this.open.phase))] += open;
      if (this.open.waiting) waited += open;
    }
    const [prefill, decode, mixed] = sums.map((sum) => sum / (t1 - t0));
    return { shares: { prefill, decode, mixed, idle: Math.max(0, 1 - prefill - decode - mixed) }, waited };
  }

  setState(state, time, detail) {
    const open = this.states.at(-1);
    if (open && open.t1 === Infinity) open.t1 = time;
    this.state = state;
    if (state !== "ready" && state !== "draining") this.states.push({ t0: time, t1: Infinity, state, detail });
  }

  #learn(duration) {
    this.pure.push(duration);
    if (this.pure.length > RECENT_STEPS) this.pure.shift();
    if (this.pure.length % 8 === 0 || !this.typicalNs || this.pure.length === RECENT_STEPS) {
      this.typicalNs = [...this.pure].sort((a, b) => a - b)[this.pure.length >> 1];
    }
  }

  #grow() {
    for (const name of ["starts", "ends", "phases", "waiting"]) {
      const larger = new this[name].constructor(this[name].length * 2);
      larger.set(this[name]);
      this[name] = larger;
    }
  }
}

/** Everything. `stall`: {objectiveNs: 0 or the longest gap between tokens that is fine, factor, floorNs}. */
export class TimelineModel {
  constructor(stall = {}) {
    this.stall = { objectiveNs: 0, factor: 3, floorNs: 4e6, ...stall };
    this.clear();
  }

  clear() {
    this.lanes = new Map();
    this.requests = new Map(); // in the order in which they became known
    this.header = null;
    this.sequence = 0;
    this.numCells = 0;
    this.oldest = Infinity;
    this.newest = 0;
    this.version = 0;
  }

  setLanes(lanes) {
    for (const { id, label, role } of lanes) Object.assign(this.lane(id), { name: label || "", role: role || "" });
    this.version++;
  }

  lane(id) {
    let lane = this.lanes.get(id);
    if (!lane) {
      lane = new Lane(id);
      this.lanes.set(id, lane);
      this.lanes = new Map([...this.lanes].sort(([a], [b]) => a - b));
    }
    return lane;
  }

  request(id) {
    let request = this.requests.get(id);
    if (!request) {
      request = new TimelineRequest(id);
      this.requests.set(id, request);
      if (this.requests.size > MAX_REQUESTS) this.#forgetRequests();
    }
    return request;
  }

  /** Take in records as they come; those that are known already are passed over. */
  add(records) {
    for (const record of records) {
      if (record.sequence !== undefined) {
        if (record.sequence <= this.sequence) continue;
        this.sequence = record.sequence;
      }
      this[`_${record.kind}`]?.(record);
    }
    this.version++;
  }

  /** The steps that are being computed, each with the number of its worker; those of before are over. */
  setOpen(records) {
    for (const lane of this.lanes.values()) this.#close(lane);
    for (const record of records) this._step_begun(record);
    this.version++;
  }

  /** How long a gap may be before the stream counts as stalled. 0: not known yet. */
  limitNs(worker) {
    const { objectiveNs, factor, floorNs } = this.stall;
    if (objectiveNs) return objectiveNs;
    const typical = this.lanes.get(worker)?.typicalNs;
    return typical ? Math.max(factor * typical, floorNs) : 0;
  }

  /** Why a request of this worker got nothing in [t0, t1], as data; null when nothing is known. */
  reason(request, worker, t0, t1) {
    const lane = this.lanes.get(worker);
    if (!lane) return null;
    const others = new Map();
    const [from, to] = lane.between(t0, t1 - 1); // what begins at t1 is what it waited for
    for (let at = from; at < to; at++) {
      for (const [id, , tokens] of lane.steps[at].prefills || []) {
        if (id !== request.id) others.set(id, (others.get(id) || 0) + tokens);
      }
    }
    if (others.size) {
      const [id, tokens] = [...others].sort((a, b) => b[1] - a[1])[0];
      const more = others.size > 1 ? ` and ${others.size - 1} more` : "";
      return { kind: "prefill", id, tokens, more, worker };
    }
    if (lane.open && lane.open.time_ns < t1) {
      const [id, , tokens] = (lane.open.prefills || []).find(([other]) => other !== request.id) ?? [];
      if (id !== undefined) return { kind: "prefill", id, tokens, more: "", worker };
    }
    const down = lane.states.find((state) => state.t0 < t1 && state.t1 > t0);
    if (down) return { kind: "state", state: down.state, worker };
    return { kind: to > from ? "busy" : "unknown", worker };
  }

  _header(record) {
    if (this.header && this.header.run_id !== record.run_id) this.clear();
    this.header = record;
    for (const [id, { state, role }] of Object.entries(record.workers)) {
      const lane = this.lane(Number(id));
      if (role) Object.assign(lane, { role });
      if (lane.state !== state) lane.setState(state, record.now_ns, "");
    }
    this.#setBatches(record.decoding);
  }

  _gap(record) {
    this.sequence = Math.max(this.sequence, record.last);
    for (const lane of this.lanes.values()) this.#close(lane); // whether it still runs is not known
    for (const request of this.requests.values()) if (!request.end) request.lose();
    this.#setBatches(record.decoding);
  }

  _worker(record) {
    const lane = this.lane(record.worker);
    if (record.role) lane.role = record.role;
    if (record.state !== "ready" && record.state !== "draining") this.#close(lane);
    lane.setState(record.state, record.time_ns, record.detail || "");
    for (const id of record.left || []) lane.batch.delete(id);
    this.#saw(record.time_ns, record.time_ns);
  }

  _step_begun(record) {
    const lane = this.lane(record.worker);
    lane.open = { ...record, waiting: record.num_decodes ? 0 : lane.batch.size };
    for (const [id, first, tokens] of record.prefills || []) this.request(id).open = { t0: record.time_ns, first, tokens, worker: lane.id };
    this.#saw(record.time_ns, record.time_ns);
  }

  _step(record) {
    const lane = this.lane(record.worker);
    this.#close(lane);
    for (const id of record.left || []) lane.batch.delete(id);
    for (const id of record.joined || []) lane.batch.add(id);
    lane.push(record);
    for (const [id, first, tokens] of record.prefills || []) if (id) this.request(id).chunk(record, first, tokens); // "": not named
    if (record.num_decodes) {
      const steps = record.num_steps || 1; // the simulator joins steps in which nothing is decided
      const limit = this.limitNs(record.worker);
      for (let step = 1; step <= steps; step++) {
        const time = record.start_ns + ((record.end_ns - record.start_ns) * step) / steps;
        for (const id of lane.batch) this.request(id).token(time, record.worker, limit);
      }
    }
    this.#saw(record.start_ns, record.end_ns);
    if (++this.numCells > MAX_CELLS) this.#forgetCells();
  }

  _request(record) {
    const request = this.request(record.request_id);
    request.milestone(record, this.limitNs(request.worker));
    this.#saw(record.time_ns, record.time_ns);
  }

  _transfer(record) {
    this.lane(record.worker).transfers.push(record);
    this.request(record.request_id).transfers.push(record);
    this.#saw(record.start_ns, record.end_ns);
  }

  /** Its open step is over. */
  #close(lane) {
    for (const [id] of lane.open?.prefills || []) {
      const request = this.requests.get(id);
      if (request?.open?.worker === lane.id) request.open = null;
    }
    lane.open = null;
  }

  #saw(start, end) {
    if (start < this.oldest) this.oldest = start;
    if (end > this.newest) this.newest = end;
  }

  #setBatches(decoding) {
    for (const lane of this.lanes.values()) lane.batch.clear();
    for (const [worker, ids] of Object.entries(decoding || {})) {
      const lane = this.lane(Number(worker));
      for (const id of ids) {
        lane.batch.add(id);
        this.request(id).worker = lane.id;
      }
    }
  }

  #forgetCells() {
    for (const lane of this.lanes.values()) if (lane.length > 64) lane.halve();
    this.numCells = [...this.lanes.values()].reduce((sum, lane) => sum + lane.length, 0);
    this.oldest = Math.min(...[...this.lanes.values()].filter((lane) => lane.length).map((lane) => lane.starts[0]));
    for (const [id, request] of this.requests) if (request.end && request.end < this.oldest) this.requests.delete(id);
  }

  #forgetRequests() {
    for (const [id, request] of this.requests) {
      if (request.end) this.requests.delete(id);
      if (this.requests.size <= MAX_REQUESTS * 0.8) return;
    }
  }
}
