/** The models' section: each model, how it runs, and why. */

import { byId, el } from "./dom.js";
import { count } from "./format.js";

const PATHS = {
  "packed+shared": "packed, shared prompts computed once",
  "shared": "not packed, shared prompts computed once",
  packed: "packed, without padding",
  padded: "padded to the longest",
  single: "one by one",
  function: "a Python function",
  sum: "a weighted sum of its components",
  chat: "another server's model",
};
/** What `why` says, if it gives no reason. */
const WHY = { sum: "Sum of", chat: "Asks" };
/** Ways to run without weights of their own. */
const WEIGHTLESS = ["function", "sum", "chat"];
let said = "";

/** Shows one card per model. */
export function show({ models }) {
  const says = JSON.stringify(models);
  if (says === said) return;
  said = says;
  byId("models-grid").replaceChildren(...models.map(model));
}

function model(m) {
  const takes = [["takes_text", "text"], ["takes_messages", "messages"], ["takes_tokens", "tokens"], ["takes_prompts", "prompts"]];
  const facts = [
    ["Runs", PATHS[m.path] ?? m.path],
    [WHY[m.path] ?? "Why", m.why === m.source ? "" : m.why],
    ["Proved", m.proofs.join("; ")],
    ["Weights", WEIGHTLESS.includes(m.path) ? "" : `${m.dtype} on ${m.device}`],
    ["Version", m.weights_version, "code"],
    ["Source", m.source, "code"],
    ["Outputs", m.outputs.join(", ").replaceAll("_", " ")],
    ["Attributes", m.attribute_names.join(", ")],
    ["Steps", m.step_rule],
    ["Inputs", takes.filter(([key]) => m[key]).map(([, word]) => word).join(", ")],
    ["Longest sequence", m.max_length ? `${count(m.max_length)} tokens` : ""],
  ];
  return el("article", { class: "card model" },
    el("div", { class: "title" },
      el("h3", {}, m.name, el("small", {}, m.is_critic ? "critic" : m.components ? "sum" : m.kind.replaceAll(/[-_]/g, " "))),
      el("span", { class: `pill ${m.is_loaded ? "ok" : "idle"}` }, m.is_loaded ? "loaded" : "unloaded")),
    el("dl", { class: "about" }, ...facts.filter(([, value]) => value).flatMap(([word, value, kind]) =>
      [el("dt", {}, word), el("dd", { class: kind ?? null }, value)])));
}
