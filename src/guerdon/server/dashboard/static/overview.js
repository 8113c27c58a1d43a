/** The page's head: the server, whether all is well, and the numbers at a glance. */

import { byId, el, putText } from "./dom.js";
import { count, isNumber, latency, number, percent, span, windowName } from "./format.js";
import { checks, driftOf, findings } from "./health.js";
import { sparkline } from "./lines.js";
import { since } from "./panels.js";

let said = "";

/** The line in the bar: whether it is ready, where, which version, for how long. */
export function showServer({ server }) {
  const ready = server.is_ready ? "Ready" : "Not ready";
  const parts = [server.address, `guerdon ${server.version}`, `up ${span(server.now - server.started)}`].filter(Boolean);
  byId("server").replaceChildren(
    el("span", { class: `pill ${server.is_ready ? "ok" : "bad"}` }, ready),
    ...parts.map((part) => el("span", { class: "part" }, part)),
  );
}

/** Says in the bar, too, that nobody answers: what stands beside it is old. */
export function showSilence(text) {
  const pill = document.querySelector("#server .pill");
  if (!pill) return;
  pill.className = "pill bad";
  putText(pill, text);
}

/** Healthy, or what to look at. */
export function showVerdict(snapshot, name, windowS) {
  const found = findings(snapshot, name);
  const lines = snapshot.series.models[name] ?? {};
  const known = driftOf(snapshot.rewards[name]?.drift).level === "same";
  const asked = (lines.requests_per_s ?? []).some((v) => v > 0);
  const level = found.length ? found[0].level : asked ? "ok" : "idle";
  const title = {
    ok: "Healthy",
    idle: "Ready, and idle",
    warn: found.length === 1 ? "One thing to look at" : `${found.length} things to look at`,
    bad: "Something is wrong",
  }[level];
  const text = {
    ok: `No errors to speak of in the last ${windowName(windowS)}; ${known ? "rewards as in the reference" : "too early to tell whether rewards drift"}.`,
    idle: `No request came for ${name} in the last ${windowName(windowS)}.`,
  }[level];
  document.title = `${title} · ${name} · guerdon`;
  const fine = found.length ? [] : checks(snapshot, name);
  const says = JSON.stringify([level, title, text, found, fine]);
  if (says === said) return;
  said = says;
  const verdict = byId("verdict");
  verdict.className = `verdict ${level}`;
  verdict.replaceChildren(
    el("span", { class: "sign", "aria-hidden": "true" }, { ok: "✓", idle: "–", warn: "!", bad: "×" }[level]),
    el("div", { "aria-live": "polite" }, el("h1", {}, title), text ? el("p", {}, text) : null),
    fine.length ? el("ul", { class: "checks" }, ...fine.map(([what, figure]) =>
      el("li", {}, el("i", { "aria-hidden": "true" }, "✓"), `${what} `, el("b", {}, figure)))) : "",
    found.length ? el("ul", { class: "findings" }, ...found.map(({ level: how, text: what, detail, href }) =>
      el("li", { class: how }, el("a", { href }, el("b", {}, what), el("span", {}, detail))))) : "",
  );
}

const TILES = [
  ["requests", "Requests", "per second"],
  ["tokens", "Tokens", "per second"],
  ["queue", "Queue", "sequences"],
  ["latency", "Latency", "median"],
  ["fill", "Batch fill", "of the budget"],
  ["saved", "Saved by sharing", "of all tokens"],
];
const tiles = new Map();

/** The tiles, empty. */
export function makeTiles() {
  const nodes = TILES.map(([id, title, unit]) => {
    const value = el("b", { class: "value" }, "–");
    const under = el("p", { class: "under" });
    const line = el("div", { class: "line" });
    tiles.set(id, { value, under, line });
    return el("article", { class: "tile", id: `tile-${id}` },
      el("h2", {}, title), el("p", { class: "figure" }, value, el("small", {}, unit)), line, under);
  });
  byId("tiles").replaceChildren(...nodes);
}

function recent(values) {
  const found = (values ?? []).filter(isNumber).slice(-5);
  return found.length ? found.reduce((sum, v) => sum + v, 0) / found.length : null;
}

function put(id, value, under, values, kind) {
  const tile = tiles.get(id);
  putText(tile.value, value);
  putText(tile.under, under);
  tile.line.replaceChildren(sparkline(values, kind));
}

/** The numbers of now, and their way over the window. */
export function showTiles(snapshot, name) {
  const own = snapshot.series.models[name] ?? {};
  const totals = snapshot.totals[name] ?? {};
  const names = ["requests_per_s", "received_tokens_per_s", "computed_tokens_per_s", "queue_sequences", "queue_tokens",
    "latency_p50_s", "batch_fill", "batch_sequences", "sequences_per_s"];
  const drawn = since(snapshot, names.map((key) => ({ name: key, values: own[key] })));
  const lines = Object.fromEntries(drawn.series.map(({ name: key, values }) => [key, values]));
  const now = Object.fromEntries(Object.entries(lines).map(([key, values]) => [key, recent(values)]));
  const { p50, p90, p99 } = totals.latency_s ?? {};
  const requests = Object.values(totals.requests ?? {}).reduce((sum, n) => sum + n, 0);
  put("requests", number(now.requests_per_s), both(now.sequences_per_s, "sequences/s", `${count(requests)} requests in all`), lines.requests_per_s, "accent");
  put("tokens", number(now.received_tokens_per_s), both(now.computed_tokens_per_s, "computed", `${number(totals.received_tokens)} in all`), lines.received_tokens_per_s, "accent");
  put("queue", number(lines.queue_sequences.findLast(isNumber)), `${number(lines.queue_tokens.findLast(isNumber))} tokens wait`, lines.queue_sequences, "accent");
  put("latency", latency(p50), `p90 ${latency(p90)} · p99 ${latency(p99)}`, lines.latency_p50_s, "accent");
  put("fill", percent(now.batch_fill ?? totals.batch_fill), isNumber(now.batch_sequences) ? `${number(now.batch_sequences)} sequences a batch` : "no batch lately", lines.batch_fill, "accent");
  const saved = lines.received_tokens_per_s.map((got, i) => (got > 0 ? Math.max(0, 1 - lines.computed_tokens_per_s[i] / got) : null));
  put("saved", percent(totals.saved_share), savedText(totals), saved, "good");
}

function both(rate, word, sum) {
  return isNumber(rate) ? `${number(rate)} ${word} · ${sum}` : sum;
}

function savedText({ received_tokens: received, computed_tokens: computed }) {
  if (!isNumber(received) || !isNumber(computed) || !received) return "prompts that responses share";
  return `${number(Math.max(0, received - computed))} tokens of shared prompts`;
}

/** What the banner says of an answer that does not come; null: nothing. */
export function showNotice(kind, text, action = null) {
  const notice = byId("notice");
  notice.hidden = text === null;
  if (text === null) return;
  notice.className = `notice ${kind}`;
  if (notice.dataset.says === text) return;
  notice.dataset.says = text;
  notice.replaceChildren(el("span", {}, text), action ?? "");
}
