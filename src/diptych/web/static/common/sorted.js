/** Searching in arrays whose values ascend. */

/** The first index whose value is above `limit`. */
export function firstAbove(values, limit, end = values.length) {
  let low = 0;
  let high = end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}
