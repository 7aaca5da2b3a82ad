/** The places of a slider beside a number. No DOM here. */

/** The values of a slider: even steps, or on a logarithmic scale round numbers (of tokens: powers of two and between). */
export function stopsOf(low, high, whole, log) {
  if (!log) {
    const count = whole ? Math.min(1000, high - low) : 200;
    return Array.from({ length: count + 1 }, (_, index) => Number((low + ((high - low) * index) / count).toPrecision(4)));
  }
  const [base, shares] = whole ? [2, [1, 1.25, 1.5, 1.75]] : [10, [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]];
  const found = new Set([low, high]);
  for (let power = base ** -9; power <= high; power *= base) {
    for (const share of shares) {
      const value = Number((power * share).toPrecision(3 + 4 * whole));
      if (value > low && value < high && (!whole || Number.isInteger(value))) found.add(value);
    }
  }
  return [...found].sort((a, b) => a - b);
}

/** The index of the stop that is nearest to a value; of two, the higher. */
export function nearestStop(stops, value) {
  const above = stops.findIndex((stop) => stop >= value);
  if (above < 0) return stops.length - 1;
  return above && value - stops[above - 1] < stops[above] - value ? above - 1 : above;
}
