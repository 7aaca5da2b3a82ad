/**
 * What every chapter shares: a form whose state is the address, an endpoint that computes, and the results.
 *
 *   panel({name: "phases", draw: (data, state) => {...}});
 *
 * Nothing is computed here. Numbers and formulas come from the endpoint of the same name.
 */

import { $, announce, h, setText, show } from "../common/dom.js";
import { headers } from "../common/server.js";
import { themeButton } from "../common/theme.js";
import { nearestStop, stopsOf } from "./stops.js";

const WAIT_MS = 40; // between two questions while something is being dragged
const form = $("#form");
const problem = $("#problem");
const results = $("#results");

/** Begin. live: false asks nothing by itself; onTry: called when the reader tries something. Returns {state, set}. */
export function panel({ name, draw, live = true, onState = () => {}, onTry = () => {} }) {
  const asker = live ? new Asker(name, draw) : null;
  readAddress();
  bindRanges();
  const changed = (wait = WAIT_MS) => {
    writeAddress();
    countMore();
    onState(state());
    asker?.askAfter(wait);
  };
  form.addEventListener("input", (event) => {
    if (event.target.name) changed();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (live) changed(0);
  });
  $("#reset-all").addEventListener("click", () => {
    restore({});
    changed(0);
    announce("All settings are back to their defaults.");
  });
  $("#copy-link").addEventListener("click", () => copyLink());
  bindTries((values) => {
    restore(values);
    changed(0);
    onTry();
  });
  window.addEventListener("popstate", () => {
    readAddress();
    changed(0);
  });
  themeButton($("#theme"));
  countMore();
  onState(state());
  if (asker) asker.ask();
  else results.setAttribute("aria-busy", "false");
  return {
    state,
    set(values) {
      for (const [key, value] of Object.entries(values)) setField(key, String(value));
      changed(0);
    },
  };
}

/**
 * Asks the endpoint of a panel while the form changes, one question at a time: what is drawn follows a slider as fast as
 * answers come, and the newest state is always asked for last.
 */
class Asker {
  constructor(name, draw) {
    Object.assign(this, { name, draw, timer: 0, isAsking: false, isStale: false });
  }

  askAfter(wait) {
    results.setAttribute("aria-busy", "true");
    if (this.isAsking) this.isStale = true;
    else this.timer ||= setTimeout(() => this.ask(), wait);
  }

  async ask() {
    this.timer = 0;
    this.isAsking = true;
    this.isStale = false;
    results.setAttribute("aria-busy", "true");
    const [asked, values] = [query(), state()];
    try {
      const reply = await get(this.name, asked);
      const data = await reply.json();
      if (reply.ok) this.#show(data, asked, values);
      else refuse(errorOf(reply, data), this.isStale);
    } catch (error) {
      refuse({ message: "The guide does not answer. Is it still running?" });
      throw error;
    } finally {
      this.isAsking = false;
      if (this.isStale) this.askAfter(0);
    }
  }

  #show(data, asked, values) {
    accept();
    this.draw(data, values);
    results.setAttribute("aria-busy", String(this.isStale));
    results.dataset.state = asked;
  }
}

/** Links of "What to try": each sets the panel, and shows what comes of it. */
function bindTries(set) {
  for (const link of document.querySelectorAll("a.try")) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      set(Object.fromEntries(new URLSearchParams(link.search)));
      announce(`${link.textContent}: set.`);
      $(".panel").scrollIntoView({ block: "nearest", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    });
  }
}

/** How many of the settings that are folded away differ from their defaults. */
function countMore() {
  const changed = new URLSearchParams(query());
  const names = new Set([...document.querySelectorAll("details.more [name]")].map((input) => input.name));
  const number = [...names].filter((name) => changed.has(name)).length;
  $("#more-changed").textContent = number ? ` (${number} changed)` : "";
}

/** Ask an endpoint; with the API key that this tab was given on the live page, if any. */
export const get = (name, asked, signal) => fetch(`api/${name}?${asked}`, { signal, headers: headers() });

/** What to say of a reply that is not 2xx. */
export function errorOf(reply, data) {
  if (reply.status === 401) return { message: "This server asks for an API key. Give it on the live page, and come back in the same tab." };
  return data.error;
}

/** All values of the form, as text. */
function state() {
  return Object.fromEntries(new FormData(form));
}

/** Those that differ from their defaults, as a query. */
export function query() {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(state())) if (value !== defaultOf(name)) found.set(name, value);
  return found.toString();
}

export function refuse(error, isStale = false) {
  problem.textContent = error.message;
  problem.hidden = false;
  results.setAttribute("aria-busy", String(isStale));
  results.classList.add("stale");
  for (const input of form.elements) if (input.name) input.removeAttribute("aria-invalid");
  const field = error.param && form.elements[error.param];
  if (field instanceof Element) field.setAttribute("aria-invalid", "true");
  const folded = error.param && $(`details.more [name="${CSS.escape(error.param)}"]`)?.closest("details");
  if (folded) folded.open = true;
}

export function accept() {
  problem.hidden = true;
  results.classList.remove("stale");
  for (const input of form.elements) if (input.name) input.removeAttribute("aria-invalid");
}

/** The formulas and where the durations come from. */
export function showFormulas(data) {
  show($("#formulas"), data.formulas.map((formula) => h("div", {}, h("dt", {}, formula.name), h("dd", {}, h("span.words-of", {}, formula.expression), h("span.filled", {}, "= ", formula.filled), h("b", {}, "= ", formula.result)))));
  showMachine(data.machine);
}

export function showMachine(machine) {
  const bits = machine.weight_bits === 16 ? "" : ` Weights in ${machine.weight_bits} bits.`;
  show($("#machine"), `One worker: ${machine.devices}.${bits} Durations: ${machine.words}.`);
}

/** The first sentence stands above the picture, the others under it. */
export function showNotes([headline = "", ...notes]) {
  setText($("#headline"), headline);
  show($("#notes"), notes.map((text) => h("p", {}, text)));
}

/** Tiles of {name, value, about, tone}. */
export function showTiles(tiles) {
  show($("#tiles"), tiles.map((tile) => h("div.card.tile", {}, h("span.name", {}, tile.name), h("span.value", {}, tile.value), h(`span.about${tile.tone ? `.${tile.tone}` : ""}`, {}, tile.about ?? ""))));
}

async function copyLink() {
  writeAddress();
  const button = $("#copy-link");
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "It is in the address bar"; // no permission, or no secure context
  }
  announce("The address of this page brings back this state.");
  setTimeout(() => (button.textContent = "Copy link"), 1600);
}

function fields(name) {
  const found = form.elements[name];
  return found instanceof RadioNodeList ? [...found] : found ? [found] : [];
}

function defaultOf(name) {
  const [first, ...more] = fields(name);
  if (!first) return undefined;
  if (first.type !== "radio") return first.dataset.default;
  return [first, ...more].find((input) => "default" in input.dataset)?.value;
}

function setField(name, value) {
  for (const input of fields(name)) {
    if (input.type === "radio") input.checked = input.value === value;
    else input.value = value;
    input.dispatchEvent(new CustomEvent("settled"));
  }
}

function restore(values) {
  const names = new Set([...form.elements].map((input) => input.name).filter(Boolean));
  for (const name of names) setField(name, values[name] ?? defaultOf(name));
}

function readAddress() {
  restore(Object.fromEntries(new URLSearchParams(location.search)));
}

function writeAddress() {
  const text = query();
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : ""));
}

/** Each number has a slider beside it; both say the same. */
function bindRanges() {
  for (const range of form.querySelectorAll("input[type=range][data-scale]")) {
    const number = document.getElementById(range.id.replace(/-range$/, ""));
    const stops = stopsOf(Number(number.min), Number(number.max), number.step !== "any", range.dataset.scale === "log");
    const unit = number.parentElement.querySelector(".unit")?.textContent ?? "";
    range.max = String(stops.length - 1);
    const follow = () => {
      range.value = String(nearestStop(stops, Number(number.value)));
      range.setAttribute("aria-valuetext", `${number.value} ${unit}`.trim());
    };
    range.addEventListener("input", () => {
      number.value = String(stops[Number(range.value)]);
      range.setAttribute("aria-valuetext", `${number.value} ${unit}`.trim());
      number.dispatchEvent(new Event("input", { bubbles: true }));
    });
    number.addEventListener("input", (event) => event.isTrusted && follow());
    number.addEventListener("settled", follow);
    follow();
  }
}
