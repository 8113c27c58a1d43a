"""Measures a REINFORCE step (rollout, scoring, log-probs, update): guerdon and TRL's RLOOTrainer, alternating.

  python benchmarks/reinforce.py [--data FILE.jsonl[.gz]]     prints tables, writes results and a plot under --out

Both have the same random policy in float32, the same prompts (about 180 tokens each), eight responses to each, the same
loss (RLOO, the KL to the reference in the reward, one optimiser step) and the same reward model of the policy's shape,
which a `guerdon serve` process serves to both over HTTP. Every response has 150 tokens: EOS is not sampled before. Each
form runs in a process of its own, whose first step is a warm-up and not counted; its peak memory is what was resident.

TRL is measured twice: as its users run it, and in a process that keeps freed memory, as guerdon's do. The promise is
LEAST times the speed of TRL as its users run it; the last line says whether it holds, and the exit status is 1 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from critic_forms import KEEPS_MEMORY
from critic_server import serving_rewards
from reinforce_forms import PARTS
from report import machine
from workload import DEMO_PROMPTS, MAX_LENGTH, SMOLLM2, VOCAB_SIZE, make_tokenizer, read_groups

HERE = Path(__file__).parent
PROMPT_TOKENS = 180
FORMS = {  # the rows of the table
    "TRL": ("trl",),
    "TRL, keeping memory": ("trl",),
    "TRL, static cache": ("trl", "--cache", "static"),
    "TRL, continuous batching": ("trl", "--continuous"),
    "guerdon": ("guerdon",),
}
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 704}
SHAPES = {"small": SMALL, "smollm2": SMOLLM2 | {"tie_word_embeddings": True}}
LEAST = {"small": 2.5, "smollm2": 2.2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help='JSONL of {"prompt", "responses"}; default: the demo\'s prompts')
    parser.add_argument("--out", type=Path, default=Path("out/bench-reinforce"), help="folder of models and results")
    default = ["TRL", "TRL, keeping memory", "guerdon"]
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=default, help="what to measure")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step (default: 8)")
    parser.add_argument("--rollouts", type=int, default=8, help="responses per prompt (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=150, help="tokens per response (default: 150)")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="the models' shape (default: small, 256 x 4)")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's per_device_train_batch_size (default: 16)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all forms (default: 3)")
    parser.add_argument("--steps", type=int, default=2, help="measured steps per form and round (default: 2)")
    parser.add_argument("--port", type=int, default=5555, help="the server's port (default: 5555)")
    args = parser.parse_args()
    args.micro_batch = min(args.micro_batch, args.prompts * args.rollouts)
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.data or DEMO_PROMPTS
    prompts, lengths = make_models_and_prompts(data, args)
    steps = measure(prompts, args)
    results = {"about": machine(), "settings": settings(args, lengths), "steps": steps}
    (args.out / "reinforce.json").write_text(json.dumps(results, indent=1))
    text = report(results)
    (args.out / "reinforce.md").write_text(text)
    print(text)
    plot(results, args.out / "reinforce.png")
    times = times_faster(steps, "guerdon")
    beside = times_faster(steps, "guerdon", "TRL, keeping memory")
    least = LEAST[args.shape]
    print(f"Promised is {least} times TRL: guerdon is {times:.2f} times as fast, {beside:.2f} where TRL keeps memory.")
    return int(not times >= least)


def make_models_and_prompts(data: Path, args: argparse.Namespace) -> tuple[Path, list[int]]:
    """Saves random models `policy` and `reward` with one tokenizer; returns the prompts' file and their lengths."""
    texts = [text for group in read_groups(data, 1000) for text in group]
    tokenizer = make_tokenizer(texts)
    tokenizer.padding_side = "left"
    shape = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[args.shape],
    }
    torch.manual_seed(0)
    for name, model in (
        ("policy", LlamaForCausalLM(LlamaConfig(**shape))),
        ("reward", LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1))),
    ):
        model.save_pretrained(args.out / name)
        tokenizer.save_pretrained(args.out / name)
    rows = cut(texts, tokenizer, args.prompts)
    path = args.out / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return path, [len(tokenizer(row)["input_ids"]) for row in rows]


def cut(texts: list[str], tokenizer: PreTrainedTokenizerFast, count: int) -> list[str]:
    """Returns `count` pieces of the text, of PROMPT_TOKENS tokens on average, at most a quarter more or less."""
    ids = [token for text in texts for token in tokenizer(text + "\n")["input_ids"]]
    pieces, start = [], 0
    for i in range(count):
        length = round(PROMPT_TOKENS * (0.75 + 0.5 * (i + 0.5) / count))
        piece = ids[start : start + length]
        if len(piece) < length:
            raise SystemExit(f"the data has {len(ids)} tokens, too few for {count} prompts; give a larger --data")
        pieces.append(tokenizer.decode(piece))
        start += length
    return pieces


def measure(prompts: Path, args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Returns the seconds of every measured step by form; each form has a process per round, all one server."""
    steps: dict[str, list[dict[str, float]]] = {form: [] for form in args.forms}
    with serving_rewards(args.out / "reward", args.port, args.out / "server.log"):
        for number, form in tqdm([(i, form) for i in range(args.rounds) for form in args.forms], leave=False):
            folder = args.out / f"{FORMS[form][0]}-{time.time_ns()}"
            command = [sys.executable, str(HERE / "reinforce_forms.py"), *FORMS[form]]
            command += [str(args.out / "policy"), str(prompts), str(folder), "--port", str(args.port), "--fixed"]
            command += ["--steps", str(args.steps + 1), "--rollouts", str(args.rollouts)]
            command += ["--new-tokens", str(args.new_tokens), "--micro-batch", str(args.micro_batch)]
            with (args.out / f"{form}-{number}.log").open("w") as log:
                environment = os.environ | (KEEPS_MEMORY if "keeping memory" in form else {})
                done = subprocess.run(
                    command, stdout=subprocess.PIPE, stderr=log, text=True, check=False, env=environment
                )
            if done.returncode != 0:
                raise SystemExit(f"{form} failed; see {log.name}")
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
            steps[form] += [json.loads(line) for line in lines[-args.steps :]]
    return steps


def settings(args: argparse.Namespace, lengths: list[int]) -> dict[str, object]:
    """Describes what both forms have in common."""
    shape = {"vocab_size": VOCAB_SIZE} | SHAPES[args.shape]
    return {
        "model": "Llama {hidden_size} x {num_hidden_layers}, vocabulary {vocab_size}".format(**shape),
        "prompts": args.prompts,
        "rollouts": args.rollouts,
        "prompt_tokens": statistics.mean(lengths),
        "new_tokens": args.new_tokens,
        "threads": torch.get_num_threads(),
        "micro_batch": args.micro_batch,
    }


def report(results: dict) -> str:
    """Formats the results as Markdown: medians over all measured steps."""
    about, given, steps = results["about"], results["settings"], results["steps"]
    lines = [
        f"{about['date']}, commit {about['commit']}, {about['hardware']}, {given['threads']} threads, float32. "
        f"{given['model']}; {given['prompts']} prompts of {given['prompt_tokens']:.0f} tokens, {given['rollouts']} "
        f"responses of {given['new_tokens']} to each; TRL in micro-batches of {given['micro_batch']}. Medians of all "
        "steps, in seconds.",
        "",
        f"| | step | range | {' | '.join(PARTS)} | rest | tokens/s | peak memory, MB | times faster |",
        f"| --- {'| --- ' * (len(PARTS) + 6)}|",
    ]
    for form, rows in steps.items():
        whole = [row["step"] for row in rows]
        parts = [statistics.median(row[part] for row in rows) for part in PARTS]
        rest = statistics.median(row["step"] - sum(row[part] for part in PARTS) for row in rows)
        rate = statistics.median(row["tokens"] / row["step"] for row in rows)
        cells = [
            f"{statistics.median(whole):.2f}",
            f"{min(whole):.2f}–{max(whole):.2f}",
            *(f"{x:.2f}" for x in [*parts, rest]),
        ]
        peak = statistics.median(row["peak_bytes"] for row in rows) / 1e6
        lines.append(f"| {form} | {' | '.join(cells)} | {rate:.0f} | {peak:.0f} | {times_faster(steps, form):.2f} |")
    lines += [
        "",
        "`reward` is the time spent waiting for scores: TRL asks when all responses are there, guerdon as each group "
        "is. Tokens are those of the responses.",
    ]
    return "\n".join(lines)


def times_faster(steps: dict[str, list[dict[str, float]]], form: str, than: str = "TRL") -> float:
    """Returns the speed-up over another form; NaN if one of them was not measured."""
    medians = {name: statistics.median(row["step"] for row in rows) for name, rows in steps.items()}
    return medians.get(than, float("nan")) / medians.get(form, float("nan"))


def plot(results: dict, path: Path) -> None:
    """Draws stacked bars: where a step's seconds go, by form."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps, given = results["steps"], results["settings"]
    forms = list(steps)[::-1]
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.7 * len(forms)))
    colours = ["#2a6f97", "#e9b44c", "#61a5c2", "#a9d6e5", "#9b2226", "#cccccc"]
    left = np.zeros(len(forms))
    for part, colour in zip([*PARTS, "rest"], colours, strict=True):
        values = np.array([statistics.median(seconds_of(part, row) for row in steps[form]) for form in forms])
        axis.barh(forms, values, left=left, color=colour, label=part)
        left += values
    for i, total in enumerate(left):
        axis.text(total + left.max() * 0.01, i, f"{total:.1f} s", va="center")
    axis.set_title(
        f"One REINFORCE step in seconds: {given['prompts']} prompts x {given['rollouts']} responses, {given['model']}",
        loc="left", fontsize=10,
    )  # fmt: skip
    axis.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.1)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def seconds_of(part: str, row: dict[str, float]) -> float:
    """Returns the seconds of one part of a step; `rest` is what no part includes."""
    return row["step"] - sum(row[name] for name in PARTS) if part == "rest" else row[part]


if __name__ == "__main__":
    sys.exit(main())
