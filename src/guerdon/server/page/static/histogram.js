/** The window's rewards as bars, with the reference's as an outline. */

import { Chart } from "./chart.js";
import { svg } from "./dom.js";
import { percent, reward } from "./format.js";
import { decimals, linear, rounded, ticks } from "./scale.js";

/** `data`: { edges, window, reference, means: [window's, reference's] }; counts are shown as shares of their sum. */
export class Histogram extends Chart {
  layout() {
    const { left, right, top, bottom } = this.box;
    this.shares = [this.data.window, this.data.reference].map(shares);
    const used = this.shares.flatMap((row) => row.map((s, i) => (s > 0 ? i : -1)).filter((i) => i >= 0));
    const { edges } = this.data;
    const first = used.length ? Math.max(0, Math.min(...used) - 1) : 0;
    const last = used.length ? Math.min(edges.length - 1, Math.max(...used) + 2) : edges.length - 1;
    this.x = linear([edges[first], edges[last]], [left, right]);
    this.range = [first, last];
    this.domain = rounded(0, Math.max(...this.shares.flat(), 0.01), 3);
    this.y = linear(this.domain, [bottom, top]);
  }

  axes() {
    const { edges } = this.data;
    const [low, high] = this.range.map((i) => edges[i]);
    const marks = ticks(low, high, Math.max(2, Math.floor((this.box.right - this.box.left) / 60)));
    return [
      ...this.yAxis(this.y, ticks(...this.domain, 4), percent),
      ...this.xAxis(this.x, marks, (v) => reward(v, decimals(marks))),
    ];
  }

  marks() {
    const { edges } = this.data;
    const { bottom, top } = this.box;
    const [now, before] = this.shares;
    const bars = now.map((share, i) => {
      if (!share) return null;
      const [x0, x1] = [this.x(edges[i]), this.x(edges[i + 1])];
      const y = this.y(share);
      return svg("rect", { class: "bar", x: x0 + 0.5, width: Math.max(x1 - x0 - 1, 1), y, height: bottom - y });
    });
    let outline = "";
    if (before.some((share) => share > 0)) {
      const [first, last] = this.range;
      outline = `M${this.x(edges[first]).toFixed(1)} ${bottom}`;
      for (let i = first; i < last; i++) {
        const y = this.y(before[i]).toFixed(1);
        outline += `L${this.x(edges[i]).toFixed(1)} ${y}L${this.x(edges[i + 1]).toFixed(1)} ${y}`;
      }
      outline += `L${this.x(edges[last]).toFixed(1)} ${bottom}`;
    }
    const means = this.data.means.map((mean, i) => mean === null ? null : svg("line", {
      class: `mean ${i ? "before" : "now"}`, x1: this.x(mean), x2: this.x(mean), y1: top, y2: bottom,
    }));
    return [...bars, svg("path", { class: "outline", d: outline }), ...means].filter(Boolean);
  }

  table() {
    const { edges, window: now, reference } = this.data;
    return { head: ["from", "to", "window", "reference"], rows: now.map((n, i) => [edges[i], edges[i + 1], n, reference[i]]) };
  }

  keys() {
    return this.data.window.length;
  }

  pick(px) {
    const value = this.x.invert(px);
    const i = this.data.edges.findIndex((edge, k) => edge <= value && value < this.data.edges[k + 1]);
    return i < 0 ? null : i;
  }

  told(i) {
    const { edges } = this.data;
    const x = this.x((edges[i] + edges[i + 1]) / 2);
    const rows = [["accent", "window", percent(this.shares[0][i])], ["outline", "reference", percent(this.shares[1][i])]];
    return { x, title: `${reward(edges[i])} to ${reward(edges[i + 1])}`, rows };
  }
}

function shares(counts) {
  const total = counts.reduce((sum, n) => sum + n, 0);
  return counts.map((n) => (total ? n / total : 0));
}
