/** Length against reward: one point per sample, and a line through the means of the length bins. */

import { Chart, linePath } from "./chart.js";
import { svg } from "./dom.js";
import { count, number, reward } from "./format.js";
import { decimals, extent, linear, logTicks, logarithmic, rounded, ticks } from "./scale.js";

/** The axis is logarithmic if the longest is at least this many times the shortest. */
const WIDE = 20;

/** `data`: { points: [[tokens, reward]], bins: [{ tokens, mean, count }] }. */
export class Scatter extends Chart {
  layout() {
    const { left, right, top, bottom } = this.box;
    const { points, bins } = this.data;
    const [shortest, longest] = extent(points.map(([tokens]) => tokens)) ?? [0, 1];
    this.isLog = shortest > 0 && longest / shortest >= WIDE;
    const room = Math.max((longest - shortest) * 0.03, 1);
    this.lengths = this.isLog ? [shortest / 1.1, longest * 1.1] : [Math.max(0, shortest - room), longest + room];
    this.x = (this.isLog ? logarithmic : linear)(this.lengths, [left, right]);
    this.domain = rounded(...(extent([...points.map(([, r]) => r), ...bins.map(({ mean }) => mean)]) ?? [0, 1]), 4);
    this.y = linear(this.domain, [bottom, top]);
  }

  axes() {
    const most = Math.max(2, Math.floor((this.box.right - this.box.left) / 60));
    const at = (this.isLog ? logTicks : ticks)(...this.lengths, most).filter(Number.isInteger);
    const marks = ticks(...this.domain, 5);
    return [
      ...this.yAxis(this.y, marks, (v) => reward(v, decimals(marks))),
      ...this.xAxis(this.x, at, number),
    ];
  }

  marks() {
    const { points, bins } = this.data;
    const cloud = points.map(([tokens, r]) => svg("circle", { class: "point", cx: this.x(tokens), cy: this.y(r), r: 2.6 }));
    const means = bins.map(({ tokens, mean }) => [this.x(tokens), mean === null ? null : this.y(mean)]);
    const dots = means.filter(([, y]) => y !== null).map(([cx, cy]) => svg("circle", { class: "dot mean", cx, cy, r: 3 }));
    return [...cloud, svg("path", { class: "trend-under", d: linePath(means) }),
      svg("path", { class: "trend", d: linePath(means) }), ...dots];
  }

  table() {
    return { head: ["tokens", "reward"], rows: this.data.points };
  }

  keys() {
    return this.data.bins.length;
  }

  pick(px) {
    const distances = this.data.bins.map(({ tokens }) => Math.abs(this.x(tokens) - px));
    return distances.length ? distances.indexOf(Math.min(...distances)) : null;
  }

  told(i) {
    const { tokens, mean, count: n } = this.data.bins[i];
    return { x: this.x(tokens), title: `about ${number(tokens)} tokens`, rows: [["trend", "mean reward", reward(mean)], ["", "samples", count(n)]] };
  }
}
