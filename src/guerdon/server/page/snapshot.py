"""Makes what the page asks for by its URL: gathered quickly on the service's loop, computed on another thread."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest
from guerdon.kinds import all_kinds
from guerdon.server.catalog import Catalog
from guerdon.server.critic.controller import Critic
from guerdon.server.metrics import UNKNOWN
from guerdon.server.page import drift, traffic
from guerdon.server.page.history import (
    COARSE_S,
    FINE_S,
    FINE_WINDOW_S,
    Bucket,
    PooledRewards,
    TakenBuckets,
    TakenComponents,
)
from guerdon.server.page.recorder import PageRecorder
from guerdon.server.page.traffic import TakenErrors, Window
from guerdon.wire import schema
from guerdon.wire.forms.page_bodies import Snapshot

LEAST_S, MOST_S = 60.0, 86_400.0
_DEFAULT_S = 600.0
_SLACK_S = 60.0
"""The kept start begins this much earlier."""

MAX_COLUMNS = 144
"""Maximum of columns of the rewards over time."""

_SHARES = {"p05": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}
_MAX_POINTS, _NUM_LENGTH_BINS = 400, 12
_OF_INFO = (
    *("name", "kind", "outputs", "attribute_names", "weights_version", "dtype", "device", "path", "why", "proofs"),
    *("source", "max_length", "takes_text", "takes_messages", "takes_tokens", "takes_prompts", "step_rule"),
)


@dataclass(frozen=True)
class PageQuery:
    """The last `window_s` seconds; `reference` is `previous`, `start`, or a start and end in Unix time.

    Times are rounded to whole buckets, so that snapshots can be shared. `model`, if not empty, restricts series and
    rewards to one model, and `beside` adds another. `until` ends the window in the past, in Unix time.
    """

    window_s: float
    reference: str | tuple[float, float]
    model: str = ""
    beside: str = ""
    until: float | None = None

    def compared(self, start: float, started: float) -> tuple[float, float]:
        """Returns start and end of the reference for a window from `start`; the server started at `started`.

        The reference ends before the window, unless its times were given.
        """
        if isinstance(self.reference, tuple):
            return self.reference
        if self.reference == "start":
            return started - _SLACK_S, min(started + self.window_s, start)
        return start - self.window_s, start


def parse_query(query: Mapping[str, str], *known: str) -> PageQuery:
    """Parses a query with the known keys; raises InvalidRequest."""
    for name in query:
        if name not in known:
            raise InvalidRequest(f"the URL has the unknown key {name!r}; this path takes {', '.join(known)}")
    reference: str | tuple[float, float] = query.get("reference", "previous")
    if reference not in ("previous", "start"):
        begins, _, ends = str(reference).partition("-")
        start, end = _number(begins), _number(ends)
        if not 0 <= start < end < math.inf:
            raise InvalidRequest(
                f"the URL has reference={reference}; give previous, start, or FROM-TO in seconds since 1970, such as "
                "1767225600-1767229200"
            )
        reference = _rounded_up(start, FINE_S), _rounded_up(end, FINE_S)  # all requests share these bounds
    window_s, until = _number(query.get("window", str(_DEFAULT_S))), None
    if not LEAST_S <= window_s <= MOST_S:
        raise InvalidRequest(f"the URL has window={query['window']}; give seconds from {LEAST_S:g} to {MOST_S:g}")
    window_s = _rounded_up(window_s, FINE_S if window_s <= FINE_WINDOW_S else COARSE_S)
    if "until" in query:
        until = _number(query["until"])
        if not 0 < until < math.inf:
            raise InvalidRequest(f"the URL has until={query['until']}; give seconds since 1970, such as 1767229200")
        until = _rounded_up(until, FINE_S)
    return PageQuery(window_s, reference, query.get("model", ""), query.get("beside", ""), until)


def _rounded_up(seconds: float, step_s: float) -> float:
    return math.ceil(seconds / step_s) * step_s


def _number(text: str) -> float:
    """Returns the number, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True, eq=False)
class Gathered:
    """The gathered state, readable on any thread; `windows` have the counters of the shown models, `whole` all."""

    server: dict[str, Any]
    models: list[dict[str, Any]]
    critic: dict[str, Any] | None
    names: list[str]
    sums: frozenset[str]
    remote: list[str]
    samples: list[traffic.Sample]
    windows: dict[str, Window]
    steps: Window
    whole: Window
    rewards: dict[str, tuple[TakenBuckets[Bucket], TakenBuckets[Bucket]]]
    components: dict[str, TakenComponents]
    entropies: dict[str, TakenComponents]
    errors: dict[str, list[TakenErrors]]
    versions: dict[str, list[tuple[float, str]]]
    start: float
    step_s: float
    num_columns: int
    spans: tuple[tuple[float, float], tuple[float, float]]


def gather(
    recorder: PageRecorder,
    catalog: Catalog,
    critic: Critic | None,
    asked: PageQuery,
    server: dict[str, Any],
    samples: list[traffic.Sample],
) -> Gathered:
    """Gathers the state for a query of the page; on the service's asyncio loop.

    `server` is the transport's state, `samples` are the recorder's current ones. `critic` is None if
    there is none or the caller may not see it.
    """
    recorder.refresh(samples)
    now = recorder.now()
    until = now if asked.until is None else min(asked.until, now)
    unit_s = FINE_S if asked.window_s + now - until <= FINE_WINDOW_S else COARSE_S
    step_s = unit_s * max(1, math.ceil(asked.window_s / MAX_COLUMNS / unit_s))
    count = math.ceil(asked.window_s / step_s)
    end = math.ceil(until / step_s) * step_s
    start = end - count * step_s
    compared = asked.compared(start, recorder.started)
    if isinstance(asked.reference, str) and compared[0] < now - FINE_WINDOW_S - FINE_S:  # so that it ends before
        compared = (compared[0] // COARSE_S * COARSE_S, compared[1] // COARSE_S * COARSE_S)
    infos = catalog.infos()
    shown = [*dict.fromkeys(filter(None, (asked.model, asked.beside)))] if asked.model else recorder.names
    counted = shown if critic is None else [*dict.fromkeys((*shown, catalog.critic_name))]
    columns = {name: slice(i * traffic.WIDTH, (i + 1) * traffic.WIDTH) for i, name in enumerate(recorder.names)}
    operations = [name for name in catalog.operations if critic is not None]
    rewarded = [info.name for info in infos if schema.REWARDS.has(info) and info.name in shown]
    scored = recorder.rewards
    return Gathered(
        server=server | {"now": now, "started": recorder.started},
        models=[
            {name: getattr(info, name) for name in _OF_INFO}
            | all_kinds.of(info).tile(info, infos)
            | {"is_loaded": catalog.is_loaded(info.name), "is_critic": info.name == catalog.critic_name}
            for info in infos
        ],
        critic=None if critic is None else _critic(critic, recorder.epoch),
        names=recorder.names,
        sums=frozenset(catalog.sums),
        remote=[info.name for info in infos if all_kinds.of(info).is_remote],
        samples=samples,
        windows={name: recorder.counters.window(asked.window_s, columns[name], until) for name in counted},
        steps=recorder.counters.window(asked.window_s, slice(0), until),
        whole=recorder.counters.whole(asked.window_s, until),
        rewards={name: (scored.taken(name, start, now), scored.taken(name, compared[0], now)) for name in rewarded},
        components={name: taken for name in shown if (taken := recorder.components.taken(name, start, now))},
        entropies={name: taken for name in shown if (taken := recorder.entropies.taken(name, start, now))},
        errors={
            name: recorder.errors.taken([name, *(operations if name == catalog.critic_name else ())], start, now)
            for name in shown
        },
        versions={name: scored.versions(name) for name in rewarded},
        start=start,
        step_s=step_s,
        num_columns=count,
        spans=((start, end), compared),
    )


def make(g: Gathered) -> Snapshot:
    """Returns the page's object, with numpy arrays; NaN for unknown numbers."""
    counted = traffic.totals(g.samples)
    totals = {}
    for row, name in enumerate(g.names):
        told = counted.get(name) or traffic.empty()
        received = told["received_tokens"]
        saved = 1 - told["computed_tokens"] / received if received else math.nan  # negative with padding
        shares = {"saved_share": saved if math.isnan(saved) else max(0.0, saved), "padded_share": max(0.0, -saved)}
        totals[name] = told | shares | traffic.over(g.whole, row, name not in g.sums)
    return {
        "server": g.server | {"unknown_requests": counted.get(UNKNOWN, {}).get("requests", {})},
        "models": g.models,
        "series": {
            "from": g.steps.start,
            "step_s": g.steps.step_s,
            "length": len(g.steps),
            "models": {name: traffic.series(window, 0, name not in g.sums) for name, window in g.windows.items()},
        },
        "totals": totals,
        "rewards": {name: _rewards(g, name) for name in g.rewards},
        "components": {name: taken.tell(g.start, g.step_s, g.num_columns) for name, taken in g.components.items()},
        "entropies": {name: taken.tell(g.start, g.step_s, g.num_columns) for name, taken in g.entropies.items()},
        "calls": traffic.judge_calls(g.samples, g.remote),
        "errors": {
            name: [one for taken in parts for one in taken.tell(g.start, g.step_s, g.num_columns)]
            for name, parts in g.errors.items()
        },
        "critic": g.critic,
    }


def _critic(critic: Critic, epoch: float) -> dict[str, Any]:
    state = critic.progress.state
    assert state is not None, "it was restored"
    names = ("step", "learning_rate", "is_offloaded", "is_durable", "num_unsaved", "weights_version")
    return (
        {"name": critic.name}
        | {name: getattr(state, name) for name in names}
        | {
            "fault": None if critic.fault is None else str(critic.fault),
            "reports": critic.progress.reports(epoch),
            "checkpoints": [dataclasses.asdict(info) for info in state.checkpoints],
        }
    )


def _rewards(g: Gathered, name: str) -> dict[str, Any]:
    window, reference = (
        PooledRewards.of(taken.between(*span)) for taken, span in zip(g.rewards[name], g.spans, strict=True)
    )
    columns, count = ((window.times - g.start) // g.step_s).astype(np.int64), g.num_columns
    edges = drift.edges(*((pool.rewards, pool.weights) for pool in (window, reference)))
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
        for share, value in zip(_SHARES, found, strict=True):
            told[share][i] = value
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
        "versions": [{"time": time, "version": version} for time, version in g.versions[name]],
    }


def _drift(g: Gathered, window: PooledRewards, reference: PooledRewards) -> dict[str, Any]:
    now, then = (drift.total(moments for _, moments in pool.parts) for pool in (window, reference))
    in_window, in_reference = g.spans
    return {
        "ks": drift.ks(window.rewards, window.weights, reference.rewards, reference.weights),
        "shift": drift.shift(now, then),
        "window": _span(now, window.num_drawn, *in_window),
        "reference": _span(then, reference.num_drawn, *in_reference) if then.count else None,
    }


def _span(moments: drift.Moments, num_drawn: float, start: float, end: float) -> dict[str, Any]:
    mean = moments.mean if moments.count else math.nan
    told = {"count": moments.count, "num_drawn": num_drawn, "mean": mean, "std": moments.std}
    return told | {"from": start, "to": end}


def _length(pool: PooledRewards) -> dict[str, Any]:
    """Returns length against reward: correlations, means by length, and sample points."""
    tokens, rewards, weights = pool.tokens, pool.rewards, pool.weights
    shown = slice(None, None, max(1, -(-len(tokens) // _MAX_POINTS)))
    bins = drift.binned(tokens, rewards, weights, _NUM_LENGTH_BINS)
    return {
        "points": np.column_stack([tokens[shown], rewards[shown]]),
        "pearson": drift.pearson(tokens, rewards, weights),
        "spearman": drift.spearman(tokens, rewards, weights),
        "count": sum(moments.count for _, moments in pool.parts),
        "num_distinct": drift.num_distinct(tokens, rewards, weights),
        "bins": [{"tokens": at, "mean": mean, "count": count} for at, mean, count in bins],
    }
