"""SAO's recipe on a toy: one response a prompt, a calculator in its middle, and a critic that learns on a server."""

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # for calculator.py
from models import make  # noqa: E402

from serving import guerdon, serving  # noqa: E402

LEARNING_RATE = 2e-3


def arguments(description: str | None, out: str) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for all results (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seeds the models and the run (%(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="number of training steps (%(default)s)")
    return parser.parse_args()


def flags(args: argparse.Namespace) -> list[object]:
    """Returns the flags of `guerdon ppo` that depend on the command line."""
    return [
        "--policy.model", args.out / "policy", "--run.output-dir", args.out / "ppo", "--run.steps", args.steps,
        "--data.prompts", args.out / "prompts.jsonl", "--data.validation", args.out / "held_out.jsonl",
        "--run.seed", args.seed,
    ]  # fmt: skip


def conclude(args: argparse.Namespace) -> None:
    """Prints the mean reward of the last 20 steps, and the rewards on products that were never trained on."""
    rows = [json.loads(line) for line in (args.out / "ppo/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rewards = [row["reward"] for row in rows[1:]][-20:]
    held_out = [row["validation_reward"] for row in rows if "validation_reward" in row]
    print(f"\nReward of the last 20 steps: {sum(rewards) / len(rewards):.3f}")
    print(f"On products that were never trained on: {held_out[0]:.2f} before, {held_out[-1]:.2f} after")


def main() -> None:
    args = arguments(__doc__, out="out/sao")
    make(args.out, args.seed)
    learning = ["--checkpoint-dir", args.out / "kept", "--learning-rate", LEARNING_RATE, "--global-batch-size", 128]
    with (
        serving("serve", "calculator:reward", log=args.out / "reward.log") as reward_url,
        serving("serve-critic", args.out / "critic", *learning, log=args.out / "critic.log") as url,
    ):
        urls = ["--remote-critic-rm.critic.url", url, "--remote-critic-rm.reward-model.urls", reward_url]
        guerdon("ppo", HERE / "sao.yaml", *flags(args), *urls)
    conclude(args)


if __name__ == "__main__":
    main()
