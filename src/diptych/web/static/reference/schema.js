/** What an OpenAPI schema says, in words: types, limits, references. */

/** The schema that a reference stands for. */
function resolve(document, schema) {
  const path = schema?.$ref?.replace("#/", "").split("/");
  return path ? path.reduce((part, name) => part?.[name], document) : schema;
}

/** The name of a referenced schema, or "". */
export const nameOf = (schema) => schema?.$ref?.split("/").at(-1) ?? "";

/** A type in words: "integer, 1 to 128", "list of string", "StreamOptions". null is left out: it means not given. */
export function typeWords(schema) {
  if (!schema) return "";
  if (schema.$ref) return nameOf(schema);
  const choices = (schema.anyOf ?? schema.oneOf)?.filter((choice) => choice.type !== "null");
  if (choices) return [...new Set(choices.map(typeWords))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeWords(schema.items) || "anything"}${count(schema)}`;
  return `${schema.type ?? "anything"}${limits(schema)}`;
}

function limits({ minimum, maximum, exclusiveMinimum, exclusiveMaximum, maxLength }) {
  const low = minimum ?? exclusiveMinimum;
  const high = maximum ?? exclusiveMaximum;
  const from = exclusiveMinimum === undefined ? "from" : "above";
  if (maxLength !== undefined) return ` of at most ${maxLength} characters`;
  if (low !== undefined && high !== undefined) return exclusiveMinimum === undefined ? `, ${low} to ${high}` : `, above ${low}, at most ${high}`;
  if (low !== undefined) return `, ${from} ${low}`;
  return high === undefined ? "" : `, at most ${high}`;
}

const count = ({ maxItems }) => (maxItems === undefined ? "" : `, at most ${maxItems}`);

/** [{name, words, about, required}] of the fields of an object. */
export function fieldsOf(document, schema) {
  const found = resolve(document, schema);
  const required = new Set(found?.required ?? []);
  return Object.entries(found?.properties ?? {}).map(([name, field]) => ({ name, words: typeWords(field), about: field.description ?? "", required: required.has(name) }));
}

/** The schemas that a schema refers to, itself left out, each once and in the order of their coming. */
export function referenced(document, schema, found = new Map()) {
  for (const part of parts(resolve(document, schema))) {
    const name = nameOf(part);
    if (name && !found.has(name)) {
      found.set(name, part);
      referenced(document, part, found);
    } else if (!name) referenced(document, part, found);
  }
  return found;
}

function parts(schema) {
  if (!schema) return [];
  return [...Object.values(schema.properties ?? {}), ...(schema.anyOf ?? schema.oneOf ?? []), ...(schema.items ? [schema.items] : []),
    ...(typeof schema.additionalProperties === "object" ? [schema.additionalProperties] : [])];
}
