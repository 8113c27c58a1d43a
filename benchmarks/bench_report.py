"""Formats the results of bench.py as Markdown."""

from __future__ import annotations

import statistics

import growth
import rates
from claims import best, rate, rival_of
from forms import FORMS
from in_process import ENGINE, IN_PROCESS
from workload import PROMPTS

median = statistics.median


def report(results: dict) -> str:
    """Formats all parts that the results have; medians over the rounds."""
    parts = []
    if "peers" in results:
        parts += _peers(results["peers"])
    if "null" in results:
        parts += ["## Without a model", _about(results["null"]), _null(results["null"]["forms"])]
    if "rates" in results:
        parts += ["## Share of the machine's limit", rates.table(results["rates"])]
    if "growth" in results:
        parts += ["## Cost by responses a prompt", growth.table(results["growth"])]
    return "\n\n".join(parts)


def _about(part: dict) -> str:
    return f"{part['date']}, commit {part['commit']}, {part['hardware']}."


def _peers(part: dict) -> list[str]:
    told = [
        "## Scoring",
        f"{_about(part)} {part['data']}. Medians over at most {part['rounds']} rounds. "
        f"Responses are cut after {part['response_tokens']} tokens.",
    ]
    loads = [name for name in PROMPTS if any(cell["load"] == name for cell in part["cells"])]
    for name in loads:
        cells = [cell for cell in part["cells"] if cell["load"] == name]
        told += [f"### Prompts: {name}", _sizes(cells), _rates(cells), _best(cells)]
        told += [
            f"{cell['responses']} responses a prompt:\n\n{_detail(cell)}" for cell in cells if cell["responses"] == 8
        ]
    if part["missing"]:
        told.append("Not measured: " + "; ".join(f"{name} ({why})" for name, why in part["missing"].items()) + ".")
    return told


def _sizes(cells: list[dict]) -> str:
    each = (
        f"{c['responses']}: {c['prompts']} prompts, {c['sequences']} sequences, {c['tokens']} tokens "
        f"(medians: {c['median_tokens']}, the prompt {c['prompt_tokens']})"
        for c in cells
    )
    return "Responses a prompt, " + "; ".join(each) + "."


def _rates(cells: list[dict]) -> str:
    """Formats sequences/s of every form by responses per prompt; guerdon's and the peers' best are bold."""
    names = [f.name for f in (*FORMS, *IN_PROCESS) if any(f.name in cell["forms"] for cell in cells)]
    tops = [{best(cell)[0], best(cell, ours=True, served=True)[0]} for cell in cells]
    lines = [
        "| sequences/s, by responses a prompt | " + " | ".join(str(cell["responses"]) for cell in cells) + " |",
        "| --- |" + " --- |" * len(cells),
    ]
    for name in names:
        told = []
        for cell, top in zip(cells, tops, strict=True):
            row = cell["forms"].get(name)
            value = f"{rate(row):.2f}" if row else ""
            told.append(f"**{value}**" if name in top and row else value)
        lines.append(f"| {name} | {' | '.join(told)} |")
    return "\n".join(lines)


def _best(cells: list[dict]) -> str:
    """Formats the speed-up of guerdon's server over the best peers, by responses per prompt."""
    lines = [
        "| times faster | " + " | ".join(str(cell["responses"]) for cell in cells) + " |",
        "| --- |" + " --- |" * len(cells),
    ]
    kinds = {"the best padded peer": {"pads": True}, "the fastest form of any other peer": {"rival": ""}}
    for rival in sorted(set.intersection(*({*map(rival_of, cell["forms"])} for cell in cells)) - {""}):
        kinds[f"{rival}'s fastest form"] = {"rival": rival}
    for title, kind in kinds.items():
        told = [f"{best(cell, ours=True, served=True)[1] / best(cell, **kind)[1]:.2f}" for cell in cells]
        lines.append(f"| than {title} | {' | '.join(told)} |")
    if all(ENGINE.name in cell["forms"] for cell in cells):
        told = [f"{best(cell, ours=True, served=True)[1] / rate(cell['forms'][ENGINE.name]):.2f}" for cell in cells]
        lines.append(f"| than guerdon's engine in process | {' | '.join(told)} |")
    return "\n".join(lines)


def _detail(cell: dict) -> str:
    lines = [
        "| scoring | sequences/s | range | rounds | tokens/s | p50 ms | p99 ms | largest difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    per_sequence = cell["tokens"] / cell["sequences"]
    for name, row in sorted(cell["forms"].items(), key=lambda item: -rate(item[1])):
        waits = [f"{median(row[k]):.0f}" if row[k] else "" for k in ("p50_ms", "p99_ms")]
        diff = f"{row['max_diff']:.1e}" if "max_diff" in row else ""
        lines.append(
            f"| {name} | {rate(row):.2f} | {min(row['seq_s']):.2f}–{max(row['seq_s']):.2f} | {len(row['seq_s'])} "
            f"| {rate(row) * per_sequence:.0f} | {waits[0]} | {waits[1]} | {diff} |"
        )
    return "\n".join(lines)


def _null(forms: dict) -> str:
    lines = [
        "| no model, 512 tokens a request | p50 ms at 1 | requests/s at 1 | at 8 | at 64 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in forms.items():
        told = [f"{median(row[f'rps_{c}']):.0f}" for c in (1, 8, 64)]
        lines.append(f"| {name} | {median(row['p50_ms_1']):.2f} | {' | '.join(told)} |")
    return "\n".join(lines)
