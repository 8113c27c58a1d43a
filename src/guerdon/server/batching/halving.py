"""If a batch's forward raises: tries the plain forward, then halves, so that only the guilty sample fails.

A path that raises on samples that the plain forward scores, or gives no finite score, is left for good: it would fail
again on each such sample. After a batch that did not fit the memory batches hold fewer tokens, later more again.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from guerdon.core import Command, Executor, Score, Scored, Sequence, Signal
from guerdon.errors import GuerdonError, SampleFailed, ServerFault, Unavailable, describe, first_line, is_out_of_memory
from guerdon.server.batching.jobs import Batch
from guerdon.server.logs import failure, without_frames
from guerdon.server.metrics import Metrics

log = logging.getLogger(__name__)

_FAULTS = (
    "an illegal memory access", "an illegal instruction", "device-side assert", "misaligned address",
    "unspecified launch failure", "invalid program counter", "hardware stack error", "uncorrectable",
    "the launch timed out", "context is destroyed",
)  # fmt: skip
_DEAD = re.compile(
    r"(?:rank \d+ on \S+: )?(?:global batch \d+ of \d+ failed \()?(?:rank \d+ on \S+: )?"
    rf"AcceleratorError: (\w+ error: (?:{'|'.join(_FAULTS)})[^\n]*)"
)
"""Matches the start of an error after which CUDA refuses every call; also of other ranks and of trains."""


class Halving:
    """Scores one failed batch of a model; `num_out_of_memory` counts the forwards that ran out of memory."""

    def __init__(self, group: Executor, model: str) -> None:
        self.num_out_of_memory = 0
        self._group = group
        self._model = model
        self._most_fitted = 0
        self._is_sample_too_large = False
        self._may_blame_path = False

    @property
    def fits(self) -> int | None:
        """How many tokens fitted the memory at once, if the batch had too many; else None.

        None as well if memory did not suffice for a single sample: that one failed, and no smaller batch would have
        helped it.
        """
        is_batchs = self.num_out_of_memory and not self._is_sample_too_large
        return self._most_fitted if is_batchs and self._most_fitted else None

    def judge(self, batch: Batch, error: BaseException) -> GuerdonError:
        """Returns the answer to a sample that alone raises this error; raises as `check_device`."""
        if isinstance(error, Unavailable):
            return error.with_traceback(None)  # whose frames refer to the answer: that cycle would keep the batch
        is_alone, cause = len(batch.entries) == 1, ""
        self._may_blame_path = not is_out_of_memory(error)
        if not self._may_blame_path:
            cause = " for lack of memory"  # which the error itself may not say
            self.num_out_of_memory += 1
            self._is_sample_too_large |= is_alone
        else:
            check_device(error)
        if isinstance(error, GuerdonError):
            return without_frames(error)  # frames may hold a forward's tensors
        answer = ServerFault(f"the model failed on this sample{cause}: {describe(error)}")
        if is_alone:
            failure(log, logging.ERROR, "%s failed on a sample", self._model, error=error)
        without_frames(error)  # for whoever else holds it
        return answer

    def split(self, batch: Batch, error: GuerdonError) -> Scored:
        """Returns results in batch order: those of the plain forward, else the halves', or `error` for a single sample.

        Unavailable is no sample's fault, and so the answer to every sample.
        """
        failed = Scored([error] * len(batch.entries), "")
        if isinstance(error, Unavailable) or all(job.cancelled for job, _ in batch.entries):
            return failed
        if self._may_blame_path and (scored := self._score_plainly(batch.sequences)) is not None:
            reason = first_line(error)
            self._group.execute(Command(Signal.LEAVE_PATH, self._model, why=reason))
            return scored
        if len(batch.entries) == 1:
            return failed
        half = len(batch.entries) // 2
        parts = [(batch.entries[part], batch.costs[part]) for part in (slice(half), slice(half, None))]
        first, second = (self._score(Batch(entries, costs, sum(costs))) for entries, costs in parts)
        return Scored([*first.results, *second.results], first.weights_version or second.weights_version)

    def mend(self, batch: Batch, scored: Scored) -> Scored:
        """Returns the results, with the plain forward's for samples without a finite score, and leaves their path."""
        failed = [i for i, result in enumerate(scored.results) if type(result) is SampleFailed]
        if not failed:
            return scored
        plain = self._score_plainly([batch.sequences[i] for i in failed])
        if plain is None:
            return scored
        results = [*scored.results]
        if mended := [i for i, result in zip(failed, plain.results, strict=True) if isinstance(result, Score)]:
            why = str(results[mended[0]]).split(";", 1)[0]
            self._group.execute(Command(Signal.LEAVE_PATH, self._model, why=why))
        for i, result in zip(failed, plain.results, strict=True):
            results[i] = result
        return Scored(results, scored.weights_version)

    def _score_plainly(self, sequences: list[Sequence]) -> Scored | None:
        """Returns the plain forward's scores; None if it raises, as for a function, which has no other way to score."""
        command = Command(Signal.FORWARD, self._model, sequences, plain=True)
        try:
            return check_count(self._group.execute(command), len(sequences))
        except BaseException as e:  # as in `_score`
            check_device(e)
            return None

    def _score(self, batch: Batch) -> Scored:
        command = Command(Signal.FORWARD, self._model, batch.sequences)
        try:
            scored = check_count(self._group.execute(command), len(batch.entries))
        except BaseException as e:  # SystemExit as well: a user's function must not end this thread
            error = self.judge(batch, e)
        else:
            self._most_fitted = max(self._most_fitted, batch.num_tokens)
            return scored
        return self.split(batch, error)  # outside of the handler, so that the error's frames are free


def check_count(scored: Any, num_samples: int) -> Scored:
    """Raises ValueError if there is not one result per sample."""
    assert isinstance(scored, Scored)
    if len(scored.results) != num_samples:
        raise ValueError(f"{len(scored.results)} results for {num_samples} samples")
    return scored


def check_device(error: BaseException) -> None:
    """Raises ServerFault if the error says that the device computes nothing more until its process restarts.

    Only the start of the text counts: what follows may be a client's.
    """
    for known in filter(None, (error, error.__cause__)):
        dead = _DEAD.match(str(known) if isinstance(known, GuerdonError) else describe(known))
        if dead is not None:
            raise ServerFault(f"the device computes nothing any more, and the server ends ({dead[1]})") from error


_PATIENCE, _MOST_PATIENCE = 64, 4096


class Budget:
    """The `num_tokens` that a batch may hold, never more than at the start. Pure.

    A shortage may be short, since others use the memory too. So after `patience` batches that fitted the budget
    doubles; if that was too much, the next doubling waits twice as long, so that a lasting shortage costs little.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = self._at_start = num_tokens
        self.patience = _PATIENCE
        self._largest = 0  # largest batch that ever fitted
        self._num_fitted = 0
        self._has_grown = False

    def fitted(self, num_tokens: int) -> None:
        """Counts a batch that fitted the memory."""
        self._largest = max(self._largest, num_tokens)
        if self.num_tokens == self._at_start:
            return
        self._num_fitted += 1
        if self._num_fitted == self.patience:
            self.num_tokens = min(2 * self.num_tokens, self._at_start)
            self._num_fitted, self._has_grown = 0, True

    def did_not_fit(self, num_tokens: int) -> None:
        """Lowers the budget after a batch that only fitted by `num_tokens` at a time.

        Goes down to these or, if that is more, to what ever fitted, but at least to half: a small batch in a shortage
        says little about larger ones.
        """
        if self._has_grown:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        self._largest = max(self._largest, num_tokens)
        self.num_tokens = min(self.num_tokens, max(num_tokens, min(self._largest, self.num_tokens // 2)))
        self._num_fitted, self._has_grown = 0, False


class Budgets:
    """The budgets of all models, shown in the metrics; lowered budgets are logged."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._budgets: dict[str, Budget] = {}
        self._fixed: set[str] = set()

    def start(self, model: str, num_tokens: int, *, is_fixed: bool) -> None:
        """Starts a model's budget anew; one that `is_fixed` is never lowered."""
        self._budgets[model] = Budget(num_tokens)
        (self._fixed.add if is_fixed else self._fixed.discard)(model)
        self._metrics.set("guerdon_batch_budget_tokens", num_tokens, model)

    def learn(self, model: str, num_tokens: int, halving: Halving | None) -> int | None:
        """Learns from a batch of this many tokens, and from its halving if its forward raised.

        Returns the new budget if it changed.
        """
        budget = self._budgets[model]
        before = budget.num_tokens
        if halving is None or not halving.num_out_of_memory:
            budget.fitted(num_tokens)
        else:
            self._metrics.add("guerdon_out_of_memory", halving.num_out_of_memory, model)
            if halving.fits is not None and model not in self._fixed:
                budget.did_not_fit(halving.fits)
        after = budget.num_tokens
        if after == before:
            return None
        self._metrics.set("guerdon_batch_budget_tokens", after, model)
        if after < before:
            log.warning(
                "%s: out of memory with a batch of %d tokens or less; a batch has %d at most for the next %d. Give "
                "--max-batch-tokens %d to start with that",
                model,
                before,
                after,
                budget.patience,
                after,
            )
        return after
