/** The operator's buttons: what each worker is for, and which workers there are. Hidden where the server does not answer. */

import { $, h, setText, show } from "../common/dom.js";
import { ServerError, errorOf } from "../common/server.js";

const KEY = "diptych-admin-key";

/** Fills the panel and keeps it up to date. onChanged is called after every change. */
export class Admin {
  constructor(onChanged) {
    this.onChanged = onChanged;
    this.workers = [];
    this.access = "closed";
    this.key = stored();
    $("#admin-worker").addEventListener("change", () => this.#showButtons());
    $("#admin-add").addEventListener("click", () => this.#do("POST", "admin/workers", null, "A worker is being started", "It serves"));
    $("#admin-key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.key = $("#admin-key").value.trim();
      try {
        sessionStorage.setItem(KEY, this.key);
      } catch {
        // No storage: the key is asked for once per page.
      }
      this.refresh();
    });
    for (const [group, name, choices] of [["role", "role", ["prefill", "decode", "both"]], ["shape", "shape", ["chunked", "unified"]]]) {
      show($(`#admin-${group}`), choices.map((choice) => h("button", { type: "button", "data-choice": choice, onclick: () => this.#change({ [name]: choice }, `Its ${name} is ${choice} from now on`) }, choice)));
    }
    $("#admin-cores-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const cores = $("#admin-cores").value.trim();
      if (cores) this.#change({ cores }, `It computes on CPUs ${cores} from its next step on`);
    });
    $("#admin-drain").addEventListener("click", () => this.#change({ drain: !this.#isDraining() }, this.#isDraining() ? "It is used again" : "It gets nothing new, and hands its streams to others"));
    $("#admin-remove").addEventListener("click", () => {
      const { worker } = this.#selected();
      if (window.confirm(`Drain worker ${worker} and stop its process?`)) this.#do("DELETE", `admin/workers/${worker}`, null, `Worker ${worker} is being drained`, "It has stopped");
    });
  }

  /** Ask the server for its workers; the panel hides where this page may not change them. access: see /ui/state. */
  async refresh(access = this.access) {
    const panel = $("#admin");
    this.access = access;
    if (!this.isOpen) {
      panel.hidden = access !== "key";
      $("#admin-key-form").hidden = false;
      $("#admin-controls").hidden = true;
      return;
    }
    try {
      const { workers, max_workers: most } = await this.#fetch("GET", "admin/workers");
      panel.hidden = false;
      $("#admin-key-form").hidden = true;
      $("#admin-controls").hidden = false;
      this.workers = workers.filter((worker) => worker.state !== "stopped");
      $("#admin-add").disabled = this.workers.length >= most;
      $("#admin-add").title = this.workers.length >= most ? `There may be ${most} (--max-workers)` : "";
      this.#showWorkers();
    } catch (error) {
      const asksForKey = error instanceof ServerError && error.status === 401;
      panel.hidden = !asksForKey;
      $("#admin-key-form").hidden = !asksForKey;
      $("#admin-controls").hidden = true;
    }
  }

  #showWorkers() {
    const select = $("#admin-worker");
    const key = this.workers.map((worker) => worker.worker).join();
    if (select.dataset.key !== key) {
      const before = select.value;
      select.dataset.key = key;
      show(select, this.workers.map(({ worker }) => h("option", { value: String(worker) }, `worker ${worker}`)));
      if (this.workers.some(({ worker }) => String(worker) === before)) select.value = before;
    }
    this.#showButtons();
  }

  #showButtons() {
    const worker = this.#selected();
    if (!worker) return;
    for (const button of $("#admin-role").children) button.setAttribute("aria-pressed", String(button.dataset.choice === worker.role));
    $("#admin-cores-form").hidden = !worker.cores;
    $("#admin-cores").placeholder = worker.cores ?? "";
    setText($("#admin-drain"), this.#isDraining() ? "Use again" : "Drain");
  }

  #selected() {
    return this.workers.find(({ worker }) => String(worker) === $("#admin-worker").value) ?? this.workers[0];
  }

  #isDraining() {
    return this.#selected()?.state === "draining";
  }

  #change(body, done) {
    const { worker } = this.#selected();
    return this.#do("POST", `admin/workers/${worker}`, body, "", `Worker ${worker}: ${done.charAt(0).toLowerCase()}${done.slice(1)}`);
  }

  /** Whether this page may change workers now. */
  get isOpen() {
    return this.access === "open" || (this.access === "key" && Boolean(this.key));
  }

  /** Change one worker; rejects with an error in words. body: see docs/api.md. */
  async changeWorker(worker, body) {
    await this.#fetch("POST", `admin/workers/${worker}`, body);
    await this.refresh();
    this.onChanged();
  }

  async #do(method, path, body, meanwhile, done) {
    const words = $("#admin-words");
    words.className = "small muted";
    setText(words, meanwhile && `${meanwhile} …`);
    try {
      await this.#fetch(method, path, body);
      setText(words, `${done}.`);
    } catch (error) {
      words.className = "small bad";
      setText(words, error.message);
    }
    await this.refresh();
    this.onChanged();
  }

  async #fetch(method, path, body = null) {
    const headers = { ...(this.key && { Authorization: `Bearer ${this.key}` }), ...(body && { "Content-Type": "application/json" }) };
    const reply = await fetch(path, { method, headers, body: body && JSON.stringify(body), cache: "no-store" });
    if (!reply.ok) throw await errorOf(reply);
    return reply.json();
  }
}

function stored() {
  try {
    return sessionStorage.getItem(KEY) || "";
  } catch {
    return "";
  }
}
