/** What the readers of the streams see: their texts side by side, growing or standing still, as this page receives them. */

import { $, h, setText, show } from "../common/dom.js";
import { count, duration } from "../common/format.js";

const SHOWN = 420; // characters of a text
const STILL_MS = 250; // without a token, where no objective says what is too long
const TICK_MS = 100;

/** Draws the streams of a Sender. stillMs: () => the longest gap that is fine, 0 for none. */
export class Readers {
  constructor(sender, stillMs) {
    Object.assign(this, { sender, stillMs, shown: "", timer: 0 });
    this.parts = new Map();
  }

  /** Something began or ended. */
  update() {
    const { readers } = this.sender;
    const names = [...readers.keys()].join();
    $("#readers").hidden = !readers.size;
    if (names !== this.shown) {
      this.shown = names;
      this.parts.clear();
      show($("#readers-texts"), [...readers.keys()].map((name) => this.#reader(name)));
    }
    if (readers.size && !this.timer) this.timer = setInterval(() => this.#tick(), TICK_MS);
    this.#tick();
  }

  #reader(name) {
    const part = { state: h("span.pill", {}, "waiting"), text: h("div.reader-text", {}), longest: h("span.small.muted", {}) };
    part.root = h("article.reader", { "aria-label": name }, h("div.reader-head", {}, h("b", {}, name), part.state), part.text, part.longest);
    this.parts.set(name, part);
    return part.root;
  }

  #tick() {
    const now = performance.now();
    let isRunning = false;
    for (const [name, stream] of this.sender.readers) {
      const part = this.parts.get(name);
      if (!part) continue;
      isRunning ||= stream.isRunning;
      this.#draw(part, stream, now);
    }
    if (!isRunning) {
      clearInterval(this.timer);
      this.timer = 0;
    }
  }

  #draw(part, stream, now) {
    const still = stream.isRunning && stream.numTokens ? now - stream.lastAt : 0;
    const isStill = still > (this.stillMs() || STILL_MS);
    const [words, mood] = !stream.isRunning ? ["stopped", ""] : !stream.numTokens ? ["waiting", ""] : isStill ? [`still for ${duration(still < 100 ? Math.floor(still / 10) * 1e7 : Math.floor(still / 100) * 1e8)}`, "bad"] : ["writing", "good"];
    setText(part.state, words);
    part.state.className = `pill ${mood}`;
    part.root.classList.toggle("still", isStill);
    setText(part.text, stream.text ? stream.text.slice(-SHOWN) : stream.numTokens ? `${count(stream.numTokens)} tokens (this model has no text)` : "");
    part.text.scrollTop = part.text.scrollHeight;
    const longest = Math.max(stream.longestMs, isStill ? still : 0);
    setText(part.longest, longest ? `longest pause: ${duration(Math.round(longest) * 1e6)}` : "");
  }
}
