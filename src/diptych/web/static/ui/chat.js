/** The chat box: a conversation with the model that is served, or a text that it continues. */

import { $, announce, h, setText } from "../common/dom.js";
import { count, milliseconds, significant } from "../common/format.js";

const CHAT_TOKENS = 512;
const TEXT_TOKENS = 96;
const TEMPERATURE = 0.2;
const CODE = "def get(self, key, default=None):\n    try:\n        return self[key]\n    except KeyError:\n";

export class Chat {
  constructor(sender) {
    this.sender = sender;
    this.messages = []; // {role, content}
    this.isBusy = false;
    this.hasChat = null;
    const input = $("#chat-input");
    $("#chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask(input.value);
    });
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || this.mode !== "chat") return;
      event.preventDefault();
      $("#chat-form").requestSubmit();
    });
    $("#chat-new").addEventListener("click", () => this.#clear());
    $("#chat-mode").addEventListener("change", () => this.#setMode());
  }

  get mode() {
    return $("#chat-mode").value;
  }

  /** model: of /ui/state. */
  update(model, isReady) {
    $("#chat").hidden = !model.has_text;
    $("#chat-send").disabled = !isReady || this.isBusy;
    if (this.hasChat === model.has_chat) return;
    this.hasChat = model.has_chat;
    $("#chat-mode").value = model.has_chat ? "chat" : "text";
    this.#setMode();
  }

  #setMode() {
    const isChat = this.mode === "chat";
    const input = $("#chat-input");
    input.rows = isChat ? 2 : 5;
    input.placeholder = isChat ? "Ask something" : "A text to go on with";
    if (!isChat && !input.value) input.value = CODE;
    else if (isChat && input.value === CODE) input.value = "";
    setText($("#chat-send"), isChat ? "Send" : "Continue it");
    setText($("#chat-about"), isChat || this.hasChat ? "" : "This model continues texts; it was not trained to answer.");
    this.#clear();
  }

  #clear() {
    this.messages = [];
    $("#chat-log").replaceChildren();
    $("#chat-new").hidden = true;
  }

  async #ask(text) {
    if (this.isBusy || !text.trim()) return;
    const isChat = this.mode === "chat";
    const answer = this.#open(text, isChat);
    const common = { temperature: TEMPERATURE, stream_options: { include_usage: true } };
    if (isChat) $("#chat-input").value = "";
    const [path, body] = isChat ? ["v1/chat/completions", { messages: [...this.messages, { role: "user", content: text }], max_tokens: CHAT_TOKENS, ...common }] : ["v1/completions", { prompt: text, max_tokens: TEXT_TOKENS, stop: ["\n\n"], ...common }];
    this.#setBusy(true);
    const log = $("#chat-log");
    const reply = await this.sender.ask(path, body, ({ reasoning, text: so_far }) => {
      setText(answer.reasoning, reasoning);
      setText(answer.text, so_far);
      log.scrollTop = log.scrollHeight;
    });
    this.#setBusy(false);
    if (isChat) this.messages.push(...turns(text, reply));
    setText(answer.about, figures(reply));
    announce(reply.text ? `The answer: ${reply.text}` : `${figures(reply)}.`);
  }

  /** The question and the place of its answer. */
  #open(text, isChat) {
    const log = $("#chat-log");
    if (!isChat) log.replaceChildren();
    const answer = { reasoning: h("span.reasoning.muted", {}), text: h("span", {}), about: h("span.small.muted", {}, "…") };
    log.append(...(isChat ? [h("p.said-by-you", {}, text)] : []), h("div.said-by-model", {}, isChat ? null : h("span.muted", {}, text), answer.reasoning, answer.text), h("p.chat-figures", {}, answer.about));
    log.scrollTop = log.scrollHeight;
    $("#chat-new").hidden = false;
    return answer;
  }

  #setBusy(isBusy) {
    this.isBusy = isBusy;
    $("#chat-send").disabled = isBusy;
    if (!isBusy && this.mode === "chat") $("#chat-input").focus({ preventScroll: true });
  }
}

/** What a question and its answer add to the conversation: the answer without its reasoning; nothing where there was none. */
export function turns(question, { text }) {
  return text ? [{ role: "user", content: question }, { role: "assistant", content: text }] : [];
}

/** How fast an answer came, or why there is none. */
export function figures({ reasoning, text, numTokens, ttftMs, totalMs }) {
  if (ttftMs === null) return "no answer";
  const rate = numTokens > 1 && totalMs > ttftMs ? `, ${significant(((numTokens - 1) * 1000) / (totalMs - ttftMs))} tokens/s` : "";
  const end = reasoning && !text ? "; it ended within its reasoning, before an answer" : "";
  return `first token ${milliseconds(ttftMs)}, ${count(numTokens)} tokens${rate}${end}`;
}
