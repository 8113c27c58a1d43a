"""One batch's forward, and its halves' where it raises, so that only the guilty sample fails."""

from __future__ import annotations

import logging
import re
from typing import Any, Protocol

from guerdon.core import Command, Scored, Signal
from guerdon.errors import GuerdonError, ServerFault, Unavailable
from guerdon.server.batching.scheduler import Batch
from guerdon.server.logs import failure, without_frames

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "out of memory", "_STATUS_ALLOC_FAILED", "not enough memory", "allocate memory", "bad_alloc", "OutOfMemoryError",
)  # fmt: skip
"""What is in the errors' texts: of CUDA's and its libraries', of torch's on a CPU, of C++'s, and of another rank's,
which is a text."""
_FAULTS = (
    "an illegal memory access", "an illegal instruction", "device-side assert", "misaligned address",
    "unspecified launch failure", "invalid program counter", "hardware stack error", "uncorrectable",
    "the launch timed out", "context is destroyed",
)  # fmt: skip
_DEAD = re.compile(
    r"(?:rank \d+ on \S+: )?(?:global batch \d+ of \d+ failed \()?(?:rank \d+ on \S+: )?"
    rf"AcceleratorError: (\w+ error: (?:{'|'.join(_FAULTS)})[^\n]*)"
)
"""Begins the text of an error after which CUDA refuses every call of the process; from other ranks, or of a train."""


class Group(Protocol):
    """Whatever executes one command on every rank and answers with rank 0's result."""

    def lead(self, command: Command) -> Any: ...


class Attempt:
    """Scores one batch of a model; `num_out_of_memory` counts the forwards for which there was not enough memory."""

    def __init__(self, group: Group, model: str) -> None:
        self.num_out_of_memory = 0
        self._group = group
        self._model = model
        self._most_fitted = 0
        self._is_sample_too_large = False

    @property
    def fits(self) -> int | None:
        """How many tokens there was memory for at once, where the batch had too many; else None.

        Also None where memory did not even suffice for a single sample: that one failed, and no smaller batch would
        have helped it.
        """
        is_batchs = self.num_out_of_memory and not self._is_sample_too_large
        return self._most_fitted if is_batchs and self._most_fitted else None

    def score(self, batch: Batch) -> Scored:
        """Results in batch order. Unavailable is no sample's fault, and every sample's answer.

        Raises as `check_device`.
        """
        is_alone = len(batch.entries) == 1
        try:
            scored = self._group.lead(Command(Signal.FORWARD, self._model, batch.sequences))
            assert isinstance(scored, Scored)
            if len(scored.results) != len(batch.entries):
                raise ValueError(f"{len(scored.results)} results for {len(batch.entries)} samples")
            self._most_fitted = max(self._most_fitted, batch.num_tokens)
            return scored
        except Unavailable as e:
            return Scored([e] * len(batch.entries), "")
        except GuerdonError as e:
            self._note(e, is_alone)
            error: GuerdonError = without_frames(e)  # which may hold a forward's tensors
        # SystemExit, too: what a user's function raises must not end this thread.
        except BaseException as e:
            self._note(e, is_alone)
            error = ServerFault(f"the model failed on this sample: {type(e).__name__}: {e}")
            if is_alone:
                failure(log, logging.ERROR, "%s failed on a sample", self._model, error=e)
            without_frames(e)  # whoever else holds it
        if is_alone or all(job.cancelled for job, _ in batch.entries):
            return Scored([error] * len(batch.entries), "")
        first, second = (self.score(half) for half in batch.halves())
        return Scored([*first.results, *second.results], first.weights_version or second.weights_version)

    def _note(self, error: BaseException, is_alone: bool) -> None:
        if is_out_of_memory(error):
            self.num_out_of_memory += 1
            self._is_sample_too_large |= is_alone
        else:
            check_device(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether that is what the error says; torch has a class of its own for a GPU's memory only."""
    return isinstance(error, MemoryError) or any(text in f"{type(error).__name__}: {error}" for text in _OUT_OF_MEMORY)


def check_device(error: BaseException) -> None:
    """Raises ServerFault where the error says that a device computes nothing any more until its process is restarted.

    Only the beginning of the text counts: what comes behind it may be a client's.
    """
    for known in (error, error.__cause__):
        dead = _DEAD.match(str(known) if isinstance(known, GuerdonError) else f"{type(known).__name__}: {known}")
        if dead is not None:
            raise ServerFault(f"the device computes nothing any more, and the server ends ({dead[1]})") from error
