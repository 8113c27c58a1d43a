"""The random load fitted to a model that tells neither its vocabulary nor its longest sequence: by trying."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from guerdon.cli.bench.load import Load, RandomTexts, RandomTokens, Shape
from guerdon.client.calls import ModelSignature
from guerdon.client.clients import AsyncRewardClient
from guerdon.errors import ConfigError, InvalidRequest, PayloadTooLarge, StartError

_MOST_IDS = 32_768
"""Tried first; more different ones would make no difference."""
_SHORTEST = 8


async def fitted(
    client: AsyncRewardClient, signature: ModelSignature, shape: Shape, seed: int, vocab_size: int | None
) -> tuple[Load, Shape]:
    """The load in what the model takes, texts before token ids, and its shape with a `max_length` that is accepted.

    Raises StartError where nothing is accepted, and the GuerdonError of a server that fails.
    """
    if "sentences" in signature.inputs:
        if vocab_size is not None:
            raise ConfigError(f"--vocab-size is given, and model '{signature.name}' is sent text", "leave it out")
    elif "tokens" in signature.inputs:
        vocab_size = vocab_size or await _vocabulary(client)
    else:
        raise StartError(
            f"model '{signature.name}' takes {', '.join(signature.inputs)}: neither text nor token ids",
            "name another with --model, or give rows that it takes with --data",
        )
    while True:
        load = RandomTexts(shape, seed) if vocab_size is None else RandomTokens(shape, seed, vocab_size)
        refusal = await _refusal(client, load.longest().samples)
        if refusal is None:
            return load, shape
        shorter = 3 * shape.max_length // 4
        if shorter < _SHORTEST:
            raise StartError(f"model '{signature.name}' scores not even a short sequence: {refusal}", "see its log")
        shape = dataclasses.replace(shape, max_length=shorter)


async def _vocabulary(client: AsyncRewardClient) -> int:
    """A number of ids, all of which the model has: half as many with each try."""
    size = _MOST_IDS
    while (refusal := await _refusal(client, {"tokens": [np.array([1, size - 1])]})) is not None:
        if size <= 2:
            raise StartError(f"the model takes none of the token ids that were tried: {refusal}", "give --vocab-size")
        size //= 2
    return size


async def _refusal(client: AsyncRewardClient, samples: dict[str, Any]) -> str | None:
    """Why the server does not score these; None where it does."""
    try:
        (error,) = (await client.score(**samples)).errors
    except (InvalidRequest, PayloadTooLarge) as e:
        return str(e)
    return error
