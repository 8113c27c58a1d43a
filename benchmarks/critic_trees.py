"""Measures a critic's train step on one tree, and on its flattened rows without sharing, in this process.

  python benchmarks/critic_trees.py                8 branches of 60 tokens behind 1,000 shared ones

A step is forward, clipped value loss, backward, gradient clipping and AdamW of one global batch. The forms alternate;
the median of each and their ratio are printed. The promise is LEAST times the flattened form's speed; the last line
says whether it holds, and the exit status is 1 if not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForSequenceClassification

from guerdon.assembly import build_trainer
from guerdon.critic_core import TrainRequest
from guerdon.settings.config import CriticConfig
from guerdon.trees import flatten
from workload import SHAPES, VOCAB_SIZE

LEAST = 4.0
PATHS = {"tree": "packed+shared", "flattened": "packed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=int, default=1000, help="tokens that all branches share (default: 1000)")
    parser.add_argument("--branches", type=int, default=8, help="branches of the tree (default: 8)")
    parser.add_argument("--own", type=int, default=60, help="tokens of each branch (default: 60)")
    parser.add_argument("--steps", type=int, default=5, help="steps of each form (default: 5)")
    args = parser.parse_args()
    tree = make_tree(args.shared, args.branches, args.own)
    flat, _ = flatten(tree)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        longest = args.shared + args.own
        config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=longest, **SHAPES["small"], num_labels=1)
        LlamaForSequenceClassification(config).save_pretrained(folder)
        trainer = build_trainer(CriticConfig(model=folder, global_batch_size=args.branches))
    seconds: dict[str, list[float]] = {form: [] for form in PATHS}
    for step in tqdm(range(args.steps + 1), unit="step"):
        for form, request in (("tree", tree), ("flattened", flat)):
            trainer.engine.path = PATHS[form]  # both use the packed forward's attention
            started = time.perf_counter()
            trainer.train(request)
            if step:  # the first one warms up
                seconds[form].append(time.perf_counter() - started)
    tokens = {"tree": int(tree.lengths.sum()), "flattened": args.branches * longest}
    median = {form: statistics.median(times) for form, times in seconds.items()}
    for form, times in seconds.items():
        print(f"{form}: {tokens[form]:,} tokens, {median[form]:.2f} s a step ({min(times):.2f} to {max(times):.2f})")
    ratio = median["flattened"] / median["tree"]
    print(f"Promised is {LEAST} times the flattened form: {ratio:.1f}{'' if ratio >= LEAST else ', which is less'}.")
    return int(ratio < LEAST)


def make_tree(shared: int, branches: int, own: int) -> TrainRequest:
    """Makes a root of observations with a branch of actions for each of `branches`."""
    rng = np.random.default_rng(0)
    lengths = np.array([shared, *[own] * branches])
    shape = (branches + 1, lengths.max())
    mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.float32)
    mask[0] = 0
    targets = rng.normal(size=(2, *shape)).astype(np.float32)
    parents = np.array([-1, *[0] * branches])
    return TrainRequest("", rng.integers(3, VOCAB_SIZE, shape), *targets, mask, parents=parents, lengths=lengths)


if __name__ == "__main__":
    raise SystemExit(main())
