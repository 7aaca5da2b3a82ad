/** Calls of openai-node. */

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ENDLESS, KEY, MODEL, QUESTION, TOO_LONG, URL, expectAbort, expectChoice, run } from "./calls.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: KEY, maxRetries: 0 });
const { completions } = client.chat;
const asked = { model: MODEL, messages: [{ role: "user", content: QUESTION }], temperature: 0, max_tokens: 12 };
const choice = z.object({ colour: z.enum(["red", "green", "blue"]), count: z.number().int().min(0).max(9) });
const tool = zodFunction({ name: "choose", parameters: choice });

async function models() {
  const found = await client.models.list();
  assert(found.data.some((model) => model.id === MODEL), "the model is not listed");
  assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
}

async function chat() {
  const messages = [{ role: "developer", content: "Be brief." }, ...asked.messages];
  const more = { user: "me", metadata: { a: "b" }, store: false, service_tier: "auto", prompt_cache_key: "a" };
  const reply = await completions.create({ ...asked, ...more, messages });
  assert(reply.choices[0].message.content, JSON.stringify(reply));
  assert.equal(reply.usage.completion_tokens, 12);
}

async function stream() {
  let [text, usage] = ["", null];
  const parts = await completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
  for await (const part of parts) {
    text += part.choices[0]?.delta.content ?? "";
    usage = part.usage ?? usage;
  }
  const whole = (await completions.create(asked)).choices[0].message.content;
  assert.equal(text, whole);
  assert.equal(usage.completion_tokens, 12);
  assert.equal(await completions.stream(asked).finalContent(), whole);
}

async function textCompletions() {
  const reply = await client.completions.create({ model: MODEL, prompt: "import os\n", max_tokens: 8 });
  assert(reply.choices[0].text, JSON.stringify(reply));
}

async function several() {
  assert.equal((await completions.create({ ...asked, temperature: 1, n: 3 })).choices.length, 3);
}

async function logprobs() {
  const reply = await completions.create({ ...asked, logprobs: true, top_logprobs: 3 });
  assert.equal(reply.choices[0].logprobs.content[0].top_logprobs.length, 3);
}

async function tools() {
  const body = { ...asked, max_tokens: 100, tools: [tool], parallel_tool_calls: false };
  const forced = { type: "function", function: { name: "choose" } };
  const { message } = (await completions.parse({ ...body, tool_choice: forced })).choices[0];
  expectChoice(message.tool_calls[0].function.parsed_arguments);
  const streamed = await completions.stream({ ...body, tool_choice: "required" }).finalChatCompletion();
  expectChoice(JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments));
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "done" };
  const messages = [...asked.messages, message, result];
  assert((await completions.create({ ...body, messages, max_tokens: 8 })).choices[0].message.content);
}

async function structured() {
  const format = zodResponseFormat(choice, "choice");
  const reply = await completions.parse({ ...asked, max_tokens: 60, response_format: format });
  expectChoice(reply.choices[0].message.parsed);
}

async function responses() {
  const body = { model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 60 };
  const reply = await client.responses.create(body);
  assert(reply.output_text, JSON.stringify(reply));
  assert.equal((await client.responses.retrieve(reply.id)).id, reply.id);
  const end = await client.responses.stream({ ...body, previous_response_id: reply.id }).finalResponse();
  assert(end.output_text, JSON.stringify(end));
  const parsed = await client.responses.parse({ ...body, text: { format: zodTextFormat(choice, "choice") } });
  expectChoice(parsed.output_parsed);
}

async function embeddings() {
  const reply = await client.embeddings.create({ model: MODEL, input: ["one", "two"] });
  assert(reply.data.length === 2 && reply.data[0].embedding.length > 1, "no vectors");
}

async function abort() {
  const endless = { ...asked, max_tokens: ENDLESS, ignore_eos: true };
  const parts = await completions.create({ ...endless, stream: true });
  for await (const part of parts) {
    assert(part.id);
    break;
  }
  const again = await completions.create({ ...endless, stream: true });
  await again[Symbol.asyncIterator]().next();
  await expectAbort(() => again.controller.abort());
  const control = new AbortController();
  const whole = completions.create(endless, { signal: control.signal }).catch(() => "aborted");
  await expectAbort(() => control.abort());
  assert.equal(await whole, "aborted");
}

async function requestId() {
  assert((await completions.create(asked))._request_id, "no id");
  const given = await completions.create(asked, { headers: { "X-Request-Id": "mine-3" } });
  assert.equal(given._request_id, "mine-3");
}

async function tooLong() {
  const messages = [{ role: "user", content: TOO_LONG }];
  const error = await completions.create({ ...asked, messages }).catch((failure) => failure);
  assert(error instanceof OpenAI.BadRequestError, String(error));
  assert.equal(error.code, "context_length_exceeded");
}

await run([
  ["models", models], ["chat", chat], ["stream", stream], ["completions", textCompletions], ["n", several],
  ["logprobs", logprobs], ["tools", tools], ["structured", structured], ["responses", responses],
  ["embeddings", embeddings], ["abort", abort], ["request id", requestId], ["too long", tooLong],
]);
