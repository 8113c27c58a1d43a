"""Sums up the calls of judges in words to their servers since the start. Pure: no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from guerdon.server.page.traffic import Sample

METRICS = (
    "guerdon_judge_calls",
    "guerdon_judge_call_seconds",
    "guerdon_judge_calls_in_progress",
    "guerdon_judge_kept_answers",
    "guerdon_judge_parse_failures",
    "guerdon_judge_prompt_tokens",
    "guerdon_judge_completion_tokens",
    "guerdon_judge_cost",
    "guerdon_judge_budget_used",
)
"""The metrics that it reads."""

_OF_SAMPLES = {
    "guerdon_judge_calls_in_progress": "in_progress",
    "guerdon_judge_kept_answers_total": "kept_answers",
    "guerdon_judge_parse_failures_total": "unreadable_answers",
    "guerdon_judge_prompt_tokens_total": "prompt_tokens",
    "guerdon_judge_completion_tokens_total": "completion_tokens",
    "guerdon_judge_cost_total": "cost",
    "guerdon_judge_budget_used": "budget_used",
    "guerdon_judge_call_seconds_sum": "seconds",
    "guerdon_judge_call_seconds_count": "timed",
}
_UNKNOWN = ("cost", "budget_used")
"""Without prices there is no cost, and without a budget no share of it."""


def calls(samples: Iterable[Sample], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the calls of these judges by outcome, with their time, cost and answers."""
    found = {name: _empty() for name in names}
    for metric, labels, value in samples:
        told = found.get(labels.get("model", ""))
        if told is None:
            continue
        if metric == "guerdon_judge_calls_total":
            told["outcomes"][labels["outcome"]] = int(value)
        elif metric in _OF_SAMPLES:
            told[_OF_SAMPLES[metric]] = value
    for told in found.values():
        seconds, timed = told.pop("seconds"), told.pop("timed")
        told["mean_s"] = seconds / timed if timed else math.nan
    return found


def _empty() -> dict[str, Any]:
    return {"outcomes": {}} | dict.fromkeys(_OF_SAMPLES.values(), 0.0) | dict.fromkeys(_UNKNOWN, math.nan)
