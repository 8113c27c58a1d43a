"""The demo: trains a reward model, serves it, trains a policy against it, and compares responses."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from demo import parts, showing
from demo.story import KINDS
from guerdon import RewardClient
from serving import guerdon, serving

DEFAULT_URL = "http://127.0.0.1:5555"
"""Stands in reinforce.yaml for whoever runs it again; the demo's own server has a free port."""
NUM_SHOWN = 5
"""Number of held-out prompts with printed responses."""
NUM_MEASURED = 8
"""Responses per held-out prompt, before and after."""
WIDTH = 46
"""Columns per response in the printed comparison."""
NUM_LAST = 5
"""Number of last steps over which the KL is averaged."""


def server_settings(out: Path) -> dict[str, Any]:
    """Returns the content of server.yaml: the reward is the sum of the reward model's and of `repetition`'s."""
    return {
        "models": [
            {"name": "reward_model", "model": str(out / parts.REWARD_MODEL)},
            {"name": "repetition", "model": "demo.repetition:repetition"},
        ],
        "rewards": [
            {"name": "total", "components": [{"model": "reward_model"}, {"model": "repetition", "weight": 15.0}]}
        ],
    }


def actor_settings(out: Path, seed: int, steps: int) -> dict[str, Any]:
    """Returns the content of reinforce.yaml."""
    return {
        "policy": {"model": str(out / parts.POLICY), "learning_rate": 5e-4},
        "data": {
            "prompts": str(out / parts.PROMPTS),
            "validation": str(out / parts.VALIDATION),
            "num_validation": 96,
            "template": True,
        },
        "rollouts": {"prompts_per_step": 16, "rollouts_per_prompt": 8, "max_new_tokens": 64},
        "reinforce": {"advantage_estimator": "rloo", "kl_coefficient": 0.3, "global_batch_size": 128},
        "remote_rm": {"reward_model": {"urls": [DEFAULT_URL], "name": "total"}, "send": "messages"},
        "run": {"steps": steps, "seed": seed, "output_dir": str(out / "run"), "save_every": steps},
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy's responses to the held-out prompts and their rewards, `[num_prompts, NUM_MEASURED]` each."""

    responses: list[list[str]]
    rewards: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.rewards.mean())


def run(out: Path, seed: int, steps: int) -> None:
    """Runs the demo and leaves all files in `out`."""
    import torch

    started = time.monotonic()
    torch.set_num_threads(1)  # models this small lose more by synchronising threads than they gain
    out.mkdir(parents=True, exist_ok=True)
    folder = out / "run"
    shutil.rmtree(folder, ignore_errors=True)

    showing.heading("1  A reward model learns from preferences what a good answer is")
    parts.make_reward_model(out, seed)
    showing.heading("2  A policy learns to answer: well, badly, rudely, off topic")
    parts.make_policy(out, seed)
    parts.make_prompts(out, seed)
    held_out = [json.loads(line) for line in (out / parts.HELD_OUT).read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in held_out]

    showing.heading("3  guerdon serves the reward model, and a function that punishes repetition")
    (out / "server.yaml").write_text(yaml.safe_dump(server_settings(out), sort_keys=False), encoding="utf-8")
    with (
        serving("serve", "--config", out / "server.yaml", log=out / "server.log", num_threads=1) as url,
        RewardClient(url, "total") as client,
    ):
        accuracy = pair_accuracy(client, held_out)
        print(f"  {accuracy:.1%} of held-out pairs of answers are ranked as a person would")
        before = measure(client, out / parts.POLICY, prompts)

        showing.heading("4  The policy learns from the server by REINFORCE")
        file = out / "reinforce.yaml"
        file.write_text(yaml.safe_dump(actor_settings(out, seed, steps), sort_keys=False), encoding="utf-8")
        guerdon("reinforce", file, "--remote-rm.reward-model.urls", url, num_threads=1)
        trained = folder / "checkpoints" / f"step-{steps:06d}" / "policy"
        after = measure(client, trained, prompts)

    showing.heading("5  Before and after, on held-out prompts")
    stride = -(-len(prompts) // NUM_SHOWN)
    print(f"  every {stride}th prompt, and of its {NUM_MEASURED} responses the one in the middle by reward\n")
    for i in range(0, len(prompts), stride):
        show(prompts[i], before, after, i)
    steps_done = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    results = {
        "reward_before": before.mean,
        "reward_after": after.mean,
        "kl": float(np.mean([row["kl"] for row in steps_done if "kl" in row][-NUM_LAST:])),
        "seconds": round(time.monotonic() - started, 1),
        "steps": steps,
        "seed": seed,
        "pair_accuracy": accuracy,
    }
    (out / "summary.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    showing.draw_learning(steps_done, before.rewards, after.rewards, out / "learning.png")

    showing.heading("Done")
    print(
        f"  The mean reward of {after.rewards.size} held-out responses went from {before.mean:.2f} to {after.mean:.2f},"
        f" at a KL of {results['kl']:.1f} nats; {results['seconds']:.0f} s in all"
    )
    showing.list_files(
        [
            (out / "learning.png", "rewards and KL as a picture"),
            (out / "summary.json", "the figures"),
            (folder / "samples", "responses during training, beside curves.png, metrics.jsonl and tensorboard/"),
            (trained, "the policy as a transformers checkpoint"),
            (out / parts.REWARD_MODEL, f"the reward model: guerdon serve {out / parts.REWARD_MODEL}"),
            (out / "server.yaml", f"both rewards: PYTHONPATH=examples guerdon serve --config {out / 'server.yaml'}"),
            (out / "reinforce.yaml", f"the run's settings: guerdon reinforce {out / 'reinforce.yaml'}"),
            (out / "server.log", "the server's log"),
        ]
    )


def measure(client: RewardClient, folder: Path, prompts: list[str]) -> Measured:
    """Samples NUM_MEASURED responses to each prompt with transformers, and scores them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=64, num_return_sequences=NUM_MEASURED)
    responses = tokenizer.batch_decode(drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    asked = [chat for chat in chats for _ in range(NUM_MEASURED)]
    messages = [[*chat, {"role": "assistant", "content": text}] for chat, text in zip(asked, responses, strict=True)]
    rewards = client.score(messages=messages).rewards.reshape(-1, NUM_MEASURED)
    return Measured([responses[i : i + NUM_MEASURED] for i in range(0, len(responses), NUM_MEASURED)], rewards)


def pair_accuracy(client: RewardClient, rows: list[dict[str, Any]]) -> float:
    """Returns the share of pairs of answers that the rewards rank as a person would."""
    hits = []
    for row in rows:
        scores = client.score(
            messages=[
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": response}]
                for response in row["responses"]
            ]
        )
        rewards = dict(zip(row["kinds"], scores.rewards, strict=True))
        hits += [rewards[kind] > rewards[worse] for i, kind in enumerate(KINDS[:2]) for worse in KINDS[i + 1 :]]
    return sum(hits) / len(hits)


def show(prompt: str, before: Measured, after: Measured, i: int) -> None:
    """Prints the middle responses to prompt `i` by reward, before and after, side by side."""
    print(f"  {showing.bold(showing.shortened(prompt))}")
    sides = []
    for measured, colour in ((before, showing.RED), (after, showing.GREEN)):
        middle = measured.rewards[i].argsort(kind="stable")[(NUM_MEASURED - 1) // 2]
        text = measured.responses[i][middle] or "(an empty response)"
        sides.append((measured.rewards[i][middle], colour, showing.wrapped(text, WIDTH, most=4)))
    for row in range(max(len(lines) for _, _, lines in sides)):
        cells = []
        for reward, colour, lines in sides:
            number = showing.coloured(colour, f"{reward:6.2f}") if row == 0 else " " * 6
            cells.append(f"{number}  {lines[row] if row < len(lines) else '':<{WIDTH}}")
        print(f"    {'    '.join(cells).rstrip()}")
    print()
