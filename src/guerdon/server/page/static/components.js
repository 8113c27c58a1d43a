/** The section of what a reward is made of: a sum's components, a judge's criteria, attributes; a teacher's log-probs. */

import { byId, putText } from "./dom.js";
import { count, isNumber, number, percent, reward } from "./format.js";
import { givesLogprobs } from "./health.js";
import { Lines } from "./lines.js";
import { axis, card, middles } from "./panels.js";

/** The attribute of a judge that is no criterion: the probability of tokens that are no labels. */
const OTHER = "other_mass";
/** Nor is that of a judge that compares: the share of its verdicts on which the two orders disagreed. */
const DISAGREED = "disagreed";
/** Nor the largest entropy over the labels of any criterion, which shows a judge that is unsure. */
const UNSURE = "label_entropy";
const BESIDE = [OTHER, DISAGREED, UNSURE];
const COLOURS = 8;
let cards, besides;

/** Creates the empty cards. */
export function make() {
  cards = {
    mean: chartCard("Mean", "over time", reward),
    std: chartCard("Spread", "standard deviation", number),
    share: chartCard("Share", "of the reward's variance", percent),
  };
  besides = {
    [OTHER]: chartCard("Mass on no label", "mean of other_mass", percent),
    [DISAGREED]: chartCard("Orders disagree", "of its verdicts", percent),
    [UNSURE]: chartCard("Unsure", "between labels, in nats", number),
    entropy: chartCard("Entropy", "mean per asked token, in nats", number),
  };
  byId("components-grid").replaceChildren(...all().map((made) => made.node));
}

function all() {
  return [...Object.values(cards), ...Object.values(besides)];
}

function chartCard(title, unit, format) {
  const made = card({ title, unit });
  const chart = new Lines(made.body, {
    label: `${title}, ${unit}`, format, fromZero: title !== "Mean", margin: { left: 54 },
    describe: ({ series }) => series.map(({ name, figure }) => `${name} ${figure}`).join(", "),
  });
  made.offer(chart, title);
  return { ...made, chart, format };
}

/** Shows the model's components; hides the section if it has none. */
export function show(snapshot, name) {
  const own = snapshot.components[name];
  const isShown = Boolean(own && own.window.count);
  byId("components").hidden = !isShown;
  const link = document.querySelector('nav a[href="#components"]');
  link.hidden = !isShown;
  if (!isShown) return;
  const [title, aside] = words(snapshot, name, own);
  putText(byId("components-title"), title);
  putText(link, title);
  putText(byId("components-aside"), aside);
  const isJudge = own.names.includes(OTHER);
  const criteria = own.names.map((part, i) => [part, i]).filter(([part]) => !isJudge || !BESIDE.includes(part));
  for (const [key, made] of Object.entries(cards)) put(snapshot, own, key, made, criteria);
  cards.share.node.hidden = criteria.length < 2;
  if (!cards.share.node.hidden && !own.window.share.some(isNumber)) {
    cards.share.empty("Too few different rewards for shares");
  }
  for (const part of BESIDE) showBeside(snapshot, besides[part], isJudge ? own : null, part);
  showBeside(snapshot, besides.entropy, snapshot.entropies[name], "entropy per token");
  byId("components-grid").dataset.cards = String(all().filter((made) => !made.node.hidden).length);
}

/** Shows the mean of one part in a card of its own; hides the card without it. */
function showBeside(snapshot, made, own, part) {
  const at = own?.window.count ? own.names.indexOf(part) : -1;
  made.node.hidden = at < 0;
  if (at >= 0) put(snapshot, own, "mean", made, [[part, at]]);
}

function words(snapshot, name, own) {
  const model = snapshot.models.find((m) => m.name === name);
  const cut = own.num_left_out ? `; the first ${own.names.length} of ${own.names.length + own.num_left_out}` : "";
  if (givesLogprobs(snapshot, name)) return ["Log-probs", `of ${count(own.window.count)} samples, each its mean per asked token`];
  if (own.names.includes(OTHER)) return ["Criteria", `as the judge gave them${cut}`];
  if (model?.components) return ["Components", `their own rewards, before weights, normalisation and clips${cut}`];
  return ["Attributes", `as the model gave them${cut}`];
}

function put(snapshot, own, key, made, parts) {
  made.empty(null);
  const series = parts.map(([part, i], at) =>
    ({ kind: colour(at), name: part, values: own[key][i], figure: made.format(own.window[key][i]) }));
  made.legend(series.map(({ kind, name, figure }) => [kind, name, figure]));
  made.chart.update({ x: middles(snapshot, own), ...axis(snapshot), series });
}

/** Returns the class of the colour of the line at that place; from the ninth on they are dashed. */
function colour(at) {
  return `c${at % COLOURS}${at >= COLOURS ? " dashed" : ""}`;
}
