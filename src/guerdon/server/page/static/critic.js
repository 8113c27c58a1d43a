/** The critic's section: its training by step, and its checkpoints. */

import { byId, el, putText } from "./dom.js";
import { count, isNumber, number, plural } from "./format.js";
import { Lines } from "./lines.js";
import { card } from "./panels.js";
import { extent } from "./scale.js";

const PANELS = [
  ["loss", "Loss", false],
  ["explained_variance", "Explained variance", false],
  ["clip_fraction", "Clip fraction", true],
  ["grad_norm", "Gradient norm", true],
  ["learning_rate", "Learning rate", true],
];
let panels, checkpoints;

/** Creates the empty cards. */
export function make() {
  panels = PANELS.map(([key, title, fromZero]) => {
    const made = card({ title, unit: "by step" });
    const chart = new Lines(made.body, {
      label: `${title} by step`, overTime: false, fromZero, margin: { left: 54 },
      describe: ({ series }) => `the latest is ${number(series[0].values.findLast(isNumber))}`,
    });
    return { key, title, card: made, chart };
  });
  checkpoints = card({ title: "Checkpoints" });
  byId("critic-grid").replaceChildren(...panels.map((panel) => panel.card.node), checkpoints.node);
}

/** Shows the snapshot's critic; hides the section if there is none. */
export function show({ critic }) {
  byId("critic").hidden = critic === null;
  document.querySelector('nav a[href="#critic"]').hidden = critic === null;
  if (critic === null) return;
  const words = [`${critic.name} at step ${count(critic.step)}`, `learning rate ${number(critic.learning_rate)}`];
  words.push(critic.is_durable ? `${plural(critic.num_unsaved, "request")} since the last checkpoint` : "not saved: it has no checkpoint folder");
  if (critic.is_offloaded) words.push("offloaded");
  if (critic.fault) words.push(`fault: ${critic.fault}`);
  putText(byId("critic-state"), words.join(" · "));
  const { step } = critic.reports;
  const [least, most] = extent(step) ?? [0, 1];
  for (const { key, card: made, chart } of panels) {
    made.empty(step.length ? null : "No train request since the server's start");
    if (!step.length) continue;
    const values = critic.reports[key];
    made.say("");
    made.legend([["accent", "now", number(values.findLast(isNumber))]]);
    chart.update({ x: step, from: Math.min(least, most - 1), to: most, series: [{ kind: "accent", name: key.replaceAll("_", " "), values }] });
  }
  const rows = critic.checkpoints.slice().sort((a, b) => b.step - a.step);
  checkpoints.empty(rows.length ? null : "None yet");
  const says = JSON.stringify(rows);
  if (checkpoints.body.dataset.says === says) return;
  checkpoints.body.dataset.says = says;
  checkpoints.body.replaceChildren(el("ol", { class: "scrolls", tabindex: 0, "aria-label": "Checkpoints, the newest first" }, ...rows.map((row) =>
    el("li", {}, el("b", {}, row.name), el("p", { class: "facts" }, told(row)), el("p", { class: "facts code" }, row.weights_version)))));
}

/** Returns the metrics that tell checkpoints apart; the charts have the others of that step. */
function told({ metrics }) {
  const shown = Object.entries(metrics).filter(([key]) => !["clip_fraction", "grad_norm", "learning_rate"].includes(key));
  return shown.map(([key, value]) => `${key.replaceAll("_", " ")} ${number(value)}`).join(" · ") || "no metrics";
}
