/** Formats numbers, durations and times for people; whatever is not a number becomes a dash. */

export const NOTHING = "–";

/** Whether `x` is a finite number. */
export function isNumber(x) {
  return typeof x === "number" && Number.isFinite(x);
}

function signed(text) {
  return text.replace(/^-(?=[0.]*$)/, "").replace("-", "\u2212");
}

/** Formats at most three significant digits, with k, M, G: 0.12, 3.4, 120, 1.2k. */
export function number(x) {
  if (!isNumber(x)) return NOTHING;
  const size = Math.abs(x);
  if (size === 0) return "0";
  for (const [power, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= power * 0.9995) return signed(trimmed((x / power).toPrecision(3))) + letter;
  }
  if (size < 0.001) return signed(x.toExponential(1).replace(".0e", "e").replace("e-", "e\u2212"));
  return signed(trimmed(x.toPrecision(size < 1 ? 2 : 3)));
}

function trimmed(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** Formats a whole number with thin spaces between the thousands. */
export function count(n) {
  return isNumber(n) ? String(Math.round(n)).replace(/\B(?=(\d{3})+$)/g, "\u202f") : NOTHING;
}

/** Formats a reward with a fixed number of decimals, so that rewards line up. */
export function reward(x, digits = 2) {
  return isNumber(x) ? signed(x.toFixed(digits)) : NOTHING;
}

/** Formats a difference with its sign. */
export function difference(x, digits = 1) {
  if (!isNumber(x)) return NOTHING;
  const text = signed(x.toFixed(digits));
  return text.startsWith("\u2212") ? text : `+${text}`;
}

/** Formats a share of one as a percentage; with `digits`, as axes ask for it, exactly, so that ticks differ. */
export function percent(x, digits) {
  if (!isNumber(x)) return NOTHING;
  const p = x * 100;
  if (digits !== undefined) return `${number(p)}%`;
  if (p > 0 && p < 0.1) return "< 0.1%";
  return `${signed(p.toFixed(p > 0 && p < 10 ? 1 : 0))}%`;
}

/** Formats a latency: 850 µs, 12 ms, 1.3 s. */
export function latency(s) {
  if (!isNumber(s)) return NOTHING;
  if (s === 0) return "0\u00a0ms";
  if (s < 0.001) return `${Math.round(s * 1e6)}\u00a0\u00b5s`;
  if (s < 0.9995) return `${number(s * 1000)}\u00a0ms`;
  return `${number(s)}\u00a0s`;
}

/** Formats a duration in its two largest units: 45 s, 3 min 10 s, 2 h 5 min, 4 d 3 h. */
export function span(s) {
  if (!isNumber(s)) return NOTHING;
  const whole = Math.max(0, Math.round(s));
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = whole ? units.findIndex(([size]) => whole >= size) : 3;
  const [size, name] = units[first];
  const rest = units[first + 1];
  const left = rest ? Math.floor((whole % size) / rest[0]) : 0;
  return `${Math.floor(whole / size)}\u00a0${name}${left ? ` ${left}\u00a0${rest[1]}` : ""}`;
}

const pad = (n) => String(n).padStart(2, "0");

/** Formats Unix time as the time of day, with seconds if asked for. */
export function clock(t, seconds = true) {
  if (!isNumber(t)) return NOTHING;
  const at = new Date(t * 1000);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}${seconds ? `:${pad(at.getSeconds())}` : ""}`;
}

/** Names a window like the menu. */
export function windowName(s) {
  if (s % 3600 === 0) return s === 3600 ? "hour" : `${s / 3600} hours`;
  return `${Math.round(s / 60)} minutes`;
}

/** Formats a count with its noun: 1 sequence, 2 sequences. */
export function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
}
