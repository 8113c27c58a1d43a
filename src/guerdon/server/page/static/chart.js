/** The base of every chart: size, axes, and the read-out under the pointer or by the arrow keys. */

import { el, putText, svg } from "./dom.js";

const GAP = 14;

/**
 * A chart in `host`, redrawn whenever its data or size changes. Subclasses define
 *   layout()        sets scales from this.data and the plot's edges
 *   marks()         SVG elements above the axes
 *   pick(x, y)      the item at that pixel: an integer, or null
 *   keys()          the number of items, for the arrow keys
 *   told(key)       { x, y, title, rows: [[class, name, value]] } of one item
 */
export class Chart {
  constructor(host, { label, height = 168, margin = {}, describe = () => "" }) {
    this.host = host;
    this.label = label;
    this.height = height;
    this.margin = { top: 10, right: 10, bottom: 22, left: 42, ...margin };
    this.describe = describe;
    this.data = null;
    this.key = null;
    host.classList.add("chart");
    this.svg = svg("svg", { role: "application", "aria-roledescription": "chart", tabindex: 0, height, "aria-label": label });
    this.readout = el("div", { class: "readout", hidden: true });
    this.said = el("p", { class: "hidden", role: "status" });
    host.append(this.svg, this.readout, this.said);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.render()).observe(host);
  }

  /** Draws new data. */
  update(data) {
    this.data = data;
    this.render();
  }

  /** Returns the plot's edges in pixels. */
  get box() {
    const { top, right, bottom, left } = this.margin;
    return { left, top, right: Math.max(this.width - right, left + 1), bottom: this.height - bottom };
  }

  render() {
    this.width = this.host.clientWidth;
    if (!this.data || !this.width) return;
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.setAttribute("aria-label", [this.label, this.describe(this.data)].filter(Boolean).join(". "));
    this.layout();
    this.cursor = svg("g", { class: "cursor" });
    this.svg.replaceChildren(...this.axes(), ...this.marks(), this.cursor);
    if (this.key !== null) this.show(this.key < this.keys() ? this.key : null);
  }

  axes() {
    return [];
  }

  /** Returns horizontal lines with their numbers at the left. */
  yAxis(scale, at, format) {
    const { left, right } = this.box;
    return at.map((value) => {
      const y = Math.round(scale(value)) + 0.5;
      return svg("g", { class: "tick" },
        svg("line", { x1: left, x2: right, y1: y, y2: y }),
        svg("text", { x: left - 8, y, dy: "0.32em", "text-anchor": "end" }, format(value)));
    });
  }

  /** Returns the numbers under the plot; those that would overflow are moved inside. */
  xAxis(scale, at, format) {
    const { left, right, bottom } = this.box;
    return at.map((value) => {
      const x = scale(value);
      const anchor = x < left + 16 ? "start" : x > right - 16 ? "end" : "middle";
      return svg("text", { class: "tick-x", x, y: bottom + 16, "text-anchor": anchor }, format(value));
    });
  }

  point(event) {
    if (!this.data) return;
    const bounds = this.svg.getBoundingClientRect();
    this.show(this.pick(event.clientX - bounds.left, event.clientY - bounds.top));
  }

  press(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (event.key === "Escape") this.show(null);
    if (move === undefined || !this.data || !this.keys()) return;
    event.preventDefault();
    const last = this.keys() - 1;
    const from = this.key ?? (move > 0 ? -1 : last + 1);
    this.show(Math.min(Math.max(from + move, 0), last));
    const { title, rows } = this.told(this.key);
    putText(this.said, [title, ...rows.map(([, name, value]) => `${name} ${value}`)].join(", "));
  }

  /** Shows the read-out of `key`; null hides it. */
  show(key) {
    this.key = key;
    const told = key === null || !this.data ? null : this.told(key);
    this.readout.hidden = told === null;
    this.cursor?.replaceChildren(...(told ? this.pointed(told) : []));
    if (!told) return;
    this.readout.replaceChildren(
      el("strong", {}, told.title),
      ...told.rows.map(([kind, name, value]) =>
        el("div", {}, el("i", { class: `swatch ${kind}` }), el("span", {}, name), el("b", {}, value))),
    );
    const { offsetWidth: width } = this.readout;
    const beside = told.x + GAP + width < this.width ? told.x + GAP : told.x - GAP - width;
    this.readout.style.left = `${Math.max(0, Math.min(beside, this.width - width))}px`;
    this.readout.style.top = `${this.margin.top}px`;
  }

  /** Returns the marks at the place of the read-out. */
  pointed({ x }) {
    const { top, bottom } = this.box;
    return [svg("line", { class: "crosshair", x1: x, x2: x, y1: top, y2: bottom })];
  }
}

/** Returns an SVG path through the points `[x, y]`; a null y breaks it, and a lone point is a dot. */
export function linePath(points) {
  let path = "";
  let isOpen = false;
  points.forEach(([x, y], i) => {
    if (y === null) {
      isOpen = false;
      return;
    }
    path += `${isOpen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (!isOpen && (points[i + 1]?.[1] ?? null) === null) path += "h0.01";
    isOpen = true;
  });
  return path;
}

/** Returns an SVG path of the area between the points and the line at `base`. */
export function areaPath(points, base) {
  let path = "";
  let from = null;
  points.forEach(([x, y], i) => {
    if (y === null) return;
    if (from === null) {
      from = x;
      path += `M${x.toFixed(1)} ${base}`;
    }
    path += `L${x.toFixed(1)} ${y.toFixed(1)}`;
    if ((points[i + 1]?.[1] ?? null) === null) {
      path += `L${x.toFixed(1)} ${base}Z`;
      from = null;
    }
  });
  return path;
}
