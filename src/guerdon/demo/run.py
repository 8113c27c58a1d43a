"""The demo from end to end: model, server, scores, pictures; every part as a user would run it."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from tqdm import tqdm

from guerdon.client import RewardClient
from guerdon.client.files import FileSummary, score_file
from guerdon.demo import plot, recipe
from guerdon.demo.story import KINDS
from guerdon.errors import StartError

NUM_SHOWN = 4
"""Prompts whose best and worst response are printed."""


def run(out: Path, data: Path | None, limit: int) -> None:
    """Makes the model, serves it in a process of its own, scores `data` (None: the built-in prompts) into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    prompts = _prepare(out / "prompts.jsonl", data, limit)

    _heading("1  A small reward model, trained on preference pairs")
    _train(out / "reward_model")

    _heading("2  guerdon serve, in a process of its own")
    scored = out / "scores.jsonl"
    scored.unlink(missing_ok=True)
    with _server(out / "reward_model", out / "server.log") as url, RewardClient(url) as client:
        client.wait_ready(timeout_s=60)
        _heading("3  Scoring every response through RewardClient")
        summary = score_file(client, prompts, scored, template=True)
    rows = [json.loads(line) for line in scored.read_text(encoding="utf-8").splitlines()]
    if not summary.rewards:
        raise StartError(f"no response in {data} could be scored", f"see the errors in {scored}")

    _heading("4  Best and worst")
    for row in _spread_out([row for row in rows if len(_ranked(row)) > 1], NUM_SHOWN):
        _show(row)
    results = _summarise(rows, summary)
    (out / "summary.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    plot.save(rows, out / "rewards.png", f"guerdon demo: {data.name if data else 'built-in prompts'}")

    _heading("Done")
    print(f"  {summary}")
    if "pair_accuracy" in results:
        print(f"  {results['pair_accuracy']:.1%} of {results['num_pairs']} held-out pairs are ranked as a person would")
    else:
        print("  The model knows a few everyday topics only: take its rewards for your data as a trial of the server.")
    for name, what in (
        ("rewards.png", "the rewards, drawn"),
        ("scores.jsonl", "every response with its reward"),
        ("summary.json", "the figures"),
        ("reward_model", f"the model: guerdon serve {out / 'reward_model'}"),
        ("server.log", "what the server logged"),
    ):
        print(f"  {_bold(str(out / name)):<{28 + len(str(out))}} {what}")


def _prepare(path: Path, data: Path | None, limit: int) -> Path:
    """Writes the rows to score to `path`: the built-in ones, or the first `limit` of `data`, checked."""
    if data is None:
        path.write_bytes(files("guerdon.demo").joinpath("heldout.jsonl").read_bytes())
        return path
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


def _train(folder: Path) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar is enough
    torch.set_num_threads(1)  # a model this small loses more between threads than it gains
    chosen = recipe.Recipe()
    started = time.monotonic()
    with tqdm(total=chosen.num_steps, unit="step", desc="  training") as bar:

        def on_step(_step: int, loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()

        recipe.make(folder, chosen, on_step)
    print(f"  saved in {folder} after {time.monotonic() - started:.1f} s")


@contextmanager
def _server(model: Path, log_path: Path) -> Iterator[str]:
    """A `guerdon serve` process on free ports; yields its URL once it says that it is ready, and stops it after."""
    command = [sys.executable, "-m", "guerdon", "serve", str(model), "--port", "0", "--no-grpc"]
    print("  $ guerdon " + " ".join(command[3:]))
    with open(log_path, "wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(f"  {_dim(line.rstrip())}")
            ready = re.search(r"ready at (http://\S+)", line)
            if ready:
                break
        else:
            tail = "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
            raise StartError(f"the server ended with status {process.wait()}:\n{tail}", f"see {log_path}")
        yield ready[1]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        print("  the server has stopped")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def _summarise(rows: list[dict[str, Any]], summary: FileSummary) -> dict[str, Any]:
    gaps = [ranked[0][0] - ranked[-1][0] for ranked in map(_ranked, rows) if ranked]
    results: dict[str, Any] = {
        "num_prompts": len(rows),
        "num_responses": summary.num_samples,
        "num_failed": summary.num_failed,
        "seconds": round(summary.seconds, 3),
        "mean_reward": summary.mean,
        "min_reward": min(summary.rewards),
        "max_reward": max(summary.rewards),
        "mean_gap": sum(gaps) / len(gaps),
    }
    if all("kinds" in row for row in rows):
        hits = [hit for row in rows for hit in _hits(dict(zip(row["kinds"], row["rewards"], strict=True)))]
        results |= {"num_pairs": len(hits), "pair_accuracy": sum(hits) / len(hits)}
    return results


def _hits(rewards: dict[str, float]) -> list[bool]:
    """For each pair of kinds that a person would rank, whether the rewards rank it so."""
    pairs = [(kind, worse) for i, kind in enumerate(KINDS[:2]) for worse in KINDS[i + 1 :]]
    return [rewards[kind] > rewards[worse] for kind, worse in pairs]


def _ranked(row: dict[str, Any]) -> list[tuple[float, str]]:
    """(reward, response) from best to worst, without failed ones."""
    pairs = zip(row["rewards"], row["responses"], strict=True)
    return sorted((pair for pair in pairs if pair[0] is not None), reverse=True)


def _spread_out(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    return rows[:: max(1, len(rows) // count)][:count]


def _show(row: dict[str, Any]) -> None:
    ranked = _ranked(row)
    print(f"  {_bold(textwrap.shorten(row['prompt'], 110, placeholder=' ...'))}")
    for (reward, response), colour, name in ((ranked[0], "32", "best "), (ranked[-1], "31", "worst")):
        lines = textwrap.wrap(" ".join(response.split()) or "(nothing)", 88, max_lines=3, placeholder=" ...")
        print(f"    {_ansi(colour, f'{name} {reward:8.3f}')}  {lines[0]}")
        for line in lines[1:]:
            print(f"{'':20}{line}")
    print()


def _heading(text: str) -> None:
    print(f"\n{_bold(text)}", flush=True)


def _bold(text: str) -> str:
    return _ansi("1", text)


def _dim(text: str) -> str:
    return _ansi("2", text)


def _ansi(code: str, text: str) -> str:
    """Coloured where a terminal reads it and NO_COLOR is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{code}m{text}\033[0m"
