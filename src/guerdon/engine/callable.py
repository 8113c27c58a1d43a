"""Scorers that are a user's own function: `module:function` over texts or ids, and NeMo-Aligner's padded `infer_fn`."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from guerdon.config import ModelConfig
from guerdon.core import ModelInfo, Score, Sequence
from guerdon.errors import CheckpointError, InvalidRequest, SampleFailed

MAX_BATCH_TOKENS = 65_536
"""Default budget for a function whose cost is unknown."""

_READS = "`texts` or `responses` (lists of strings) or `tokens` (a list of int64 arrays)"

_TOLD = {"prompts": "prompt", "labels": "label"}
"""The parameters that a function may have beside its first, and where a sequence has what they get."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionScorer:
    """`module:function`: returns one number for each of its `texts`, `responses` or `tokens`.

    The name of its first parameter says what it takes: `texts: list[str]`; `responses: list[str]`, the texts without
    the prompts that clients told, or the last message of each conversation; `tokens: list[int64 array]`. Where it has
    parameters named `prompts` or `labels`, it gets what clients told of each sample: `list[str | None]`, and any JSON
    value or None.
    """

    encoder = None

    def __init__(self, config: ModelConfig) -> None:
        """Imports the function; raises CheckpointError where that fails or it cannot be called with its parameters."""
        self._function = _import(config.model)
        parameters = inspect.signature(self._function).parameters
        takes = next(iter(parameters), "")
        if takes not in ("texts", "responses", "tokens"):
            raise CheckpointError(f"the first parameter of {config.model} is {takes or 'missing'}", f"name it {_READS}")
        self._takes = takes
        self._told = [name for name in _TOLD if name in parameters]
        for name, parameter in parameters.items():
            if name not in (takes, *self._told) and parameter.kind in _BY_NAME and parameter.default is parameter.empty:
                raise CheckpointError(
                    f"{config.model} has a parameter {name}, for which there is nothing",
                    f"give it a default; beside {_READS} a function may have `prompts` and `labels`",
                )
        self.max_batch_tokens = config.max_batch_tokens or MAX_BATCH_TOKENS
        self.info = ModelInfo(
            config.name,
            "function",
            max_length=config.max_length,
            takes_text=takes != "tokens",
            takes_messages=takes == "responses",
            takes_tokens=takes == "tokens",
            takes_prompts=takes == "responses" or "prompts" in self._told,
            takes_labels="labels" in self._told,
            path="function",
            why=config.model,
            source=config.model,
        )

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """One result a sequence, in order; raises where the function returns another number of results."""
        inputs = [self._read(s) for s in sequences]
        told = {name: [getattr(s, _TOLD[name]) for s in sequences] for name in self._told}
        return _as_scores(self._function(inputs, **told), len(sequences))

    def _read(self, sequence: Sequence) -> Any:
        if self._takes == "tokens":
            return sequence.tokens
        text = sequence.text or ""
        return text.removeprefix(sequence.prompt or "") if self._takes == "responses" else text


class PaddedScorer:
    """NeMo-Aligner's `infer_fn(inputs=(tokens, lengths))` over right-padded batches of torch tensors.

    `tokens` and `lengths` are those of `pad_batch`; it returns rewards `[B]` or `[B,1]`, of which those of rows that
    only fill up are dropped.
    """

    def __init__(
        self,
        infer_fn: Callable[..., Any],
        info: ModelInfo,
        *,
        encoder: Any = None,
        forward_batch_size: int = 1,
        strip_to_multiple: int | None = None,
    ) -> None:
        # Imported here and not above: a FunctionScorer needs no torch. Not in `score`: it takes a second.
        self._torch = importlib.import_module("torch")
        self._infer_fn = infer_fn
        self._forward_batch_size = forward_batch_size
        self._multiple = strip_to_multiple or 1
        self.encoder = encoder
        self.info = info
        self.max_batch_tokens = MAX_BATCH_TOKENS

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """One result a sequence, in order."""
        torch = self._torch
        inputs = pad_batch(sequences, self._forward_batch_size, self._multiple)
        count = len(inputs[0])
        with torch.inference_mode():
            out = self._infer_fn(inputs=inputs)
        rewards = out.detach().float().cpu().numpy() if isinstance(out, torch.Tensor) else np.asarray(out)
        if rewards.size != count:
            raise ValueError(f"infer_fn returned shape {list(rewards.shape)} for {count} rows; return one reward a row")
        return _as_scores(rewards.reshape(-1)[: len(sequences)], len(sequences))


class FunctionEncoder:
    """NeMo-Aligner's `tokenize_func(sentences) -> (tokens [B,T], lengths [B])` as the service calls it."""

    def __init__(self, tokenize_func: Callable[..., Any]) -> None:
        self._tokenize = tokenize_func
        self._lock = threading.Lock()

    def encode(self, texts: list[str], add_special_tokens: bool = False) -> list[np.ndarray | InvalidRequest]:
        """The ids of each text, int64 `[T]`; which special tokens it adds is the function's own affair."""
        if add_special_tokens:
            refusal = "add_special_tokens: this server's own tokenize_func decides what is added; leave it out"
            return [InvalidRequest(refusal) for _ in texts]
        with self._lock:  # a user's function need not be thread-safe
            tokens, lengths = self._tokenize(texts)
        rows = np.asarray(tokens, dtype=np.int64)
        return [row[:n] for row, n in zip(rows, np.asarray(lengths).reshape(-1), strict=True)]


def pad_batch(sequences: list[Sequence], forward_batch_size: int, multiple: int) -> tuple[Any, Any]:
    """Torch tensors `tokens` int64 `[B,T]`, right-padded with 0, and `lengths` int64 `[B]`.

    T is the longest of the batch, rounded up to `multiple`. A batch larger than `forward_batch_size` gets rows of one
    token until it is a multiple of it, as NeMo-Aligner's pipeline wants it.
    """
    torch = importlib.import_module("torch")
    count = len(sequences)
    if count > forward_batch_size:
        count = math.ceil(count / forward_batch_size) * forward_batch_size
    width = max(len(s.tokens) for s in sequences)
    tokens = torch.zeros((count, math.ceil(width / multiple) * multiple), dtype=torch.long)
    # A padding row of length 0 would make a head that reads the last token index -1.
    lengths = torch.ones(count, dtype=torch.long)
    for i, s in enumerate(sequences):
        tokens[i, : len(s.tokens)] = torch.from_numpy(s.tokens)
        lengths[i] = len(s.tokens)
    return tokens, lengths


def _as_scores(values: Any, count: int) -> list[Score | SampleFailed]:
    rewards = np.asarray(values, dtype=np.float32).reshape(-1)
    if len(rewards) != count:
        raise ValueError(f"the function returned {len(rewards)} rewards for {count} samples")
    return [
        Score(float(r)) if math.isfinite(r) else SampleFailed(f"the function returned {float(r)} for this sample")
        for r in rewards
    ]


def _import(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    # The console script does not look into the working directory, where a user's own module lies.
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    # Whatever the user's module raises while it is imported.
    except Exception as e:
        raise CheckpointError(
            f"cannot import {name}: {type(e).__name__}: {e}", "give module:function, importable from here"
        ) from e
    finally:
        sys.path.remove("")
    if not callable(function):
        raise CheckpointError(f"{name} is not a function", "give module:function")
    return function
