/**
 * Server-sent events by fetch, because EventSource cannot send an API key. Reconnects by itself and goes on after the
 * last event that it has seen.
 */

const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 5000;
const SILENCE_MS = 25_000; // the server says something every 10 s

/** Read a body of server-sent events: calls onEvent({id, data}) for each that is whole, until the body ends. */
export function readEvents(body, onEvent, onBytes = () => {}) {
  return readParts(body, /\r?\n\r?\n/, (event) => {
    const fields = { id: "", data: [] };
    for (const line of event.split(/\r?\n/)) {
      if (line.startsWith("data:")) fields.data.push(line.slice(5).replace(/^ /, ""));
      else if (line.startsWith("id:")) fields.id = line.slice(3).trim();
    }
    if (fields.data.length) onEvent({ id: fields.id, data: fields.data.join("\n") });
  }, onBytes);
}

/** Read a body of lines that each hold a JSON value: calls onValue(value) for each that is whole, until the body ends. */
export const readLines = (body, onValue) => readParts(body, /\n/, (line) => onValue(JSON.parse(line)));

async function readParts(body, separator, onPart, onBytes = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    onBytes();
    const parts = (rest + value).split(separator);
    rest = parts.pop();
    for (const part of parts) onPart(part);
  }
}

/**
 * url: () => address (asked at every attempt); headers: () => headers; onEvent({id, data});
 * onState(state, detail): connecting, open, waiting (detail: ms until the next attempt), denied (401) or stopped.
 */
export class EventStream {
  constructor({ url, headers = () => ({}), onEvent, onState = () => {} }) {
    Object.assign(this, { url, headers, onEvent, onState });
    this.lastId = "";
    this.state = "stopped";
  }

  start() {
    this.stop();
    this.run = Symbol("run");
    this.#go(this.run);
  }

  stop() {
    this.run = null;
    this.abort?.abort();
    clearTimeout(this.timer);
    this.#set("stopped");
  }

  /** Try now, without the pause. */
  retry() {
    if (this.state !== "open") this.start();
  }

  async #go(run) {
    let pause = FIRST_PAUSE_MS;
    while (this.run === run) {
      this.#set("connecting");
      try {
        const status = await this.#read(run, () => (pause = FIRST_PAUSE_MS));
        if (this.run !== run) return;
        if (status === 401) {
          this.#set("denied");
          return;
        }
      } catch (error) {
        if (this.run !== run) return;
        this.error = error; // the connection broke; the state says so, and we try again
      }
      this.#set("waiting", pause);
      await new Promise((resolve) => {
        this.timer = setTimeout(resolve, pause);
      });
      pause = Math.min(LONGEST_PAUSE_MS, pause * 1.6);
    }
  }

  async #read(run, onOpen) {
    this.abort = new AbortController();
    const { signal } = this.abort;
    let heard = performance.now();
    const watch = setInterval(() => performance.now() - heard > SILENCE_MS && this.abort.abort(), 2000);
    try {
      const resume = this.lastId ? { "Last-Event-ID": this.lastId } : {};
      const reply = await fetch(this.url(), { headers: { ...this.headers(), ...resume }, signal, cache: "no-store" });
      if (!reply.ok) return reply.status;
      onOpen();
      this.#set("open");
      await readEvents(reply.body, (event) => {
        if (this.run !== run) return;
        if (event.id) this.lastId = event.id;
        this.onEvent(event);
      }, () => (heard = performance.now()));
      return reply.status;
    } finally {
      clearInterval(watch);
    }
  }

  #set(state, detail = null) {
    this.state = state;
    this.onState(state, detail);
  }
}
