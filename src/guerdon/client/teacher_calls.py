"""Turns the questions to a teacher into its tensors, and its reply into `TeacherAnswers`; no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import orjson

from guerdon.client import calls, plain_json
from guerdon.client.calls import Call, Conversations, Integers, ModelSignature, Texts, TokenRows
from guerdon.client.retry import RetryingCaller, Steps
from guerdon.client.teacher_head import Head
from guerdon.core import Message
from guerdon.errors import InvalidRequest, ServerFault
from guerdon.teacher_core import named_teachers, own_prompt
from guerdon.wire import schema
from guerdon.wire.schema import Field
from guerdon.wire.tensors import InferReply, InferRequest, Tensor, from_bits, pad_rows

GivenIds = Sequence[Integers] | Sequence[Sequence[Integers]] | np.ndarray
"""Ids for each sample: `[K]` for all of its tokens, or `[n, K]` for its n asked tokens in order; -1 is a pad."""

OwnPrompts = Sequence[str | Integers | Sequence[Message] | None]
"""A prompt of the teacher's own for each sample: a text, token ids, a conversation, or None for the sample's own."""

NamedTeachers = str | Mapping[str, float] | Sequence[str | Mapping[str, float] | None]
"""A teacher's name, or names and weights of a mixture: one for all samples, or one for each."""

_TABLES = (
    *(schema.LOGPROBS, schema.ENTROPY, schema.TOP_IDS, schema.TOP_LOGPROBS, schema.REST),
    *(schema.TARGET_LOGPROBS, schema.CHUNKS, schema.TOKEN_IDS),
)
_ALWAYS = (schema.LOGPROB_COUNTS, schema.ERRORS)


class TeacherArgs(TypedDict, total=False):
    """The keywords of every question to a teacher; give exactly one of `tokens`, `texts`, `messages` and `responses`.

    `texts` are whole, as for `RewardClient.score`; `responses` are those to `prompts`, or to conversations in
    `messages`, and each is tokenised together with its prompt. Asked are all tokens but the first, of `tokens` those
    after the first `prompt_lengths`, of `texts` those after the `prompts` that they begin with, and of `responses`
    their own; of `messages` alone those of the assistant's message that ends them, and of what the chat template writes
    after it. `teacher_prompts` go with `tokens`: each is a text, token ids or a conversation, after which the teacher
    reads the response in place of its own prompt, or None; a row without `prompt_lengths` is all response then.
    `temperature` (1) divides the logits, `entropy` (False) asks for the entropies too, `rest` (False) beside
    the likeliest ids for what is outside them, `token_ids` (False) for the asked tokens' ids. `teachers` are who
    answers: for each sample, or for all, the name of a teacher of the server, or names and weights of a mixture, the
    weighted mean of their probabilities; None is the client's own model. `priority` and `timeout_s` are as for
    `RewardClient.score`.
    """

    tokens: TokenRows
    texts: Texts
    messages: Conversations
    responses: Texts
    prompts: Texts | None
    prompt_lengths: Integers | None
    teacher_prompts: OwnPrompts | None
    teachers: NamedTeachers | None
    temperature: float
    entropy: bool
    rest: bool
    token_ids: bool
    priority: int
    timeout_s: float | None


@dataclass(slots=True, eq=False)
class TeacherAnswers:
    """A teacher's answers about the samples of one call; each list has one array a sample, in the order sent.

    Sample i has n_i asked tokens. `logprobs` and `entropy`, natural logarithms, are float32 `[n_i]`; `top_ids` int32
    and `top_logprobs` float32 are `[n_i, k]`, best first; `rest`, float32 `[n_i]`, is the logarithm of the probability
    of all other ids together, minus infinity for 0; `given_logprobs` are float32 `[n_i, K_i]`, 0 at pads;
    `hidden` is float32 (float16 for a model in float16) `[n_i, H]`, `tokens` int32 `[n_i]`. Outputs that were not
    requested are None.

    `chunks`, int32 `[n_i]`, come from a teacher with another tokenizer: tokens of one chunk have equal shares of its
    log-prob, and a token that has none is -1, its log-prob NaN.

    If a sample failed, its arrays are empty, and `errors[i]` says why; it is None otherwise. `weights_version` names
    the weights; `queue_s` and `compute_s` are the seconds the server spent waiting and computing.
    """

    errors: list[str | None]
    logprobs: list[np.ndarray] | None = None
    entropy: list[np.ndarray] | None = None
    top_ids: list[np.ndarray] | None = None
    top_logprobs: list[np.ndarray] | None = None
    rest: list[np.ndarray] | None = None
    given_logprobs: list[np.ndarray] | None = None
    hidden: list[np.ndarray] | None = None
    chunks: list[np.ndarray] | None = None
    tokens: list[np.ndarray] | None = None
    weights_version: str = ""
    queue_s: float = 0.0
    compute_s: float = 0.0

    def __len__(self) -> int:
        return len(self.errors)

    def raise_for_failed(self) -> TeacherAnswers:
        """Returns itself; raises SampleFailed naming the first failed sample if there is one."""
        calls.raise_first(self.errors)
        return self


def prepare_logprobs(model: str, samples: TeacherArgs) -> Call[TeacherAnswers]:
    """Returns the call for the log-probs of the samples' own tokens."""
    return prepare_top(model, 0, samples)


def prepare_top(model: str, k: int, samples: TeacherArgs) -> Call[TeacherAnswers]:
    """Returns the call for the `k` likeliest ids of each token, if any, and the log-probs of the actual ones."""
    if k == 0:
        return _prepare(model, samples, (schema.LOGPROBS,))
    return _prepare(model, samples, (schema.LOGPROBS, schema.TOP_IDS, schema.TOP_LOGPROBS), {"top_k": int(k)})


def prepare_given(model: str, ids: GivenIds, samples: TeacherArgs) -> Call[TeacherAnswers]:
    """Returns the call for the log-probs of `ids`, and those of the actual tokens."""
    return _prepare(model, samples, (schema.LOGPROBS, schema.TARGET_LOGPROBS), given=_id_tables(ids))


def prepare_hidden(model: str, dtype: Literal["bfloat16"] | None, samples: TeacherArgs) -> Call[TeacherAnswers]:
    """Returns the call for the states that the head turns into logits, rounded if there is a `dtype`."""
    parameters = {} if dtype is None else {"hidden_dtype": dtype}
    return _prepare(model, samples, (schema.HIDDEN_STATES, schema.HIDDEN_OFFSETS), parameters)


def fetch_head(caller: RetryingCaller, model: str, known: Head | None) -> Steps[Head]:
    """Returns the model's head, `known` itself if it is still the same."""
    file = yield from caller.fetch_head(model, "" if known is None else known.digest)
    if file is not None:
        return Head.from_file(file)
    if known is None:
        raise ServerFault(f"the server sent no head of {model}")
    return known


def _prepare(
    model: str,
    samples: TeacherArgs,
    outputs: tuple[Field, ...],
    parameters: dict[str, Any] | None = None,
    given: list[np.ndarray] | None = None,
) -> Call[TeacherAnswers]:
    about: dict[str, Any] = {**samples}
    parameters = {**(parameters or {}), "temperature": float(about.pop("temperature", 1.0))}
    if about.pop("entropy", False):
        outputs += (schema.ENTROPY,)
    if about.pop("token_ids", False):
        outputs += (schema.TOKEN_IDS,)
    if about.pop("rest", False):
        if "top_k" not in parameters:
            raise InvalidRequest("rest is what top leaves out: ask for it with top")
        outputs += (schema.REST,)
    own_prompts, teachers = about.pop("teacher_prompts", None), about.pop("teachers", None)
    before = _join(about)
    request = calls.make_request(**about)
    if before is not None:
        request.messages = [list(conversation) for conversation in before]
    extra: list[Tensor] = []
    if own_prompts is not None:
        if request.tokens is None:
            raise InvalidRequest(
                "teacher_prompts go with tokens; of texts and responses, give the teacher's prompts as prompts"
            )
        extra.append(_written(schema.TEACHER_PROMPTS, own_prompts, len(request), own_prompt))
    if teachers is not None:
        each = [teachers] * len(request) if isinstance(teachers, str | Mapping) else teachers
        extra.append(_written(schema.TEACHERS, each, len(request), named_teachers))
    if given is not None and len(given) != len(request):
        raise InvalidRequest(f"ids has {len(given)} entries for {len(request)} samples; it must have one entry each")

    def build(signature: ModelSignature, left_s: float) -> InferRequest:
        calls.check_gives(signature, schema.LOGPROBS)
        if request.prompts is not None and schema.PROMPTS.name not in signature.inputs:
            raise InvalidRequest(f"model '{model}' takes no prompts, because it reads no text: send tokens")
        if missing := [tensor.name for tensor in extra if tensor.name not in signature.inputs]:
            raise InvalidRequest(f"model '{model}' takes no {missing[0]}: its server is of an older release")
        sent = calls.build(request, signature, None if request.timeout_s is None else left_s)
        sent.inputs |= {tensor.name: tensor for tensor in extra}
        if given is not None:
            name = schema.TARGET_IDS.name
            sent.inputs[name] = Tensor.of(name, _pad_tables(given))
        sent.outputs = {field.name: True for field in (*outputs, *_ALWAYS)}
        if schema.CHUNKS.name in signature.outputs:
            sent.outputs[schema.CHUNKS.name] = True
        sent.parameters |= parameters
        return sent

    def parse(reply: InferReply, queue_s: float, compute_s: float) -> TeacherAnswers:
        found = {tensor.name: tensor.data for tensor in reply.outputs}
        missing = {field.name for field in (*outputs, *_ALWAYS)} - found.keys()
        if missing or len(found[schema.LOGPROB_COUNTS.name]) != len(request):
            raise ServerFault(f"the server sent no {min(missing) if missing else 'counts'} for {len(request)} samples")
        counts = np.ravel(found[schema.LOGPROB_COUNTS.name]).tolist()
        answers = TeacherAnswers(
            errors=calls.sample_errors(found, len(request)),
            hidden=_hidden(found) if schema.HIDDEN_STATES.name in found else None,
            weights_version=str(reply.parameters.get("weights_version", "")),
            queue_s=queue_s,
            compute_s=compute_s,
        )
        for field in _TABLES:
            if field.name in found:
                # Copies, which are writable, and do not keep the padding.
                rows = [np.array(row[:count]) for row, count in zip(found[field.name], counts, strict=True)]
                if field is schema.TARGET_LOGPROBS and given is not None:
                    rows = [row[..., : ids.shape[-1]] for row, ids in zip(rows, given, strict=True)]
                setattr(answers, field.at.removeprefix("answer."), rows)
        return answers

    return Call(model, build, parse, calls.estimate_cost(request), request.timeout_s, priority=request.priority)


def _join(about: dict[str, Any]) -> Conversations | None:
    """Makes `texts` of `responses`, whole ones if there are prompts; returns the conversations that they answer."""
    responses = about.pop("responses", None)
    if responses is None:
        if about.get("texts") is not None and about.get("messages") is not None:
            raise InvalidRequest("texts are whole: give the responses to messages as responses")
        return None
    names = [name for name in ("prompts", "messages") if about.get(name) is not None]
    if len(names) != 1 or any(about.get(name) is not None for name in ("tokens", "texts", "prompt_lengths")):
        raise InvalidRequest("responses go with prompts or with messages, one before each, and with nothing else")
    (name,) = names
    before = about.pop(name)
    calls.check_samples("responses", responses)
    calls.check_samples(name, before)
    if len(before) != len(responses):
        raise InvalidRequest(f"{name} has {len(before)} entries for {len(responses)} responses; give one before each")
    if name == "messages":
        about["texts"] = responses
        return before
    about["texts"] = [prompt + response for prompt, response in zip(before, responses, strict=True)]
    about["prompts"] = before
    return None


def _written(field: Field, values: Any, count: int, read: Callable[[Any, str], Any]) -> Tensor:
    """Returns a tensor with a JSON value for each of `count` samples; raises InvalidRequest naming the one at fault.

    `read` raises it for what the server would refuse.
    """
    name = field.name
    if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or len(values) != count:
        raise InvalidRequest(f"{name} must be a list with one entry for each of the {count} samples")
    if field is schema.TEACHERS:  # before they are JSON, which has no NaN
        values = [read(value, f"{name}[{i}]") for i, value in enumerate(values)]
    written = [plain_json.write(value, f"{name}[{i}]") for i, value in enumerate(values)]
    for i, value in enumerate(written):
        read(orjson.loads(value), f"{name}[{i}]")
    return Tensor(name, field.datatype, (count, 1), written)


def _id_tables(ids: GivenIds) -> list[np.ndarray]:
    """Returns each sample's ids as int64 `[K]` or `[n, K]`; raises InvalidRequest naming the sample at fault."""
    tables = []
    for i, row in enumerate(ids):
        try:
            table = np.asarray(row)
        except (TypeError, ValueError, RuntimeError) as e:
            raise InvalidRequest(f"ids[{i}] cannot be read as integers: {e}") from e
        if table.ndim not in (1, 2) or table.dtype.kind not in "iu":
            raise InvalidRequest(
                f"ids[{i}] must be a list of ids, or one such list for each asked token, of equal lengths"
            )
        tables.append(table.astype(np.int64, copy=False))
    if len({table.ndim for table in tables}) > 1:
        raise InvalidRequest("ids has one list for some samples and a list for each token for others: choose one form")
    return tables


def _pad_tables(tables: list[np.ndarray]) -> np.ndarray:
    """Returns the tables as one array `[B,K]` or `[B,R,K]`, padded with -1."""
    if tables[0].ndim == 1:
        return pad_rows(tables, np.int64, -1)
    padded = np.full((len(tables), *np.max([table.shape for table in tables], axis=0)), -1, np.int64)
    for out, table in zip(padded, tables, strict=True):
        out[: len(table), : table.shape[1]] = table
    return padded


def _hidden(outputs: dict[str, Any]) -> list[np.ndarray]:
    states = outputs[schema.HIDDEN_STATES.name]
    assert isinstance(states, np.ndarray)
    if states.dtype == np.uint16:  # in process; the wire's reader has made float32 of them
        states = from_bits(states)
    elif not states.flags.writeable:
        states = states.copy()
    return np.split(states, np.ravel(outputs[schema.HIDDEN_OFFSETS.name])[1:-1])
