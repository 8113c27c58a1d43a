/** The "Try it" section: scores a prompt's responses, and shows rewards, their parts, and every token's value or log-prob. */

import { tryOut } from "./api.js";
import { byId, el, putText } from "./dom.js";
import { isNumber, latency, plural, reward } from "./format.js";
import { heatText, legend, rangeOf } from "./tokens.js";

const MOST = 16;
let model, prompt, template, templateField, ids, idsField, responses, add, submit, results;

/** Creates the form and an empty list of results. */
export function make() {
  model = el("select", { id: "try-model" });
  prompt = el("textarea", { id: "try-prompt", rows: 3, placeholder: "A user's message" });
  template = el("input", { type: "checkbox", id: "try-template" });
  templateField = el("label", { class: "check" }, template, "use the model's chat template");
  ids = el("input", { type: "checkbox", id: "try-ids", onchange: () => offer() });
  idsField = el("label", { class: "check" }, ids, "token ids instead of text");
  responses = el("div", { class: "responses" });
  add = el("button", { type: "button", class: "quiet", onclick: () => addResponse().focus() }, "Add a response");
  submit = el("button", { type: "submit", class: "primary" }, "Score");
  results = el("div", { class: "card results", "aria-live": "polite" }, el("p", { class: "empty" }, "Rewards appear here."));
  const form = el("form", { class: "card" },
    el("label", { class: "field" }, el("span", {}, "Model"), model),
    el("label", { class: "field" }, el("span", {}, "Prompt"), prompt), templateField, idsField, responses,
    el("div", { class: "actions" }, submit, add));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  addResponse();
  addResponse();
  byId("try-grid").replaceChildren(form, results);
}

/** Kinds without a chat template and a tokenizer of their own. */
const UNTOKENISED = ["function", "chat_judge"];
let serving = [];
let ofPage = null;

/** Offers the loaded models that take text or token ids; chooses the page's model `name` when that changes. */
export function show({ models }, name) {
  const able = models.filter((m) => m.is_loaded && (m.takes_text || m.takes_tokens));
  const says = JSON.stringify(able.map((m) => [m.name, m.takes_text, m.takes_messages, m.takes_tokens]));
  if (says === model.dataset.says && name === ofPage) return;
  model.dataset.says = says;
  serving = able;
  const chosen = name === ofPage ? model.value : name;
  ofPage = name;
  model.replaceChildren(...able.map((m) => el("option", { value: m.name }, m.name)));
  if (able.some((m) => m.name === chosen)) model.value = chosen;
  submit.disabled = !able.length;
  if (!able.length) results.replaceChildren(el("p", { class: "empty" }, "No model is loaded."));
  model.onchange = offerModel;
  offerModel();
}

/** Offers what the chosen model takes. */
function offerModel() {
  const { takes_text: text, takes_tokens: tokens, takes_messages: messages, outputs } = serving.find((m) => m.name === model.value) ?? {};
  idsField.hidden = !tokens;
  ids.disabled = !text;
  ids.checked = Boolean(tokens && !text);
  template.checked = messages ?? false;
  const waiting = results.querySelector(".empty");
  if (waiting && outputs) putText(waiting, `${outputs.includes("logprobs") ? "Log-probs" : "Rewards"} appear here.`);
  offer();
}

/** Shows what goes with text, or with ids. */
function offer() {
  const { takes_messages: messages, kind } = serving.find((m) => m.name === model.value) ?? {};
  templateField.lastChild.textContent = UNTOKENISED.includes(kind) ? "as a conversation, not one text" : "use the model's chat template";
  templateField.hidden = !messages || ids.checked;
  prompt.placeholder = ids.checked ? "Ids, such as 5 6 7" : "A user's message";
  for (const area of responses.querySelectorAll("textarea")) area.placeholder = answerHint();
}

const answerHint = () => (ids.checked ? "Ids, such as 8 9" : "The policy's answer");

function addResponse() {
  const text = el("textarea", { rows: 2, placeholder: answerHint() });
  const remove = el("button", { type: "button", class: "quiet remove", "aria-label": "Remove this response" }, "×");
  const row = el("div", { class: "response" }, el("label", { class: "field" }, el("span", {}), text), remove);
  remove.addEventListener("click", () => {
    row.remove();
    number();
    add.focus();
  });
  responses.append(row);
  number();
  return text;
}

function number() {
  const rows = [...responses.children];
  rows.forEach((row, i) => {
    row.querySelector("span").textContent = rows.length > 1 ? `Response ${i + 1}` : "Response";
    row.querySelector("button").hidden = rows.length < 2;
  });
  add.disabled = rows.length >= MOST;
}

async function send() {
  const texts = [...responses.querySelectorAll("textarea")].map((area) => area.value);
  const filled = texts.filter((text) => text !== "");
  if (!filled.length) {
    results.replaceChildren(el("p", { class: "failed" }, "Write at least one response."));
    return;
  }
  submit.disabled = true;
  results.setAttribute("aria-busy", "true");
  try {
    const told = await tryOut({ model: model.value, ...(ids.checked ? tokens(filled) : written(filled)) });
    results.replaceChildren(...found(told, filled));
  } catch (failure) {
    results.replaceChildren(el("p", { class: "failed" }, failure.message));
  } finally {
    submit.disabled = false;
    results.removeAttribute("aria-busy");
  }
}

function written(filled) {
  const request = { prompt: prompt.value || null, responses: filled };
  return template.checked && !templateField.hidden ? { ...request, template: true } : request;
}

function tokens(filled) {
  const before = readIds(prompt.value);
  return { tokens: filled.map((text) => [...before, ...readIds(text)]), prompt_length: before.length };
}

/** Reads ids with spaces, commas or brackets between them. */
function readIds(text) {
  if (/[^\d\s,[\]]/.test(text)) throw new Error("Write token ids: whole numbers, with spaces or commas between them.");
  return (text.match(/\d+/g) ?? []).map(Number);
}

function found(told, texts) {
  const numbers = told.results.map((result) => result.reward).filter(isNumber);
  const [low, high] = [Math.min(0, ...numbers), Math.max(0, ...numbers)];
  const best = new Set(numbers).size > 1 ? Math.max(...numbers) : null;
  const range = rangeOf(told.results);
  const about = UNTOKENISED.includes(serving.find((m) => m.name === told.model)?.kind) ? "about " : "";
  const took = `${told.model} · version ${told.weights_version} · waited ${latency(told.queue_s)}, computed ${latency(told.compute_s)}`;
  return [
    el("ol", { class: "scored" }, ...told.results.map((result, i) => one(result, i, texts[i], [low, high], best, range, about))),
    range ? legend(range) : null,
    el("p", { class: "facts" }, took),
  ].filter(Boolean);
}

function one(result, i, text, [low, high], best, range, about) {
  const isBest = best !== null && result.reward === best;
  const isTeachers = !isNumber(result.reward) && result.error === null && result.tokens?.some(({ likeliest }) => likeliest);
  const head = el("div", { class: "head" },
    el("span", {}, `Response ${i + 1}`),
    isNumber(result.reward) ? bar(result.reward, low, high) : el("span", { class: "failed" }, result.error ?? (isTeachers ? "" : "no score")),
    el("b", { class: "score" }, isTeachers ? "" : reward(result.reward)), isBest ? el("span", { class: "pill ok" }, "best") : null);
  const parts = Object.entries({ ...result.components, ...result.attributes });
  const shown = result.tokens?.length
    ? heatText(result, range, `Response ${i + 1}`)
    : el("p", { class: "text" }, text);
  return el("li", {}, head, shown,
    parts.length ? el("dl", { class: "parts" }, ...parts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, reward(value))))) : null,
    isNumber(result.num_tokens) && !result.tokens?.length ? el("p", { class: "facts" }, `${about}${plural(result.num_tokens, "token")}`) : null);
}

/** Returns a bar from 0 to the reward, on one scale for all responses. */
function bar(value, low, high) {
  const width = high - low || 1;
  const fill = el("i", { class: value < 0 ? "low" : "high" });
  fill.style.left = `${((Math.min(value, 0) - low) / width) * 100}%`;
  fill.style.width = `${(Math.abs(value) / width) * 100}%`;
  const zero = el("i", { class: "zero" });
  zero.style.left = `${(-low / width) * 100}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill, zero);
}
