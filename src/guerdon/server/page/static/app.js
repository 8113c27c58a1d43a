/** The page: polls a snapshot every few seconds, and lets each section show its part. */

import { Failure, snapshot as ask } from "./api.js";
import * as calls from "./calls.js";
import * as components from "./components.js";
import * as connect from "./connect.js";
import * as critic from "./critic.js";
import { byId, el } from "./dom.js";
import { clock, span, windowName } from "./format.js";
import * as errors from "./errors.js";
import * as models from "./models.js";
import * as overview from "./overview.js";
import * as rewards from "./rewards.js";
import * as samples from "./samples.js";
import * as theme from "./theme.js";
import * as traffic from "./traffic.js";
import * as tryit from "./tryit.js";
import { onZoom } from "./zoom.js";

/** Seconds between two polls; a snapshot of a long window costs more and changes less. */
const PAUSE_S = 2;
const LONGEST_PAUSE_S = 10;
/** After this time without an answer the page shows "No answer" instead of "Ready". */
const STALE_S = 6;
/** After this time it says that the server has stopped. */
const STOPPED_S = 30;
/** So many versions of the weights are offered as references. */
const MOST_VERSIONS = 5;
/** The server keeps rewards in stretches of so many seconds. */
const BUCKET_S = 10;

const shown = {
  model: null, other: null, windowS: 900, until: null, before: 900, reference: "previous",
  snapshot: null, answered: null, asked: null, failure: null, fault: null, version: null,
};
/** Models that the server refused to send a snapshot of, such as an unknown name in the URL. */
const refused = new Set();
let timer = 0;
let round = 0;

function pauseS() {
  return shown.failure ? PAUSE_S : Math.min(Math.max(shown.windowS / 600, PAUSE_S), LONGEST_PAUSE_S);
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++round;
  shown.asked ??= Date.now();
  try {
    const told = await fetched();
    if (mine !== round) return; // the window was changed meanwhile
    Object.assign(shown, { snapshot: told, answered: Date.now(), asked: null, failure: null, fault: null });
    shown.version ??= told.server.version;
    draw();
  } catch (failure) {
    if (mine !== round) return;
    if (failure instanceof Failure) shown.failure = failure;
    else {
      shown.fault = failure; // a bug, or the page is older than the server; the next answer may succeed
      reportError(failure);
    }
  } finally {
    if (mine === round) {
      tell();
      schedule();
    }
  }
}

/** Fetches the snapshot of the chosen model, or of all models if the server does not know it. */
async function fetched() {
  const { windowS, reference, model, until } = shown;
  const other = shown.other === model ? null : shown.other;
  if (model === null || refused.has(model)) return ask(windowS, reference, { until });
  try {
    return await ask(windowS, reference, { model, other, until });
  } catch (failure) {
    if (!(failure instanceof Failure) || ![400, 404].includes(failure.status)) throw failure;
    const told = await ask(windowS, reference, { until });
    refused.add(model);
    return told;
  }
}

function schedule() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(refresh, pauseS() * 1000);
}

function draw() {
  const { snapshot, windowS, until } = shown;
  chooseModels(snapshot.models);
  const { model, other } = shown;
  Object.assign(snapshot, { until, isZoomed: until !== null, period: period() });
  showZoom();
  overview.showServer(snapshot);
  overview.showVerdict(snapshot, model, windowS);
  overview.showTiles(snapshot, model, windowS);
  connect.show(snapshot, model, windowS);
  rewards.show(snapshot, model, windowS, shown.reference, other);
  samples.show(snapshot, model, windowS);
  components.show(snapshot, model);
  traffic.show(snapshot, model, windowS, other);
  calls.show(snapshot, model);
  errors.show(snapshot, model);
  critic.show(snapshot);
  models.show(snapshot);
  tryit.show(snapshot, model);
  compare();
  byId("main").removeAttribute("aria-busy");
}

/** Fills the menu, and keeps the chosen model while it is served. */
function chooseModels(served) {
  const names = served.map((m) => m.name);
  if (!names.includes(shown.model)) shown.model = names[0];
  const menu = byId("model");
  if (menu.dataset.names !== names.join("\n")) {
    menu.dataset.names = names.join("\n");
    menu.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
  menu.value = shown.model;
  const others = names.filter((name) => name !== shown.model);
  if (!others.includes(shown.other)) shown.other = null;
  byId("beside-field").hidden = !others.length;
  const second = byId("other");
  if (second.dataset.names !== others.join("\n")) {
    second.dataset.names = others.join("\n");
    second.replaceChildren(el("option", { value: "" }, "no other model"), ...others.map((name) => el("option", { value: name }, name)));
  }
  second.value = shown.other ?? "";
}

/** Returns the shown time in words, behind a verb. */
function period() {
  const { until, windowS } = shown;
  return until === null ? `in the last ${windowName(windowS)}` : `from ${clock(until - windowS)} to ${clock(until)}`;
}

/** Shows the range that the page is zoomed to, and the way back. */
function showZoom() {
  const { until, windowS, before } = shown;
  const place = byId("zoomed");
  place.hidden = until === null;
  const says = `${clock(until - windowS)} – ${clock(until)}`;
  if (until === null || place.dataset.of === says) return;
  place.dataset.of = says;
  place.replaceChildren(el("span", { role: "status" }, `Zoomed to ${says}`),
    el("button", { type: "button", class: "quiet", onclick: () => choose({ until: null, windowS: before }) }, `Back to the last ${windowName(before)}`));
}

/** Returns the times of the weights' previous versions as references: [FROM-TO, text], the newest first. */
function versionSpans() {
  const { snapshot, model } = shown;
  const changes = snapshot.rewards[model]?.versions ?? [];
  const begun = Math.floor(snapshot.server.started / BUCKET_S) * BUCKET_S;
  return changes.map(({ time }, i) => {
    const { time: since, version } = changes[i - 1] ?? { time: begun, version: null };
    // Without the stretches that have rewards of two versions.
    const [from, to] = [Math.ceil(since / BUCKET_S), Math.floor(time / BUCKET_S)].map((n) => n * BUCKET_S);
    return [from, to, `${version === null ? "first version" : `version ${version.slice(0, 8)}`}, ${clock(since, false)}–${clock(time, false)}`];
  }).filter(([from, to]) => from < to).map(([from, to, text]) => [`${from}-${to}`, text]).slice(-MOST_VERSIONS).reverse();
}

/** Shows the menu of references. */
function compare() {
  const place = byId("compare");
  const options = [["previous", "the time before"], ["start", "the server's start"], ...versionSpans()];
  const kept = shown.reference.includes("-") && !options.some(([value]) => value === shown.reference) ? shown.reference : null;
  if (kept) options.push([kept, kept.split("-").map((t) => clock(Number(t), false)).join("–")]);
  const says = JSON.stringify([shown.reference, options]);
  if (place.dataset.of === says) return;
  place.dataset.of = says;
  const menu = el("select", { id: "reference" }, ...options.map(([value, text]) => el("option", { value }, text)));
  menu.value = shown.reference;
  menu.addEventListener("change", () => choose({ reference: menu.value }));
  const keep = el("button", { type: "button", class: "quiet", id: "keep" }, "Keep this window as the reference");
  keep.addEventListener("click", () => {
    const now = shown.until ?? shown.snapshot.server.now;
    choose({ reference: `${Math.floor(now - shown.windowS)}-${Math.floor(now)}` });
  });
  place.replaceChildren(el("label", { class: "field" }, el("span", {}, "Compared with"), menu), keep);
}

function choose(change) {
  Object.assign(shown, change);
  const { model, other, windowS, until, reference } = shown;
  byId("window").value = until === null ? String(windowS) : "";
  const query = new URLSearchParams({
    ...(model ? { model } : {}), ...(other ? { beside: other } : {}), window: windowS, ...(until ? { until } : {}), reference,
  });
  history.replaceState(null, "", `?${query}${location.hash}`);
  // The page still shows the previous model, window or reference.
  byId("main").setAttribute("aria-busy", "true");
  refresh();
}

/** Shows whether the server answers, in the notice, the bar and the title. */
function tell() {
  const { failure, fault, answered, asked, snapshot: told, version } = shown;
  const silent = asked === null ? 0 : (Date.now() - asked) / 1000;
  const again = () => el("button", { type: "button", onclick: () => refresh() }, "Try again");
  let state = answered === null ? "loading" : "live";
  let said = null;
  const reload = () => el("button", { type: "button", onclick: () => location.reload() }, "Reload");
  if (fault) {
    state = "broken";
    said = `This page cannot read the server's answer (${fault.message}). It may be older than the server: reload it.`;
    overview.showNotice("bad", said, reload());
  } else if (failure?.kind === "unauthorised") {
    state = "refused";
    said = "This server asks for a key. Reload the page, and give any name and the key as the password.";
    overview.showNotice("bad", said, reload());
  } else if (failure && failure.kind !== "unreachable") {
    state = "refused";
    said = `The server refuses: ${failure.message}`;
    overview.showNotice("bad", said, again());
  } else if (failure && (answered === null || silent > STOPPED_S)) {
    state = "stopped";
    said = answered === null ? `Cannot reach the server: ${failure.message}. Trying again.`
      : `The server has not answered since ${clock(answered / 1000)}: it has stopped or is unreachable. The page shows its last answer.`;
    overview.showNotice("bad", said, again());
  } else if (answered !== null && silent > STALE_S) {
    state = "stale";
    said = `No answer for ${span(Math.floor(silent / 2) * 2)}; trying again. The page shows the state of ${clock(answered / 1000)}.`;
    overview.showNotice("warn", said);
  } else if (!failure && told && told.server.version !== version) {
    said = `The server is guerdon ${told.server.version} now; this page came with ${version}.`;
    overview.showNotice("warn", said, reload());
  }
  if (said === null) overview.showNotice("", null);
  document.body.dataset.state = state;
  const word = { stale: "No answer", stopped: "No answer", refused: "Refused", broken: "Cannot be shown" }[state];
  if (!word) return;
  overview.showSilence(word, state === "stale" ? "warn" : "bad");
  document.title = `${word} · guerdon`;
}

function start() {
  const asked = new URLSearchParams(location.search);
  const windowS = Number(asked.get("window"));
  const menu = byId("window");
  const until = Number(asked.get("until"));
  const isOffered = windowS > 0 && [...menu.options].some((option) => Number(option.value) === windowS);
  if (isOffered) shown.before = windowS;
  if (until > 0 && windowS > 0) Object.assign(shown, { until, windowS });
  else shown.windowS = shown.before;
  menu.value = shown.until === null ? String(shown.windowS) : "";
  const reference = asked.get("reference") ?? "";
  if (reference === "start" || /^\d+-\d+$/.test(reference)) shown.reference = reference;
  shown.model = asked.get("model");
  shown.other = asked.get("beside");
  theme.start(byId("theme"));
  overview.makeTiles();
  rewards.make();
  samples.make();
  components.make();
  traffic.make();
  calls.make();
  errors.make();
  critic.make();
  tryit.make();
  menu.addEventListener("change", () => choose({ windowS: Number(menu.value), until: null }));
  byId("other").addEventListener("change", (event) => choose({ other: event.target.value || null }));
  onZoom((end, lengthS) => choose({ until: end, windowS: lengthS, before: shown.until === null ? shown.windowS : shown.before }));
  byId("model").addEventListener("change", (event) => choose({ model: event.target.value }));
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(timer);
      return;
    }
    if (!shown.failure) shown.asked = null; // the page did not poll while it was hidden
    refresh();
  });
  setInterval(() => document.hidden || tell(), 1000);
  refresh();
}

start();
