/** A table of outcomes: how often each came, and its share. */

import { el } from "./dom.js";
import { count, percent } from "./format.js";

/**
 * Returns the table of `groups` by name, each with how often each outcome came, the first of the `fine` ones on top; null
 * if nothing came. A group named "" has no heading; `caption` is for screen readers.
 */
export function shares(caption, groups, fine) {
  const parts = Object.entries(groups).map(([name, outcomes]) => [name, sorted(outcomes, fine)]).filter(([, rows]) => rows.length);
  if (!parts.length) return null;
  return el("table", { class: "outcomes" }, el("caption", { class: "hidden" }, caption), ...parts.map(([name, rows]) => el("tbody", {},
    name ? el("tr", {}, el("th", { scope: "rowgroup", colspan: 4, class: "group" }, name)) : "",
    ...lines(rows, fine))));
}

function sorted(outcomes, fine) {
  return Object.entries(outcomes).filter(([, n]) => n > 0).sort(([a, n], [b, m]) => (b === fine[0]) - (a === fine[0]) || m - n);
}

function lines(rows, fine) {
  const all = rows.reduce((sum, [, n]) => sum + n, 0);
  const most = Math.max(...rows.map(([, n]) => n));
  return rows.map(([outcome, n]) => el("tr", {},
    el("th", { scope: "row" }, outcome),
    el("td", { class: "share" }, el("meter", { class: fine.includes(outcome) ? "ok" : "bad", min: 0, max: most, value: n, "aria-label": `${outcome}: ${count(n)}` })),
    el("td", {}, count(n)),
    el("td", {}, percent(n / all))));
}
