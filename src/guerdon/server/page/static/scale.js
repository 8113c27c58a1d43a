/** Maps values to pixels, and places an axis's ticks. */

/** Returns a linear scale from the domain to the range. */
export function linear([d0, d1], [r0, r1]) {
  const slope = d1 === d0 ? 0 : (r1 - r0) / (d1 - d0);
  const scale = (x) => r0 + (x - d0) * slope;
  scale.invert = (y) => (slope === 0 ? d0 : d0 + (y - r0) / slope);
  return scale;
}

/** Returns a logarithmic scale; the domain must be positive. */
export function logarithmic([d0, d1], range) {
  const inner = linear([Math.log(d0), Math.log(d1)], range);
  const scale = (x) => inner(Math.log(Math.max(x, d0)));
  scale.invert = (y) => Math.exp(inner.invert(y));
  return scale;
}

function roundStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  const lead = raw / power;
  return power * ([1, 2, 5].find((most) => lead <= most * (1 + 1e-9)) ?? 10);
}

/** Returns about `most` round numbers from `low` to `high`. */
export function ticks(low, high, most = 4) {
  if (!(high > low)) return [low];
  const step = roundStep((high - low) / most);
  const first = Math.ceil(low / step - 1e-9);
  const found = [];
  for (let i = first; i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

/** Returns how many decimals tell the ticks apart, at most 4. */
export function decimals([first, second = first]) {
  return second > first ? Math.min(Math.max(0, -Math.floor(Math.log10(second - first) + 1e-9)), 4) : 0;
}

/** Returns ticks of a logarithmic axis: 1, 2 and 5 times the powers of ten, thinned to `most`. */
export function logTicks(low, high, most = 6) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    for (const lead of [1, 2, 5]) if (lead * power >= low && lead * power <= high) found.push(lead * power);
  }
  const every = Math.ceil(found.length / most);
  return found.filter((_, i) => i % every === 0);
}

/** Rounds a range outwards, so that `most + 1` ticks or so have one at both ends; an empty one gets some height. */
export function rounded(low, high, most = 4) {
  if (!(high > low)) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const step = roundStep((high - low) / most);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

const TIME_STEPS = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/** Returns ticks at round times of the clock, in Unix time. */
export function timeTicks(from, to, most = 6) {
  const offset = new Date(from * 1000).getTimezoneOffset() * 60;
  const begin = (step) => Math.ceil((from - offset) / step) * step + offset;
  const fits = TIME_STEPS.findIndex((s) => (to - from) / s <= most);
  let i = fits < 0 ? TIME_STEPS.length - 1 : fits;
  if (i > 0 && begin(TIME_STEPS[i]) + TIME_STEPS[i] > to) i -= 1; // one tick alone tells no distance
  const step = TIME_STEPS[i];
  const found = [];
  for (let t = begin(step); t <= to; t += step) found.push(t);
  return { at: found, withSeconds: step < 60 };
}

/** Returns the smallest and the largest number, null if there are none. */
export function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const x of values) {
    if (typeof x !== "number" || !Number.isFinite(x)) continue;
    if (x < low) low = x;
    if (x > high) high = x;
  }
  return low <= high ? [low, high] : null;
}
