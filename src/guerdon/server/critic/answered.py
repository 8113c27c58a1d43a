"""The advantages and returns that train requests with rewards were answered, kept so that they are answered again."""

from __future__ import annotations

import dataclasses

import numpy as np
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

from guerdon.critic_core import TrainReport, TrainRequest
from guerdon.errors import InvalidRequest

MOST_BYTES = 256 << 20
"""Older answers are dropped, but never the newest; a client asks again for the one that it waits for."""


class AnsweredEstimates:
    """Advantages and returns by the requests' ids: the masked tokens' of the newest requests, at most MOST_BYTES."""

    def __init__(self, data: bytes | None = None) -> None:
        """`data` is what `dumps` returned."""
        tables = {} if data is None else unpack(data)
        # safetensors does not keep the order.
        self._tables = {name.split("/", 1)[1]: tables[name] for name in sorted(tables)}

    def dumps(self) -> bytes | None:
        """Returns all of it as bytes; None if there is nothing."""
        if not self._tables:
            return None
        return pack({f"{i:06d}/{name}": table for i, (name, table) in enumerate(self._tables.items())})

    def keep(self, request: TrainRequest) -> None:
        """Keeps the request's estimates, if it has rewards."""
        if request.advantages is None:
            return
        counts = request.mask > 0
        self.drop(request.id)
        self._tables[request.id] = np.stack([request.advantages[counts], request.returns[counts]])
        while len(self._tables) > 1 and sum(table.nbytes for table in self._tables.values()) > MOST_BYTES:
            del self._tables[next(iter(self._tables))]

    def drop(self, name: str) -> None:
        """Drops the kept estimates of the request of that id, if any."""
        self._tables.pop(name, None)

    def complete(self, report: TrainReport, request: TrainRequest) -> TrainReport:
        """Returns the report with the advantages and returns of the request, if that has rewards.

        Raises InvalidRequest if they are not kept any more.
        """
        if request.rewards is None:
            return report
        if (table := self._tables.get(request.id)) is None:
            raise InvalidRequest(
                f"train request {request.id!r} was applied (the critic was at step {report.step} then), but its "
                f"advantages are not kept any more: those of the newest requests are, {MOST_BYTES >> 20} MiB of them"
            )
        advantages, returns = np.zeros((2, *request.mask.shape), np.float32)
        advantages[request.mask > 0], returns[request.mask > 0] = table
        return dataclasses.replace(report, advantages=advantages, returns=returns)
