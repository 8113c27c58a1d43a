/** The card of recent errors: each kind, how often and when it came; never a text. */

import { byId, el } from "./dom.js";
import { count, plural, span } from "./format.js";
import { sparkline } from "./lines.js";
import { card } from "./panels.js";

let panel;

/** Creates the empty card. */
export function make() {
  panel = card({ title: "Recent errors", unit: "by kind", wide: true, id: "errors" });
  byId("traffic-grid").append(panel.node);
}

/** Shows the model's errors in the window; hides the card if there were none. */
export function show(snapshot, name) {
  const rows = snapshot.errors[name] ?? [];
  panel.node.hidden = !rows.length;
  if (!rows.length) return;
  const { now } = snapshot.server;
  const sum = (of) => rows.filter((row) => row.of === of).reduce((all, row) => all + row.count, 0);
  const parts = ["request", "sample"].map((of) => [of, sum(of)]).filter(([, n]) => n);
  panel.say(`${parts.map(([of, n]) => plural(n, of)).join(" and ")} ${snapshot.period}`);
  panel.body.replaceChildren(el("div", { class: "scrolls-x", tabindex: 0, role: "region", "aria-label": "Recent errors" }, el("table", { class: "errors" },
    el("thead", {}, el("tr", {}, ...["Kind", "Number", "Last", "Over time", "HTTP", "What it means"].map((word) => el("th", { scope: "col" }, word)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {},
      el("th", { scope: "row" }, row.kind, el("small", {}, row.of === "sample" ? "a sample" : "a whole request")),
      el("td", {}, count(row.count)),
      el("td", {}, `${span(now - row.last)} ago`),
      el("td", { class: "line" }, sparkline(row.counts, "bad")),
      el("td", {}, row.of === "sample" ? "in the answer" : String(row.http)),
      el("td", {}, row.what)))))));
}
