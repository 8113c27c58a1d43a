/** The traffic's section: requests, tokens, latency, queue, batches and outcomes. */

import { byId, el } from "./dom.js";
import { count, isNumber, latency, number, percent, span } from "./format.js";
import { isRemote, last, total } from "./health.js";
import { Lines } from "./lines.js";
import { shares } from "./outcomes.js";
import { card, lately, meanLately, since } from "./panels.js";

const PANELS = [
  { title: "Requests", unit: "per second", ofRequests: true, main: "requests_per_s", lines: [["requests_per_s", "all", "accent", true], ["errors_per_s", "failed", "bad", false]], format: number },
  { title: "Tokens", unit: "per second", ofParts: true, ofOwn: true, main: "computed_tokens_per_s", lines: [["received_tokens_per_s", "received", "muted", true], ["computed_tokens_per_s", "computed", "accent", true]], format: number },
  { title: "Latency", unit: "from arrival to answer", ofRequests: true, ofWindow: true, main: "latency_p50_s", lines: [["latency_p99_s", "p99", "light", false], ["latency_p90_s", "p90", "middle", false], ["latency_p50_s", "p50", "accent", false]], format: latency },
  { title: "Queue", unit: "sequences", ofParts: true, main: "queue_sequences", lines: [["queue_sequences", "waiting", "accent", true]], format: number },
  { title: "Batches", unit: "share of the token budget", ofParts: true, ofOwn: true, main: "batch_fill", lines: [["batch_fill", "fill", "accent", true]], format: percent },
];
/** Outcomes that are not errors; with Cancelled the client disconnected. */
const FINE = ["ok", "Cancelled"];
/** Shown instead of the requests of a model that is only scored as part of a sum. */
const PART = "Requests are counted at the sum that contains it";
let panels, errors;

/** Creates the empty cards. */
export function make() {
  panels = PANELS.map((panel) => {
    const made = card(panel);
    const chart = new Lines(made.body, {
      label: `${panel.title}, ${panel.unit}`,
      format: panel.format,
      margin: { left: 54 },
      describe: ({ series, when }) => `${when}: ${series.map(({ name, figure }) => `${name} ${figure}`).join(", ")}`,
    });
    made.offer(chart);
    return { ...panel, card: made, chart };
  });
  errors = card({ title: "Outcomes", unit: "since the start" });
  byId("traffic-grid").replaceChildren(...panels.map((panel) => panel.card.node), errors.node);
}

/** Shows the model's series; legends show means of the last minute, or the window's percentiles. */
export function show(snapshot, name, windowS, other) {
  const own = snapshot.series.models[name] ?? {};
  const parts = snapshot.models.find((m) => m.name === name)?.components;
  const elsewhere = parts && `A sum is computed by its components: ${parts.join(", ")}`;
  const isPart = !total(own.requests_per_s, 1) && total(own.sequences_per_s, 1) > 0;
  const totals = snapshot.totals[name] ?? {};
  const isOwn = !isRemote(snapshot, name);
  const besides = other ? snapshot.series.models[other] ?? {} : null;
  for (const { lines, main, card: made, chart, format, ofOwn, ofParts, ofRequests, ofWindow } of panels) {
    made.node.hidden = Boolean(ofOwn) && !isOwn;
    if (made.node.hidden) continue;
    const has = lines.some(([key]) => (own[key] ?? []).some(isNumber)) && !(ofRequests && isPart);
    made.empty(has ? null : (ofParts && elsewhere) || (isPart && PART) || "Nothing in this window");
    const when = ofWindow ? (snapshot.isZoomed ? "whole range" : `last ${span(windowS)}`) : lately(snapshot);
    made.say(has ? when : "");
    if (!has) continue;
    const shown = lines.map(([key, label, kind, area]) => {
      const figure = format(ofWindow ? totals.latency_s?.[label] : meanLately(snapshot, own[key]) ?? last(own[key]));
      return { kind, name: label, area, values: own[key], figure };
    });
    if (besides) {
      const figure = format(ofWindow ? snapshot.totals[other]?.latency_s?.p50 : meanLately(snapshot, besides[main]) ?? last(besides[main]));
      shown.push({ kind: "c1", name: other, area: false, values: besides[main], figure });
    }
    const data = since(snapshot, shown);
    made.legend(data.series.map(({ kind, name: label, figure }) => [kind, label, figure]));
    chart.update({ ...data, when });
  }
  showOutcomes(name, totals, snapshot.server.unknown_requests ?? {});
}

function showOutcomes(name, { requests = {}, sequences = {}, out_of_memory: memory, rechecked = {} }, unknown) {
  const table = shares("Requests and samples by outcome", { Requests: requests, Samples: sequences }, FINE);
  errors.empty(table ? null : `No request for ${name} yet`);
  const facts = [
    ["forwards out of memory", memory ?? 0],
    ["scored again: the same", rechecked.same],
    ["scored again: differs", rechecked.differs],
    ...Object.entries(unknown).map(([outcome, n]) => [`unknown model: ${outcome}`, n]),
  ].filter(([, n]) => isNumber(n));
  errors.body.replaceChildren(
    table ?? "",
    el("dl", { class: "facts" }, ...facts.flatMap(([word, n]) => [el("dt", {}, word), el("dd", {}, count(n))])),
  );
}
