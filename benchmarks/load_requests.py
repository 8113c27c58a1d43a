"""The requests of server_load.py: random requests as in RLHF, the same for the same seed, or the rows of a file."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.client.calls import ModelSignature
from guerdon.client.jsonl import read_rows, samples_of
from guerdon.client.reward_client import AsyncRewardClient
from guerdon.errors import ConfigError, InvalidRequest, PayloadTooLarge, StartError

CHARACTERS_PER_TOKEN = 4
"""Roughly the length of an English token."""

_COMMON_WORDS = (
    "the of and to in a is that it was for on are with as they be at this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around "
    "another came come work three word must because does part even place well such here take why things help put "
    "years different away again off went old number great tell men say small every found still between name should "
    "home big give air line set own under read last never us left end along while might next sound below saw "
    "something thought both few those always looked show large often together asked house world going want school "
    "important until form food keep children feet land side without boy once animals life enough took sometimes four "
    "head above kind began almost live page got earth need far hand high year mother light parts country father let "
    "night following picture being study second eyes soon times story boys since white days ever paper hard near "
    "sentence better best across during today others however sure means knew try told young miles sun ways thing "
    "whole hear example heard several change answer room sea against top turned learn point city play toward five"
)
_FIRST_ID = 4
"""Smaller ids are often special tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the arguments of `RewardClient.score`, and its size; `num_tokens` is None for text."""

    samples: dict[str, Any]
    num_sequences: int
    num_tokens: int | None


@dataclass(frozen=True, slots=True)
class Shape:
    """Distribution of prompt and response lengths in tokens: log-normal with these means.

    A sequence has at most `max_length` tokens. `spread` is the standard deviation of the log lengths.
    """

    prompt_tokens: float
    response_tokens: float
    responses: int
    spread: float
    max_length: int

    def lengths(self, random: np.random.Generator) -> tuple[int, np.ndarray]:
        """Draws the length of one prompt, and those of its responses, int64 `[responses]`; all at least 1."""
        prompt = int(min(self._drawn(random, self.prompt_tokens, 1)[0], max(1, 3 * self.max_length // 4)))
        drawn = self._drawn(random, self.response_tokens, self.responses)
        return prompt, np.clip(drawn, 1, max(1, self.max_length - prompt))

    def _drawn(self, random: np.random.Generator, mean: float, count: int) -> np.ndarray:
        middle = math.log(mean) - self.spread**2 / 2
        return np.maximum(1, np.rint(random.lognormal(middle, self.spread, count))).astype(np.int64)


class RandomTexts:
    """Random text of common words; every request has another prompt."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape, self._seed = shape, seed
        longest = 5 * CHARACTERS_PER_TOKEN * shape.max_length // 4
        # A word has more than three characters on average, its space included.
        words = np.random.default_rng(seed).choice(_COMMON_WORDS.split(), 50_000 + longest // 3)
        self._text = " ".join(words.tolist())
        self._num_starts = len(self._text) - longest

    def num_sequences(self, index: int) -> int:
        """Returns the number of sequences of request `index`, without making it."""
        return self._shape.responses

    def request(self, index: int) -> Request:
        """Makes request `index`; deterministic."""
        random = np.random.default_rng((self._seed, index))
        prompt_length, lengths = self._shape.lengths(random)
        prompt = f"{index} {self._cut(random, prompt_length)}"
        texts = [prompt + self._cut(random, length) for length in lengths.tolist()]
        return Request({"texts": texts, "prompts": [prompt] * len(texts)}, len(texts), None)

    def _cut(self, random: np.random.Generator, num_tokens: int) -> str:
        start = int(random.integers(self._num_starts))
        return self._text[start : start + CHARACTERS_PER_TOKEN * num_tokens]

    def longest(self) -> Request:
        """Makes a sequence a quarter longer than any other, because tokens per character vary."""
        return Request({"texts": [self._text[: 5 * CHARACTERS_PER_TOKEN * self._shape.max_length // 4]]}, 1, None)


class RandomTokens:
    """Random token ids below `vocab_size`; every request has another prompt."""

    def __init__(self, shape: Shape, seed: int, vocab_size: int) -> None:
        self._shape, self._seed = shape, seed
        self._ids = (min(_FIRST_ID, vocab_size - 1), vocab_size)

    def num_sequences(self, index: int) -> int:
        """Returns the number of sequences of request `index`, without making it."""
        return self._shape.responses

    def request(self, index: int) -> Request:
        """Makes request `index`; deterministic."""
        random = np.random.default_rng((self._seed, index))
        prompt_length, lengths = self._shape.lengths(random)
        prompt = random.integers(*self._ids, prompt_length)
        rows = [np.concatenate([prompt, random.integers(*self._ids, length)]) for length in lengths.tolist()]
        return Request({"tokens": rows}, len(rows), sum(map(len, rows)))

    def longest(self) -> Request:
        """Makes a sequence of the maximum length."""
        row = np.random.default_rng(self._seed).integers(*self._ids, self._shape.max_length)
        return Request({"tokens": [row]}, 1, len(row))


class FromFile:
    """The rows of a JSONL file, one per request, in a cycle."""

    def __init__(self, path: Path, template: bool, signature: ModelSignature) -> None:
        """Raises StartError if the file is unreadable, empty, or does not fit the model's inputs."""
        self._requests = list(_requests(path, template))
        if not self._requests:
            raise StartError(f"{path} has no samples", "give a file with rows to score")
        wanted = {"texts": "sentences", "messages": "messages"}
        for kind in sorted({next(iter(request.samples)) for request in self._requests}):
            if wanted[kind] not in signature.inputs:
                raise StartError(
                    f"{path} has {kind}, and model '{signature.name}' takes {', '.join(signature.inputs)}",
                    "leave out --data: the random load then has token ids"
                    if kind == "texts"
                    else "give rows of text, or serve a model with a chat template",
                )

    def num_sequences(self, index: int) -> int:
        """Returns the number of sequences of request `index`."""
        return self.request(index).num_sequences

    def request(self, index: int) -> Request:
        """Returns request `index`."""
        return self._requests[index % len(self._requests)]


Load = RandomTexts | RandomTokens | FromFile


def _requests(path: Path, template: bool) -> Iterator[Request]:
    for line, row in read_rows(path):
        samples = samples_of(row, path, line, template)
        if not samples:
            continue
        arguments: dict[str, Any] = {"texts" if isinstance(samples[0], str) else "messages": samples}
        if isinstance(row.get("prompt"), str):
            arguments["prompts"] = list(itertools.repeat(row["prompt"], len(samples)))
        if "label" in row:
            arguments["labels"] = list(itertools.repeat(row["label"], len(samples)))
        yield Request(arguments, len(samples), None)


_MOST_IDS = 32_768
"""The first guess; a larger vocabulary would not change the load."""
_SHORTEST = 8


async def fit(
    client: AsyncRewardClient, signature: ModelSignature, shape: Shape, seed: int, vocab_size: int | None
) -> tuple[Load, Shape]:
    """Returns a random load that the model accepts, text if possible, and its shape.

    The server reports neither vocabulary nor maximum length: both are found by trial. Raises StartError if the model
    accepts nothing, and the server's own errors.
    """
    if "sentences" in signature.inputs:
        if vocab_size is not None:
            raise ConfigError(f"--vocab-size is given, and model '{signature.name}' gets text", "leave it out")
    elif "tokens" in signature.inputs:
        vocab_size = vocab_size or await _find_vocab_size(client)
    else:
        raise StartError(
            f"model '{signature.name}' takes {', '.join(signature.inputs)}: neither text nor token ids",
            "name another with --model, or give rows that it takes with --data",
        )
    while True:
        load = RandomTexts(shape, seed) if vocab_size is None else RandomTokens(shape, seed, vocab_size)
        rejection = await _rejection(client, load.longest().samples)
        if rejection is None:
            return load, shape
        shorter = 3 * shape.max_length // 4
        if shorter < _SHORTEST:
            raise StartError(f"model '{signature.name}' scores no sequence, however short: {rejection}", "see its log")
        shape = dataclasses.replace(shape, max_length=shorter)


async def _find_vocab_size(client: AsyncRewardClient) -> int:
    """Halves the vocabulary until the model accepts its largest id."""
    size = _MOST_IDS
    while (rejection := await _rejection(client, {"tokens": [np.array([1, size - 1])]})) is not None:
        if size <= 2:
            raise StartError(f"the model rejects all tried token ids: {rejection}", "give --vocab-size")
        size //= 2
    return size


async def _rejection(client: AsyncRewardClient, samples: dict[str, Any]) -> str | None:
    """Returns the error if the server rejects the samples."""
    try:
        (error,) = (await client.score(**samples)).errors
    except (InvalidRequest, PayloadTooLarge) as e:
        return str(e)
    return error
