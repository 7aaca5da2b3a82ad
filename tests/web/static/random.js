/** Made-up inputs for laws: seeded, so that a failure can be repeated. */

/** A generator of numbers in [0, 1) that gives the same ones for the same seed (an LCG modulo 2 ** 32). */
export function numbers(seed) {
  let state = (seed * 2654435761 + 12345) >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Call `law(random, seed)` for many seeds; what fails says its seed. */
export function forSeeds(count, law) {
  for (let seed = 1; seed <= count; seed++) {
    try {
      law(numbers(seed), seed);
    } catch (error) {
      error.message = `seed ${seed}: ${error.message}`;
      throw error;
    }
  }
}

/** An integer in [low, high]. */
export const between = (random, low, high) => low + Math.floor(random() * (high - low + 1));

/** Any number whose size is from 10 ** low to 10 ** high, every power of ten as likely as any other. */
export const ofAnySize = (random, low, high) => 10 ** (low + random() * (high - low));

/** The same elements in another order. */
export function shuffled(random, values) {
  const found = [...values];
  for (let at = found.length - 1; at > 0; at--) {
    const other = between(random, 0, at);
    [found[at], found[other]] = [found[other], found[at]];
  }
  return found;
}

/** The list in pieces of any length, in its order. */
export function inPieces(random, values) {
  const pieces = [];
  for (let at = 0; at < values.length;) {
    const length = between(random, 1, 7);
    pieces.push(values.slice(at, at + length));
    at += length;
  }
  return pieces;
}
