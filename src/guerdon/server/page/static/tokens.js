/** A text with its tokens' values or log-probs as shades: high ones in one colour, low ones in another. */

import { el, putText } from "./dom.js";
import { isNumber, percent, plural, reward } from "./format.js";

/** Percent of the colour in the ground, of which text must still stand out. */
export const DEEPEST = 55;

/** The smallest and the largest value of all results, and what stands between the two colours. */
export function rangeOf(results) {
  const values = results.flatMap((result) => [
    ...(result.tokens ?? []).map((token) => token.value), ...(result.steps ?? []).map((step) => step.reward),
  ]).filter(isNumber);
  if (!values.length) return null;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return { low, high, middle: low < 0 && high > 0 ? 0 : (low + high) / 2 };
}

/** Shades the element by the value. */
function shade(node, value, { low, high, middle }) {
  if (!isNumber(value)) return;
  const side = value >= middle ? high - middle : middle - low;
  const depth = side ? Math.abs(value - middle) / side : 0;
  node.classList.add(value >= middle ? "high" : "low");
  node.style.setProperty("--depth", `${Math.round(depth * DEEPEST)}%`);
}

/** Returns the legend of the shades. */
export function legend({ low, high, middle }) {
  const ramp = Array.from({ length: 9 }, (_, i) => {
    const cell = el("i", {});
    shade(cell, low + ((high - low) * i) / 8, { low, high, middle });
    return cell;
  });
  return el("p", { class: "ramp" }, el("span", {}, reward(low)), ...ramp, el("span", {}, reward(high)));
}

/** Returns one result's text as tokens; the pointer and the arrow keys read out their values. */
export function heatText({ tokens, steps }, range, label) {
  const hasValues = tokens.some(({ value }) => isNumber(value));
  const isTeachers = tokens.some(({ likeliest }) => likeliest);
  const read = isTeachers ? "its log-prob, and what was likeliest in its place" : "its value";
  const said = hasValues ? `. Point at one, or use the arrow keys, to read ${read}.` : steps?.length ? ` in ${plural(steps.length, "step")}; each step's reward follows it.` : "";
  const told = el("p", { class: "told", "aria-live": "polite" }, plural(tokens.length, "token") + said);
  const ends = new Map((steps ?? []).map((step, i) => [step.index, { ...step, number: i + 1 }]));
  const nodes = [];
  const what = isTeachers ? " with its tokens' log-probs" : hasValues ? " with its tokens' values" : steps?.length ? " with its steps' rewards" : "";
  const text = el("div", { class: "heat-text", tabindex: 0, role: "group", "aria-label": label + what });
  const choices = el("div", { class: "likeliest" });
  let at = -1;
  const tell = (i) => {
    nodes[at]?.classList.remove("at");
    at = i;
    nodes[i].classList.add("at");
    const { text: piece, value, rank } = tokens[i];
    const step = ends.get(i);
    choices.replaceChildren(...likeliest(tokens[i]));
    const none = isTeachers ? "nothing predicts it" : "no value";
    putText(told, `Token ${i + 1}, “${piece}”: ${isNumber(value) ? reward(value, 3) : none}${rank ? `, rank ${rank}` : ""}${step ? `; step ${step.number}: ${reward(step.reward, 3)}` : ""}`);
  };
  tokens.forEach((token, i) => {
    const node = el("span", { class: `token${token.in_prompt ? " prompt" : ""}`, "data-i": i }, token.text);
    if (range) shade(node, token.value, range);
    nodes.push(node);
    text.append(node);
    const step = ends.get(i);
    if (!step) return;
    const mark = el("span", { class: "step", "data-i": i }, reward(step.reward));
    if (range) shade(mark, step.reward, range);
    text.append(mark);
  });
  if (!hasValues) return el("div", {}, text, told);
  text.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined) tell(Number(i));
  });
  text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !nodes.length) return;
    event.preventDefault();
    tell(Math.min(Math.max(at + move, 0), nodes.length - 1));
  });
  return el("div", {}, text, told, isTeachers ? choices : null);
}

/** Returns a table of the likeliest tokens in the token's place, in which the token itself is marked. */
function likeliest({ text, likeliest: found }) {
  if (!found?.length) return [];
  const rows = found.map(([piece, logprob]) => {
    const share = Math.exp(logprob);
    return el("tr", { class: piece === text ? "own" : null },
      el("th", { scope: "row" }, `“${piece}”`), el("td", {}, reward(logprob, 3)), el("td", {}, percent(share)),
      el("td", { class: "share" }, el("meter", { class: "ok", value: share, "aria-hidden": "true" })));
  });
  return [el("table", {}, el("thead", {}, el("tr", {},
    ...["Likeliest here", "Log-prob", "Probability", ""].map((word) => el("th", { scope: "col" }, word)))), el("tbody", {}, ...rows))];
}
