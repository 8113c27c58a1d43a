"""What NeMo-Aligner's clients share: they wait for their servers once, send rollouts, and close."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon.adapters.nemo_aligner.settings import setting
from guerdon.client import CriticClient, RewardClient
from guerdon.errors import InvalidRequest

START_S = 6000.0
"""How long the first call waits for a server that is not up yet, as NeMo-Aligner's does."""


class Remote:
    """The servers behind one client."""

    def __init__(self, cfg: Any, *clients: RewardClient | CriticClient) -> None:
        self.cfg = cfg
        self._clients = clients
        self._is_ready = False

    @property
    def communicator(self) -> Remote:
        """What NeMo-Aligner's scripts close at their end."""
        return self

    def close(self) -> None:
        """Closes the connections; also done by itself."""
        for client in self._clients:
            client.close()

    def _wait_once(self) -> None:
        """Returns once the servers are up; every call begins with it, and only the first one waits."""
        if not self._is_ready:
            for client in self._clients:
                client.wait_ready(START_S)
            self._is_ready = True

    def _samples(self, rollout_batch: Mapping[str, Any]) -> dict[str, Any]:
        """The rows of `response_tokens` `[B, S]` without their padding, to be sent as `cfg` says."""
        self._wait_once()
        tokens = rollout_batch["response_tokens"].cpu().numpy()
        lengths = rollout_batch["response_lengths"].reshape(-1).cpu().numpy()
        if len(lengths) != len(tokens) or (lengths > tokens.shape[1]).any():
            raise InvalidRequest(
                f"response_lengths are {lengths.tolist()} for response_tokens of shape {list(tokens.shape)}: give the "
                "length of each row, prompt and response"
            )
        rows = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        return {"tokens": rows, "pad_to_length": setting(self.cfg, "pad_to_length", None)}
