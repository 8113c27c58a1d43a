"""How many tokens a model's batches may hold: fewer after one that did not fit the memory, later more again. Pure."""

from __future__ import annotations

_PATIENCE, _MOST_PATIENCE = 64, 4096


class Budget:
    """The `num_tokens` that a batch may hold, at most as many as at the start.

    What else uses the memory may need it for a moment only, so no shortage lasts for ever: after `patience` batches
    that fitted the budget doubles. Where that was too much the next doubling takes twice as many, so that a shortage
    that stays costs little.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = self._at_start = num_tokens
        self.patience = _PATIENCE
        self._largest = 0  # of what fitted, ever
        self._num_fitted = 0
        self._has_grown = False

    def fitted(self, num_tokens: int) -> None:
        """Counts a batch for which there was memory."""
        self._largest = max(self._largest, num_tokens)
        if self.num_tokens == self._at_start:
            return
        self._num_fitted += 1
        if self._num_fitted == self.patience:
            self.num_tokens = min(2 * self.num_tokens, self._at_start)
            self._num_fitted, self._has_grown = 0, True

    def did_not_fit(self, num_tokens: int) -> None:
        """Lessens the budget after a batch of which only `num_tokens` at once fitted: to these, or to as much as ever
        fitted where that is more, at most to half: a small batch that meets a shortage says little of larger ones.
        """
        if self._has_grown:
            self.patience = min(2 * self.patience, _MOST_PATIENCE)
        self._largest = max(self._largest, num_tokens)
        self.num_tokens = min(self.num_tokens, max(num_tokens, min(self._largest, self.num_tokens // 2)))
        self._num_fitted, self._has_grown = 0, False
