"""The calls of judges in words, as the page sums them up."""

import math

import pytest

from guerdon.server.metrics import Metrics
from guerdon.server.page import judge_calls


def test_calls_are_summed_up_by_judge():
    metrics = Metrics()
    for outcome, name in [("answered", "a"), ("answered", "a"), ("timeout", "a"), ("answered", "b")]:
        metrics.add("guerdon_judge_calls", 1, name, outcome)
        metrics.observe("guerdon_judge_call_seconds", 0.5 if outcome == "answered" else 2.0, name)
    metrics.add("guerdon_judge_kept_answers", 3, "a")
    metrics.add("guerdon_judge_parse_failures", 1, "a")
    metrics.add("guerdon_judge_prompt_tokens", 200, "a")
    metrics.add("guerdon_judge_completion_tokens", 20, "a")
    metrics.add("guerdon_judge_cost", 0.25, "a")
    metrics.set("guerdon_judge_budget_used", 0.125, "a")
    told = judge_calls.calls(metrics.sample(*judge_calls.METRICS), ["a", "c"])
    assert told["a"] == {
        "outcomes": {"answered": 2, "timeout": 1},
        "in_progress": 0,
        "kept_answers": 3,
        "unreadable_answers": 1,
        "prompt_tokens": 200,
        "completion_tokens": 20,
        "cost": 0.25,
        "budget_used": 0.125,
        "mean_s": pytest.approx(1.0),
    }
    assert [*told] == ["a", "c"]
    assert told["c"]["outcomes"] == {} and told["c"]["kept_answers"] == 0
    assert all(math.isnan(told["c"][name]) for name in ("cost", "budget_used", "mean_s"))
