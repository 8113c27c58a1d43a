/** A table of outcomes: how often each came, and its share. */

import { el } from "./dom.js";
import { count, percent } from "./format.js";

/** Returns the table, the first of the `fine` ones on top, null without any; `caption` is for screen readers. */
export function shares(caption, outcomes, fine) {
  const isFine = (outcome) => fine.includes(outcome);
  const rows = Object.entries(outcomes).filter(([, n]) => n > 0).sort(([a, n], [b, m]) => (b === fine[0]) - (a === fine[0]) || m - n);
  if (!rows.length) return null;
  const all = rows.reduce((sum, [, n]) => sum + n, 0);
  const most = Math.max(...rows.map(([, n]) => n));
  return el("table", { class: "outcomes" }, el("caption", { class: "hidden" }, caption), el("tbody", {}, ...rows.map(([outcome, n]) => el("tr", {},
    el("th", { scope: "row" }, outcome),
    el("td", { class: "share" }, el("meter", { class: isFine(outcome) ? "ok" : "bad", min: 0, max: most, value: n, "aria-label": `${outcome}: ${count(n)}` })),
    el("td", {}, count(n)),
    el("td", {}, percent(n / all))))));
}
