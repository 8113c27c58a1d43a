/** Finds what a person should look at in a snapshot; pure. */

import { count, difference, isNumber, latency, number, percent, plural, span } from "./format.js";

/** Shares of the window's requests that failed. */
const FAILING = 0.01;
const FAILING_BADLY = 0.1;
/** Share of the window's sequences without a score. */
const LOSING = 0.001;
/** Seconds of work in the queue. */
const LONG_WAIT_S = 30;
/** Seconds within which half of the requests should be answered. */
const SLOW_S = 10;
/** The same if requests wait WAITING times as long as they compute. */
const SLOW_IN_QUEUE_S = 2;
const WAITING = 10;
/** Share of the request time-out within which 99% should be answered. */
const NEAR_TIMEOUT = 0.5;
/** Distributions with fewer rewards are not compared. */
const ENOUGH = 50;
/** The largest normal difference of means, in the reference's standard deviations, and KS distance. */
const SHIFTED = 0.3;
const KS_APART = 0.12;
/** Kolmogorov-Smirnov: samples of one distribution exceed this times sqrt(1/n + 1/m) once in a hundred times. */
const BY_CHANCE = 1.63;
/** Standard deviation as a share of the reference's. */
const NARROWED = 0.3;
/** Rank correlation of length and reward. */
const CORRELATED = 0.4;
/** With fewer different pairs of length and reward, no correlation is shown. */
const ENOUGH_DIFFERENT = 20;
/** The rank correlation of independent numbers exceeds this times 1/sqrt(n - 1) once in a hundred times. */
const CORRELATED_BY_CHANCE = 2.58;

/** Retention of rewards on the server, except those of its start. */
const KEPT_S = 86_400;

/** Returns why the window has no reference; `reference` is the chosen one, `server` the server's state. */
export function absence(reference, windowS, { now, started }) {
  const end = reference === "previous" ? now - windowS : Number(reference.split("-")[1]);
  if (Number.isNaN(end)) return "Nothing to compare with yet";
  if (end <= now - KEPT_S) return "The reference is gone: rewards are kept for a day";
  if (end > started) return reference === "previous" ? "Nothing to compare with yet" : "No rewards came in the reference";
  return reference === "previous" ? "Nothing to compare with yet" : "The reference is gone: it is from before the server's start";
}

/**
 * Returns how the window's rewards differ from the reference's: level none, same or apart, and why; `absent` is the text
 * if there is no reference.
 */
export function driftOf(drift, absent = "Nothing to compare with yet") {
  const { ks, shift, window: now, reference } = drift ?? {};
  if (!reference?.count || !now?.count) return { level: "none", text: absent };
  const least = Math.min(now.count, reference.count);
  if (least < ENOUGH) return { level: "none", text: `Too few rewards to compare (${count(least)} of ${ENOUGH})` };
  const noise = Math.sqrt(1 / now.count + 1 / reference.count);
  // Means use all rewards, distributions the sampled ones.
  const noiseOfDrawn = Math.sqrt(1 / (now.num_drawn ?? now.count) + 1 / (reference.num_drawn ?? reference.count));
  const moved = isNumber(shift) && Math.abs(shift) > Math.max(SHIFTED, 3 * noise);
  const narrowed = now.std < NARROWED * reference.std;
  const apart = isNumber(ks) && ks > Math.max(KS_APART, BY_CHANCE * noiseOfDrawn);
  const figures = `${difference(shift)} standard deviations, KS ${isNumber(ks) ? ks.toFixed(2) : "–"}`;
  if (narrowed) {
    const share = percent(now.std / reference.std);
    return { level: "apart", text: `Nearly constant: their spread is ${share} of the reference's (KS ${isNumber(ks) ? ks.toFixed(2) : "–"})` };
  }
  if (moved) return { level: "apart", text: `Shifted by ${figures}` };
  if (apart) return { level: "apart", text: `Different shape: ${figures}` };
  return { level: "same", text: `Same as the reference: ${figures}` };
}

/** Returns how length correlates with the reward: level none, fine or high, and why. */
export function lengthOf(length) {
  const { spearman, pearson, count: n, num_distinct: different } = length ?? {};
  if (!n) return { level: "none", text: "No correlation yet" };
  if (n < ENOUGH) return { level: "none", text: `Too few rewards for a correlation (${count(n)} of ${ENOUGH})` };
  if (different < ENOUGH_DIFFERENT) {
    return { level: "none", text: `Too few different sequences for a correlation (${count(Math.floor(different))} of ${ENOUGH_DIFFERENT})` };
  }
  if (!isNumber(spearman)) return { level: "none", text: "No correlation: all lengths or all rewards are the same" };
  const figures = `Spearman ${difference(spearman, 2)}, Pearson ${difference(pearson, 2)}, n ${count(n)}`;
  if (Math.abs(spearman) < Math.max(CORRELATED, CORRELATED_BY_CHANCE / Math.sqrt(different - 1))) return { level: "fine", text: figures };
  const which = spearman > 0 ? "Longer" : "Shorter";
  return { level: "high", text: `${which} sequences score higher: ${figures}` };
}

/** Returns the window's total of a series of rates. */
export function total(values, stepS) {
  return (values ?? []).reduce((sum, v) => sum + (isNumber(v) ? v * stepS : 0), 0);
}

/** Returns the latest number of a series, null if there is none. */
export function last(values) {
  return (values ?? []).findLast(isNumber) ?? null;
}

/**
 * Returns the findings about the model, worst first: { level: bad or warn, text, detail, href }.
 */
export function findings(snapshot, name) {
  const found = [
    ...ofServer(snapshot, name), ...ofTraffic(snapshot, name), ...ofOthers(snapshot, name), ...ofLatency(snapshot, name),
    ...ofRewards(snapshot, name),
  ];
  if (snapshot.critic) found.push(...ofCritic(snapshot.critic));
  return found.sort((a, b) => (a.level === "bad" ? 0 : 1) - (b.level === "bad" ? 0 : 1));
}

/**
 * Returns the samples of the window: how many there were, how many of them have no score, and their share, null without
 * samples.
 */
export function lostOf({ totals }, name) {
  const { sequences: all = 0, failed_sequences: lost = 0 } = totals[name]?.window ?? {};
  return { all, lost, share: all ? lost / all : null };
}

/** Whether the model gives rewards; a critic without a reward model does not. */
export function givesRewards({ models }, name) {
  return models.find((m) => m.name === name)?.outputs.includes("rewards") ?? false;
}

/** Whether the model is a teacher. */
export function givesLogprobs({ models }, name) {
  return models.find((m) => m.name === name)?.outputs.includes("logprobs") ?? false;
}

/** Whether another server computes the model: it then has neither tokens nor batches here. */
export function isRemote({ models }, name) {
  return models.find((m) => m.name === name)?.kind === "chat_judge";
}

/** Whether the critic was trained in the last `windowS` seconds. */
export function isTrained({ critic, server, until }, windowS) {
  const end = until ?? server.now;
  return critic?.reports.time.some((t) => t >= end - windowS && t <= end) ?? false;
}

/** Returns the checks that passed, as [name, figure]; without those that lack data. */
export function checks(snapshot, name) {
  const lines = snapshot.series.models[name] ?? {};
  const all = total(lines.requests_per_s, snapshot.series.step_s);
  const { drift, length } = snapshot.rewards[name] ?? {};
  const told = [];
  if (all) told.push(["Failed requests", percent(total(lines.errors_per_s, snapshot.series.step_s) / all)]);
  const { latency_s: times } = snapshot.totals[name] ?? {};
  const { lost, share } = lostOf(snapshot, name);
  if (isNumber(share)) told.push(["Failed samples", lost ? `${count(lost)} (${percent(share)})` : "0"]);
  if (isNumber(times?.p50)) told.push(["Latency", `${latency(times.p50)}, p99 ${latency(times.p99)}`]);
  if (isNumber(last(lines.queue_sequences))) told.push(["Queue", number(last(lines.queue_sequences))]);
  if (driftOf(drift).level === "same") told.push(["Drift", `${difference(drift.shift)} σ`]);
  if (lengthOf(length).level === "fine") told.push(["Length", `ρ ${difference(length.spearman, 2)}`]);
  if (snapshot.critic) told.push(["Critic", `step ${count(snapshot.critic.step)}`]);
  return told;
}

function ofServer({ server, models }, name) {
  const found = [];
  if (!server.is_ready) found.push({ level: "bad", text: "Not ready", detail: server.why || "it refuses requests now", href: "#models" });
  const model = models.find((m) => m.name === name);
  if (model && !model.is_loaded) found.push({ level: "warn", text: `${name} is unloaded`, detail: "an admin may load it", href: "#models" });
  return found;
}

function ofTraffic({ series, totals }, name) {
  const found = [];
  const lines = series.models[name] ?? {};
  const all = total(lines.requests_per_s, series.step_s);
  const failed = total(lines.errors_per_s, series.step_s);
  const share = all ? failed / all : 0;
  if (share > FAILING) {
    const level = share > FAILING_BADLY ? "bad" : "warn";
    found.push({ level, text: `${percent(share)} of requests fail`, detail: `${plural(failed, "request")} in this window`, href: "#traffic" });
  }
  const waiting = last(lines.queue_sequences);
  const pace = (lines.sequences_per_s ?? []).filter(isNumber).slice(-30);
  const perSecond = pace.reduce((sum, v) => sum + v, 0) / (pace.length || 1);
  if (waiting && perSecond > 0 && waiting / perSecond > LONG_WAIT_S) {
    found.push({ level: "warn", text: "The queue is long", detail: `it holds about ${span(waiting / perSecond)} of work`, href: "#traffic" });
  }
  const stuck = stuckS(lines, series.step_s);
  if (stuck > LONG_WAIT_S) {
    found.push({ level: "warn", text: "The queue is stuck", detail: `${plural(waiting, "sequence")} waiting, and nothing answered for ${span(stuck)}`, href: "#traffic" });
  }
  const sums = totals[name]?.window ?? {};
  const { all: samples, lost, share: lostShare } = lostOf({ totals }, name);
  if (lostShare > LOSING) {
    const level = lostShare > FAILING_BADLY ? "bad" : "warn";
    const text = lost === samples ? "No sample gets a score" : `${plural(lost, "sample")} without a score`;
    found.push({ level, text, detail: `${percent(lostShare)} of ${count(samples)} in this window; their kinds are below`, href: "#errors" });
  }
  if (sums.rechecked_differs) {
    const detail = `${plural(sums.rechecked_differs, "sequence")} of those scored again in this window`;
    found.push({ level: "bad", text: "Scores differ from the plain forward", detail, href: "#models" });
  }
  if (sums.out_of_memory) {
    const detail = `${plural(sums.out_of_memory, "forward")} had to be split in this window`;
    found.push({ level: "warn", text: "Out of memory", detail, href: "#traffic" });
  }
  return found;
}

/** Finds other models whose samples mostly fail: the page shows one model. */
function ofOthers(snapshot, name) {
  const found = snapshot.models.map((m) => [m.name, lostOf(snapshot, m.name)]).filter(([other, { share }]) => other !== name && share > FAILING_BADLY);
  if (!found.length) return [];
  const [[worst]] = found.sort(([, a], [, b]) => b.share - a.share);
  const text = found.length > 1 ? `${found.length} other models lose samples` : `${worst} loses samples`;
  const detail = `without a score in this window: ${found.map(([other, { all, share }]) => `${percent(share)} of ${count(all)} by ${other}`).join(", ")}`;
  return [{ level: "warn", text, detail, href: `?model=${encodeURIComponent(worst)}` }];
}

/** Returns for how many seconds the queue has stood still at the window's end; a single step does not count. */
function stuckS({ queue_sequences: queue = [], sequences_per_s: answered = [] }, stepS) {
  const steps = queue.length - 1 - queue.findLastIndex((waiting, i) => !(waiting > 0) || answered[i] > 0);
  return steps > 1 ? steps * stepS : 0;
}

function ofLatency({ server, models, totals }, name) {
  const found = [];
  const { p50, p99, wait, compute } = totals[name]?.latency_s ?? {};
  const waits = wait > WAITING * compute;
  if (p50 > SLOW_S || (waits && p50 > SLOW_IN_QUEUE_S)) {
    const waiting = isNumber(wait) ? `, with a mean wait of ${latency(wait)}` : "";
    found.push({ level: "warn", text: wait > compute ? "Requests wait long" : "Requests are slow", detail: `half take over ${latency(p50)}${waiting}`, href: "#traffic" });
  }
  // A critic's requests have no timeout, because a train may take long.
  const allowed = models.find((m) => m.name === name)?.is_critic ? null : server.request_timeout_s;
  if (isNumber(allowed) && p99 >= NEAR_TIMEOUT * allowed) {
    found.push({ level: "warn", text: "Requests are close to their timeout", detail: `1% take over ${latency(p99)}; the timeout is ${latency(allowed)}`, href: "#traffic" });
  }
  return found;
}

function ofRewards({ rewards }, name) {
  const found = [];
  const own = rewards[name];
  if (!own) return found;
  const drift = driftOf(own.drift);
  if (drift.level === "apart") found.push({ level: "warn", text: "Rewards have drifted", detail: lowered(drift.text), href: "#rewards" });
  const length = lengthOf(own.length);
  if (length.level === "high") {
    found.push({ level: "warn", text: "Length predicts the reward", detail: lowered(length.text), href: "#length" });
  }
  return found;
}

function ofCritic(critic) {
  const found = [];
  if (critic.fault) found.push({ level: "bad", text: "The critic has a fault", detail: critic.fault, href: "#critic" });
  const recent = critic.reports.explained_variance.slice(-20).filter(isNumber);
  const mean = recent.reduce((sum, v) => sum + v, 0) / (recent.length || 1);
  if (recent.length === 20 && mean < 0) {
    found.push({ level: "warn", text: "The critic explains nothing", detail: `explained variance ${number(mean)} over its last 20 updates`, href: "#critic" });
  }
  if (!critic.is_durable && critic.num_unsaved) {
    found.push({ level: "warn", text: "The critic is not saved", detail: "it has no checkpoint folder", href: "#critic" });
  }
  return found;
}

function lowered(text) {
  return text[0].toLowerCase() + text.slice(1);
}
