"""Scores a random share of the answered sequences again by the plain forward, and compares."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping

import numpy as np

from guerdon.core import Command, Executor, Score, Scored, Sequence, Signal
from guerdon.errors import Unavailable
from guerdon.server.batching.jobs import Batch
from guerdon.server.logs import failure
from guerdon.server.metrics import Metrics

log = logging.getLogger(__name__)

_TOLERANCE = {"float32": 1e-3}
_TOLERANCE_OF_HALF_PRECISION = 5e-2
"""Largest differences that count as the same; relative if the plain result exceeds 1."""

_WARN_EVERY_S = 60.0


class Recheck:
    """Checks finished batches; `shares` says by model how many sequences, `dtypes` how exactly.

    Failures here are counted and logged, and change no answer.
    """

    def __init__(self, shares: Mapping[str, float], dtypes: Mapping[str, str], metrics: Metrics) -> None:
        self._shares = shares
        self._dtypes = dtypes
        self._metrics = metrics
        self._random = random.Random(0)  # every n-th could coincide with a prompt's responses
        self._warned: dict[str, float] = {}

    def after(self, model: str, batch: Batch, scored: Scored, group: Executor) -> None:
        """Checks a batch that was answered; the weights must still be the same."""
        share = self._shares.get(model, 0.0)
        if not share:
            return
        picked = [
            (s, result)
            for s, result in zip(batch.sequences, scored.results, strict=True)
            if isinstance(result, Score) and self._random.random() < share
        ]
        if not picked:
            return
        command = Command(Signal.FORWARD, model, [s for s, _ in picked], plain=True)
        try:
            plain = group.execute(command)
            assert isinstance(plain, Scored)
            self._compare(model, picked, plain)
        except Unavailable:
            return  # says nothing about the scores
        except BaseException as e:
            self._metrics.add("guerdon_recheck_sequences", len(picked), model, "failed")
            if self._may_warn(model):
                failure(log, logging.WARNING, "%s could not be checked by its plain forward", model, error=e)

    def _compare(self, model: str, picked: list[tuple[Sequence, Score]], plain: Scored) -> None:
        tolerance = _TOLERANCE.get(self._dtypes.get(model, "float32"), _TOLERANCE_OF_HALF_PRECISION)
        worst = 0.0
        for (s, score), reference in zip(picked, plain.results, strict=True):
            if not isinstance(reference, Score):
                self._metrics.add("guerdon_recheck_sequences", 1, model, "failed")
                continue
            difference, excess = compare(score, reference, s.wants_reward)
            self._metrics.observe("guerdon_recheck_difference", difference, model)
            is_same = excess <= tolerance
            self._metrics.add("guerdon_recheck_sequences", 1, model, "same" if is_same else "differs")
            if not is_same:
                worst = max(worst, difference)
        if worst and self._may_warn(model):
            log.warning(
                "%s: scores differ from the plain forward's by up to %.3g, which is beyond %g; serve it with "
                "--deterministic, and report what guerdon_model_info says of it",
                model,
                worst,
                tolerance,
            )

    def _may_warn(self, model: str) -> bool:
        now = time.monotonic()
        if now - self._warned.get(model, -_WARN_EVERY_S) < _WARN_EVERY_S:
            return False
        self._warned[model] = now
        return True


def compare(score: Score, reference: Score, wants_reward: bool = True) -> tuple[float, float]:
    """Returns the largest absolute difference of two scores' numbers, and the largest relative to max(1, reference).

    Infinite if one has a number that the other lacks.
    """
    pairs = [(getattr(score, name), getattr(reference, name)) for name in ("attributes", "values", "steps")]
    if score.answer is not None:
        assert reference.answer is not None
        pairs += zip(score.answer.numbers(), reference.answer.numbers(), strict=True)
    elif wants_reward:
        pairs.append((np.float64(score.reward), np.float64(reference.reward)))
    difference = excess = 0.0
    for ours, theirs in pairs:
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return np.inf, np.inf
        apart = np.abs(ours.astype(np.float64) - theirs)
        if not np.isfinite(apart).all():
            return np.inf, np.inf
        difference = max(difference, float(apart.max(initial=0.0)))
        excess = max(excess, float((apart / np.maximum(1.0, np.abs(theirs))).max(initial=0.0)))
    return difference, excess
