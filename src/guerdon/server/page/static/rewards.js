/** The rewards' section: over time, against a reference, and against length. */

import { byId } from "./dom.js";
import { clock, count, isNumber, plural, reward } from "./format.js";
import { absence, driftOf, givesRewards, lengthOf, lostOf } from "./health.js";
import { Heat } from "./heat.js";
import { Histogram } from "./histogram.js";
import { Lines } from "./lines.js";
import { axis, card, middles } from "./panels.js";
import { Scatter } from "./scatter.js";

const LEGEND = [["median", "median"], ["quarter", "25% and 75%"], ["edge", "5% and 95%"], ["cells", "stronger colour: more rewards"]];
/** Both are stored by the minute, so they may overlap by this much. */
const OVERLAP_S = 60;
let over, against, length, beside, charts;

/** Creates the empty cards. */
export function make() {
  over = card({ title: "Distribution over time" });
  against = card({ title: "This window and the reference" });
  length = card({ title: "Length against reward", unit: "tokens", id: "length", wide: true });
  beside = card({ title: "Two models", unit: "median reward", id: "beside", wide: true });
  byId("rewards-grid").replaceChildren(over.node, against.node, beside.node, length.node);
  charts = {
    heat: new Heat(over.body, { label: "Rewards over time", height: 264, describe: told }),
    histogram: new Histogram(against.body, { label: "Rewards of the window beside the reference", height: 242, margin: { left: 40 } }),
    beside: new Lines(beside.body, {
      label: "Median rewards of two models", format: reward, fromZero: false, height: 220, margin: { left: 54 },
      describe: ({ series }) => series.filter(({ figure }) => figure).map(({ name, figure }) => `${name} ${figure}`).join(", "),
    }),
    scatter: new Scatter(length.body, { label: "Length in tokens against reward", height: 264, describe: ({ text }) => text }),
  };
  over.offer(charts.heat);
  against.offer(charts.histogram, "Histogram");
  beside.offer(charts.beside);
  length.offer(charts.scatter);
}

function told({ count: counts, p50 }) {
  const n = counts.reduce((sum, c) => sum + (c ?? 0), 0);
  return `${count(n)} rewards; the latest median is ${reward(p50.findLast(isNumber))}`;
}

/** Shows the model's rewards. */
export function show(snapshot, name, windowS, asked, other) {
  const gives = givesRewards(snapshot, name);
  byId("rewards").hidden = !gives;
  document.querySelector('nav a[href="#rewards"]').hidden = !gives;
  if (!gives) return;
  const own = snapshot.rewards[name];
  const n = own ? own.count.reduce((sum, c) => sum + (c ?? 0), 0) : 0;
  const { lost } = lostOf(snapshot, name);
  const why = lost ? `${plural(lost, "sample")} got no score: Recent errors has their kinds.` : "They appear here with the first request.";
  const none = n ? null : `No rewards from ${name} ${snapshot.period}. ${why}`;
  for (const panel of [over, against, length]) panel.empty(none);
  showBeside(snapshot, name, other);
  if (none) {
    for (const panel of [over, against, length]) panel.say("");
    return;
  }
  const { window: now, reference } = own.drift;
  const without = lost ? `; ${plural(lost, "sample")} without one` : "";
  over.say(`${count(now?.count ?? n)} rewards, mean ${reward(now?.mean)}, standard deviation ${reward(now?.std)}${without}`);
  const ends = axis(snapshot);
  const swaps = (own.versions ?? []).filter(({ time }) => time > ends.from && time < ends.to);
  over.legend([...LEGEND, ...(swaps.length ? [["swap", "weights changed"]] : [])]);
  charts.heat.update({ ...own, ...ends, start: own.from, step: own.step_s, swaps });

  const drift = driftOf(own.drift, absence(asked, windowS, snapshot.server));
  const isInside = reference?.count && reference.to - now.from > OVERLAP_S;
  against.say(isInside ? `${drift.text}; part of the reference lies in this window` : drift.text, drift.level);
  const { edges, window: counts, reference: before } = own.histogram;
  against.legend([
    ["bar", "this window", `mean ${reward(now?.mean)}`],
    ["outline", reference?.count ? `reference ${clock(reference.from, false)}–${clock(reference.to, false)}` : "no reference yet", reference?.count ? `mean ${reward(reference.mean)}` : undefined],
  ]);
  charts.histogram.update({ edges, window: counts, reference: before ?? counts.map(() => 0), means: [now?.mean ?? null, reference?.count ? reference.mean : null] });

  const judged = lengthOf(own.length);
  const advice = judged.level === "high" ? ". A policy that learns from it may learn to be " + (own.length.spearman > 0 ? "long." : "short.") : "";
  length.say(judged.text + advice, judged.level);
  length.legend([["point", "a sample"], ["trend", "mean at that length"]]);
  charts.scatter.update({ ...own.length, text: judged.text });
}

/** Shows both models' medians and quartiles on one axis, if another model was chosen. */
function showBeside(snapshot, name, other) {
  const own = [name, other].map((one) => [one, snapshot.rewards[one]]);
  beside.node.hidden = !own.every(([, rewards]) => rewards);
  if (beside.node.hidden) return;
  const series = own.flatMap(([one, rewards], i) => [["p50", ""], ["p25", "thin"], ["p75", "thin"]].map(([key, how]) => {
    const { count: n, mean, std } = rewards.drift.window;
    const figure = how ? "" : n ? `mean ${reward(mean)}, std ${reward(std)}` : "no rewards";
    return { kind: `c${i} ${how}`.trim(), name: how ? `${one} ${key === "p25" ? "25%" : "75%"}` : one, values: rewards[key], figure };
  }));
  beside.say("thin: 25% and 75%");
  beside.legend(series.filter(({ figure }) => figure).map(({ kind, name: word, figure }) => [kind, word, figure]));
  charts.beside.update({ x: middles(snapshot, own[0][1]), ...axis(snapshot), series });
}
