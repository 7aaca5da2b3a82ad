/** Talking to the server: the key, and errors in words. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { ServerError, getJson, hasKey, headers, post, setKey } from "../../../src/diptych/web/static/common/server.js";

const realFetch = globalThis.fetch;

afterEach(() => {
  globalThis.fetch = realFetch;
});

function answering(body, status = 200) {
  const asked = [];
  globalThis.fetch = (path, options) => {
    asked.push({ path, ...options });
    return Promise.resolve(new Response(body, { status }));
  };
  return asked;
}

test("a key is sent once it is given, without the spaces around it", async () => {
  assert.deepEqual([hasKey(), headers()], [false, {}]);
  setKey(" secret ");
  assert.equal(hasKey(), true);
  const asked = answering('{"a": 1}');
  assert.deepEqual(await getJson("ui/state"), { a: 1 });
  assert.equal(asked[0].headers.Authorization, "Bearer secret");
  assert.equal(asked[0].cache, "no-store");
});

test("a body is sent as JSON", async () => {
  const asked = answering("{}");
  await post("v1/completions", { prompt: "x" });
  assert.deepEqual([asked[0].method, asked[0].headers["Content-Type"], asked[0].body], ["POST", "application/json", '{"prompt":"x"}']);
});

test("an error says what the server said", async () => {
  const refusals = [['{"error": {"message": "max_tokens is -1"}}', "max_tokens is -1"], ["not JSON", "the server answered 400: not JSON"], ["", "the server answered 400"], ["[]", "the server answered 400: []"]];
  for (const [body, message] of refusals) {
    answering(body, 400);
    await assert.rejects(getJson("x"), (error) => error instanceof ServerError && error.status === 400 && error.message === message);
  }
});
