"""Makes a small reward model, serves it, and trains a small policy against it; or scores a file with that model."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from demo import learning, scoring


def main() -> None:
    parser = argparse.ArgumentParser("python -m demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=7, help="seeds models, prompts and responses (default: 7)")
    parser.add_argument("--steps", type=int, default=60, help="number of training steps of the policy (default: 60)")
    parser.add_argument("--data", type=Path, metavar="FILE",
                        help='only scores this JSONL or .jsonl.gz file of {"prompt", "responses"}')  # fmt: skip
    parser.add_argument("--limit", type=int, default=100, metavar="N", help="scores at most N prompts (default: 100)")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help="default: out/demo")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit_on_signal)  # otherwise the server that the demo starts would outlive it
    if args.data:
        scoring.run(args.out, args.data, args.limit)
    else:
        learning.run(args.out, args.seed, args.steps)


def _exit_on_signal(number: int, _frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
