"""All that the page shows at one moment, as one object: gathered quickly where requests are served, made elsewhere."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon.core import ModelInfo
from guerdon.metrics import UNKNOWN
from guerdon.server.critic.critic import Critic
from guerdon.server.dashboard import drift, traffic
from guerdon.server.dashboard.asked import Asked
from guerdon.server.dashboard.recent import Window
from guerdon.server.dashboard.scored import COARSE_S, FINE_S, FINE_WINDOW_S, Part, Pool
from guerdon.server.dashboard.watch import Watch
from guerdon.server.service import Service

MAX_COLUMNS = 144
"""Of the rewards over time."""

_SHARES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
_MAX_POINTS, _NUM_LENGTH_BINS = 400, 12
_OF_INFO = (
    *("name", "kind", "outputs", "attribute_names", "weights_version", "dtype", "device", "path", "why", "source"),
    *("max_length", "takes_text", "takes_messages", "takes_tokens", "takes_prompts", "step_rule"),
)


@dataclass(frozen=True, eq=False)
class Gathered:
    """What was known at one moment: nothing in it changes any more."""

    server: dict[str, Any]
    models: list[dict[str, Any]]
    critic: dict[str, Any] | None
    names: list[str]
    sums: frozenset[str]
    samples: list[traffic.Sample]
    window: Window
    rewards: dict[str, tuple[list[Part], list[Part]]]
    start: float
    step_s: float
    num_columns: int
    spans: tuple[tuple[float, float], tuple[float, float]]


def gather(service: Service, asked: Asked, server: dict[str, Any]) -> Gathered:
    """What the page asks for; on the service's asyncio loop. `server` is what whoever serves it tells of itself."""
    watch = service.watch
    samples, now = watch.refresh(), watch.now()
    unit_s = FINE_S if asked.window_s <= FINE_WINDOW_S else COARSE_S
    step_s = unit_s * max(1, math.ceil(asked.window_s / MAX_COLUMNS / unit_s))
    count = math.ceil(asked.window_s / step_s)
    end = math.ceil(now / step_s) * step_s
    start = end - count * step_s
    compared = asked.compared(start, watch.started)
    infos = service.scorers()
    rewards = {
        info.name: (watch.scored.parts(info.name, start, end, now), watch.scored.parts(info.name, *compared, now))
        for info in infos
        if "rewards" in info.outputs
    }
    return Gathered(
        server=server | _server(service, watch, now),
        models=[_model(service, info) for info in infos],
        critic=None if service.critic is None else _critic(service.critic),
        names=watch.names,
        sums=frozenset(info.name for info in infos if info.kind == "sum"),
        samples=samples,
        window=watch.recent.window(asked.window_s),
        rewards=rewards,
        start=start,
        step_s=step_s,
        num_columns=count,
        spans=((start, end), compared),
    )


def make(g: Gathered) -> dict[str, Any]:
    """The object that the page reads; arrays are numpy's, and NaN stands where nothing is known."""
    window, rows = g.window, {name: i for i, name in enumerate(g.names)}
    counted = traffic.totals(g.samples)
    totals = {}
    for name, row in rows.items():
        told = (
            counted.get(name)
            or traffic.totals([("guerdon_sequences_total", {"model": name, "outcome": "ok"}, 0)])[name]
        )
        received, computed = told["received_tokens"], told["computed_tokens"]
        share = {"saved_share": 1 - computed / received if received else math.nan}
        totals[name] = told | share | traffic.over(window, row, name not in g.sums)
    return {
        "server": g.server | {"unknown_requests": counted.get(UNKNOWN, {}).get("requests", {})},
        "models": g.models,
        "series": {
            "from": window.start,
            "step_s": window.step_s,
            "length": len(window),
            "models": {name: traffic.series(window, row, name not in g.sums) for name, row in rows.items()},
        },
        "totals": totals,
        "rewards": {name: _rewards(g, Pool.of(now), Pool.of(then)) for name, (now, then) in g.rewards.items()},
        "critic": g.critic,
    }


def _server(service: Service, watch: Watch, now: float) -> dict[str, Any]:
    return {
        "now": now,
        "started": watch.started,
        "is_ready": service.is_ready(),
        "why": service.why_not_ready(),
        "has_keys": bool(service.access.names),
    }


def _model(service: Service, info: ModelInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in _OF_INFO} | {
        "is_loaded": service.is_loaded(info.name),
        "components": list(info.attribute_names) if info.kind == "sum" else None,
        "is_critic": service.critic is not None and service.critic.lane == info.name,
    }


def _critic(critic: Critic) -> dict[str, Any]:
    state = critic.progress.state
    assert state is not None, "it was restored"
    names = ("step", "learning_rate", "is_offloaded", "is_durable", "num_unsaved", "weights_version")
    return (
        {"name": critic.name}
        | {name: getattr(state, name) for name in names}
        | {
            "fault": None if critic.fault is None else str(critic.fault),
            "reports": critic.progress.reports(),
            "checkpoints": [dataclasses.asdict(info) for info in state.checkpoints],
        }
    )


def _rewards(g: Gathered, window: Pool, reference: Pool) -> dict[str, Any]:
    columns, count = ((window.times - g.start) // g.step_s).astype(np.int64), g.num_columns
    all_weights = np.concatenate([window.weights, reference.weights])
    edges = drift.edges(np.concatenate([window.rewards, reference.rewards]), all_weights)
    told = {name: np.full(count, np.nan) for name in ("mean", *_SHARES)}
    counts, heat = np.zeros(count), np.zeros((count, len(edges) - 1))
    parts: dict[int, drift.Moments] = {}
    for time, moments in window.parts:
        i = int((time - g.start) // g.step_s)
        parts[i] = parts.get(i, drift.Moments()) + moments
    bounds = np.searchsorted(columns, np.arange(count + 1))
    for i, moments in parts.items():
        rewards, weights = (values[bounds[i] : bounds[i + 1]] for values in (window.rewards, window.weights))
        counts[i], told["mean"][i] = moments.count, moments.mean
        found = drift.quantiles(rewards, weights, _SHARES.values())
        for name, value in zip(_SHARES, found, strict=True):
            told[name][i] = value
        heat[i] = drift.histogram(rewards, weights, edges)
    return {
        "from": g.start,
        "step_s": g.step_s,
        "count": counts,
        **told,
        "heat": {"edges": edges, "counts": heat},
        "histogram": {
            "edges": edges,
            "window": drift.histogram(window.rewards, window.weights, edges),
            "reference": drift.histogram(reference.rewards, reference.weights, edges),
        },
        "drift": _drift(g, window, reference),
        "length": _length(window),
    }


def _drift(g: Gathered, window: Pool, reference: Pool) -> dict[str, Any]:
    now, then = (drift.total(moments for _, moments in pool.parts) for pool in (window, reference))
    in_window, in_reference = g.spans
    return {
        "ks": drift.ks(window.rewards, window.weights, reference.rewards, reference.weights),
        "shift": drift.shift(now, then),
        "window": _span(now, *in_window),
        "reference": _span(then, *in_reference) if then.count else None,
    }


def _span(moments: drift.Moments, start: float, end: float) -> dict[str, Any]:
    mean = moments.mean if moments.count else math.nan
    return {"count": moments.count, "mean": mean, "std": moments.std, "from": start, "to": end}


def _length(pool: Pool) -> dict[str, Any]:
    """How rewards go with lengths: correlations, means by length, and some samples as they are."""
    tokens, rewards, weights = pool.tokens, pool.rewards, pool.weights
    shown = slice(None, None, max(1, -(-len(tokens) // _MAX_POINTS)))
    bins = drift.binned(tokens, rewards, weights, _NUM_LENGTH_BINS)
    return {
        "points": np.column_stack([tokens[shown], rewards[shown]]),
        "pearson": drift.pearson(tokens, rewards, weights),
        "spearman": drift.spearman(tokens, rewards, weights),
        "count": sum(moments.count for _, moments in pool.parts),
        "bins": [{"tokens": at, "mean": mean, "count": count} for at, mean, count in bins],
    }
