/** The time axis of a timeline: where its ticks are and what they are called. No DOM here. */

import { duration } from "./format.js";

const STEPS_NS = [...[...Array(10).keys()].flatMap((power) => [1, 2, 5].map((unit) => unit * 10 ** power)), 1e10, 3e10, 6e10, 12e10, 3e11, 6e11, 18e11, 36e11];

/** Times for ticks: [{time, text}]. clock: nanoseconds of the Unix time at zero, or null for times from `origin` on. */
export function ticks(t0, t1, pixels, clock, origin = 0) {
  const wanted = Math.max(1, (t1 - t0) / Math.max(1, pixels / (pixels < 420 ? 60 : 110)));
  const step = STEPS_NS.find((candidate) => candidate >= wanted) ?? wanted;
  const zero = clock === null ? origin : -(clock % 86_400e9);
  const found = [];
  for (let time = Math.ceil((t0 - zero) / step) * step + zero; time <= t1; time += step) {
    found.push({ time, text: clock === null ? duration(Math.round(time - origin)) : clockText(time + clock, step) });
  }
  return found;
}

/** A Unix time in nanoseconds as a clock shows it, with as many decimals as the step needs. */
export function clockText(unixNs, step) {
  const places = step >= 1e9 ? 0 : Math.min(6, Math.ceil(9 - Math.log10(step)));
  const units = Math.round((unixNs / 1e9) * 10 ** places); // of the last decimal
  const seconds = Math.floor(units / 10 ** places);
  const text = new Date(seconds * 1000).toTimeString().slice(0, 8);
  return places ? `${text}.${String(units - seconds * 10 ** places).padStart(places, "0")}` : text;
}
