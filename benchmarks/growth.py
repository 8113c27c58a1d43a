"""Measures the cost of scoring by responses per prompt; it should grow like P + N·R, the computed tokens.

  python benchmarks/growth.py                              prints a table, and writes growth.json under --out

Prompts of P random tokens with N responses of R tokens each, by the engine in process. Every measurement computes about
the same number of tokens, so that its batches are alike. The results are compared with c·(P + N·R), for the c with the
smallest maximum deviation; and with that plus attention's own term, a·(visible query-key pairs), which grows faster
than tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine.packing import pack
from guerdon.settings.config import ModelConfig
from rates import make_model, pairs_of
from report import machine
from workload import VOCAB_SIZE

RESPONSES = (1, 2, 4, 8, 16, 32)
PROMPT, RESPONSE = 256, 112
COMPUTED = 15_360
"""About how many tokens one measurement computes: four batches of the CPU's budget."""
MOST_OFF = 0.1
"""The promised maximum deviation from P + N·R."""


def make_rows(responses: int, groups: int) -> list[np.ndarray]:
    """Returns the sequences of so many prompts with so many responses each."""
    luck = np.random.default_rng(responses)
    rows = []
    for _ in range(groups):
        prompt = luck.integers(3, VOCAB_SIZE, PROMPT)
        rows += [np.concatenate([prompt, luck.integers(3, VOCAB_SIZE, RESPONSE)]) for _ in range(responses)]
    return rows


def nearest(tokens: np.ndarray, seconds: np.ndarray) -> float:
    """Returns the c that minimises the largest deviation of `seconds` from `c * tokens`, relative to `c * tokens`."""
    ratios = seconds / tokens
    return float(ratios.max() + ratios.min()) / 2


def fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the non-negative factors of the columns of `terms` `[B,K]` that fit `seconds` `[B]` best, relatively.

    Least squares; a factor that would be below 0 becomes 0, and the others are fitted without it.
    """
    scaled = terms / seconds[:, None]
    used = list(range(terms.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, used], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all() or len(used) == 1:
            factors = np.zeros(terms.shape[1])
            factors[used] = found
            return factors
        used.pop(int(found.argmin()))


def deviations(results: dict) -> dict[str, list[float]]:
    """Returns the relative deviation of each measurement by curve: "tokens" is c·(P + N·R), "both" adds attention."""
    rows = results["rows"]
    seconds = np.array([statistics.median(row["seconds"]) / row["groups"] for row in rows])
    tokens = np.array([PROMPT + row["responses"] * RESPONSE for row in rows], dtype=float)
    both = np.stack([tokens, [row["pairs"] / row["groups"] for row in rows]], axis=1)
    return {
        "tokens": (seconds / (tokens * nearest(tokens, seconds)) - 1).tolist(),
        "both": (seconds / (both @ fit(both, seconds)) - 1).tolist(),
    }


def table(results: dict) -> str:
    """Formats the results as Markdown: medians over the rounds."""
    off = deviations(results)
    first = results["rows"][0]
    lines = [
        f"{results['date']}, commit {results['commit']}, {results['hardware']}. Prompts of {PROMPT} tokens, responses "
        f"of {RESPONSE}. Medians over {len(first['seconds'])} rounds.",
        "",
        "| responses a prompt | ms a prompt | range | tokens of P + N·R | computed | sent | off c·(P + N·R) | "
        "off with attention's term | times the cost of one response | as P + N·R says | as tokens sent say |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    ms = [[1e3 * s / row["groups"] for s in row["seconds"]] for row in results["rows"]]
    one = statistics.median(ms[0])
    for i, row in enumerate(results["rows"]):
        n, middle = row["responses"], statistics.median(ms[i])
        needed, sent = PROMPT + n * RESPONSE, n * (PROMPT + RESPONSE)
        lines.append(
            f"| {n} | {middle:.1f} | {min(ms[i]):.1f}–{max(ms[i]):.1f} | {needed} "
            f"| {row['computed'] / row['groups']:.0f} | {sent} | {off['tokens'][i]:+.1%} | {off['both'][i]:+.1%} "
            f"| {middle / one:.2f} "
            f"| {needed / (PROMPT + RESPONSE):.2f} | {n:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of models and results")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; medians are shown (default: 7)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    engine = build_scorer(ModelConfig(model=make_model(args.out, "384 x 6"), dtype="float32"))
    rows, loads = [], []
    for responses in RESPONSES:
        groups = round(COMPUTED / (PROMPT + responses * RESPONSE))
        made = make_rows(responses, groups)
        batches = list(pack(made, budget=engine.max_batch_tokens, share=True))
        loads.append([Sequence(row) for row in made])
        rows.append({
            "responses": responses, "groups": groups, "computed": sum(b.num_tokens for b in batches),
            "pairs": pairs_of(batches), "seconds": [],
        })  # fmt: skip
    engine.score(loads[-1])
    for _ in tqdm(range(args.rounds), desc="responses a prompt", file=sys.stderr):
        for row, load in zip(rows, loads, strict=True):
            started = time.perf_counter()
            engine.score(load)
            row["seconds"].append(time.perf_counter() - started)
    results = {**machine(), "prompt": PROMPT, "response": RESPONSE, "rows": rows}
    (args.out / "growth.json").write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
