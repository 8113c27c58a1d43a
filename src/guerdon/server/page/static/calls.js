/** The card of a judge in words: its calls to another server's model, what they cost, and how many answers were of use. */

import { byId, el } from "./dom.js";
import { count, isNumber, latency, number, percent } from "./format.js";
import { shares } from "./outcomes.js";
import { card } from "./panels.js";

let panel;

/** Creates the empty card. */
export function make() {
  panel = card({ title: "Calls", unit: "to the judge's server since the start", id: "calls" });
  byId("traffic-grid").append(panel.node);
}

/** Shows the judge's calls; hides the card of other models. */
export function show(snapshot, name) {
  const own = snapshot.calls[name];
  panel.node.hidden = !own;
  if (!own) return;
  const isUsed = Object.keys(own.outcomes).length > 0 || own.kept_answers > 0;
  panel.empty(isUsed ? null : "No call yet");
  if (!isUsed) return;
  const facts = [
    ["mean time of a call", latency(own.mean_s)],
    ["calls in progress", count(own.in_progress)],
    ["answers kept, not asked for again", count(own.kept_answers)],
    ["answers without a verdict", count(own.unreadable_answers)],
    ["tokens of prompts", count(own.prompt_tokens)],
    ["tokens of answers", count(own.completion_tokens)],
    ...(isNumber(own.cost) ? [["cost, in the prices' currency", number(own.cost)]] : []),
    ...(isNumber(own.budget_used) ? [["budget used", percent(own.budget_used)]] : []),
  ];
  panel.body.replaceChildren(el("div", { class: "pair" },
    shares("Calls by outcome", { "": own.outcomes }, ["answered"]),
    el("dl", { class: "facts" }, ...facts.flatMap(([word, figure]) => [el("dt", {}, word), el("dd", {}, figure)]))));
}
