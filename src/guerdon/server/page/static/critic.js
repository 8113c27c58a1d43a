/** The critic's section: its training by step, and its checkpoints. */

import { byId, el, putText } from "./dom.js";
import { count, isNumber, number, plural } from "./format.js";
import { Lines } from "./lines.js";
import { card, lately, meanLately, since } from "./panels.js";
import { extent } from "./scale.js";

/** Each panel's title, whether its axis begins at 0, and its lines: measure, colour and name in the legend. */
const PANELS = [
  ["Loss", false, [["loss", "accent", "now"]]],
  ["Explained variance", false, [["explained_variance", "accent", "now"]]],
  ["Value and return", false, [["return_mean", "muted", "mean return"], ["value_mean", "accent", "mean value"]]],
  ["Clip fraction", true, [["clip_fraction", "accent", "now"]]],
  ["Gradient norm", true, [["grad_norm", "accent", "now"]]],
  ["Learning rate", true, [["learning_rate", "accent", "now"]]],
];
/** Not told of a checkpoint: only the charts have them. */
const IN_CHARTS = ["value_mean", "return_mean", "clip_fraction", "grad_norm", "learning_rate"];
let panels, queue, checkpoints;

/** Creates the empty cards. */
export function make() {
  panels = PANELS.map(([title, fromZero, lines]) => {
    const made = card({ title, unit: "by step" });
    const chart = new Lines(made.body, {
      label: `${title} by step`, overTime: false, fromZero, margin: { left: 54 },
      describe: ({ series }) => series.map(({ name, values }) => `${name}: ${latest(values)}`).join(", "),
    });
    made.offer(chart);
    return { lines, card: made, chart };
  });
  queue = card({ title: "Critic's queue", unit: "sequences", id: "critic-queue" });
  queue.chart = new Lines(queue.body, {
    label: "The critic's queue, sequences", margin: { left: 54 }, describe: ({ series: [{ name, figure }] }) => `${name} ${figure}`,
  });
  queue.offer(queue.chart);
  checkpoints = card({ title: "Checkpoints", id: "checkpoints" });
  byId("critic-grid").replaceChildren(...panels.map((panel) => panel.card.node), queue.node, checkpoints.node);
}

/** Shows the snapshot's critic; hides the section if there is none. */
export function show(snapshot) {
  const { critic } = snapshot;
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
  for (const { lines, card: made, chart } of panels) {
    const has = lines.some(([key]) => critic.reports[key].some(isNumber));
    made.empty(!step.length ? "No train request yet" : has ? null : "Unknown for these train requests");
    if (!has) continue;
    const series = lines.map(([key, kind]) => ({ kind, name: key.replaceAll("_", " "), values: critic.reports[key] }));
    made.say("");
    made.legend(lines.map(([key, kind, name]) => [kind, name, latest(critic.reports[key])]));
    chart.update({ x: step, from: Math.min(least, most - 1), to: most, series });
  }
  showQueue(snapshot);
  const rows = critic.checkpoints.slice().sort((a, b) => b.step - a.step);
  checkpoints.empty(rows.length ? null : "None yet");
  const says = JSON.stringify(rows);
  if (checkpoints.body.dataset.says === says) return;
  checkpoints.body.dataset.says = says;
  checkpoints.body.replaceChildren(el("ol", { class: "scrolls", tabindex: 0, "aria-label": "Checkpoints, the newest first" }, ...rows.map((row) =>
    el("li", {}, el("b", {}, row.name), el("p", { class: "facts" }, told(row)), el("p", { class: "facts code" }, row.weights_version)))));
}

/** Shows what waits for the critic: its train requests and scores take turns. */
function showQueue(snapshot) {
  const { name } = snapshot.models.find((m) => m.is_critic);
  const values = snapshot.series.models[name]?.queue_sequences;
  const has = values?.some(isNumber);
  queue.empty(has ? null : "Nothing in this window");
  if (!has) return;
  const figure = number(meanLately(snapshot, values));
  queue.say(lately(snapshot));
  queue.legend([["accent", "waiting", figure]]);
  queue.chart.update(since(snapshot, [{ kind: "accent", name: "waiting", area: true, values, figure }]));
}

function latest(values) {
  return number(values.findLast(isNumber));
}

/** Returns the metrics that tell checkpoints apart; the charts have the others of that step. */
function told({ metrics }) {
  const shown = Object.entries(metrics).filter(([key]) => !IN_CHARTS.includes(key));
  return shown.map(([key, value]) => `${key.replaceAll("_", " ")} ${number(value)}`).join(" · ") || "no metrics";
}
