"""Measures for scale.py within the ranks of a launch; rank 0 prints one line of JSON. Run by torchrun, or alone.

scale_ranks.py commands                           the seconds of a command that computes nothing, by its size
scale_ranks.py train MODEL BATCH.npz [--fsdp] [--tensor-parallel T] [--steps N]       the seconds of a train step
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from typing import Any

import numpy as np
import torch

from guerdon.core import Command, Score, Scored, Sequence, Signal
from guerdon.critic_core import TrainRequest
from guerdon.distributed.group import Group
from guerdon.distributed.pulse import Pulse
from guerdon.distributed.ranks import Ranks, start
from guerdon.settings.config import CriticConfig, ParallelConfig

TOKENS = 300
"""Tokens per sequence; a token travels as eight bytes."""
SIZES = (1, 8, 64, 512, 4096)
"""Numbers of sequences in a command."""
VOCAB_SIZE = 8192


class Nothing:
    """A worker that computes nothing: each rank returns a score for each of its sequences."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def execute(self, command: Command) -> Scored:
        own = len(command.sequences) // self._ranks.size
        return Scored([Score(0.5) for _ in range(own)], "weights")

    def merge(self, command: Command, parts: list[Scored]) -> list[Scored]:
        return parts

    def is_watched(self, command: Command) -> bool:
        return False


def commands(ranks: Ranks, rounds: int) -> list[dict[str, float]]:
    """Returns the command's bytes by size, and its median seconds to the ranks, back, and in total."""
    pulse = Pulse(ranks)
    pulse.start()
    group = Group(Nothing(ranks), ranks, pulse)
    if not ranks.is_leader:
        group.follow()
        return []
    times: list[tuple[float, float]] = []
    group.on_done = lambda _, down, up: times.append((down, up))
    rng = np.random.default_rng(0)
    found = []
    for count in SIZES:
        sequences = [Sequence(rng.integers(0, VOCAB_SIZE, TOKENS)) for _ in range(count)]
        command = Command(Signal.FORWARD, "model", sequences)
        whole = []
        times.clear()
        for _ in range(rounds):
            started = time.perf_counter()
            group.execute(command)
            whole.append(time.perf_counter() - started)
        down, up = np.median(np.array(times), axis=0)
        size = len(pickle.dumps(command, pickle.HIGHEST_PROTOCOL))
        row = {"sequences": count, "bytes": size, "down_s": down, "up_s": up, "whole_s": float(np.median(whole))}
        found.append(row)
    group.end()
    return found


def train(ranks: Ranks, args: argparse.Namespace) -> list[float]:
    """Returns the seconds of each step on the whole batch, after a warm-up step on a part of it."""
    from guerdon.assembly import build_trainer

    batch = dict(np.load(args.batch))
    inputs = {name: batch[name] for name in ("tokens", "returns", "prev_values", "mask")}
    trainer = build_trainer(CriticConfig(model=args.model, global_batch_size=len(batch["tokens"])), ranks)

    def step(count: int) -> float:
        request = TrainRequest("step", **{name: rows[:count] for name, rows in inputs.items()})
        ranks.agree()  # so that all of them begin at once
        started = time.perf_counter()
        trainer.train(request)
        return time.perf_counter() - started

    step(16)
    return [step(len(batch["tokens"])) for _ in range(args.steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["commands", "train"])
    parser.add_argument("model", nargs="?", help="folder of the critic that is trained")
    parser.add_argument("batch", nargs="?", help="file of the batch's arrays")
    parser.add_argument("--fsdp", action="store_true", help="as the server's flag")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="as the server's flag")
    parser.add_argument("--steps", type=int, default=1, help="train steps (default: 1)")
    parser.add_argument("--rounds", type=int, default=30, help="commands per size (default: 30)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ranks = start(ParallelConfig(tensor_parallel=args.tensor_parallel, fsdp=args.fsdp), "cpu")
    found: Any = commands(ranks, args.rounds) if args.what == "commands" else train(ranks, args)
    if ranks.is_leader:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
