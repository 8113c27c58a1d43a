"""NeMo Gym's `/aggregate_metrics`: statistics of verified rollouts, over all of them and for each task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from guerdon.wire.bodies import MAX_ROWS

TASK, FAILURE = "_ng_task_index", "_ng_failure_class"
"""Keys that Gym adds to a rollout."""

_NESTED = ("reward_components", "components")
"""Objects whose numbers count as well, each under its own name after theirs."""


_LARGEST = float(np.finfo(np.float64).max) / MAX_ROWS
"""Larger numbers are left out, since their sum may be infinite."""


class MetricsBody(msgspec.Struct, kw_only=True):
    """Rollouts as `/verify` returned them, without what the policy read and wrote."""

    example: ClassVar[str] = '{"verify_responses": [{"_ng_task_index": 0, "reward": 0.5}]}'
    verify_responses: list[dict[str, Any]]


class AggregateMetrics(msgspec.Struct):
    """Numbers by name, such as `mean/reward`: of each task, of all rollouts, and those to show first."""

    group_level_metrics: list[dict[str, Any]]
    agent_metrics: dict[str, Any]
    key_metrics: dict[str, Any]


def aggregate(body: MetricsBody) -> AggregateMetrics:
    """Returns the statistics of each number that rollouts have; failed rollouts are counted, and left out."""
    tasks: dict[Any, list[Mapping[str, Any]]] = {}
    for row in body.verify_responses:
        index = row.get(TASK)
        tasks.setdefault(index if isinstance(index, int) else 0, []).append(row)
    overall = _describe(body.verify_responses) if body.verify_responses else {}
    return AggregateMetrics(
        [{TASK: index, **_describe(rows)} for index, rows in sorted(tasks.items())],
        overall,
        {name: value for name, value in overall.items() if name.startswith("mean/")},
    )


def _describe(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    scored = [row for row in rows if not row.get("mask_sample") and row.get(FAILURE) is None]
    for row in scored:
        for name, value in _numbers(row):
            columns.setdefault(name, []).append(value)
    found: dict[str, Any] = {"num_rollouts": len(rows), "num_failed_rollouts": len(rows) - len(scored)}
    for name, values in columns.items():
        numbers = np.asarray(values, np.float64)
        found |= {
            f"mean/{name}": float(numbers.mean()),
            f"max/{name}": float(numbers.max()),
            f"min/{name}": float(numbers.min()),
            f"median/{name}": float(np.median(numbers)),
            # Gym's: of the sample, and 0 for a single rollout.
            f"std/{name}": float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0,
        }
    return found


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields each finite number of a rollout by its name: its own, its components', and its token counts."""
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    objects = [("", row), ("", usage), *((f"{name}/", row.get(name)) for name in _NESTED)]
    for prefix, inner in objects:
        for name, value in inner.items() if isinstance(inner, dict) else ():
            is_number = isinstance(value, bool | int | float) and abs(value) <= _LARGEST
            if is_number and not name.startswith("_") and name != "mask_sample":
                yield prefix + name, float(value)
