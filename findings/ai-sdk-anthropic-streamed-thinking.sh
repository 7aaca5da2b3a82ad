#!/usr/bin/env bash
# AI SDK's Anthropic provider sends reasoning back after a whole reply, and drops it after the same reply as a stream.
#
# A block of thinking has a signature. A server that signs nothing gives "" in the block, and sends no signature_delta in
# a stream, as there is nothing to add to the "" of content_block_start. The provider takes the signature of a whole reply
# from the block, and that of a stream from signature_delta alone: without one the block has no signature, and the next
# step of the tool loop leaves it out of the history, with a warning. An empty signature_delta is enough to keep it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --no-save ai@6.0.326 @ai-sdk/anthropic@3.0.140 zod@4.1.12 >/dev/null
cat > loop.mjs <<'JS'
import assert from 'node:assert';
import { createServer } from 'node:http';
import { readFileSync } from 'node:fs';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const thought = { type: 'thinking', thinking: 'Look it up.', signature: '' };
const call = { type: 'tool_use', id: 'toolu_1', name: 'look', input: {} };
const text = { type: 'text', text: 'Done.' };
const usage = { input_tokens: 1, output_tokens: 1 };

function events(blocks, reason, signs) {
  const head = { id: 'msg_1', type: 'message', role: 'assistant', model: 'm', content: [], stop_reason: null, usage };
  const list = [{ type: 'message_start', message: head }];
  blocks.forEach((block, index) => {
    const start = block.type === 'thinking' ? { ...block, thinking: '' } : block.type === 'text' ? { ...block, text: '' } : block;
    const deltas = { thinking: { type: 'thinking_delta', thinking: block.thinking }, text: { type: 'text_delta', text: block.text },
      tool_use: { type: 'input_json_delta', partial_json: '{}' } };
    list.push({ type: 'content_block_start', index, content_block: start });
    list.push({ type: 'content_block_delta', index, delta: deltas[block.type] });
    if (signs && block.type === 'thinking') list.push({ type: 'content_block_delta', index, delta: { type: 'signature_delta', signature: '' } });
    list.push({ type: 'content_block_stop', index });
  });
  list.push({ type: 'message_delta', delta: { stop_reason: reason, stop_sequence: null }, usage });
  list.push({ type: 'message_stop' });
  return list.map(event => `event: ${event.type}\ndata: ${JSON.stringify(event)}\n\n`).join('');
}

async function historyOf(streams, signs) {
  const bodies = [];
  const server = createServer(async (request, reply) => {
    let body = '';
    for await (const part of request) body += part;
    bodies.push(JSON.parse(body));
    const [blocks, reason] = bodies.length === 1 ? [[thought, call], 'tool_use'] : [[text], 'end_turn'];
    reply.setHeader('content-type', streams ? 'text/event-stream' : 'application/json');
    const whole = { id: 'msg_1', type: 'message', role: 'assistant', model: 'm', content: blocks, stop_reason: reason, stop_sequence: null, usage };
    reply.end(streams ? events(blocks, reason, signs) : JSON.stringify(whole));
  });
  await new Promise(ready => server.listen(0, '127.0.0.1', ready));
  const model = createAnthropic({ baseURL: `http://127.0.0.1:${server.address().port}/v1`, apiKey: 'none' })('m');
  const tools = { look: tool({ inputSchema: z.object({}), execute: async () => 'found' }) };
  const asked = { model, tools, prompt: 'Look.', stopWhen: stepCountIs(3), maxRetries: 0 };
  await (streams ? streamText(asked).text : generateText(asked));
  server.close();
  return bodies[1].messages[1].content.map(block => block.type).join(', ');
}

const version = name => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
console.log(`ai ${version('ai')}, @ai-sdk/anthropic ${version('@ai-sdk/anthropic')}`);
const seen = [await historyOf(false, false), await historyOf(true, false), await historyOf(true, true)];
['whole reply', 'stream', 'stream with an empty signature_delta'].forEach((name, at) => console.log(`${name}: ${seen[at]}`));
assert.deepStrictEqual(seen, ['thinking, tool_use', 'tool_use', 'thinking, tool_use'], 'the client behaves otherwise now');
JS
node loop.mjs
