/** Streams are read whole however the network cuts them, and a broken one is resumed where it broke. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { EventStream, readEvents, readLines } from "../../../src/diptych/web/static/common/stream.js";
import { between, numbers } from "./random.js";

const realFetch = globalThis.fetch;

afterEach(() => {
  globalThis.fetch = realFetch;
});

/** A body of these bytes, cut anywhere: inside characters too. */
function bodyOf(text, random = numbers(1)) {
  const data = new TextEncoder().encode(text);
  let at = 0;
  return new ReadableStream({
    pull(controller) {
      if (at >= data.length) {
        controller.close();
        return;
      }
      const length = between(random, 1, 9);
      controller.enqueue(data.slice(at, at + length));
      at += length;
    },
  });
}

const written = (events, end) => events.map(({ id, data }) => `${id ? `id: ${id}${end}` : ""}${data.split("\n").map((line) => `data: ${line}${end}`).join("")}${end}`).join("");

test("events come out as they were written, wherever they are cut", async () => {
  for (let seed = 1; seed <= 60; seed++) {
    const random = numbers(seed);
    const words = ["", " two spaces", "naïve – 日本", "{\"a\":1}", "first\nsecond", "data: x"];
    const events = Array.from({ length: between(random, 0, 12) }, (_, at) => ({ id: random() < 0.5 ? String(at) : "", data: words[between(random, 0, words.length - 1)] }));
    const found = [];
    const text = written(events, seed % 2 ? "\n" : "\r\n");
    await readEvents(bodyOf(`: a comment\n\n${text}`, random), (event) => found.push(event));
    assert.deepEqual(found, events, `seed ${seed}`);
  }
});

test("an event that was cut off is not passed on", async () => {
  const found = [];
  await readEvents(bodyOf("data: whole\n\ndata: half"), ({ data }) => found.push(data));
  assert.deepEqual(found, ["whole"]);
});

test("lines of JSON come out one by one", async () => {
  const values = [{ kind: "progress", done: 1 }, ["ä", null], 7];
  const found = [];
  await readLines(bodyOf(values.map((value) => `${JSON.stringify(value)}\n`).join("")), (value) => found.push(value));
  assert.deepEqual(found, values);
});

/** A server that answers each connection with the next of `replies`, and what it was asked. */
function serving(replies) {
  const asked = [];
  globalThis.fetch = (url, { headers, signal }) => {
    asked.push({ url, headers });
    const reply = replies[asked.length - 1];
    if (reply instanceof Error) return Promise.reject(reply);
    if (reply) return Promise.resolve(reply);
    return new Promise((_, reject) => {
      signal.addEventListener("abort", () => reject(new Error("aborted")));
    });
  };
  return asked;
}

/** A stream with what it said and the states that it went through; `until` waits for one of them. */
function watched(options = {}) {
  const seen = { events: [], states: [] };
  const waiting = [];
  seen.until = (state) => new Promise((resolve) => {
    waiting.push({ state, resolve });
  });
  seen.stream = new EventStream({
    url: () => "timeline", onEvent: (event) => seen.events.push(event.data), ...options,
    onState(state) {
      seen.states.push(state);
      for (const found of waiting.filter((wanted) => wanted.state === state)) found.resolve();
    },
  });
  return seen;
}

test("a connection that breaks is made again, after the last event that was read", async () => {
  const asked = serving([new Response(bodyOf("id: 4\ndata: a\n\nid: 5\ndata: b\n\n")), new Response(bodyOf("id: 6\ndata: c\n\n"))]);
  const { stream, events, states, until } = watched({ headers: () => ({ Authorization: "Bearer k" }) });
  const broke = until("waiting");
  stream.start();
  await broke;
  const again = until("waiting");
  stream.retry();
  await again;
  stream.stop();
  assert.deepEqual(events, ["a", "b", "c"]);
  assert.deepEqual(asked.map(({ headers }) => headers), [{ Authorization: "Bearer k" }, { Authorization: "Bearer k", "Last-Event-ID": "5" }]);
  assert.deepEqual(states, ["stopped", "connecting", "open", "waiting", "stopped", "connecting", "open", "waiting", "stopped"]);
});

test("a server that is not there is asked again, one that wants a key is not", async () => {
  const asked = serving([new TypeError("no connection"), new Response("", { status: 401 })]);
  const { stream, states, until } = watched();
  const denied = until("denied");
  stream.start();
  await denied;
  await new Promise((resolve) => {
    setTimeout(resolve, 20);
  });
  assert.equal(asked.length, 2);
  assert.deepEqual(states, ["stopped", "connecting", "waiting", "connecting", "denied"]);
});

test("a stream that was stopped says nothing more", async () => {
  serving([new Response(bodyOf("data: a\n\ndata: b\n\n"))]);
  const { stream, events, until } = watched();
  stream.onEvent = (event) => {
    events.push(event.data);
    stream.stop();
  };
  const stopped = until("stopped");
  stream.start();
  await stopped;
  await new Promise((resolve) => {
    setTimeout(resolve, 20);
  });
  assert.deepEqual(events, ["a"]);
});
