"""Leaves a path that fails while it serves, for the plain forward; the base of `Forward`."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from guerdon.core import SAME_BITS, ModelInfo
from guerdon.distributed.ranks import Ranks
from guerdon.engine import onednn
from guerdon.engine.microbatches import LengthClasses
from guerdon.engine.resting import Resting
from guerdon.errors import GuerdonError, RanksLost, describe, is_out_of_memory

log = logging.getLogger(__name__)

T = TypeVar("T")

OTHER_BITS = "bits may change with the batch"
"""What a start on a CPU says if `SAME_BITS` is not proved."""


class Fallback(Resting):
    """The policy of `Forward` for its path."""

    trunk: Any
    path: str
    info: ModelInfo
    ranks: Ranks
    length_classes: LengthClasses

    def use(self, path: str) -> None:
        """Sets the trunk to what `path` needs."""
        raise NotImplementedError

    def reset_after_error(self) -> None:
        """Makes the trunk usable again after a pass that raised."""
        raise NotImplementedError

    def needs_last(self, path: str) -> bool:
        """Whether the path must compute rows with their last token, although no state that is read sees it.

        Some rotary frequencies depend on the row's length. So does sparse attention as transformers computes it: of
        keys with equal scores it takes others.
        """
        return self.length_classes.depend_on_length or not path.startswith("packed")

    def seen(self, rows: list[np.ndarray], path: str) -> list[np.ndarray]:
        """Returns the rows as they are computed by the path: here unchanged."""
        return rows

    def leave_path(self, why: str) -> None:
        """Makes every later forward the plain one, one row at a time, and warns; `why` is the error that it raised."""
        left = self.path
        if left == "single":
            return
        if self.ranks.is_leader:
            log.warning(
                "%s: the path %s fails on samples that the plain forward computes, and is not used any more, which is "
                "slower; report this: %s",
                self.info.name,
                left,
                why,
            )
        onednn.restore(self.trunk)
        proofs = tuple(f"{OTHER_BITS}: {left} failed" if proof == SAME_BITS else proof for proof in self.info.proofs)
        why = f"{left} failed while it served: {why}"
        self.info = dataclasses.replace(self.info, path="single", why=why, proofs=proofs)
        self._switch("single")

    def retry_plainly(self, work: Callable[[], T]) -> T:
        """Returns what `work` does; if it fails by the chosen path but not by the plain one, leaves the path.

        `work` must undo its effects if it raises, and raise on all ranks if any does.
        """
        chosen = self.path
        try:
            return work()
        except Exception as e:
            if chosen == "single" or isinstance(e, RanksLost) or is_out_of_memory(e):
                raise
            why = (str(e) if isinstance(e, GuerdonError) else describe(e)).split("\n", 1)[0]
        self._switch("single")  # out here, because the error keeps the frames that hold the activations
        try:
            result = work()
        except Exception:
            self._switch(chosen)
            raise
        self.path = chosen
        self.leave_path(why)
        return result

    def _switch(self, path: str) -> None:
        self.path = path
        self.use(path)
        self.reset_after_error()
