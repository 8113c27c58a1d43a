"""The command line of the example, and what its runs have in common."""

import argparse
from pathlib import Path

from pairs import read_parts, write_rows

TOKENS, TEMPERATURE = 48, 1.0
SHARES = {"reward_model": 0.27, "reinforce": 0.23, "ppo": 0.23}
"""Shares of --minutes; the rest is for loading, saving and comparing."""


def arguments(description: str) -> argparse.Namespace:
    """Parses the command line; adds `limits`, the minutes of each part."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help='JSONL (.gz) of {"prompt", "chosen", "rejected"}')
    parser.add_argument("--model", type=Path, default=Path("out/real/smollm2"), help="a chat model (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/smollm2"), help="folder for all results (%(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="time of the whole, about (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="steps of each run, if time permits (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seeds the split, the models and the runs (%(default)s)")
    args = parser.parse_args()
    if not args.model.exists() and len(args.model.parts) != 2:  # two may be a name on the hub
        parser.error(f"there is no model {args.model}: `make real` gets SmolLM2; --model takes another chat model")
    args.limits = {name: round(share * args.minutes, 2) for name, share in SHARES.items()}
    return args


def prepare(args: argparse.Namespace) -> dict[str, list[dict]]:
    """Splits the pairs; writes them and their prompts, a file for each part; returns the pairs."""
    parts = read_parts(args.data, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, pairs in parts.items():
        write_rows(pairs, args.out / f"{name}.jsonl")
        prompts = sorted({pair["prompt"] for pair in pairs})
        write_rows([{"prompt": prompt} for prompt in prompts], args.out / f"{name}_prompts.jsonl")
        print(f"  {len(pairs):5} pairs with {len(prompts):3} prompts: {name}", flush=True)
    return parts


def run_flags(args: argparse.Namespace, name: str) -> list[object]:
    """Returns the flags of `guerdon reinforce` and `guerdon ppo` that depend on the command line."""
    return [
        "--policy.model", args.model, "--data.prompts", args.out / "reward_model_prompts.jsonl",
        "--data.validation", args.out / "held_out_prompts.jsonl", "--rollouts.max-new-tokens", TOKENS,
        "--rollouts.temperature", TEMPERATURE, "--run.output-dir", args.out / name, "--run.steps", args.steps,
        "--run.time-limit", args.limits[name], "--run.seed", args.seed,
    ]  # fmt: skip


def respond_flags(args: argparse.Namespace, name: str) -> list[object]:
    """Returns the flags of respond.py for the model before training and for the newest policy of a run."""
    policies = sorted((args.out / name).glob("checkpoints/step-*/policy"))
    return [
        "--policy", policies[-1] if policies else args.model, "--prompts", args.out / "held_out_prompts.jsonl",
        "--out", args.out / f"responses_{name}.jsonl", "--tokens", TOKENS, "--temperature", TEMPERATURE,
        "--seed", args.seed,
    ]  # fmt: skip
