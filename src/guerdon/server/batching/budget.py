"""How many tokens a model's batches may hold: fewer after one that did not fit the memory, later more again."""

from __future__ import annotations

import logging

from guerdon.server.batching.halving import Halving
from guerdon.server.metrics import Metrics

log = logging.getLogger(__name__)

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
