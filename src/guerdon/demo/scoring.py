"""The demo on a user's own prompts and responses: model, server, scores, pictures."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from guerdon.client import RewardClient
from guerdon.client.files import FileSummary, score_file
from guerdon.demo import console, parts, plot
from guerdon.demo.serving import served
from guerdon.errors import StartError

NUM_SHOWN = 4
"""Prompts whose best and worst response are printed."""


def run(out: Path, data: Path, limit: int) -> None:
    """Makes the model, serves it in a process of its own, and scores the first `limit` prompts of `data` into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    prompts = _prepare(out / "rows.jsonl", data, limit)

    console.heading("1  A small reward model, trained on preference pairs")
    parts.make_reward_model(out)

    console.heading("2  guerdon serve, in a process of its own")
    scored = out / "scores.jsonl"
    scored.unlink(missing_ok=True)
    with served(out / parts.REWARD_MODEL, out / "server.log") as url, RewardClient(url) as client:
        client.wait_ready(timeout_s=60)
        console.heading("3  Scoring every response through RewardClient")
        summary = score_file(client, prompts, scored, template=True)
    rows = [json.loads(line) for line in scored.read_text(encoding="utf-8").splitlines()]
    if not summary.rewards:
        raise StartError(f"no response in {data} could be scored", f"see the errors in {scored}")

    console.heading("4  Best and worst")
    for row in _spread_out([row for row in rows if len(_ranked(row)) > 1], NUM_SHOWN):
        _show(row)
    results = _summarise(rows, summary)
    (out / "summary.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot.save(rows, out / "rewards.png", f"guerdon demo: {data.name}")

    console.heading("Done")
    print(f"  {summary}")
    print("  The model knows a few everyday topics only: take its rewards for your data as a trial of the server.")
    console.files(
        [
            (out / "rewards.png", "the rewards, drawn"),
            (out / "scores.jsonl", "every response with its reward"),
            (out / "summary.json", "the figures"),
            (out / parts.REWARD_MODEL, f"the model: guerdon serve {out / parts.REWARD_MODEL}"),
            (out / "server.log", "what the server logged"),
        ]
    )


def _prepare(path: Path, data: Path, limit: int) -> Path:
    """Writes the rows to score to `path`: the first `limit` of `data`, checked."""
    if limit < 1:
        raise StartError(f"--limit is {limit}", "give at least 1")
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
        raise StartError(f"cannot read {data}: {e}", "give a JSONL file, or .jsonl.gz") from e
    if not kept:
        raise StartError(f"{data} has no rows", 'each line is {"prompt": ..., "responses": [...]}')
    if is_cut:
        print(f"{data} has more than {limit} prompts: taking the first {limit} (--limit N, or make demo LIMIT=N)")
    path.write_text("".join(kept), encoding="utf-8")
    return path


def _checked_row(line: str, where: str) -> dict[str, Any]:
    form = 'each line is {"prompt": "...", "responses": ["...", ...]}'
    try:
        row = json.loads(line)
    except ValueError as e:
        raise StartError(f"{where}: not valid JSON ({e})", form) from e
    prompt, responses = (row.get("prompt"), row.get("responses")) if isinstance(row, dict) else (None, None)
    if not isinstance(prompt, str) or not isinstance(responses, list) or not all(isinstance(r, str) for r in responses):
        raise StartError(f"{where}: no prompt text with a list of response texts", form)
    return {"prompt": prompt, "responses": responses}


def _summarise(rows: list[dict[str, Any]], summary: FileSummary) -> dict[str, Any]:
    gaps = [ranked[0][0] - ranked[-1][0] for ranked in map(_ranked, rows) if ranked]
    return {
        "num_prompts": len(rows),
        "num_responses": summary.num_samples,
        "num_failed": summary.num_failed,
        "seconds": round(summary.seconds, 3),
        "mean_reward": summary.mean,
        "min_reward": min(summary.rewards),
        "max_reward": max(summary.rewards),
        "mean_gap": sum(gaps) / len(gaps),
    }


def _ranked(row: dict[str, Any]) -> list[tuple[float, str]]:
    """(reward, response) from best to worst, without failed ones."""
    pairs = zip(row["rewards"], row["responses"], strict=True)
    return sorted((pair for pair in pairs if pair[0] is not None), reverse=True)


def _spread_out(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return rows[:: max(1, len(rows) // count)][:count]


def _show(row: dict[str, Any]) -> None:
    ranked = _ranked(row)
    print(f"  {console.bold(console.shortened(row['prompt']))}")
    for (reward, response), colour, name in (
        (ranked[0], console.GREEN, "best "),
        (ranked[-1], console.RED, "worst"),
    ):
        lines = console.wrapped(response, 88)
        print(f"    {console.coloured(colour, f'{name} {reward:8.3f}')}  {lines[0]}")
        for line in lines[1:]:
            print(f"{'':20}{line}")
    print()
