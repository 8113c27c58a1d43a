"""The demo on your own data: trains the reward model, serves it, scores a file, draws the rewards."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from demo import parts, showing
from serving import guerdon, serving

FORM = 'each line is {"prompt": "...", "responses": ["...", ...]}'
NUM_SHOWN = 4
"""Number of prompts with printed best and worst responses."""


def run(out: Path, data: Path, limit: int) -> None:
    """Trains and serves the reward model, and scores the first `limit` prompts of `data` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    prompts = _prepare(out / "rows.jsonl", data, limit)

    showing.heading("1  A small reward model learns from preference pairs")
    parts.make_reward_model(out)

    showing.heading("2  guerdon serves it in a process of its own")
    scored = out / "scores.jsonl"
    scored.unlink(missing_ok=True)
    with serving("serve", out / parts.REWARD_MODEL, log=out / "server.log", num_threads=1) as url:
        showing.heading("3  guerdon scores every response")
        guerdon("score", "--server", url, "--template", prompts, "-o", scored, accepted=(0, 1))
    rows = [json.loads(line) for line in scored.read_text(encoding="utf-8").splitlines()]
    if not any(map(_ranked, rows)):
        sys.exit(f"no response could be scored: see the errors in {scored}")

    showing.heading("4  Best and worst")
    for row in _spread_out([row for row in rows if len(_ranked(row)) > 1], NUM_SHOWN):
        _show(row)
    (out / "summary.json").write_text(json.dumps(_summarise(rows), indent=2) + "\n", encoding="utf-8")
    showing.draw_scores(rows, out / "rewards.png", f"guerdon's demo: {data.name}")

    showing.heading("Done")
    print("  The model knows only a few everyday topics: its rewards for your data merely show that the server works.")
    showing.list_files(
        [
            (out / "rewards.png", "the rewards as a picture"),
            (out / "scores.jsonl", "all responses with their rewards"),
            (out / "summary.json", "the figures"),
            (out / parts.REWARD_MODEL, f"the model: guerdon serve {out / parts.REWARD_MODEL}"),
            (out / "server.log", "the server's log"),
        ]
    )


def _prepare(path: Path, data: Path, limit: int) -> Path:
    """Checks the first `limit` rows of `data` and writes them to `path`."""
    if limit < 1:
        sys.exit(f"--limit is {limit}: give at least 1")
    kept: list[str] = []
    is_cut = False
    try:
        with gzip.open(data, "rt", encoding="utf-8") if data.suffix == ".gz" else open(data, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if len(kept) == limit:
                    is_cut = True
                    break
                kept.append(json.dumps(_checked_row(line, f"{data}, line {number}"), ensure_ascii=False) + "\n")
    except (OSError, EOFError, UnicodeDecodeError) as e:
        sys.exit(f"cannot read {data}: {e}; give a JSONL file, or .jsonl.gz")
    if not kept:
        sys.exit(f"{data} has no rows: {FORM}")
    if is_cut:
        print(f"{data} has more than {limit} prompts: taking the first {limit} (make demo LIMIT=N takes N)")
    path.write_text("".join(kept), encoding="utf-8")
    return path


def _checked_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as e:
        sys.exit(f"{where}: not valid JSON ({e}): {FORM}")
    prompt, responses = (row.get("prompt"), row.get("responses")) if isinstance(row, dict) else (None, None)
    if not isinstance(prompt, str) or not isinstance(responses, list) or not all(isinstance(r, str) for r in responses):
        sys.exit(f"{where}: no prompt with a list of responses: {FORM}")
    return {"prompt": prompt, "responses": responses}


def _summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [reward for row in rows for reward in row["rewards"]]
    kept = [reward for reward in rewards if reward is not None]
    gaps = [ranked[0][0] - ranked[-1][0] for ranked in map(_ranked, rows) if ranked]
    return {
        "num_prompts": len(rows),
        "num_responses": len(rewards),
        "num_failed": len(rewards) - len(kept),
        "mean_reward": sum(kept) / len(kept),
        "min_reward": min(kept),
        "max_reward": max(kept),
        "mean_gap": sum(gaps) / len(gaps),
    }


def _ranked(row: dict[str, Any]) -> list[tuple[float, str]]:
    """Returns (reward, response) pairs, best first, without failed ones."""
    pairs = zip(row["rewards"], row["responses"], strict=True)
    return sorted((pair for pair in pairs if pair[0] is not None), reverse=True)


def _spread_out(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return rows[:: max(1, len(rows) // count)][:count]


def _show(row: dict[str, Any]) -> None:
    ranked = _ranked(row)
    print(f"  {showing.bold(showing.shortened(row['prompt']))}")
    for (reward, response), colour, name in (
        (ranked[0], showing.GREEN, "best "),
        (ranked[-1], showing.RED, "worst"),
    ):
        lines = showing.wrapped(response, 88)
        print(f"    {showing.coloured(colour, f'{name} {reward:8.3f}')}  {lines[0]}")
        for line in lines[1:]:
            print(f"{'':20}{line}")
    print()
