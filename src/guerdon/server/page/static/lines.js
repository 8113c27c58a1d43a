/** Lines over time, or over a critic's steps. */

import { Chart, areaPath, linePath } from "./chart.js";
import { svg } from "./dom.js";
import { clock, isNumber, number } from "./format.js";
import { decimals, extent, linear, rounded, ticks, timeTicks } from "./scale.js";

const MOST_TICKS = 3;
/** Smaller differences, as a share of the values, are not stretched over the chart's height: they are rounding. */
const LEAST_RANGE = 0.002;
const charts = new Set();
let isSharing = false;

/**
 * `data`: { x: [..], from, to, series: [{ kind, name, values, area }] }, values numbers or null. If x goes back, as a
 * critic's steps do when a checkpoint is loaded, the line breaks.
 * All `overTime` charts of the page share their cursor, so that a peak in one can be compared with the others.
 */
export class Lines extends Chart {
  constructor(host, { format = number, overTime = true, fromZero = true, title = null, ...rest }) {
    super(host, rest);
    this.format = format;
    this.overTime = overTime;
    this.fromZero = fromZero;
    this.title = title ?? (overTime ? (x) => clock(x) : (x) => `Step ${number(x)}`);
    if (overTime) charts.add(this);
  }

  layout() {
    const { left, right, top, bottom } = this.box;
    const { from, to, series } = this.data;
    const found = extent(series.flatMap(({ values }) => values)) ?? [0, 1];
    const [low, high] = this.fromZero ? [Math.min(0, found[0]), found[1]] : widened(found);
    this.domain = rounded(low, high, MOST_TICKS);
    this.x = linear([from, to], [left, right]);
    this.y = linear(this.domain, [bottom, top]);
  }

  axes() {
    const { from, to } = this.data;
    const most = Math.max(2, Math.floor((this.box.right - this.box.left) / (this.overTime ? 84 : 56)));
    const marks = ticks(...this.domain, MOST_TICKS + 1);
    const digits = Math.max(2, decimals(marks));
    const y = this.yAxis(this.y, marks, (value) => this.format(value, digits));
    if (!this.overTime) return [...y, ...this.xAxis(this.x, ticks(from, to, most), number)];
    const { at, withSeconds } = timeTicks(from, to, most);
    return [...y, ...this.xAxis(this.x, at, (t) => clock(t, withSeconds))];
  }

  marks() {
    return this.data.series.flatMap(({ kind, values, area }) => {
      const points = this.data.x.flatMap((x, i, all) => {
        const point = [this.x(x), isNumber(values[i]) ? this.y(values[i]) : null];
        return x < all[i - 1] ? [[point[0], null], point] : [point];
      });
      const line = svg("path", { class: `line ${kind}`, d: linePath(points) });
      if (!area) return [line];
      return [svg("path", { class: `area ${kind}`, d: areaPath(points, this.y(Math.max(this.domain[0], 0))) }), line];
    });
  }

  get canZoom() {
    return this.overTime;
  }

  timeAt(px) {
    return this.x.invert(px);
  }

  timeOf(key) {
    return this.data.x[key];
  }

  table() {
    const { x, series } = this.data;
    const name = this.overTime ? "time" : "step";
    const at = (value) => (this.overTime ? new Date(value * 1000).toISOString() : value);
    return { head: [name, ...series.map((line) => line.name)], rows: x.map((value, i) => [at(value), ...series.map(({ values }) => values[i])]) };
  }

  keys() {
    return this.data.x.length;
  }

  pick(px) {
    const { x } = this.data;
    if (!x.length) return null;
    return nearest(x, this.x.invert(px));
  }

  told(key) {
    const { x, series } = this.data;
    const rows = series.map(({ kind, name, values }) => [kind, name, this.format(values[key])]);
    return { x: this.x(x[key]), title: this.title(x[key]), rows, key };
  }

  pointed(told) {
    const dots = this.data.series.filter(({ values }) => isNumber(values[told.key])).map(({ kind, values }) =>
      svg("circle", { class: `dot ${kind}`, cx: told.x, cy: this.y(values[told.key]), r: 3.5 }));
    return [...super.pointed(told), ...dots];
  }

  show(key) {
    super.show(key);
    if (!this.overTime || isSharing) return;
    isSharing = true;
    const moment = key === null || !this.data ? null : this.data.x[key];
    for (const chart of charts) if (chart !== this) chart.mirror(moment);
    isSharing = false;
  }

  /** Marks the time of another chart's read-out, without a read-out of its own. */
  mirror(moment) {
    if (!this.data?.x.length || !this.cursor) return;
    const key = moment === null ? null : nearest(this.data.x, moment);
    this.cursor.replaceChildren(...(key === null ? [] : this.pointed(this.told(key))));
  }
}

/** Returns the range, at least LEAST_RANGE of its values wide. */
function widened([low, high]) {
  const missing = LEAST_RANGE * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
  return missing > 0 ? [low - missing / 2, high + missing / 2] : [low, high];
}

/** Returns the index of the nearest value, of equally near ones the last. */
function nearest(x, value) {
  let best = 0;
  for (let i = 1; i < x.length; i++) if (Math.abs(x[i] - value) <= Math.abs(x[best] - value)) best = i;
  return best;
}

/** Draws a line without axes, for a tile. */
export function sparkline(values, kind, width = 120, height = 28) {
  const found = extent(values);
  const y = linear([Math.min(found?.[0] ?? 0, 0), Math.max(found?.[1] ?? 1, 1e-9)], [height - 2, 3]);
  const points = values.map((v, i) => [(i / Math.max(values.length - 1, 1)) * width, isNumber(v) ? y(v) : null]);
  const box = { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" };
  return svg("svg", box,
    svg("path", { class: `area ${kind}`, d: areaPath(points, found?.[0] < 0 ? y(0) : height) }),
    svg("path", { class: `line ${kind}`, d: linePath(points), "vector-effect": "non-scaling-stroke" }));
}
