/** The reference: every path of openapi.json, with its parameters, its body and its replies. */

import { $, h, show } from "../common/dom.js";
import { ServerError, getJson } from "../common/server.js";
import { themeButton } from "../common/theme.js";
import { fieldsOf, nameOf, referenced, typeWords } from "./schema.js";

themeButton($("#theme"));

async function draw() {
  let api;
  try {
    api = await getJson("openapi.json");
  } catch (error) {
    const asks = error instanceof ServerError && error.status === 401;
    const words = asks ? "This server asks for an API key: enter it on the live page in this tab, then come back." : error.message;
    show($("#problem"), words);
    $("#problem").hidden = false;
    return;
  }
  const operations = Object.entries(api.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
  show($("#title"), `${api.info.title} ${api.info.version}: API reference`);
  show($("#contents"), operations.map(({ path, method }) => h("li", {}, h("a", { href: `#${anchor(method, path)}` }, h("span.method", {}, method.toUpperCase()), path))));
  show($("#paths"), operations.map((each) => section(api, each)));
  if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

const anchor = (method, path) => `${method}${path.replaceAll(/[^a-z0-9]+/gi, "-")}`;

function section(api, { path, method, operation }) {
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  return h("section.card", { id: anchor(method, path) }, h("h2", {}, h("span.method", {}, method.toUpperCase()), path),
    operation.description && h("p", {}, operation.description),
    operation.parameters?.length ? [h("h3", {}, "Parameters"), table(operation.parameters.map(({ name, schema, description, required }) => ({ name, words: typeWords(schema), about: description ?? "", required })))] : null,
    body ? [h("h3", {}, "Body"), table(fieldsOf(api, body)), ...inner(api, body)] : null,
    h("h3", {}, "Replies"), table(Object.entries(operation.responses).map(([status, reply]) => ({ name: status, words: replyWords(reply), about: reply.description ?? "", required: false })), ["Status", "Content", ""]),
    ...inner(api, operation.responses[200]?.content?.["application/json"]?.schema, true));
}

const replyWords = (reply) => Object.entries(reply.content ?? {}).map(([type, { schema }]) => (type === "application/json" ? typeWords(schema) : type)).join(" or ");

/** The schemas within a schema, folded. */
function inner(api, schema, withItself = false) {
  if (!schema) return [];
  const found = new Map(withItself && nameOf(schema) ? [[nameOf(schema), schema]] : []);
  referenced(api, schema, found);
  return [...found].map(([name, part]) => [name, fieldsOf(api, part)]).filter(([, fields]) => fields.length)
    .map(([name, fields]) => h("details", {}, h("summary", {}, name), table(fields)));
}

function table(fields, heads = ["Name", "Type", "About"]) {
  return h("table.fields", { tabindex: "0" }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, fields.map(({ name, words, about, required }) => h("tr", {}, h("td", {}, h("code", {}, name), required ? " (required)" : ""), h("td", {}, words), h("td", {}, about)))));
}

await draw();
