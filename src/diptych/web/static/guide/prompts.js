/** The list of prompts of a scenario: rows to change, add and remove. Its text is the form's field "prompts". */

import { $, announce, h, show } from "../common/dom.js";

const field = $("input[name=prompts]");
const rows = $("#prompt-rows");
const SHORT = [128, 16];
const LONG = [8192, 16];

/** Begin. */
export function promptList(panelOf) {
  const read = () => (field.value ? field.value.split(",").map((prompt) => prompt.split(":").map(Number)) : []);
  const write = (prompts) => panelOf().set({ prompts: prompts.map((prompt) => prompt.join(":")).join(",") });
  const add = ([prompt, output], word) => {
    const prompts = read();
    const last = Math.max(180, ...prompts.map(([arrival]) => arrival));
    write([...prompts, [Math.min(5000, last + 20), prompt, output]]);
    announce(`A ${word} prompt is added.`);
  };
  const draw = () => {
    const prompts = read();
    if (rows.children.length === prompts.length + 1) {
      prompts.forEach((prompt, index) => [...rows.children[index + 1].querySelectorAll("input")].forEach((input, at) => {
        if (document.activeElement !== input) input.value = String(prompt[at]);
      }));
      return;
    }
    const cell = (index, at, label, limits) => h("label", {}, h("span.visually-hidden", {}, `${label} of prompt ${index + 1}`), h("input", {
      type: "number", value: prompts[index][at], ...limits,
      oninput: (event) => {
        const changed = read();
        changed[index][at] = Number(event.target.value);
        write(changed);
      },
    }));
    show(rows, h("div.prompt-row.prompt-head", { "aria-hidden": "true" }, h("span", {}, "at ms"), h("span", {}, "prompt"), h("span", {}, "answer"), h("span")),
      prompts.map((prompt, index) => h("div.prompt-row", {},
        cell(index, 0, "Arrival in milliseconds", { min: 0, max: 5000, step: 10 }),
        cell(index, 1, "Prompt tokens", { min: 1, max: 32768, step: 1 }),
        cell(index, 2, "Answer tokens", { min: 1, max: 256, step: 1 }),
        h("button.small.plain", { type: "button", "aria-label": `Remove prompt ${index + 1}`, onclick: () => write(read().filter((_, at) => at !== index)) }, "✕"))));
  };
  $("#add-short").addEventListener("click", () => add(SHORT, "short"));
  $("#add-long").addEventListener("click", () => add(LONG, "long"));
  $("#clear-prompts").addEventListener("click", () => write([]));
  return draw;
}
