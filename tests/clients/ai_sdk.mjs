// A tool loop of the AI SDK, streamed, with one of its providers: node ai_sdk.mjs responses|chat|compatible|anthropic
// Reads AGENT_URL (without /v1), AGENT_KEY, AGENT_MODEL and AGENT_PROMPT; prints the text of all steps.
import { readFile } from "node:fs/promises";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { AGENT_URL: url, AGENT_KEY: apiKey, AGENT_MODEL: name, AGENT_PROMPT: prompt } = process.env;
const baseURL = `${url}/v1`;
const models = {
    responses: () => createOpenAI({ baseURL, apiKey })(name), // its default
    chat: () => createOpenAI({ baseURL, apiKey }).chat(name),
    compatible: () => createOpenAICompatible({ name: "diptych", baseURL, apiKey }).chatModel(name),
    anthropic: () => createAnthropic({ baseURL, apiKey })(name),
};
const tools = {
    read_file: tool({
        description: "Read a text file.",
        inputSchema: z.object({ path: z.string() }),
        execute: async ({ path }) => await readFile(path, "utf8"),
    }),
    search: tool({
        description: "Find the lines of a file that hold a text.",
        inputSchema: z.object({ path: z.string(), text: z.string(), limit: z.number().int().optional() }),
        execute: async ({ path, text }) => (await readFile(path, "utf8")).split("\n").filter((line) => line.includes(text)),
    }),
};
const result = streamText({
    model: models[process.argv[2]](),
    tools,
    prompt,
    stopWhen: stepCountIs(5),
    onError: ({ error }) => {
        console.error(error);
        process.exitCode = 1;
    },
});
for await (const piece of result.textStream) process.stdout.write(piece);
console.log(`\nsteps: ${(await result.steps).length}`);
