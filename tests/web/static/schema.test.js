import assert from "node:assert/strict";
import { test } from "node:test";

import { fieldsOf, referenced, typeWords } from "../../../src/diptych/web/static/reference/schema.js";

const document = { components: { schemas: {
  Body: { required: ["a"], properties: { a: { type: "integer", minimum: 1, maximum: 5, description: "An a." }, b: { anyOf: [{ $ref: "#/components/schemas/Inner" }, { type: "null" }] } } },
  Inner: { properties: { c: { type: "array", items: { $ref: "#/components/schemas/Body" }, maxItems: 3 } } },
} } };
const body = { $ref: "#/components/schemas/Body" };

test("types are said in words, with their limits", () => {
  assert.equal(typeWords({ type: "integer", minimum: 1, maximum: 128 }), "integer, 1 to 128");
  assert.equal(typeWords({ anyOf: [{ exclusiveMinimum: 0, maximum: 1, type: "number" }, { type: "null" }] }), "number, above 0, at most 1");
  assert.equal(typeWords({ enum: ["low", "high"] }), '"low", "high"');
  assert.equal(typeWords({ type: "array", items: { type: "string" }, maxItems: 3 }), "list of string, at most 3");
  assert.equal(typeWords({ anyOf: [{ type: "string", maxLength: 9 }, { $ref: "#/a/B" }] }), "string of at most 9 characters or B");
  assert.equal(typeWords({}), "anything");
});

test("fields say which of them are required, and schemas refer to each other without an end", () => {
  assert.deepEqual(fieldsOf(document, body), [
    { name: "a", words: "integer, 1 to 5", about: "An a.", required: true },
    { name: "b", words: "Inner", about: "", required: false },
  ]);
  assert.deepEqual([...referenced(document, body).keys()], ["Inner", "Body"]);
});
