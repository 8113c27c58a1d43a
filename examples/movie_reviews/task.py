"""What movie_reviews and ppo share: arguments, models, and the comparison at the end."""

import argparse
import json
import time
from pathlib import Path

from compare import MAX_NEW_TOKENS, TEMPERATURE, compare
from models import make_language_model, make_reward_model
from reviews import Judge, read_parts, write_prompts
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def arguments(description: str, out: str, steps: int) -> argparse.Namespace:
    """Parses the command line; `began` is the current time."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help='JSONL or .jsonl.gz of {"text", "label": 0 or 1}')
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for all results (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seeds the split, the models and the run (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="number of training steps (%(default)s)")
    return parser.parse_args(namespace=argparse.Namespace(began=time.monotonic()))


def prepare(args: argparse.Namespace) -> tuple[Judge, list[str]]:
    """Makes the models and the prompt files; returns the judge and the held-out prompts."""
    print("1  A language model, a reward model and a judge learn from separate reviews", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    parts = read_parts(args.data, args.seed)
    make_language_model(parts["language_model"], args.out / "language_model", args.seed)
    make_reward_model(parts["reward_model"], args.out / "language_model", args.out / "reward_model", args.seed)
    judge, others = Judge(parts["judge"]), parts["prompts"] + parts["held_out"]
    print(f"  the judge is right about {judge.accuracy(others):.0%} of {len(others)} other reviews")
    write_prompts(parts["prompts"], args.out / "prompts.jsonl")
    return judge, write_prompts(parts["held_out"], args.out / "held_out.jsonl")


def flags(args: argparse.Namespace, run: Path) -> list[object]:
    """Returns the flags of `guerdon reinforce` and `guerdon ppo` that depend on the command line."""
    return [
        "--policy.model", args.out / "language_model", "--run.output-dir", run, "--run.steps", args.steps,
        "--data.prompts", args.out / "prompts.jsonl", "--data.validation", args.out / "held_out.jsonl",
        "--rollouts.temperature", TEMPERATURE, "--rollouts.max-new-tokens", MAX_NEW_TOKENS, "--run.seed", args.seed,
    ]  # fmt: skip


def conclude(args: argparse.Namespace, run: Path, judge: Judge, prompts: list[str], url: str) -> None:
    """Compares the policy before and after the run, and writes the figures to judge.json."""
    print(f"\n4  Before and after, on {len(prompts)} held-out prompts")
    trained = run / "checkpoints" / f"step-{args.steps:06d}" / "policy"
    policies = {"before": args.out / "language_model", "after": trained}
    figures = compare(policies, prompts, judge, url, args.seed)
    figures["kl"] = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["kl"]
    figures["seconds"] = time.monotonic() - args.began
    (args.out / "judge.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(f"  {figures['kl']:16.3f}  nats per response: KL to the language model")
    print(f"  {figures['seconds']:16.0f}  seconds in total\n")
    print(f"  figures {args.out / 'judge.json'}\n  curves  {run / 'curves.png'}\n  policy  {trained}")
