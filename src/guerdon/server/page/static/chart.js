/** The base of every chart: size, axes, and the read-out under the pointer or by the arrow keys. */

import { el, putText, svg } from "./dom.js";
import { clock } from "./format.js";
import { zoomTo } from "./zoom.js";

const GAP = 14;
/** A shorter drag is a press, in pixels. */
const LEAST_DRAG = 8;

/**
 * A chart in `host`, redrawn whenever its data or size changes. Subclasses define
 *   layout()        sets scales from this.data and the plot's edges
 *   marks()         SVG elements above the axes
 *   pick(x, y)      the item at that pixel: an integer, or null
 *   keys()          the number of items, for the arrow keys
 *   told(key)       { x, y, title, rows: [[class, name, value]] } of one item
 *   table()         { head, rows } for a CSV file
 * and charts over time, which can be zoomed,
 *   timeAt(x)       the Unix time at that pixel
 *   timeOf(key)     the Unix time of an item
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
    this.from = null;
    host.classList.add("chart");
    this.svg = svg("svg", { role: "application", "aria-roledescription": "chart", tabindex: 0, height, "aria-label": label });
    this.readout = el("div", { class: "readout", hidden: true });
    this.said = el("p", { class: "hidden", role: "status" });
    host.append(this.svg, this.readout, this.said);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerdown", (event) => {
      this.point(event);
      this.drag(event);
    });
    this.svg.addEventListener("pointerup", (event) => this.drop(event));
    this.svg.addEventListener("pointercancel", () => this.mark(null));
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

  /** Whether a range of time can be chosen in it. */
  get canZoom() {
    return false;
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
    this.chosen = svg("rect", { class: "chosen", y: this.box.top, height: this.box.bottom - this.box.top, width: 0 });
    this.svg.replaceChildren(...this.axes(), ...this.marks(), this.chosen, this.cursor);
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
    const x = event.clientX - bounds.left;
    this.show(this.pick(x, event.clientY - bounds.top));
    if (this.from !== null) this.mark(this.from, this.within(x));
  }

  within(x) {
    const { left, right } = this.box;
    return Math.min(Math.max(x, left), right);
  }

  /** Begins to choose a range of time; a finger reads values instead. */
  drag(event) {
    if (!this.data || !this.canZoom || event.pointerType === "touch" || event.button !== 0) return;
    this.svg.setPointerCapture(event.pointerId);
    this.from = this.within(event.clientX - this.svg.getBoundingClientRect().left);
  }

  drop(event) {
    if (this.from === null) return;
    const { from } = this;
    const to = this.within(event.clientX - this.svg.getBoundingClientRect().left);
    this.mark(null);
    if (Math.abs(to - from) >= LEAST_DRAG) zoomTo(this.timeAt(from), this.timeAt(to));
  }

  /** Shows the range between two pixels; null ends the choice. */
  mark(from, to = from) {
    this.from = from;
    this.chosen?.setAttribute("x", Math.min(from ?? 0, to ?? 0));
    this.chosen?.setAttribute("width", Math.abs((from ?? 0) - (to ?? 0)));
  }

  /** Chooses the range's start, then its end, at the item of the read-out. */
  choose() {
    if (this.key === null) return;
    const moment = this.timeOf(this.key);
    if (this.since === null || this.since === undefined) {
      this.since = moment;
      putText(this.said, `From ${clock(moment)}: move to the other end and press Enter to zoom`);
    } else {
      const { since } = this;
      this.since = null;
      zoomTo(since, moment);
    }
  }

  press(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    const move = moves[event.key];
    if (event.key === "Escape") {
      this.since = null;
      this.show(null);
    }
    if (event.key === "Enter" && this.data && this.canZoom) this.choose();
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

/** Returns an SVG path through the points `[x, y]`; a null y breaks it, and a lone point is a dash. */
export function linePath(points) {
  let path = "";
  let isOpen = false;
  points.forEach(([x, y], i) => {
    if (y === null) {
      isOpen = false;
      return;
    }
    path += `${isOpen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (!isOpen && (points[i + 1]?.[1] ?? null) === null) path += "m-1.5 0h3";
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
