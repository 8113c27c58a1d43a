/** Rewards over time: one column of shades per step of time, with the quantiles as lines. */

import { Chart, linePath } from "./chart.js";
import { svg } from "./dom.js";
import { clock, count, isNumber, reward } from "./format.js";
import { decimals, linear, ticks, timeTicks } from "./scale.js";

const QUANTILES = [["p05", "edge"], ["p95", "edge"], ["p25", "quarter"], ["p75", "quarter"], ["p50", "median"]];

/** With more changes of the weights, each is a short mark instead of a line. */
const MOST_LINES = 12;

/**
 * `data`: { from, to, start, step, count, mean, p05..p95, heat: { edges, counts }, swaps: [{ time, version }] }; `from` and
 * `to` are the axis's ends, `start` and `step` place the columns, `swaps` are changes of the weights.
 */
export class Heat extends Chart {
  layout() {
    const { left, right, top, bottom } = this.box;
    const { from, to, heat } = this.data;
    this.x = linear([from, to], [left, right]);
    this.domain = filled(heat);
    this.y = linear(this.domain, [bottom, top]);
  }

  axes() {
    const { from, to } = this.data;
    const { at, withSeconds } = timeTicks(from, to, Math.max(2, Math.floor((this.box.right - this.box.left) / 84)));
    const [low, high] = this.domain;
    const marks = ticks(low, high, 5);
    return [
      ...this.yAxis(this.y, marks, (v) => reward(v, decimals(marks))),
      ...this.xAxis(this.x, at, (t) => clock(t, withSeconds)),
    ];
  }

  marks() {
    return [this.cells(), ...this.swaps(), ...this.quantiles()];
  }

  cells() {
    const { start, step, heat } = this.data;
    const { edges, counts } = heat;
    const cells = svg("g", { class: "cells", "shape-rendering": "crispEdges" });
    counts.forEach((column, i) => {
      const peak = Math.max(...(column ?? [0]));
      if (!peak) return;
      const [x0, x1] = [this.clip(start + i * step), this.clip(start + (i + 1) * step)];
      if (x1 <= x0) return;
      column.forEach((n, j) => {
        if (!n) return;
        const [y0, y1] = [this.y(edges[j + 1]), this.y(edges[j])];
        // Relative to the column's own peak, so that a quiet minute is as visible as a busy one. The power lifts tails.
        const shade = 0.05 + 0.75 * (n / peak) ** 0.8;
        cells.append(svg("rect", { x: x0, width: x1 - x0, y: y0, height: Math.max(y1 - y0, 1), opacity: shade.toFixed(2) }));
      });
    });
    return cells;
  }

  /** Marks changes of the weights: by lines, or by marks at the axis if there are many, as with a critic. */
  swaps() {
    const { top, bottom } = this.box;
    const { swaps } = this.data;
    const y1 = swaps.length > MOST_LINES ? bottom - 6 : top;
    return swaps.map(({ time }) => svg("line", { class: "swap", x1: this.x(time), x2: this.x(time), y1, y2: bottom }));
  }

  clip(t) {
    const { left, right } = this.box;
    return Math.round(Math.min(Math.max(this.x(t), left), right));
  }

  quantiles() {
    const lines = QUANTILES.map(([name, kind]) =>
      [kind, this.data[name].map((v, i) => [this.clip(this.middle(i)), isNumber(v) ? this.y(v) : null])]);
    return lines.map(([kind, points]) => svg("path", { class: `quantile ${kind}`, d: linePath(points) }));
  }

  middle(i) {
    return this.data.start + (i + 0.5) * this.data.step;
  }

  get canZoom() {
    return true;
  }

  timeAt(px) {
    return this.x.invert(px);
  }

  timeOf(key) {
    return this.middle(key);
  }

  table() {
    const names = ["count", "mean", ...QUANTILES.map(([name]) => name).sort()];
    const rows = this.data.count.map((_, i) => [new Date((this.data.start + i * this.data.step) * 1000).toISOString(), ...names.map((name) => this.data[name][i])]);
    return { head: ["from", ...names], rows };
  }

  keys() {
    return this.data.count.length;
  }

  pick(px) {
    const i = Math.floor((this.x.invert(px) - this.data.start) / this.data.step);
    return i >= 0 && i < this.keys() ? i : null;
  }

  told(i) {
    const { start, step, count: counts, mean } = this.data;
    const rows = [["", "rewards", count(counts[i] ?? 0)]];
    if (counts[i]) {
      rows.push(["", "mean", reward(mean[i])]);
      for (const [name, label] of [["p95", "95%"], ["p75", "75%"], ["p50", "median"], ["p25", "25%"], ["p05", "5%"]]) {
        rows.push([{ p50: "median", p25: "quarter", p75: "quarter" }[name] ?? "edge", label, reward(this.data[name][i])]);
      }
    }
    const swap = this.data.swaps.findLast(({ time }) => time >= start + i * step && time < start + (i + 1) * step);
    if (swap) rows.push(["swap", "new weights", swap.version.slice(0, 16)]);
    return { x: this.clip(this.middle(i)), title: `${clock(start + i * step)} – ${clock(start + (i + 1) * step)}`, rows };
  }
}

/** Returns the range of non-empty bins, with one bin of margin at both ends. */
function filled({ edges, counts }) {
  let low = edges.length, high = -1;
  for (const column of counts) {
    (column ?? []).forEach((n, j) => {
      if (!n) return;
      low = Math.min(low, j);
      high = Math.max(high, j);
    });
  }
  if (high < 0) return [edges[0], edges.at(-1)];
  return [edges[Math.max(0, low - 1)], edges[Math.min(edges.length - 1, high + 2)]];
}
