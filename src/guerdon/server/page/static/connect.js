/** The panel of an idle server: lines that ask this server's model, from a shell, Python and trainers. */

import { byId, el, putText } from "./dom.js";
import { isTrained } from "./health.js";

/** The address that the page was loaded from, with the prefix of a proxy. */
const BASE = new URL("..", import.meta.url).href.replace(/\/$/, "");

const PROMPT = "What is 2+2? ";
const RESPONSES = ["It is 4.", "It is 5."];
const TRL_ARGS = "    args=GRPOConfig(output_dir=\"out\"),\n    train_dataset=load_dataset(\"json\", data_files=\"prompts.jsonl\", split=\"train\"),\n";
let said = "";

/** Shows the panel while the model has no requests, and hides it with the first. */
export function show(snapshot, name, windowS) {
  const place = byId("connect");
  const model = snapshot.models.find((m) => m.name === name);
  const lines = snapshot.series.models[name] ?? {};
  const isAsked = [lines.requests_per_s, lines.sequences_per_s, lines.queue_sequences].some((values) => values?.some((v) => v > 0));
  const isIdle = model?.is_loaded && snapshot.server.is_ready && !isAsked && !isTrained(snapshot, windowS) && !snapshot.isZoomed;
  place.hidden = !isIdle;
  if (!isIdle) return;
  const says = JSON.stringify([model.name, model.kind, model.outputs, model.takes_text, snapshot.critic?.name, snapshot.server.has_keys]);
  if (says === said) return;
  said = says;
  const key = snapshot.server.has_keys ? "With a key of the role score or above in GUERDON_API_KEY, which guerdon's clients read as well." : "";
  place.replaceChildren(
    el("div", { class: "heading" }, el("h2", { id: "connect-title" }, "Connect"),
      el("p", { class: "aside" }, `These lines ask ${name}. ${key}`.trim())),
    tabs(snippets(model, BASE, snapshot.server.has_keys, snapshot.critic?.name)));
}

/** Returns [title, code] pairs that ask the model at `base`; `critic` is the critic's name, of which the model is a part. Pure. */
export function snippets(model, base, hasKeys, critic = "critic") {
  const ways = model.is_critic ? ofCritic(model, base, critic) : model.outputs.includes("logprobs") ? ofTeacher(model, base)
    : model.takes_text ? ofTexts(model, base) : ofTokens(model, base);
  if (!hasKeys) return ways;
  return ways.map(([title, code]) => [title, {
    curl: code.replace("curl -s ", "curl -s -H \"Authorization: Bearer $GUERDON_API_KEY\" "),
    OpenRLHF: code.replace("://", "://x:$GUERDON_API_KEY@"),
  }[title] ?? code]);
}

function ofTexts({ name }, base) {
  const url = `${base}/get_reward?model=${encodeURIComponent(name)}`;
  const texts = RESPONSES.map((text) => PROMPT + text);
  const prompts = RESPONSES.map(() => PROMPT);
  return [
    ["curl", `curl -s '${url}' \\\n    -H 'Content-Type: application/json' \\\n    -d '${JSON.stringify({ query: texts, prompts })}'\n`],
    ["Python", python("RewardClient", name, base,
      `    scores = client.score(\n        texts=${JSON.stringify(texts)},\n        prompts=${JSON.stringify(prompts)},\n    )\n    print(scores.rewards)\n`)],
    ["TRL", "from datasets import load_dataset\nfrom guerdon.adapters.trl import reward_function\nfrom trl import GRPOConfig, GRPOTrainer\n\n"
      + `trainer = GRPOTrainer(\n    model="./my-policy",\n    reward_funcs=reward_function("${base}", model="${name}"),\n${TRL_ARGS})\ntrainer.train()\n`],
    ["OpenRLHF", `python -m openrlhf.cli.train_ppo_ray \\\n    --actor.model_name_or_path ./my-policy \\\n    --reward.remote_url '${url}' \\\n`
      + "    --data.prompt_dataset ./prompts --data.input_key prompt --data.apply_chat_template\n"],
  ];
}

function ofTokens({ name }, base) {
  const inputs = [
    { name: "tokens", datatype: "INT64", shape: [2, 3], data: [5, 6, 7, 5, 6, 8] },
    { name: "sequence_lengths", datatype: "INT64", shape: [2, 1], data: [3, 3] },
  ];
  return [
    ["curl", infer(name, base, inputs)],
    ["Python", python("RewardClient", name, base, "    scores = client.score(tokens=[[5, 6, 7], [5, 6, 8]])\n    print(scores.rewards)\n")],
  ];
}

function ofTeacher({ name }, base) {
  const body = { model: name, prompt: [[5, 6, 7, 8, 9]], max_tokens: 1, prompt_logprobs: 5 };
  return [
    ["curl", `curl -s ${base}/v1/completions \\\n    -H 'Content-Type: application/json' \\\n    -d '${JSON.stringify(body)}'\n`],
    ["Python", python("TeacherClient", name, base,
      "    told = client.logprobs(tokens=[[5, 6, 7, 8, 9]], prompt_lengths=[3])\n    print(told.logprobs)\n")],
    ["TRL", "from datasets import load_dataset\nfrom guerdon.adapters.trl_models import ServedReference\nfrom trl import DPOConfig, DPOTrainer\n\n"
      + `trainer = DPOTrainer(\n    model="./my-policy",\n    ref_model=ServedReference("${base}", model="${name}"),\n    args=DPOConfig(output_dir="out"),\n    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),\n)\ntrainer.train()\n`],
  ];
}

function ofCritic({ name }, base, critic) {
  const inputs = [{ name: "tokens", datatype: "INT64", shape: [1, 4], data: [5, 6, 7, 8] }, { name: "sequence_lengths", datatype: "INT64", shape: [1, 1], data: [4] }];
  const named = critic === "critic" ? "" : `, name="${critic}"`;
  return [
    ["curl", infer(name, base, inputs)],
    ["Python", `from guerdon import CriticClient\n\nwith CriticClient("${base}"${named}) as critic:\n    scores = critic.infer(tokens=[[5, 6, 7, 8]])\n    print(scores)\n`],
    ["TRL", "from datasets import load_dataset\nfrom guerdon.adapters.trl_critic import use_critic\nfrom trl import GRPOConfig, GRPOTrainer\n\n"
      + `trainer = GRPOTrainer(\n    model="./my-policy", reward_funcs=my_reward,\n${TRL_ARGS})\nuse_critic(trainer, "${base}"${named})\ntrainer.train()\n`],
    ["OpenRLHF", "python -m guerdon.adapters.openrlhf_critic \\\n    --actor.model_name_or_path ./my-policy \\\n    --algo.advantage.estimator gae \\\n"
      + `    --critic.model_name_or_path ${base} \\\n    --critic.num_nodes 1 --critic.num_gpus_per_node 1\n`],
  ];
}

function infer(name, base, inputs) {
  return `curl -s ${base}/v2/models/${encodeURIComponent(name)}/infer \\\n    -H 'Content-Type: application/json' \\\n    -d '${JSON.stringify({ inputs })}'\n`;
}

function python(client, name, base, body) {
  return `from guerdon import ${client}\n\nwith ${client}("${base}", "${name}") as client:\n${body}`;
}

/** Returns a tab for each way; arrow keys change between them, as ARIA's tabs do. */
function tabs(ways) {
  const list = el("div", { class: "tablist", role: "tablist", "aria-label": "Ways to connect" });
  const code = el("code", {});
  const panel = el("div", { class: "panel", role: "tabpanel", id: "connect-panel" }, el("pre", { tabindex: 0 }, code));
  const copy = el("button", { type: "button", class: "quiet copy", "aria-live": "polite" }, "Copy");
  const select = (i) => {
    [...list.children].forEach((tab, j) => {
      tab.setAttribute("aria-selected", String(i === j));
      tab.tabIndex = i === j ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", `connect-${i}`);
    putText(code, ways[i][1]);
    putText(copy, "Copy");
  };
  list.append(...ways.map(([title], i) =>
    el("button", { type: "button", role: "tab", id: `connect-${i}`, "aria-controls": "connect-panel", onclick: () => select(i) }, title)));
  list.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const at = ([...list.children].indexOf(document.activeElement) + move + ways.length) % ways.length;
    select(at);
    list.children[at].focus();
  });
  // Browsers have a clipboard only on https and loopback; elsewhere the code is selected, to be copied by hand.
  copy.addEventListener("click", async () => {
    if (navigator.clipboard) {
      await navigator.clipboard.writeText(code.textContent);
      putText(copy, "Copied");
    } else {
      getSelection().selectAllChildren(code);
      putText(copy, "Selected");
    }
  });
  select(0);
  return el("div", { class: "card" }, el("div", { class: "tabs" }, list, copy), panel);
}
