"""Measures the packed forward's share of the machine's limit: its FLOP/s beside those of its matrix products alone.

  python benchmarks/rates.py                               prints a table, and writes rates.json under --out

Only necessary FLOPs count: 2·M·K·N for every matrix product of the layers, and 4·heads·head size for every visible
query-key pair, in every layer. A shared prompt counts once; in the last layer everything but keys and values counts
only for the tokens that are read; masked pairs, rotary embedding, norms, softmax and activations do not count. They are
compared with the same matrix products, [M,K] by [K,N] in the same dtype, alone and repeated on the same matrices, each
weighted by how often the forward makes it. Forward and products alternate; a share compares those of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, LlamaConfig

from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine import onednn
from guerdon.engine.packing import PackedBatch, pack
from guerdon.settings.config import ModelConfig
from report import machine
from workload import MAX_LENGTH, SHAPE, VOCAB_SIZE

Product = tuple[int, int, int]
"""A matrix product [M,K] by [K,N] as (M, K, N)."""

SHAPES = {
    "384 x 6": SHAPE,
    "576 x 30": {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
    "1024 x 4": {
        "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
        "intermediate_size": 2816,
    },
    "2048 x 2": {
        "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
    "4096 x 8": {
        "hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336,
    },
}  # fmt: skip
"""Random Llamas, by hidden size and number of layers: 576 x 30 is SmolLM2-135M's, 4096 x 8 a quarter of an 8B model."""
MEASURED = {
    "cpu": [
        ("384 x 6", "float32", 8, 8),
        ("576 x 30", "float32", 24, 1),
        ("1024 x 4", "float32", 4, 8),
        ("2048 x 2", "float32", 2, 8),
        ("384 x 6", "bfloat16", 8, 8),
        ("576 x 30", "bfloat16", 24, 1),
        ("2048 x 2", "bfloat16", 6, 8),
    ],
    "cuda": [("4096 x 8", "bfloat16", 64, 8), ("2048 x 2", "bfloat16", 64, 8), ("384 x 6", "bfloat16", 64, 8)],
}
"""Shape, dtype, number of prompts and of responses to each, by device."""
BATCH_TOKENS = {"cpu": None, "cuda": 16_384}
"""The engine's token budget by device; None for its own."""
LEAST = {"cpu": 0.85, "cuda": 0.55}
"""The promised share of the products' rate for the first row, by device."""


class Products(TorchDispatchMode):
    """Counts the matrix products within the context, by their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::mm", "aten::addmm"):
            left, right = args[-2:]
            self.found[left.shape[0], left.shape[1], right.shape[1]] += 1
        elif name in ("aten::linear", "mkldnn::_linear_pointwise"):
            self.found[args[0].numel() // args[0].shape[-1], args[0].shape[-1], made.shape[-1]] += 1
        return made


def flops_of(products: Counter[Product]) -> int:
    """Returns the FLOPs of matrix products: a multiplication and an addition each."""
    return sum(2 * m * k * n * count for (m, k, n), count in products.items())


def bytes_of(products: Counter[Product], itemsize: int) -> int:
    """Returns the least bytes that the products read and write: their factors and results, once."""
    return sum((m * k + k * n + m * n) * itemsize * count for (m, k, n), count in products.items())


def pairs_of(batches: Iterable[PackedBatch]) -> int:
    """Returns the number of causally visible query-key pairs in all packed batches."""
    lengths = ((s.stop - s.start, s.position) for batch in batches for s in batch.segments)
    return sum(length * before + length * (length + 1) // 2 for length, before in lengths)


def attention_flops(pairs: int, config: Any) -> int:
    """Returns the FLOPs of attention scores and weighted sums over so many pairs, in all layers."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4 * pairs * config.num_attention_heads * head_size


def random_rows(prompts: int, responses: int = 8, seed: int = 0) -> list[np.ndarray]:
    """Returns random ids with lengths as in RLHF: log-normal, prompts of median 180, responses of median 150."""
    luck = np.random.default_rng(seed)

    def ids(median: int, low: int, high: int) -> np.ndarray:
        return luck.integers(3, VOCAB_SIZE, int(np.clip(luck.lognormal(np.log(median), 0.7), low, high)))

    rows = []
    for _ in range(prompts):
        prompt = ids(180, 16, 768)
        rows += [np.concatenate([prompt, ids(150, 8, 768)]) for _ in range(responses)]
    return rows


def steady_s(run: Callable[[], Any], least_s: float = 0.04) -> float:
    """Returns the median seconds of runs that take `least_s` in total, at least three, after a warm-up."""
    run()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < least_s:
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def product_s(product: Product, dtype: torch.dtype, device: str) -> float:
    """Returns the seconds of a product by a linear layer's weight: on a CPU oneDNN's, by `engine.onednn`.

    On AMD's processors it is more than twice as fast as `torch.mm`, which is MKL's there. The weight lies in oneDNN's
    order, as the forward's do, if that is the faster.
    """
    m, k, n = product
    left, weight = (torch.randn(size, dtype=dtype, device=device) for size in ((m, k), (n, k)))
    if device == "cpu":
        with torch.inference_mode():
            ways = [weight, onednn.reordered(weight)] if onednn.can_reorder(dtype) else [weight]
            return min(steady_s(lambda weight=weight: onednn.product(left, weight, None)) for weight in ways)
    out = torch.empty(m, n, dtype=dtype, device=device)
    return steady_s(lambda: torch.mm(left, weight.t(), out=out))


def copy_rate(device: str) -> float:
    """Returns bytes per second, read and written, of a copy much larger than the caches."""
    source = torch.ones(64 << 20, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / steady_s(lambda: target.copy_(source), 0.3)


def the_device() -> str:
    """Returns the device on which the engine computes."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_model(folder: Path, shape: str) -> str:
    """Saves the random model of that shape, unless it exists."""
    path = folder / "rates" / shape.replace(" ", "")
    if not (path / "config.json").exists():
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LENGTH, **SHAPES[shape]}
        config = LlamaConfig(**sizes, pad_token_id=0, num_labels=1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    return str(path)


def measure(shape: str, dtype: str, prompts: int, responses: int, folder: Path, rounds: int) -> dict:
    """Measures a model's forward beside its own matrix products, `rounds` times, alternating."""
    device = the_device()
    budget = BATCH_TOKENS[device]
    engine = build_scorer(ModelConfig(model=make_model(folder, shape), dtype=dtype, max_batch_tokens=budget))
    rows = random_rows(prompts, responses)
    sequences = [Sequence(row) for row in rows]
    batches = list(pack(rows, budget=engine.max_batch_tokens, share=True))
    engine.score(sequences)
    with Products() as products:
        engine.score(sequences)
    config = engine.trunk.config
    # Of the last layer one query a row is seen, its last.
    pairs = (config.num_hidden_layers - 1) * pairs_of(batches) + sum(map(len, rows))
    in_layers, in_products = attention_flops(pairs, config), flops_of(products.found)
    seconds, product_seconds = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        engine.score(sequences)
        seconds.append(time.perf_counter() - started)
        each = {product: product_s(product, engine.dtype, device) for product in products.found}
        product_seconds.append(sum(each[p] * count for p, count in products.found.items()))
    return {
        "shape": shape, "dtype": dtype, "responses": responses, "sequences": len(rows), "sent": sum(map(len, rows)),
        "computed": sum(b.num_tokens for b in batches), "batches": len(batches), "path": engine.info.path,
        "product_flops": in_products, "attention_flops": in_layers,
        "product_bytes": bytes_of(products.found, engine.dtype.itemsize),
        "seconds": seconds, "product_seconds": product_seconds,
    }  # fmt: skip


def shares_of(row: dict) -> list[float]:
    """Returns the forward's share of the products' rate, by round."""
    flops = row["product_flops"] + row["attention_flops"]
    return [flops / s / (row["product_flops"] / p) for s, p in zip(row["seconds"], row["product_seconds"], strict=True)]


def table(results: dict) -> str:
    """Formats the results as Markdown: medians over the rounds, and the ranges of what is promised."""
    median = statistics.median
    copied = median(results["copy_bytes_s"])
    lines = [
        f"{results['date']}, commit {results['commit']}, {results['hardware']}, {results['threads']} threads. "
        f"Copying: {copied / 1e9:.1f} GB/s read and written. "
        f"Medians over {len(results['models'][0]['seconds'])} rounds.",
        "",
        "| random Llama | tokens computed | tokens/s | GFLOP/s needed | matrix products alone, GFLOP/s | "
        "share of them | range | attention's part of the FLOPs | the products' bytes at the copy rate, of the time |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["models"]:
        seconds, shares = median(row["seconds"]), shares_of(row)
        flops = row["product_flops"] + row["attention_flops"]
        lines.append(
            f"| {row['shape']}, {row['dtype']}, {row['responses']} a prompt "
            f"| {row['computed']} | {row['computed'] / seconds:.0f} "
            f"| {flops / seconds / 1e9:.0f} | {row['product_flops'] / median(row['product_seconds']) / 1e9:.0f} "
            f"| {median(shares):.0%} | {min(shares):.0%} to {max(shares):.0%} | {row['attention_flops'] / flops:.0%} "
            f"| {row['product_bytes'] / copied / seconds:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of models and results")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are shown (default: 5)")
    parser.add_argument("--only", default="", help="only models whose shape and dtype contain this, as 384 or bfloat16")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    device = the_device()
    results: dict = {
        **machine(), "device": device, "threads": torch.get_num_threads(), "models": [], "copy_bytes_s": []
    }  # fmt: skip
    chosen = [each for each in MEASURED[device] if args.only in f"{each[0]}, {each[1]}"]
    if not chosen:
        parser.error(
            f"--only {args.only}: no model; there are {', '.join(f'{e[0]}, {e[1]}' for e in MEASURED[device])}"
        )
    for shape, dtype, prompts, responses in tqdm(chosen, desc="share of the limit", file=sys.stderr):
        results["copy_bytes_s"].append(copy_rate(device))
        results["models"].append(measure(shape, dtype, prompts, responses, args.out, args.rounds))
    (args.out / "rates.json").write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
