"""Turns samples into a model's tensors, and its reply into `Scores`; no I/O."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from guerdon.client import plain_json
from guerdon.core import Message, ScoreRequest
from guerdon.errors import InvalidRequest, SampleFailed, ServerFault
from guerdon.wire import schema
from guerdon.wire.schema import Field
from guerdon.wire.score_tensors import DEFAULT_PRIORITY_LEVEL
from guerdon.wire.tensors import DTYPES, InferReply, InferRequest, Tensor, pad_rows

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Texts = Sequence[str]
"""One text for each sample."""
Conversations = Sequence[Sequence[Message]]
"""One conversation for each sample: messages such as `{"role": "user", "content": "Hi"}`."""
TokenRows = Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray
"""One row of token ids for each sample, of any lengths; or one integer array `[B, T]`."""
Integers = Sequence[int] | np.ndarray
"""Integers as a list or an array."""

_SAMPLES = {
    **dict.fromkeys(("texts", "prompts", "responses"), "a string"),
    "messages": "a list of {role, content}",
    "tokens": "a list of token ids",
}

_KINDS = {
    schema.REWARDS: ("reward model", "guerdon serve", "RewardClient"),
    schema.VALUES: ("critic", "guerdon serve-critic", "CriticClient"),
    schema.LOSS: ("critic that trains", "guerdon serve-critic", "CriticClient"),
    schema.LOGPROBS: ("teacher", "guerdon serve-teacher", "TeacherClient"),
}
"""By an output: the kind of model that has it, its command, and its client."""

_HINTS = (schema.GROUPS, schema.PROMPT_LENGTHS, schema.PROMPTS, schema.LABELS)
"""The inputs that are left out if the model does not list them."""
_SENT = (schema.SENTENCES, schema.MESSAGES, schema.TOKENS, schema.STEPS, *_HINTS)

_OUTPUTS = (
    *(schema.REWARDS, schema.ATTRIBUTES, schema.VALUES, schema.OUT_LENGTHS, schema.STEP_REWARDS, schema.STEP_COUNTS),
    schema.ERRORS,
)


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """A served model's tensors, as its metadata lists them: name to datatype."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: dict[str, str]
    outputs: dict[str, str]

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> ModelSignature:
        """Reads the protocol's model metadata; raises ServerFault if it is malformed."""
        try:
            return cls(
                name=metadata["name"],
                versions=tuple(metadata.get("versions") or ()),
                platform=metadata.get("platform", ""),
                inputs={tensor["name"]: tensor["datatype"] for tensor in metadata["inputs"]},
                outputs={tensor["name"]: tensor["datatype"] for tensor in metadata["outputs"]},
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ServerFault("the model's metadata is not the open inference protocol's") from e


@dataclass(slots=True, eq=False)
class Scores:
    """The scores of one call, one entry a sample in the order sent.

    `rewards` is float32 `[B]`, NaN (never 0.0) if the sample failed; `errors[i]` then says why, and is None otherwise.
    `attributes` is float32 `[B, A]`, `values` a list of float32 `[T_i]`, `steps` a list of float32 `[K_i]`; each is
    None if the model has none. If the server does not send the number of a text's tokens, its values are padded with 0
    to the longest of the call. `attribute_names` names the attributes' columns, and is empty if the server does not.
    `weights_version` names the weights; `queue_s` and `compute_s` are the seconds the server spent waiting and
    computing.
    """

    rewards: np.ndarray
    errors: list[str | None]
    attributes: np.ndarray | None = None
    values: list[np.ndarray] | None = None
    steps: list[np.ndarray] | None = None
    weights_version: str = ""
    queue_s: float = 0.0
    compute_s: float = 0.0
    attribute_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rewards)

    def __iter__(self) -> Iterator[float]:
        return iter(self.rewards.tolist())

    def raise_for_failed(self) -> Scores:
        """Returns itself; raises SampleFailed naming the first failed sample if there is one."""
        raise_first(self.errors)
        return self


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call, as functions to and from its tensors.

    `build` takes the model's signature and the seconds left, `parse` the reply and the seconds the server waited and
    computed. `cost` is in tokens; without `timeout_s` the policy's applies. `may_repeat` returns, for a server's
    signature, whether a request that may have arrived there may be sent again. Of the calls that wait in a client,
    those of higher `priority` go first.
    """

    model: str
    build: Callable[[ModelSignature, float], InferRequest]
    parse: Callable[[InferReply, float, float], T]
    cost: int = 0
    timeout_s: float | None = None
    may_repeat: Callable[[ModelSignature], bool] = lambda _: True
    priority: int = 0


def check_gives(signature: ModelSignature, output: Field) -> None:
    """Raises InvalidRequest that names the right client and the right command if the model lacks the output."""
    if output.name in signature.outputs:
        return
    kind, command, _ = _KINDS[output]
    asker = next((client for other, (_, _, client) in _KINDS.items() if other.name in signature.outputs), "")
    raise InvalidRequest(
        f"model '{signature.name}' is no {kind}: it gives {', '.join([*signature.outputs][:3])}"
        f"{asker and f', for which a {asker} asks'}; {command} serves one"
    )


def prepare_score(model: str, request: ScoreRequest) -> Call[Scores]:
    """Returns the call that scores `request`; the server learns the time-out if the request has its own."""

    def build_checked(signature: ModelSignature, left_s: float) -> InferRequest:
        check_gives(signature, schema.REWARDS)
        return build(request, signature, None if request.timeout_s is None else left_s)

    return Call(
        model,
        build_checked,
        lambda reply, queue_s, compute_s: parse(reply, request, queue_s, compute_s),
        estimate_cost(request),
        request.timeout_s,
        priority=request.priority,
    )


_DEFAULTS = {"priority": 0, "updates": 1, "temperature": 1.0, "entropy": False, "rest": False}
"""Of those keywords whose default is not None."""


def takes(arguments: type, defaults: Mapping[str, Any] = _DEFAULTS) -> Callable[[F], F]:
    """Decorates a call whose keywords are a typed dict's keys: adds them to its signature."""

    def decorate(call: F) -> F:
        signature = inspect.signature(call)
        shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, kind in arguments.__annotations__.items():
            default, annotation = defaults.get(name), getattr(kind, "__forward_arg__", kind)
            shown.append(inspect.Parameter(name, shown[0].KEYWORD_ONLY, default=default, annotation=annotation))
        call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return call

    return decorate


def accept(call: Callable[..., Any], given: T) -> T:
    """Returns the keywords given to a call that `takes` them; raises TypeError with its public name for others."""
    inherited = (vars(owner).get(call.__name__) for owner in type(getattr(call, "__self__", None)).__mro__)
    known = (getattr(one, "__signature__", None) for one in (call, *inherited))  # a subclass's own call has none
    signature = next(filter(None, known), None)  # `inspect.signature` takes 20 us
    taken: Any = given if signature is None else signature.parameters
    if unknown := next((name for name in cast("Mapping[str, Any]", given) if name not in taken), None):
        raise TypeError(f"{call.__qualname__}() got an unexpected keyword argument {unknown!r}")
    return given


def make_request(
    texts: Texts | None = None,
    messages: Conversations | None = None,
    tokens: TokenRows | None = None,
    groups: Integers | None = None,
    prompt_lengths: Integers | None = None,
    steps: TokenRows | None = None,
    prompts: Texts | None = None,
    labels: Sequence[Any] | None = None,
    priority: int = 0,
    timeout_s: float | None = None,
    pad_to_length: int | None = None,
    lengths: Integers | None = None,
) -> ScoreRequest:
    """Returns the request for samples given as exactly one of `texts`, `messages` and `tokens`; raises InvalidRequest.

    `tokens` are token ids, one sequence a sample, of any length up to `pad_to_length`; see `token_rows`. `groups`,
    `prompt_lengths`, `steps`, `prompts` and `labels`, the request's `references`, have one entry a sample.
    """
    given = {n: v for n, v in (("texts", texts), ("messages", messages), ("tokens", tokens)) if v is not None}
    if len(given) != 1:
        raise InvalidRequest(f"give exactly one of texts, messages and tokens, not {' and '.join(given) or 'none'}")
    ((name, samples),) = given.items()
    if lengths is not None and tokens is None:
        raise InvalidRequest(f"lengths go with tokens, not with {name}")
    if tokens is None:
        check_samples(name, samples)
    request = ScoreRequest(priority=priority, timeout_s=timeout_s, pad_to_length=pad_to_length)
    if texts is not None:
        request.texts = list(texts)
    elif messages is not None:
        request.messages = [list(conversation) for conversation in messages]
    elif tokens is not None:
        request.tokens = token_rows(tokens, lengths)
        for i, row in enumerate(request.tokens):
            if pad_to_length is not None and len(row) > pad_to_length:
                raise InvalidRequest(f"tokens[{i}] has {len(row)} ids, more than pad_to_length, {pad_to_length}")
    hints: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
        "groups": (groups, integer_row),
        "prompt_lengths": (prompt_lengths, integer_row),
        "steps": (steps, id_rows),
        "prompts": (prompts, _strings),
        "labels": (labels, lambda _, values: list(values)),
    }
    for name, (hint, read) in hints.items():
        if hint is None:
            continue
        if (count := _num_entries(hint)) != len(samples):
            found = f"is {_type_with_article(hint)}" if count is None else f"has {count} entries"
            raise InvalidRequest(f"{name} {found} for {len(samples)} samples; it must be a list of one entry each")
        setattr(request, "references" if name == "labels" else name, read(name, hint))
    return request


def check_samples(name: str, samples: Any) -> None:
    """Raises InvalidRequest unless `samples` is a list of what `name` takes."""
    if _num_entries(samples) is None:
        raise InvalidRequest(f"{name} must be a list of at least one sample, not {_type_with_article(samples)}")
    if len(samples) == 0:
        raise InvalidRequest(f"{name} must be a list of at least one sample, not empty")
    part = {"messages": Mapping, "tokens": numbers.Integral}.get(name)
    if part is not None and isinstance(next(iter(samples)), part):
        raise InvalidRequest(
            f"{name} is one sample, and must be a list of samples, each {_SAMPLES[name]}: write {name}=[[...]]"
        )
    for i, sample in enumerate(samples):
        if (_SAMPLES[name] == "a string") != isinstance(sample, str) or (
            name == "messages" and _num_entries(sample) is None
        ):
            raise InvalidRequest(f"{name}[{i}] is {_type_with_article(sample)}; each sample must be {_SAMPLES[name]}")
        for j, message in enumerate(sample if name == "messages" else ()):
            if not isinstance(message, Mapping):
                raise InvalidRequest(
                    f"{name}[{i}][{j}] is {_type_with_article(message)}, not an object with role and content"
                )


def _strings(name: str, values: Any) -> list[str]:
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise InvalidRequest(f"{name}[{i}] is {_type_with_article(value)}; each must be a string")
    return list(values)


def _num_entries(values: Any) -> int | None:
    """Returns the length of a list, a tuple or an array; None if it is a string, a mapping or has no length."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or getattr(values, "ndim", 1) == 0:
        return None
    return len(values)


def _type_with_article(value: Any) -> str:
    """Names the value's type with its article."""
    name = "string" if isinstance(value, str) else type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def estimate_cost(request: ScoreRequest) -> int:
    """Returns the request's number of tokens, estimated as four characters a token for text."""
    if request.tokens is not None:
        return sum(map(len, request.tokens))
    texts = request.texts or [str(message.get("content")) for chat in request.messages or () for message in chat]
    return sum(1 + len(text) // 4 for text in texts)


def build(request: ScoreRequest, signature: ModelSignature, timeout_s: float | None = None) -> InferRequest:
    """Returns the request in the model's tensors; `timeout_s` is sent to the server.

    Leaves out hints that the model does not list. Raises InvalidRequest if it lacks an input that matters.
    """
    inputs: list[Tensor] = []
    for field in _SENT:
        rows = getattr(request, field.at)
        if rows is None or (field.name not in signature.inputs and field in _HINTS):
            continue
        inputs.append(_write(field, rows, signature, request.pad_to_length if field is schema.TOKENS else None))
        if field is schema.TOKENS:
            inputs.append(_write(schema.LENGTHS, np.array([len(row) for row in rows]), signature))
    parameters: dict[str, Any] = {}
    if request.priority:
        # Triton's levels count down from the default to 1, which goes first.
        parameters["priority"] = max(1, DEFAULT_PRIORITY_LEVEL - request.priority)
    if timeout_s is not None:
        parameters["timeout"] = max(1, round(timeout_s * 1e6))
    return InferRequest(
        inputs={tensor.name: tensor for tensor in inputs},
        outputs={field.name: True for field in _OUTPUTS if field.name in signature.outputs},
        parameters=parameters,
    )


def parse(reply: InferReply, request: ScoreRequest, queue_s: float = 0.0, compute_s: float = 0.0) -> Scores:
    """Returns the scores in a reply; raises ServerFault without one reward a sample.

    If `rewards` has several columns, these become the attributes, and their mean the reward.
    """
    outputs = {tensor.name: tensor.data for tensor in reply.outputs}
    rewards = np.asarray(outputs.get(schema.REWARDS.name, ()), np.float32)
    if len(rewards) != len(request):
        raise ServerFault(f"the server sent {len(rewards)} rewards for {len(request)} samples")
    rewards = rewards.reshape(len(request), -1)
    attributes: np.ndarray | None = rewards if rewards.shape[1] > 1 else None
    if schema.ATTRIBUTES.name in outputs:
        attributes = np.asarray(outputs[schema.ATTRIBUTES.name], np.float32)
    merged = rewards[:, 0].copy() if rewards.shape[1] == 1 else rewards.mean(axis=1)
    names = tuple(filter(None, str(reply.parameters.get("attribute_names", "")).split(",")))
    failed = sample_errors(outputs, len(request))
    for i in np.flatnonzero(~np.isfinite(merged)):
        failed[i] = failed[i] or "the server gave no finite reward"
    merged[[error is not None for error in failed]] = np.nan
    return Scores(
        rewards=merged,
        errors=failed,
        attributes=attributes,
        attribute_names=names if attributes is not None and len(names) == attributes.shape[1] else (),
        values=sample_values(outputs, request),
        steps=_steps(outputs),
        weights_version=str(reply.parameters.get("weights_version", "")),
        queue_s=queue_s,
        compute_s=compute_s,
    )


def sample_errors(outputs: dict[str, Any], num_samples: int) -> list[str | None]:
    """Returns the server's error for each sample, None for each that succeeded."""
    errors = outputs.get(schema.ERRORS.name, [b""] * num_samples)
    return [error.decode("utf-8", "replace") or None for error in errors]


def sample_values(outputs: dict[str, Any], request: ScoreRequest) -> list[np.ndarray] | None:
    """Returns each sample's values without padding, None without values; raises ServerFault for a wrong number."""
    if schema.VALUES.name not in outputs:
        return None
    rows = list(np.asarray(outputs[schema.VALUES.name], np.float32))
    if len(rows) != len(request):
        raise ServerFault(f"the server sent values of {len(rows)} samples; {len(request)} were asked for")
    if request.tokens is not None:
        return [row[: len(tokens)] for row, tokens in zip(rows, request.tokens, strict=True)]
    name = schema.OUT_LENGTHS.name
    lengths = np.ravel(outputs[name]) if name in outputs else [None] * len(rows)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _write(field: Field, rows: Any, signature: ModelSignature, width: int | None = None) -> Tensor:
    """Returns the rows as the model's input; raises InvalidRequest if the model lacks it, or a text is not UTF-8."""
    name = field.name
    if name not in signature.inputs:
        hint = ""
        if field in (schema.SENTENCES, schema.MESSAGES) and schema.SENTENCES.name not in signature.inputs:
            hint = "; it reads no text (a checkpoint's folder without a tokenizer): send tokens"
        elif field is schema.MESSAGES:
            hint = "; apply the chat template yourself and send texts"
        raise InvalidRequest(
            f"model '{signature.name}' takes no input '{name}'; it takes {', '.join(signature.inputs)}{hint}"
        )
    if field.datatype != "BYTES":
        datatype = signature.inputs[name]
        dtype = DTYPES[datatype]
        data = rows.astype(dtype)[:, None] if field.axes == "B 1" else pad_rows(rows, dtype, field.pad, width)
        return Tensor(name, datatype, data.shape, data)
    if field in (schema.MESSAGES, schema.LABELS):
        written = [plain_json.write(value, f"{name}[{row}]") for row, value in enumerate(rows)]
        return Tensor(name, field.datatype, (len(written), 1), written)
    try:
        return Tensor.of_texts(name, rows)
    except UnicodeEncodeError as e:
        row = next(i for i, text in enumerate(rows) if text == e.object)
        why = f"{e.reason} at character {e.start}"
        raise InvalidRequest(f"{field.at}[{row}] cannot be written as UTF-8: {why}") from e


def _steps(outputs: dict[str, Any]) -> list[np.ndarray] | None:
    if schema.STEP_REWARDS.name not in outputs:
        return None
    rows = list(np.asarray(outputs[schema.STEP_REWARDS.name], np.float32))
    if schema.STEP_COUNTS.name not in outputs:
        return [row[~np.isnan(row)] for row in rows]
    counts = np.ravel(outputs[schema.STEP_COUNTS.name])
    return [row[: int(count)] for row, count in zip(rows, counts, strict=True)]


def number_row(name: str, values: Any, kinds: str, dtype: Any) -> np.ndarray:
    """Returns one row of numbers in `dtype`; raises InvalidRequest unless it is flat and of a kind in `kinds`.

    `kinds` are numpy's letters for data types.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as e:  # a tensor on a device or with a gradient, or a ragged list
        raise InvalidRequest(f"{name} cannot be read as numbers: {e}") from e
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise InvalidRequest(f"{name} must be a flat list of {'integers' if kinds == 'iu' else 'numbers'}")
    with np.errstate(over="ignore"):
        return array.astype(dtype, copy=False)


def integer_row(name: str, values: Any) -> np.ndarray:
    """Returns one row of integers as int64; raises InvalidRequest."""
    return number_row(name, values, "iu", np.int64)


def id_rows(name: str, rows: Any) -> list[np.ndarray]:
    """Returns rows of integers as int64."""
    return [integer_row(f"{name}[{i}]", values) for i, values in enumerate(rows)]


def token_rows(tokens: TokenRows, lengths: Integers | None = None) -> list[np.ndarray]:
    """Returns each sample's token ids, from lists, arrays or an array `[N, T]`, without padding if `lengths` are given.

    `lengths` has one entry a sample, and padding is on the right. Raises InvalidRequest naming the row at fault.
    """
    check_samples("tokens", tokens)
    rows = id_rows("tokens", tokens)
    if lengths is None:
        return rows
    counts = integer_row("lengths", lengths).tolist()
    if len(counts) != len(rows):
        raise InvalidRequest(f"lengths has {len(counts)} entries for {len(rows)} rows of tokens")
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if not 0 < count <= len(row):
            raise InvalidRequest(f"lengths[{i}] is {count}, and tokens[{i}] has {len(row)} ids")
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def raise_first(errors: list[str | None]) -> None:
    """Raises SampleFailed naming the first failed sample if there is one."""
    failed = [i for i, error in enumerate(errors) if error is not None]
    if failed:
        raise SampleFailed(f"{len(failed)} of {len(errors)} samples failed; row {failed[0]}: {errors[failed[0]]}")
