/** The page: asks for a snapshot every few seconds, and has each section show its part of it. */

import { Failure, snapshot as ask } from "./api.js";
import * as critic from "./critic.js";
import { byId, el } from "./dom.js";
import { clock, span } from "./format.js";
import * as models from "./models.js";
import * as overview from "./overview.js";
import * as rewards from "./rewards.js";
import * as samples from "./samples.js";
import * as theme from "./theme.js";
import * as traffic from "./traffic.js";
import * as tryit from "./tryit.js";

/** Without an answer for so long, the page says that what it shows is old. */
const STALE_S = 10;
/** And for so long, that the server has stopped. */
const STOPPED_S = 30;

const shown = { model: null, windowS: 900, reference: "previous", snapshot: null, answered: null, failure: null };
let timer = 0;
let round = 0;

/** A snapshot of a long window costs more and changes less. */
function pauseS() {
  return Math.min(Math.max(shown.windowS / 600, 2), 20);
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++round;
  try {
    const told = await ask(shown.windowS, shown.reference);
    if (mine !== round) return; // the window was changed meanwhile
    Object.assign(shown, { snapshot: told, answered: Date.now(), failure: null });
    draw();
  } catch (failure) {
    if (mine !== round) return;
    if (!(failure instanceof Failure)) throw failure; // a mistake of the page's own: the console has it
    shown.failure = failure;
  }
  tell();
  schedule();
}

function schedule() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(refresh, pauseS() * 1000);
}

function draw() {
  const { snapshot, windowS } = shown;
  chooseModels(snapshot.models);
  const { model } = shown;
  overview.showServer(snapshot);
  overview.showVerdict(snapshot, model, windowS);
  overview.showTiles(snapshot, model);
  rewards.show(snapshot, model, windowS);
  samples.show(snapshot, model, windowS);
  traffic.show(snapshot, model);
  critic.show(snapshot);
  models.show(snapshot);
  tryit.show(snapshot);
  compare();
}

/** Puts the names into the menu, and keeps the chosen one for as long as it is served. */
function chooseModels(served) {
  const names = served.map((m) => m.name);
  if (!names.includes(shown.model)) shown.model = names[0];
  const menu = byId("model");
  if (menu.dataset.names !== names.join("\n")) {
    menu.dataset.names = names.join("\n");
    menu.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
  menu.value = shown.model;
}

/** Which reference the rewards are compared with. */
function compare() {
  const place = byId("compare");
  const options = [["previous", "the time before"], ["start", "the server's start"]];
  const kept = shown.reference.includes("-") ? shown.reference : null;
  if (kept) options.push([kept, kept.split("-").map((t) => clock(Number(t), false)).join("–")]);
  if (place.dataset.of === shown.reference) return;
  place.dataset.of = shown.reference;
  const menu = el("select", { id: "reference" }, ...options.map(([value, text]) => el("option", { value }, text)));
  menu.value = shown.reference;
  menu.addEventListener("change", () => choose({ reference: menu.value }));
  const keep = el("button", { type: "button", class: "quiet", id: "keep" }, "Keep this window as the reference");
  keep.addEventListener("click", () => {
    const { now } = shown.snapshot.server;
    choose({ reference: `${Math.floor(now - shown.windowS)}-${Math.floor(now)}` });
  });
  place.replaceChildren(el("label", { class: "field" }, el("span", {}, "Compared with"), menu), keep);
}

function choose(change) {
  const asksAgain = "windowS" in change || "reference" in change;
  Object.assign(shown, change);
  const { model, windowS, reference } = shown;
  const query = new URLSearchParams({ ...(model ? { model } : {}), window: windowS, reference });
  history.replaceState(null, "", `?${query}${location.hash}`);
  if (asksAgain) refresh();
  else if (shown.snapshot) draw();
}

/** What the page says of answers that did not come. */
function tell() {
  const { failure, answered } = shown;
  const silent = answered === null ? Infinity : (Date.now() - answered) / 1000;
  const again = () => el("button", { type: "button", onclick: () => refresh() }, "Try again");
  let state = answered === null ? "loading" : "live";
  let said = null;
  if (failure?.kind === "unauthorised") {
    state = "refused";
    said = "This server asks for a key. Load the page again, and give any name, and the key as the password.";
    const reload = el("button", { type: "button", onclick: () => location.reload() }, "Load again");
    overview.showNotice("bad", said, reload);
  } else if (failure && failure.kind !== "unreachable") {
    state = "refused";
    said = `The server refuses: ${failure.message}`;
    overview.showNotice("bad", said, again());
  } else if (failure && silent > STOPPED_S) {
    state = "stopped";
    said = answered === null ? `Cannot reach the server: ${failure.message}. Trying again.`
      : `The server has not answered since ${clock(answered / 1000)}: it has stopped, or cannot be reached. What is shown is from then.`;
    overview.showNotice("bad", said, again());
  } else if (failure && silent > STALE_S) {
    state = "stale";
    said = `No answer for ${span(Math.floor(silent / 2) * 2)}; trying again.`;
    overview.showNotice("warn", said);
  }
  if (said === null) overview.showNotice("", null);
  document.body.dataset.state = state;
  if (state !== "stopped" && state !== "refused") return;
  const word = state === "stopped" ? "No answer" : "Refused";
  overview.showSilence(word);
  document.title = `${word} · guerdon`;
}

function start() {
  const asked = new URLSearchParams(location.search);
  const windowS = Number(asked.get("window"));
  const menu = byId("window");
  if ([...menu.options].some((option) => Number(option.value) === windowS)) shown.windowS = windowS;
  menu.value = String(shown.windowS);
  const reference = asked.get("reference") ?? "";
  if (reference === "start" || /^\d+-\d+$/.test(reference)) shown.reference = reference;
  shown.model = asked.get("model");
  theme.start(byId("theme"));
  overview.makeTiles();
  rewards.make();
  samples.make();
  traffic.make();
  critic.make();
  tryit.make();
  menu.addEventListener("change", () => choose({ windowS: Number(menu.value) }));
  byId("model").addEventListener("change", (event) => choose({ model: event.target.value }));
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : refresh()));
  setInterval(() => shown.failure && tell(), 1000);
  refresh();
}

start();
