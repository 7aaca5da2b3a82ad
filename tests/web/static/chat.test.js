/** What a conversation keeps, and what is said of its answers. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { figures, turns } from "../../../src/diptych/web/static/ui/chat.js";

const ANSWER = { reasoning: "France.", text: "Paris", numTokens: 9, ttftMs: 20, totalMs: 100 };

test("a question and its answer are kept without the reasoning", () => {
  assert.deepEqual(turns("Where?", ANSWER), [
    { role: "user", content: "Where?" },
    { role: "assistant", content: "Paris" },
  ]);
});

test("without an answer the question was not asked", () => {
  assert.deepEqual(turns("Where?", { ...ANSWER, text: "" }), []);
});

test("an answer that ends within its reasoning says so", () => {
  assert.match(figures(ANSWER), /^first token .*, 9 tokens, 100 tokens\/s$/);
  assert.match(figures({ ...ANSWER, text: "" }), /9 tokens.*; it ended within its reasoning, before an answer$/);
  assert.equal(figures({ ...ANSWER, reasoning: "", text: "", ttftMs: null }), "no answer");
});
