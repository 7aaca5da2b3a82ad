/** The shape of the fleet, switched while it serves: what each worker does and how it schedules prompts beside streams. */

import { $, h, setText, show } from "../common/dom.js";

const SHAPES = [["unified", "whole prompts"], ["chunked", "prompts in chunks"], ["pools", "two pools"]];
const WHY = {
  unified: "One worker computes prompts whole, and running streams stall meanwhile.",
  chunked: "Workers compute prompts in chunks between tokens: streams slow down, but do not stop.",
  engines: "Engines that others run compute prompts in their own way.",
  pools: "Prompts are computed on prefill workers and answers written on decode workers, so streams should not feel a long prompt.",
};

/** The shape that a fleet has: unified, chunked or pools. workers: of /ui/state. */
export function shapeOf(workers) {
  const there = workers.filter(({ state }) => state !== "stopped");
  if (there.some(({ role }) => role !== "both")) return "pools";
  return there.some(({ shape }) => shape === "unified") ? "unified" : "chunked";
}

/** What each worker is to become: [{worker, role, shape}], in an order in which both phases always have a worker. */
export function changesTo(shape, workers) {
  const there = workers.filter(({ state }) => state !== "stopped");
  if (shape !== "pools") return there.map(({ worker }) => ({ worker, role: "both", shape }));
  return there.map(({ worker }, place) => ({ worker, role: place ? "decode" : "prefill", shape: "chunked" })).reverse();
}

export class ShapeSwitch {
  /** change(worker, body): asks the server; rejects with an error in words. */
  constructor(change) {
    this.change = change;
    this.isBusy = false;
    show($("#shape-choices"), SHAPES.map(([shape, text]) => h("button.small", { type: "button", "data-shape": shape, onclick: () => this.#to(shape) }, text)));
  }

  /** state: of /ui/state; mayChange: whether this page may change workers. */
  update(state, mayChange) {
    this.workers = state.workers;
    const shown = shapeOf(state.workers);
    const there = state.workers.filter((worker) => worker.state !== "stopped");
    const isOurs = there.every(({ shape }) => shape);
    setText($("#story"), `${WHY[isOurs || shown === "pools" ? shown : "engines"]} Start four streams, then send a long prompt, and watch their texts.`);
    $("#shape").hidden = !mayChange || !isOurs;
    for (const button of $("#shape-choices").children) {
      button.setAttribute("aria-pressed", String(button.dataset.shape === shown));
      const isTooFew = button.dataset.shape === "pools" && there.length < 2;
      button.disabled = this.isBusy || isTooFew || state.state !== "ready";
      button.title = isTooFew ? "It takes two workers" : "";
    }
  }

  async #to(shape) {
    const words = $("#shape-words");
    this.isBusy = true;
    setText(words, "changing …");
    try {
      for (const { worker, ...body } of changesTo(shape, this.workers)) await this.change(worker, body);
      setText(words, "");
    } catch (error) {
      setText(words, error.message);
    } finally {
      this.isBusy = false;
    }
  }
}
