/** What the live page sends, and what it remembers of it. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { Sender } from "../../../src/diptych/web/static/ui/sender.js";

const realFetch = globalThis.fetch;

afterEach(() => {
  globalThis.fetch = realFetch;
});

const event = (value) => `data: ${typeof value === "string" ? value : JSON.stringify(value)}\n\n`;

/** A server that streams these events to every request; what it was asked. */
function streaming(...events) {
  const asked = [];
  globalThis.fetch = (path, { body }) => {
    asked.push(JSON.parse(body));
    const own = events.map((found) => (found.id ? { ...found, id: `${found.id}-${asked.length}` } : found));
    return new Promise((resolve) => {
      setTimeout(resolve, 1, new Response(own.map(event).join("")));
    });
  };
  return asked;
}

/** Wait until something is so. */
async function until(isSo) {
  while (!isSo()) {
    await new Promise((resolve) => {
      setTimeout(resolve, 1);
    });
  }
}

function made(model) {
  const problems = [];
  const sender = new Sender({ onChange: () => {}, onProblem: (text) => problems.push(text) });
  sender.model = model;
  return { sender, problems };
}

const MODEL = { vocab_size: 1000, max_model_len: 4096, kv_capacity_tokens: 20_000, has_text: true };

test("an answer is remembered under the request's id, with the name that it was sent as", async () => {
  const asked = streaming({ id: "cmpl", choices: [{ text: "a" }] }, { id: "cmpl", choices: [{ text: "b" }] }, "[DONE]");
  const { sender, problems } = made(MODEL);
  sender.objectives = { ttft_slo_ms: 500 };
  await sender.short();
  assert.deepEqual([...sender.names], [["cmpl-1", "Short prompt 1"]]);
  assert.deepEqual([...sender.texts], [["cmpl-1", "ab"]]);
  assert.deepEqual([asked[0].ttft_slo_ms, asked[0].stream, typeof asked[0].prompt, problems, sender.running.size], [500, true, "string", [], 0]);
});

test("long prompts are token ids of the vocabulary, as many as asked, and no two alike", async () => {
  const asked = streaming("[DONE]");
  for (const vocab_size of [64, 1000, 150_000]) {
    const { sender } = made({ ...MODEL, vocab_size });
    await sender.long(300);
    await sender.long(300);
    const [first, second] = asked.slice(-2).map(({ prompt }) => prompt);
    assert.equal(first.length, 300);
    assert.ok(first.every((token) => Number.isInteger(token) && token >= 0 && token < vocab_size));
    assert.notDeepEqual(first, second);
  }
});

test("a model without a tokenizer is sent ids only", async () => {
  const asked = streaming("[DONE]");
  await made({ ...MODEL, has_text: false }).sender.short();
  assert.ok(Array.isArray(asked[0].prompt));
});

test("streams begin again until they are stopped", async () => {
  const asked = streaming({ id: "cmpl", choices: [{ text: "a" }] }, "[DONE]");
  const { sender } = made(MODEL);
  sender.streams(2);
  await until(() => asked.length > 6);
  sender.stop();
  await until(() => !sender.running.size);
  const sent = asked.length;
  await sender.short();
  assert.equal(asked.length, sent + 1);
  asked.pop();
  assert.ok(asked.every(({ max_tokens }) => max_tokens === 2048));
});

test("an error within the stream is said with the name of the request", async () => {
  streaming({ id: "cmpl", choices: [{ text: "a" }] }, { error: { message: "worker lost" } });
  const { sender, problems } = made(MODEL);
  await sender.short();
  assert.deepEqual(problems, ["Short prompt 1: worker lost"]);
});

test("a long prompt is known by its length before it answers", () => {
  globalThis.fetch = () => new Promise(() => {});
  const { sender } = made(MODEL);
  sender.long(300);
  assert.equal(sender.nameOf({ id: "other", promptTokens: 300 }), "Long prompt 1");
  assert.equal(sender.nameOf({ id: "other", promptTokens: 301 }), "");
  assert.equal(sender.nameOf({ id: "other", promptTokens: 300, end: 5 }), "");
});

test("what the reader of a stream sees is its text, and the longest pause in it", async () => {
  globalThis.fetch = () => {
    const parts = [["a", 1], ["b", 1], ["c", 60]].map(([text, wait]) => [event({ id: "cmpl", choices: [{ text }] }), wait]);
    const body = new ReadableStream({
      async start(control) {
        for (const [text, wait] of parts) {
          await new Promise((resolve) => {
            setTimeout(resolve, wait);
          });
          control.enqueue(new TextEncoder().encode(text));
        }
      },
    });
    return Promise.resolve(new Response(body));
  };
  const { sender } = made(MODEL);
  sender.streams(1);
  const reader = sender.readers.get("Stream 1");
  await until(() => reader.numTokens === 3);
  assert.deepEqual([reader.text, reader.isRunning], ["abc", true]);
  assert.ok(reader.longestMs >= 40, String(reader.longestMs));
});

test("a conversation is asked where the caller says, and its answer grows", async () => {
  const asked = streaming({ id: "chat", choices: [{ delta: { content: "Par" } }] }, { id: "chat", choices: [{ delta: { content: "is" } }] }, { id: "chat", choices: [], usage: { completion_tokens: 2 } }, "[DONE]");
  const { sender, problems } = made(MODEL);
  const seen = [];
  const answer = await sender.ask("v1/chat/completions", { messages: [], temperature: 0.2 }, ({ text }) => seen.push(text));
  assert.deepEqual([answer.text, answer.numTokens, seen, problems], ["Paris", 2, ["Par", "Paris"], []]);
  assert.deepEqual([asked[0].temperature, asked[0].stream, asked[0].ignore_eos, [...sender.names.values()]], [0.2, true, undefined, ["Chat 1"]]);
});

test("reasoning comes apart from the answer, under either of its names", async () => {
  const deltas = [{ reasoning_content: "Fra" }, { reasoning: "nce" }, { reasoning_content: ".", content: "Par" }, { content: "is" }];
  streaming(...deltas.map((delta) => ({ id: "chat", choices: [{ delta }] })), "[DONE]");
  const { sender } = made(MODEL);
  const answer = await sender.ask("v1/chat/completions", { messages: [] }, () => {});
  assert.deepEqual([answer.reasoning, answer.text, sender.texts.get("chat-1")], ["France.", "Paris", "France.Paris"]);
});
