/** Numbers as people read them. Times come in nanoseconds unless a name says otherwise. */

const grouped = new Intl.NumberFormat("en-GB");

/** 1234567 -> "1,234,567". */
export const count = (value) => grouped.format(value);

/** Three significant digits without exponents: 0.123, 1.23, 12.3, 123, 1,235. What is nearer to 0 than 1e-12 is 0. */
export function significant(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)) + 1e-9));
  return places ? value.toFixed(Math.min(places, 12)).replace(/\.?0+$/, "").replace(/^-0$/, "0") : grouped.format(Math.round(value));
}

/** A duration with its unit: "850 ns", "1.5 ms", "12.3 s", "3 min 20 s". */
export function duration(ns) {
  if (ns === null || ns === undefined || !Number.isFinite(ns)) return "–";
  if (ns < 0) return `-${duration(-ns)}`;
  if (!ns) return "0 ms";
  if (ns < 999.5) return `${significant(ns)} ns`;
  if (ns < 999_500) return `${significant(ns / 1e3)} µs`;
  if (ns < 999.5e6) return `${significant(ns / 1e6)} ms`;
  if (ns < 119.5e9) return `${significant(ns / 1e9)} s`;
  const seconds = Math.round(ns / 1e9);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

/** The same of milliseconds. */
export const milliseconds = (ms) => (ms === null || ms === undefined ? "–" : duration(ms * 1e6));

/** Bytes in decimal units, as links and memories are sold: "671 MB". */
export function bytes(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= 0.9995 * size) return `${significant(value / size)} ${unit}`;
  }
  return `${grouped.format(value)} B`;
}

/** 0.123 -> "12 %"; small shares keep a digit. */
export function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const value = share * 100;
  return `${value && value < 9.95 ? value.toFixed(1) : Math.round(value)} %`;
}

/** Large counts, short: "1.2k", "3.4M". */
export function short(value) {
  if (Math.abs(value) >= 999_500) return `${significant(value / 1e6)}M`;
  if (Math.abs(value) >= 10_000) return `${significant(value / 1e3)}k`;
  return grouped.format(value);
}

/** The end of a request's id, enough to tell it from others. */
export function shortId(id) {
  const bare = id.replace(/^(chatcmpl|cmpl|req)-/, "");
  return bare.length > 10 ? `${bare.slice(0, 6)}${/-\d+$/.exec(bare)?.[0] ?? ""}` : bare;
}

/** One or many: plural(2, "token") -> "2 tokens". */
export const plural = (value, word) => `${grouped.format(value)} ${word}${value === 1 ? "" : "s"}`;
