/**
 * How an answer comes about, drawn: the tokens of the prompt enter at once, then one token a step, and with each the KV
 * cache grows. It rests where the reader wants less motion, and can be paused and stepped everywhere.
 */

import { $, h, setText, show } from "../common/dom.js";
import { milliseconds } from "../common/format.js";

const PROMPT = ["Why", " is", " the", " sky", " blue", "?"];
const ANSWER = ["Air", " scatters", " blue", " light", " more", " than", " red", "."];
const END = ANSWER.length; // steps: one prefill, which gives the first token, and a decode for each further one
const PREFILL_MS = 1500;
const DECODE_MS = 620;
const REST_MS = 3500;

export class Flow {
  constructor(element) {
    this.calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.at = this.calm ? END : 0; // steps that are done
    this.playing = !this.calm;
    this.timer = 0;
    this.times = null;
    const tokens = (words, kind) => words.map((word) => h(`span.flow-token.${kind}`, {}, word));
    this.parts = {
      prompt: tokens(PROMPT, "prefill"), answer: tokens(ANSWER, "decode"),
      cache: [...PROMPT.map(() => h("i.prefill")), ...ANSWER.slice(0, -1).map(() => h("i.decode"))], // the last token is never read
      steps: Array.from({ length: END }, (_, step) => h(step ? "i.decode" : "i.prefill")),
    };
    const row = (name, ...children) => h("div.flow-row", {}, h("span.small.muted", {}, name), h("div.flow-cells", {}, children));
    const about = `The model reads the ${PROMPT.length} tokens of the prompt in one step, prefill, which fills the KV cache for all of them and gives the first token of the answer. Then each decode step gives one token and adds one entry to the KV cache.`;
    show(element, h("div", { role: "img", "aria-label": about },
      row("Prompt", this.parts.prompt), row("Steps", h("div.flow-steps", {}, this.parts.steps)), row("Answer", this.parts.answer), row("KV cache", h("div.flow-cache", {}, this.parts.cache))),
    (this.said = h("p.flow-said", {})));
    $("#flow-play").addEventListener("click", () => this.#toggle());
    $("#flow-step").addEventListener("click", () => {
      this.#pause();
      this.#to(this.at >= END ? 0 : this.at + 1);
    });
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.timer) : this.playing && this.#next()));
    this.#to(this.at);
    if (this.playing) this.#next();
    else this.#pause();
  }

  /** What steps take on the device of the panel: {prefill, decode, tokens, batch}, times in ms. */
  setTimes(times) {
    this.times = times;
    this.#say();
  }

  #toggle() {
    if (this.playing) this.#pause();
    else {
      this.playing = true;
      setText($("#flow-play"), "❚❚ Pause");
      if (this.at >= END) this.#to(0);
      this.#next();
    }
  }

  #pause() {
    this.playing = false;
    clearTimeout(this.timer);
    setText($("#flow-play"), "▶ Play");
  }

  #next() {
    clearTimeout(this.timer);
    const wait = this.at >= END ? REST_MS : this.at ? DECODE_MS : PREFILL_MS;
    this.timer = setTimeout(() => {
      this.#to(this.at >= END ? 0 : this.at + 1);
      if (this.playing) this.#next();
    }, wait);
  }

  #to(at) {
    this.at = at;
    const { prompt, answer, cache, steps } = this.parts;
    const mark = (items, isDone, isNow) => items.forEach((item, index) => {
      item.classList.toggle("done", isDone(index));
      item.classList.toggle("now", isNow(index));
    });
    mark(prompt, () => at > 0, () => at === 0);
    mark(answer, (index) => index < at, (index) => index === at - 1);
    mark(cache, (index) => at > 0 && index < PROMPT.length + at - 1, (index) => (at > 1 ? index === PROMPT.length + at - 2 : at === 1 && index < PROMPT.length));
    mark(steps, (index) => index < at, (index) => index === at);
    this.#say();
  }

  #say() {
    const { at, times } = this;
    const took = (name) => (times ? ` On this device such a step takes ${milliseconds(times[name])}${name === "prefill" ? ` for ${times.tokens.toLocaleString("en-GB")} tokens` : ` for ${times.batch === 1 ? "one stream" : `${times.batch} streams`}`}.` : "");
    if (!at) setText(this.said, `Prefill: all ${PROMPT.length} tokens of the prompt go through the model together.${took("prefill")}`);
    else if (at === 1) setText(this.said, "The prompt is read: its KV cache is there, and the first token of the answer.");
    else if (at < END) setText(this.said, `Decode: one step for each token, and one more entry in the KV cache.${took("decode")}`);
    else setText(this.said, `${END} tokens: one prefill step and ${END - 1} decode steps.`);
  }
}
