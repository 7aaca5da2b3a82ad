/** Calls of Vercel's ai with @ai-sdk/openai-compatible. */

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { ENDLESS, KEY, MODEL, QUESTION, TOO_LONG, URL, expectAbort, expectChoice, run } from "./calls.mjs";

const own = { name: "diptych", baseURL: URL, apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true };
const provider = createOpenAICompatible(own);
const model = provider.chatModel(MODEL);
const asked = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 12, maxRetries: 0 };
const schema = z.object({ colour: z.enum(["red", "green", "blue"]), count: z.number().int().min(0).max(9) });
const tools = { choose: tool({ description: "Choose.", inputSchema: schema, execute: ({ colour }) => colour }) };

async function chat() {
  const { text, usage } = await generateText(asked);
  assert(text, "no text");
  assert.equal(usage.outputTokens, 12);
}

async function stream() {
  const reply = streamText(asked);
  let text = "";
  for await (const part of reply.textStream) text += part;
  assert.equal(text, (await generateText(asked)).text);
  assert.equal((await reply.usage).outputTokens, 12);
}

async function completions() {
  const { text } = await generateText({ ...asked, model: provider.completionModel(MODEL) });
  assert(text, "no text");
}

async function callTools() {
  const providerOptions = { diptych: { parallel_tool_calls: false } };
  const forced = { ...asked, tools, maxOutputTokens: 100, providerOptions };
  for (const toolChoice of ["required", { type: "tool", toolName: "choose" }]) {
    const { toolCalls, toolResults } = await generateText({ ...forced, toolChoice });
    expectChoice(toolCalls[0].input);
    assert(toolResults[0].output, "the tool was not called");
  }
  const streamed = streamText({ ...forced, toolChoice: "required" });
  expectChoice((await streamed.toolCalls)[0].input);
}

async function structured() {
  const { object } = await generateObject({ ...asked, schema, maxOutputTokens: 60 });
  expectChoice(object);
}

async function embeddings() {
  const make = provider.embeddingModel ?? provider.textEmbeddingModel;
  const { embedding } = await embed({ model: make.call(provider, MODEL), value: "one" });
  assert(embedding.length > 1, "no vector");
}

async function abort() {
  const control = new AbortController();
  const endless = { ...asked, maxOutputTokens: ENDLESS, providerOptions: { diptych: { ignore_eos: true } } };
  const reply = streamText({ ...endless, abortSignal: control.signal, onError() {} });
  const parts = reply.textStream[Symbol.asyncIterator]();
  await parts.next();
  await expectAbort(() => control.abort());
}

async function requestId() {
  const { response } = await generateText(asked);
  assert(response.headers["x-request-id"], JSON.stringify(response.headers));
}

async function tooLong() {
  const error = await generateText({ ...asked, prompt: TOO_LONG }).catch((failure) => failure);
  assert(APICallError.isInstance(error) && error.statusCode === 400 && !error.isRetryable, String(error));
  assert(error.message.includes("maximum context length"), error.message);
}

await run([
  ["chat", chat], ["stream", stream], ["completions", completions], ["tools", callTools], ["structured", structured],
  ["embeddings", embeddings], ["abort", abort], ["request id", requestId], ["too long", tooLong],
]);
