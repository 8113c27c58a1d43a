"""Rewards of padded `input_ids`, as trlX asks a Triton server for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from guerdon.client import RewardClient, Scores
from guerdon.client.calls import Call
from guerdon.errors import GuerdonError, SampleFailed, ServerFault
from guerdon.wire.tensors import InferReply, InferRequest, Tensor


class InputIdsClient(RewardClient):
    """A reward client that can also ask a server which knows nothing but `input_ids` and `rewards`."""

    def score_input_ids(self, rows: Sequence[Sequence[int]], fill: int, batch_size: int) -> Scores:
        """The scores of rows of ids, every row filled up to the longest of all; `batch_size` rows a request at most.

        All requests are on their way at once. Raises what the server raised after all tries, and SampleFailed for a
        reward that is not finite.
        """
        table = np.full((len(rows), max(map(len, rows))), fill, np.int32)
        for out, row in zip(table, rows, strict=True):
            out[: len(row)] = row
        starts = range(0, len(rows), batch_size)
        calls = [_scoring(self._model, table[start : start + batch_size]) for start in starts]
        futures = [self._submit(self._caller.ask(call)) for call in calls]
        parts = []
        for start, future in zip(starts, futures, strict=True):
            try:
                parts.append(future.result())
            except GuerdonError as e:
                e.add_note(f"asked for {min(batch_size, len(rows) - start)} samples; row 0 is sample {start}")
                raise
        rewards = np.concatenate([part.rewards for part in parts])
        versions = sorted({part.weights_version for part in parts})  # several while the server takes new weights
        return Scores(rewards, [None] * len(rows), weights_version=" ".join(versions))


def _scoring(model: str, table: np.ndarray) -> Call[Scores]:
    def parse(reply: InferReply, queue_s: float, compute_s: float) -> Scores:
        outputs = {tensor.name: tensor.data for tensor in reply.outputs}
        rewards = np.asarray(outputs.get("rewards", ()), np.float32).reshape(-1)
        if len(rewards) != len(table):
            raise ServerFault(f"the server sent {len(rewards)} rewards for {len(table)} samples")
        if not np.isfinite(rewards).all():
            raise SampleFailed(f"row {np.flatnonzero(~np.isfinite(rewards))[0]}: the server gave no finite reward")
        version = str(reply.parameters.get("weights_version", ""))
        return Scores(rewards, [None] * len(table), weights_version=version, queue_s=queue_s, compute_s=compute_s)

    # No outputs are named: the server gives its usual ones, as it does to trlX's own request.
    request = InferRequest({"input_ids": Tensor("input_ids", "INT32", table.shape, table)})
    return Call(model, lambda _signature, _left_s: request, parse, table.size)
