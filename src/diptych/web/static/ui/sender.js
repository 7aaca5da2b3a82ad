/** Sends prompts to the server that is being watched, and remembers what it sent: names, texts, how it ended. */

import { readEvents } from "../common/stream.js";
import { post } from "../common/server.js";

const STREAM_TOKENS = 4000;
const SHORT_TOKENS = 24;
const LONG_ANSWER_TOKENS = 8;
const TEXTS = ["def read_lines(path):\n", "class Queue:\n    def put(self, item):\n", "def median(values):\n", "import json\n\ndef load(path):\n"];

export class Sender {
  /** onChange(): something began or ended; onProblem(text): a request failed. */
  constructor({ onChange, onProblem }) {
    Object.assign(this, { onChange, onProblem });
    this.names = new Map(); // id of a request -> its name here
    this.texts = new Map(); // id -> what came back
    this.running = new Set();
    this.readers = new Map(); // name -> what its reader sees: {text, numTokens, lastAt, longestMs, isRunning}, times in ms
    this.counts = { Stream: 0, "Long prompt": 0, "Short prompt": 0, Chat: 0 };
    this.model = null; // of /ui/state
    this.objectives = {};
    this.continues = false;
  }

  /** Streams that begin anew when they end, until ``stop``. */
  streams(number) {
    for (const [name, { isRunning }] of this.readers) if (!isRunning) this.readers.delete(name);
    for (let at = 0; at < number; at++) this.#stream(++this.counts.Stream);
  }

  short() {
    const text = TEXTS[this.counts["Short prompt"] % TEXTS.length];
    return this.#send(`Short prompt ${++this.counts["Short prompt"]}`, { prompt: this.#prompt(text, 12), max_tokens: SHORT_TOKENS, ignore_eos: true, temperature: 0.8 });
  }

  /** A prompt of so many tokens that nobody has sent before: no cache helps. */
  long(numTokens) {
    return this.#send(`Long prompt ${++this.counts["Long prompt"]}`, { prompt: this.#randomTokens(numTokens), max_tokens: LONG_ANSWER_TOKENS, ignore_eos: true, temperature: 0.8 });
  }

  /** A conversation's or a text's next answer; onText is called with it as it grows. Returns {reasoning, text, numTokens, ttftMs, totalMs}. */
  async ask(path, body, onText) {
    const begun = performance.now();
    const answer = { reasoning: "", text: "", numTokens: 0, ttftMs: null, totalMs: 0 };
    const onToken = (chunk) => {
      if (chunk.usage) answer.numTokens = chunk.usage.completion_tokens;
      const [choice] = chunk.choices;
      if (!choice) return;
      answer.ttftMs ??= performance.now() - begun;
      answer.reasoning += reasoningOf(choice);
      answer.text += contentOf(choice);
      onText(answer);
    };
    await this.#send(`Chat ${++this.counts.Chat}`, body, { path, onToken });
    return Object.assign(answer, { totalMs: performance.now() - begun });
  }

  stop() {
    for (const sent of this.running) {
      sent.again = false;
      sent.abort.abort();
    }
  }

  async #stream(number) {
    const prompt = this.#prompt(`${TEXTS[number % TEXTS.length]}# ${number}\n`, 16);
    const reader = { text: "", numTokens: 0, lastAt: 0, longestMs: 0, isRunning: true };
    const name = `Stream ${number}`;
    this.readers.set(name, reader);
    const again = await this.#send(name, { prompt, max_tokens: this.#streamTokens(), ignore_eos: true, temperature: 0.8 }, { again: true, onToken: (chunk) => read(reader, chunk) });
    reader.isRunning = false;
    if (again) this.#stream(number);
    else this.onChange();
  }

  /** As long as the context and a share of the KV cache allow. */
  #streamTokens() {
    const { max_model_len: context, kv_capacity_tokens: capacity } = this.model ?? {};
    return Math.max(8, Math.floor(Math.min(STREAM_TOKENS, (context ?? 2048) / 2, (capacity ?? 4096) / 8)));
  }

  #prompt(text, numTokens) {
    return this.model?.has_text === false ? this.#randomTokens(numTokens) : text;
  }

  #randomTokens(numTokens) {
    const size = Math.max(16, Math.floor((this.model?.vocab_size ?? 256) * 0.9));
    const low = Math.min(8, size - 8); // special tokens are often the first ones
    return Array.from({ length: numTokens }, () => low + Math.floor(Math.random() * (size - low)));
  }

  async #send(name, body, { again = false, path = "v1/completions", onToken = null } = {}) {
    const sent = { name, again, onToken, abort: new AbortController(), promptTokens: Array.isArray(body.prompt) ? body.prompt.length : null };
    this.running.add(sent);
    this.onChange();
    try {
      const reply = await post(path, { ...body, ...this.objectives, stream: true }, sent.abort.signal);
      await readEvents(reply.body, ({ data }) => this.#onChunk(sent, data));
      return sent.again;
    } catch (error) {
      if (error.name !== "AbortError") this.onProblem(`${name}: ${error.message}`);
      return false;
    } finally {
      this.running.delete(sent);
      this.onChange();
    }
  }

  #onChunk(sent, data) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (!sent.id) {
      sent.id = chunk.id;
      this.names.set(chunk.id, sent.name);
    }
    sent.onToken?.(chunk);
    const [choice] = chunk.choices;
    this.texts.set(chunk.id, ((this.texts.get(chunk.id) ?? "") + (choice ? reasoningOf(choice) + contentOf(choice) : "")).slice(-2000));
    if (this.texts.size > 100) this.texts.delete(this.texts.keys().next().value);
  }

  /** The name of a request that was sent from here. Long prompts are known by their length before they answer. */
  nameOf(request) {
    const known = this.names.get(request.id);
    if (known || !request.promptTokens || request.firstToken || request.end) return known ?? "";
    for (const sent of this.running) if (!sent.id && sent.promptTokens === request.promptTokens && sent.promptTokens > 100) return sent.name;
    return "";
  }
}

/** What a choice of an event adds to the answer. */
const contentOf = ({ text, delta }) => text ?? delta?.content ?? "";

/** What it adds to the reasoning before the answer; servers have two names for it. */
const reasoningOf = ({ delta }) => delta?.reasoning_content ?? delta?.reasoning ?? "";

/** A token has come to the reader of a stream. */
function read(reader, chunk) {
  const now = performance.now();
  if (!chunk.choices.length) return;
  if (reader.numTokens) reader.longestMs = Math.max(reader.longestMs, now - reader.lastAt);
  reader.lastAt = now;
  reader.numTokens++;
  reader.text = (reader.text + (chunk.choices[0].text ?? "")).slice(-2000);
}
