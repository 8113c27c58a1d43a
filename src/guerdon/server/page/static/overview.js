/** The overview: server, verdict, and the tiles with the main numbers. */

import { byId, el, putText } from "./dom.js";
import { count, isNumber, latency, number, percent, plural, span } from "./format.js";
import { checks, driftOf, findings, givesLogprobs, givesRewards, isRemote, isTrained, last, lostOf, total } from "./health.js";
import { sparkline } from "./lines.js";
import { lately, meanLately, since } from "./panels.js";

let said = "";

/** Shows in the bar whether the server is ready, its address, version and uptime. */
export function showServer({ server }) {
  const ready = server.is_ready ? "Ready" : "Not ready";
  const parts = [server.address, `guerdon ${server.version}`, `up ${span(server.now - server.started)}`].filter(Boolean);
  byId("server").replaceChildren(
    el("span", { class: `pill ${server.is_ready ? "ok" : "bad"}` }, ready),
    ...parts.map((part) => el("span", { class: "part" }, part)),
  );
}

/** Shows in the bar that the server does not answer, because the figures beside it are stale. */
export function showSilence(text, level) {
  const pill = document.querySelector("#server .pill");
  if (!pill) return;
  pill.className = `pill ${level}`;
  putText(pill, text);
}

/** Shows the verdict: healthy, or the findings. */
export function showVerdict(snapshot, name, windowS) {
  const found = findings(snapshot, name);
  const lines = snapshot.series.models[name] ?? {};
  // A sum's components get sequences and no requests.
  const asked = [...(lines.requests_per_s ?? []), ...(lines.sequences_per_s ?? [])].some((v) => v > 0);
  const waiting = last(lines.queue_sequences);
  const trained = isTrained(snapshot, windowS);
  const level = found.length ? found[0].level : asked || trained ? "ok" : "idle";
  const title = {
    ok: "Healthy",
    idle: waiting ? "Ready, and busy" : "Ready, and idle",
    warn: found.length === 1 ? "One thing to look at" : `${found.length} things to look at`,
    bad: "Something is wrong",
  }[level];
  const text = {
    ok: `Fewer than 1% of requests fail ${snapshot.period}${beside(snapshot, name, trained)}.`,
    idle: waiting ? `${plural(waiting, "sequence")} waiting for ${name}; nothing was answered ${snapshot.period}.`
      : `No requests for ${name} ${snapshot.period}.`,
  }[level] ?? figures(snapshot, name);
  document.title = `${title} · ${name} · guerdon`;
  const fine = found.length ? [] : checks(snapshot, name);
  const says = JSON.stringify([level, title, text, found, fine]);
  if (says === said) return;
  said = says;
  announce(level, title, found);
  const verdict = byId("verdict");
  verdict.className = `verdict ${level}`;
  verdict.replaceChildren(
    el("span", { class: "sign", "aria-hidden": "true" }, { ok: "✓", idle: "–", warn: "!", bad: "×" }[level]),
    el("div", {}, el("h1", {}, title), text ? el("p", {}, text) : null),
    fine.length ? el("ul", { class: "checks" }, ...fine.map(([what, figure]) =>
      el("li", {}, el("i", { "aria-hidden": "true" }, "✓"), `${what} `, el("b", {}, figure)))) : "",
    found.length ? el("ul", { class: "findings" }, ...found.map(({ level: how, text: what, detail, href }) =>
      el("li", { class: how }, el("a", { href }, el("b", {}, what), el("span", {}, detail))))) : "",
  );
}

/** Returns latency and failures in a line, for a verdict that has findings. */
function figures(snapshot, name) {
  return checks(snapshot, name).filter(([what]) => ["Failed requests", "Failed samples", "Latency"].includes(what))
    .map(([what, figure]) => `${what} ${figure}`).join(" · ");
}

/** Returns the aside: whether a model's rewards drift, or that a critic is being trained. */
function beside(snapshot, name, trained) {
  if (!givesRewards(snapshot, name)) return trained ? "; the critic is being trained" : "";
  if (driftOf(snapshot.rewards[name]?.drift).level === "same") return "; rewards match the reference";
  return "; too early to tell whether rewards drift";
}

/** Announces the verdict to screen readers if the findings change, not whenever a figure does. */
function announce(level, title, found) {
  const kinds = JSON.stringify([level, ...found.map(({ text }) => text.replaceAll(/[^a-z]+/gi, " "))]);
  const place = byId("said");
  if (place.dataset.of === kinds) return;
  place.dataset.of = kinds;
  putText(place, [title, ...found.map(({ text, detail }) => `${text}: ${detail}`)].join(". "));
}

const TILES = [
  // Id, heading, unit; the time that a number covers stands beside the heading.
  ["requests", "Requests", "per second"],
  ["tokens", "Tokens", "per second"],
  ["queue", "Queue", "sequences"],
  ["latency", "Latency", "median"],
  ["fill", "Batch fill", "of the budget"],
  ["saved", "Saved", "of all tokens"],
];
/** Not shown of a model that another server computes, and of a sum, which its components compute. */
const OF_OWN = ["tokens", "fill", "saved"];
const OF_PARTS = [...OF_OWN, "queue"];
const tiles = new Map();

/** Creates the empty tiles. */
export function makeTiles() {
  const nodes = TILES.map(([id, title, unit]) => {
    const value = el("b", { class: "value" }, "–");
    const under = el("p", { class: "under" });
    const line = el("div", { class: "line" });
    const when = el("small", {});
    const node = el("article", { class: "tile", id: `tile-${id}` },
      el("h2", {}, title, when), el("p", { class: "figure" }, value, el("small", {}, unit)), line, under);
    tiles.set(id, { node, value, under, line, when });
    return node;
  });
  byId("tiles").replaceChildren(...nodes);
}

function put(id, when, value, under, values) {
  const tile = tiles.get(id);
  putText(tile.when, when);
  putText(tile.value, value);
  putText(tile.under, under);
  tile.line.replaceChildren(sparkline(values, id === "saved" ? "good" : "accent"));
}

/** Shows current numbers, and their history over the window. */
export function showTiles(snapshot, name, windowS) {
  const own = snapshot.series.models[name] ?? {};
  const totals = snapshot.totals[name] ?? {};
  const isSum = Boolean(snapshot.models.find((m) => m.name === name)?.components);
  const without = isSum ? OF_PARTS : isRemote(snapshot, name) ? OF_OWN : [];
  for (const [id, tile] of tiles) tile.node.hidden = without.includes(id);
  const names = ["requests_per_s", "received_tokens_per_s", "computed_tokens_per_s", "queue_sequences", "queue_tokens",
    "latency_p50_s", "batch_fill", "batch_sequences", "sequences_per_s"];
  const drawn = since(snapshot, names.map((key) => ({ name: key, values: own[key] })));
  const lines = Object.fromEntries(drawn.series.map(({ name: key, values }) => [key, values]));
  const now = Object.fromEntries(Object.entries(lines).map(([key, values]) => [key, meanLately(snapshot, values)]));
  const { p50, p90, p99 } = totals.latency_s ?? {};
  const requests = Object.values(totals.requests ?? {}).reduce((sum, n) => sum + n, 0);
  const when = lately(snapshot);
  const whole = snapshot.isZoomed ? "whole range" : `last ${span(windowS)}`;
  const { all, lost } = lostOf(snapshot, name);
  const also = lost ? `${count(lost)} of ${count(all)} samples failed` : `${count(requests)} since the start`;
  put("requests", when, number(now.requests_per_s), both(now.sequences_per_s, "sequences/s", also), lines.requests_per_s);
  put("tokens", when, number(now.received_tokens_per_s), both(now.computed_tokens_per_s, "computed", `${number(totals.received_tokens)} since the start`), lines.received_tokens_per_s);
  put("queue", snapshot.isZoomed ? "at its end" : "now", number(lines.queue_sequences.findLast(isNumber)), `${number(lines.queue_tokens.findLast(isNumber))} tokens wait`, lines.queue_sequences);
  put("latency", whole, latency(p50), `p90 ${latency(p90)} · p99 ${latency(p99)}`, lines.latency_p50_s);
  const filled = isNumber(now.batch_fill);
  const batch = isNumber(now.batch_sequences) ? `${number(now.batch_sequences)} sequences per batch` : "no batch lately";
  put("fill", filled ? when : whole, percent(filled ? now.batch_fill : totals.batch_fill), batch, lines.batch_fill);
  const received = total(own.received_tokens_per_s, snapshot.series.step_s);
  const computed = total(own.computed_tokens_per_s, snapshot.series.step_s);
  const saved = lines.received_tokens_per_s.map((got, i) => (got > 0 ? 1 - lines.computed_tokens_per_s[i] / got : null));
  const isVain = lost > 0 && lost === all;
  put("saved", whole, received && !isVain ? percent(1 - computed / received) : "–",
    isVain ? "no sample got a score" : savedText(received, computed, givesLogprobs(snapshot, name)), isVain ? [] : saved);
}

function both(value, word, other) {
  return isNumber(value) ? `${number(value)} ${word} · ${other}` : other;
}

/** Describes the tokens that sharing saved, or that padding or the size of a teacher's answers added. */
function savedText(received, computed, isTeacher) {
  if (!received) return "shared prompts, computed once";
  if (computed > received) return `${number(computed - received)} tokens ${isTeacher ? "for the size of answers" : "of padding"}`;
  return `${number(received - computed)} tokens of shared prompts`;
}

/** Shows a notice with a button; null hides it. */
export function showNotice(kind, text, action = null) {
  const notice = byId("notice");
  notice.hidden = text === null;
  if (text === null) return;
  notice.className = `notice ${kind}`;
  if (notice.dataset.says === text) return;
  notice.dataset.says = text;
  notice.replaceChildren(el("span", {}, text), action ?? "");
}
