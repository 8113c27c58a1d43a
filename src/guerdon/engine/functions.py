"""Scorers that call a user's function: `module:function` over texts or ids, and NeMo-Aligner's padded `infer_fn`."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score, Sequence, Truncation
from guerdon.distributed.parts import WHOLE, BatchParts
from guerdon.errors import CheckpointError, ConfigError, InvalidRequest, SampleFailed, ServerFault, StartError, describe
from guerdon.messages import shown
from guerdon.padded_rows import read_rows
from guerdon.settings.config import ModelConfig
from guerdon.settings.fields import default_of

log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = 65_536
"""Default token budget of a function, whose cost is unknown."""

_READS = "`texts` or `responses` (lists of strings) or `tokens` (a list of int64 arrays)"

_EXTRA = {"prompts": "prompt", "labels": "reference"}
"""Optional parameters of a function, and the attribute of a sequence that they get."""

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_BY_ITSELF = "do that in the function, or in a sum of `rewards:`, whose components have mean and std"
_LEAVE_OUT = "leave it out there: only the function itself says how it computes"
_OF_CHECKPOINTS = {
    "mean": _BY_ITSELF,
    "std": _BY_ITSELF,
    "attribute_weights": "have the function return one number for each sample, which is the reward",
    "recheck_share": "leave it out there: there is no second way to run a function",
    **dict.fromkeys(
        (
            *("revision", "base", "dtype", "dequantize", "require_packed", "deterministic", "pooling"),
            *("merge_attributes", "reward"),
        ),
        _LEAVE_OUT,
    ),
    **dict.fromkeys(("step_separator", "step_reduction"), "leave it out there: a function gives no step rewards"),
    **dict.fromkeys(
        ("chat_template", "system", "generation_prompt", "turns"),
        "leave it out there: conversations reach a function as their last message, and are not rendered",
    ),
}
"""Settings that do not apply to a function, and what to do instead."""

_OF_TOKENS = dict.fromkeys(("max_length", "truncation"), "leave it out there: the function gets texts, however long")


@dataclass(frozen=True, slots=True)
class FunctionForm:
    """A user function's parameters: `texts`, `responses` or `tokens`, and optionally `prompts` and `labels`.

    Samples without one of the `required` fail. `version` changes with its name and with the file of its module.
    """

    takes: str
    extra: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    needs_isolation: bool = False
    version: str = "1"

    def info(self, config: ModelConfig) -> ModelInfo:
        """Returns the function's description as a model; raises ConfigError for a setting that does not apply."""
        if self.takes != "tokens":
            _refuse(config, _OF_TOKENS, "a function of texts")
        return ModelInfo(
            config.name,
            "function",
            max_length=config.max_length,
            takes_text=self.takes != "tokens",
            takes_messages=self.takes == "responses",
            takes_tokens=self.takes == "tokens",
            takes_prompts=self.takes == "responses" or "prompts" in self.extra,
            takes_labels="labels" in self.extra,
            weights_version=self.version,
            path="function",
            is_checkpoint=False,
            why=config.model,
            source=config.model,
        )

    def read(self, sequence: Sequence, name: str) -> Any:
        """Returns the sample's arguments for the function, or an InvalidRequest if one is missing."""
        for required in self.required:
            if getattr(sequence, _EXTRA[required]) is None:
                return InvalidRequest(
                    f"{name} reads {required}, and this sample's {required[:-1]} was not sent, or is null or NaN: "
                    f"send `{required}` beside the samples, as the page of the trainer or the protocol says"
                )
        if self.takes == "tokens":
            return sequence.tokens
        text, prompt = sequence.text, sequence.prompt
        assert text is not None
        if self.takes == "texts" or sequence.is_response:
            return text
        if prompt is None:
            return InvalidRequest(
                f"{name} reads responses, and this text's prompt was not sent: send `prompts` beside the texts, or "
                "messages"
            )
        if not text.startswith(prompt):
            return InvalidRequest(
                f"{name} reads responses, and the text, {shown(text)}, does not begin with its prompt, {shown(prompt)}"
            )
        return text.removeprefix(prompt)

    def read_extra(self, sequences: Iterable[Sequence]) -> dict[str, list[Any]]:
        """Returns the function's further arguments."""
        return {name: [getattr(sequence, _EXTRA[name]) for sequence in sequences] for name in self.extra}


def read_form(function: Callable[..., Any], name: str) -> FunctionForm:
    """Returns what `function`, imported as `name`, takes; raises CheckpointError if that is not supported."""
    if _is_deferred(function) or _is_deferred(type(function).__call__):
        raise CheckpointError(
            f"{name} is asynchronous, or a generator: calling it returns no numbers",
            "make it a plain function that returns a list of numbers",
        )
    parameters = inspect.signature(function).parameters
    takes = next(iter(parameters), "")
    if takes not in ("texts", "responses", "tokens"):
        raise CheckpointError(f"the first parameter of {name} is {takes or 'missing'}", f"name it {_READS}")
    extra = tuple(known for known in _EXTRA if known in parameters)
    for parameter_name, parameter in parameters.items():
        is_known = parameter_name in (takes, *extra)
        if not is_known and parameter.kind in _BY_NAME and parameter.default is parameter.empty:
            raise CheckpointError(
                f"{name} has an unknown parameter {parameter_name}",
                f"give it a default; beside {_READS} a function may have `prompts` and `labels`",
            )
    required = tuple(known for known in extra if parameters[known].default is inspect.Parameter.empty)
    needs_isolation = bool(getattr(function, "needs_isolation", False))
    # The version changes with the name of an imported function and the file of its module.
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    content = Path(file).read_bytes() if file and Path(file).is_file() else b""
    version = hashlib.blake2b(name.encode() + b"\0" + content, digest_size=8).hexdigest()
    return FunctionForm(takes, extra, required, needs_isolation, version)


def check_function_settings(config: ModelConfig) -> None:
    """Raises ConfigError for a setting that does not apply to functions."""
    _refuse(config, _OF_CHECKPOINTS, "a function")


class FunctionScorer:
    """`module:function`: returns one number for each of its `texts`, `responses` or `tokens`.

    The name of its first parameter says what it takes: `texts: list[str]`; `responses: list[str]`, the texts without
    the prompts that clients send, or the assistant's last message of each conversation; `tokens: list[int64 array]`.
    Parameters named `prompts` (`list[str]`) and `labels` (any JSON values) get what clients send with each sample. If
    one has no default, samples without it fail; else they get None.

    One thread at a time calls the functions of a process, but models may compute on others meanwhile.
    """

    encoder = None
    takes_all = False

    def __init__(self, config: ModelConfig) -> None:
        """Imports the function.

        Raises CheckpointError if that fails or its parameters are not supported, ConfigError for a setting that does
        not apply to functions, or if the function needs isolation.
        """
        check_function_settings(config)
        self._function = import_function(config.model)
        self._form = read_form(self._function, config.model)
        if self._form.needs_isolation:
            raise ConfigError(
                f"{config.model} runs in a child process only", "give --isolate, or write `isolate: true` beside it"
            )
        self.info = self._form.info(config)
        self.max_batch_tokens = config.max_batch_tokens or MAX_BATCH_TOKENS

    def watch(self, tick: Callable[..., None]) -> bool:
        """Returns False: the progress of a function is unknown."""
        return False

    def score(self, sequences: list[Sequence]) -> list[Score | InvalidRequest | SampleFailed]:
        """Returns one result per sequence, in order; calls the function with complete ones only."""
        results = [self._form.read(s, self.info.name) for s in sequences]
        fine = [i for i, sample in enumerate(results) if not isinstance(sample, InvalidRequest)]
        if fine:
            extra = self._form.read_extra([sequences[i] for i in fine])
            scores = as_scores(self._function([results[i] for i in fine], **extra), len(fine), self.info.name)
            for i, score in zip(fine, scores, strict=True):
                results[i] = score
        return results


class PaddedScorer:
    """NeMo-Aligner's `infer_fn(inputs=(tokens, lengths))` over right-padded batches of torch tensors.

    `tokens` and `lengths` are those of `pad_batch`; it returns rewards `[B]`, `[B,1]` or, as a regression model,
    `[B,A]`, whose mean is the reward. Results of padding rows are dropped.
    """

    def __init__(
        self,
        infer_fn: Callable[..., Any],
        info: ModelInfo,
        *,
        encoder: Any = None,
        forward_batch_size: int = 1,
        strip_to_multiple: int | None = None,
        takes_all: bool = True,
    ) -> None:
        """With `takes_all` every rank gets all samples; `parts` says which rows the function computes on this rank.

        Only one thread at a time calls the function.
        """
        # Import here, because a FunctionScorer needs no torch, and not in `score`, because it takes a second.
        self._torch = importlib.import_module("torch")
        self._infer_fn = infer_fn
        self._forward_batch_size, self._multiple = forward_batch_size, strip_to_multiple or 1
        self.encoder, self.info, self.takes_all = encoder, info, takes_all
        self.max_batch_tokens = MAX_BATCH_TOKENS
        self.parts = WHOLE
        self._lock = threading.Lock()

    def watch(self, tick: Callable[..., None]) -> bool:
        """Returns False: the progress of a function is unknown."""
        return False

    def score(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Returns one result for each sequence, in order; collective if `parts` splits batches over ranks."""
        return self._score(sequences, self.parts)

    def score_here(self, sequences: list[Sequence]) -> list[Score | SampleFailed]:
        """Scores like `score`, but computes every row in this process."""
        return self._score(sequences, WHOLE)

    def _score(self, sequences: list[Sequence], parts: BatchParts) -> list[Score | SampleFailed]:
        tokens, lengths = pad_batch(sequences, self._forward_batch_size, self._multiple, parts.count)
        count = len(tokens)
        rows = parts.slice(count)

        def compute() -> np.ndarray:
            torch = self._torch
            with torch.inference_mode():
                out = self._infer_fn(inputs=(tokens[rows], lengths[rows]))
            return out.detach().float().cpu().numpy() if isinstance(out, torch.Tensor) else np.asarray(out)

        with self._lock:
            made = parts.gather(compute)
        rewards = made[0] if len(made) == 1 else np.concatenate([np.atleast_1d(part) for part in made])
        if rewards.ndim == 2 and len(rewards) == count and rewards.shape[1] > 1:
            with np.errstate(over="ignore"):
                table = rewards[: len(sequences)].astype(np.float32)
            return [
                Score(float(row.mean(dtype=np.float64)), attributes=row)
                if np.isfinite(row).all()
                else SampleFailed(f"the function returned {row.tolist()} for this sample")
                for row in table
            ]
        if rewards.size != count:
            returned = (
                f"infer_fn returned shape {list(rewards.shape)} for {count} rows; return one reward, or one row of "
                "attributes, for each"
            )
            return _refused(returned, len(sequences), self.info.name)
        return as_scores(rewards.reshape(-1)[: len(sequences)], len(sequences), self.info.name)


class FunctionEncoder:
    """Adapts NeMo-Aligner's `tokenize_func(sentences) -> (tokens [B,T], lengths [B])` to the service."""

    def __init__(self, tokenize_func: Callable[..., Any]) -> None:
        self._tokenize = tokenize_func
        self._lock = threading.Lock()

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray | InvalidRequest]:
        """Returns the ids of each text, int64 `[T]`; the function decides which special tokens it adds."""
        if add_special_tokens:
            refusal = "add_special_tokens: this server's own tokenize_func decides what is added; leave it out"
            return [InvalidRequest(refusal) for _ in texts]
        tokens, lengths = self._run(texts)
        return [row[:n] for row, n in zip(tokens, lengths, strict=True)]

    def padded(self, sentences: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids `[B,T]` and lengths `[B]` of sentences, an array of bytes or str."""
        given = np.asarray(sentences, dtype=object).reshape(-1)
        return self._run([x if isinstance(x, str) else bytes(x).decode() for x in given])

    def _run(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:  # a user's function need not be thread-safe
            tokens, lengths = self._tokenize(texts)
        try:
            tokens, lengths = read_rows(tokens, lengths)
        except InvalidRequest as error:
            raise ServerFault(f"this server's tokenize_func erred: {error}") from None
        if len(tokens) != len(texts):
            raise ServerFault(f"this server's tokenize_func gave {len(tokens)} rows for {len(texts)} texts")
        return tokens, lengths


def pad_batch(sequences: list[Sequence], forward_batch_size: int, multiple: int, num_parts: int = 1) -> tuple[Any, Any]:
    """Returns torch tensors `tokens` int64 `[B,T]`, right-padded with 0, and `lengths` int64 `[B]`.

    T is the longest length, rounded up to `multiple`, but at most the width of the widest row that was sent. Padding
    rows of one token make the batch divisible into `num_parts` equal parts; if these are larger than
    `forward_batch_size`, each becomes a multiple of it, as NeMo-Aligner's pipeline requires.
    """
    torch = importlib.import_module("torch")
    most = forward_batch_size * num_parts
    of = most if len(sequences) > most else num_parts
    count = math.ceil(len(sequences) / of) * of
    longest = max(len(s.tokens) for s in sequences)
    sent = max(max(s.width or 0, len(s.tokens)) for s in sequences)
    tokens = torch.zeros((count, min(math.ceil(longest / multiple) * multiple, sent)), dtype=torch.long)
    # With length 0 a head that reads the last token would read index -1.
    lengths = torch.ones(count, dtype=torch.long)
    for i, s in enumerate(sequences):
        tokens.numpy()[i, : len(s.tokens)] = s.tokens  # torch.from_numpy would warn about read-only arrays
        lengths[i] = len(s.tokens)
    return tokens, lengths


def check_batching(max_queue_delay_microseconds: float, strip_sequence_length_to_multiple: int | None) -> None:
    """Raises ConfigError if the delay or the multiple is out of range."""
    if not 0 <= max_queue_delay_microseconds < math.inf:
        raise ConfigError(
            f"max_queue_delay_microseconds is {max_queue_delay_microseconds}", "give 0, or how long a batch may wait"
        )
    if strip_sequence_length_to_multiple is not None and strip_sequence_length_to_multiple < 1:
        raise ConfigError(
            f"strip_sequence_length_to_multiple is {strip_sequence_length_to_multiple}",
            "give at least 1, or None to leave lengths as they are",
        )


def as_scores(values: Any, count: int, name: str) -> list[Score | SampleFailed]:
    """Converts a function's return value to its samples' results."""
    with np.errstate(over="ignore"):  # becomes the sample's error
        rewards = np.asarray(values, dtype=np.float32)
    if rewards.ndim == 0 or rewards.size != count:
        returned = "a single number" if rewards.ndim == 0 else f"{rewards.size} rewards"
        returned = f"the function returned {returned} for {count} samples; return a list with one number for each"
        return _refused(returned, count, name)
    return [
        Score(float(r)) if math.isfinite(r) else SampleFailed(f"the function returned {float(r)} for this sample")
        for r in rewards.reshape(-1)
    ]


def _refused(returned: str, count: int, name: str) -> list[Score | SampleFailed]:
    """Fails every sample: an exception would cause retries with fewer, which may return other numbers."""
    log.error("%s: %s", name, returned)
    return [SampleFailed(returned) for _ in range(count)]


def _refuse(config: ModelConfig, instead: Mapping[str, str], kind: str) -> None:
    """Raises ConfigError for the first setting in `instead` that is not at its default."""
    defaults = {field.name: default_of(field) for field in dataclasses.fields(config)}
    for name, what in instead.items():
        if (value := getattr(config, name)) != defaults[name]:
            raise ConfigError(f"{name} is {value}, but {config.model} is {kind}, to which it does not apply", what)


def _is_deferred(function: Any) -> bool:
    tests = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return any(test(function) for test in tests)


def import_function(name: str) -> Callable[..., Any]:
    """Imports `module:function`; raises CheckpointError."""
    module, _, attribute = name.partition(":")
    # A console script's sys.path lacks the working directory, where the user's module is.
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (StartError, KeyboardInterrupt):  # StartErrors are those of guerdon's own functions, with better advice
        raise
    # The user's module may raise anything when it is imported.
    except BaseException as e:
        raise CheckpointError(
            f"cannot import {name}: {describe(e)}",
            f"give {module.removesuffix('.py')}:{attribute}"
            if module.endswith(".py")
            else "give module:function, importable from here",
        ) from e
    finally:
        sys.path.remove("")
    if not callable(function):
        raise CheckpointError(f"{name} is not a function", "give module:function")
    return function
