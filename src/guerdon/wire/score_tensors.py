"""Scores and log-probs as tensors: turns inputs into a request, and its results into outputs."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, named
from guerdon.teacher_core import LogprobQuery, named_teachers, own_prompt
from guerdon.trees import Forest
from guerdon.wire import schema
from guerdon.wire.bodies import MAX_ROWS, check_count, check_depth, check_values, parse, shown, too_deep
from guerdon.wire.long_json import MAX_STRING_BYTES, PIECE
from guerdon.wire.schema import Field, Info
from guerdon.wire.signature import MODEL_VERSION, check_names
from guerdon.wire.tensors import InferReply, InferRequest, Tensor, integer_per_row, integers

DEFAULT_PRIORITY_LEVEL = 100
"""The priority level of requests that name none. Triton's levels count down: 1 goes first."""

_MAX_NUMBERS = 1 << 26
"""Most numbers in one output, whose rows are as long as the longest: many more than the characters sent."""

_NUMBER_BYTES = 4

_LARGEST_TEMPERATURE = 1e30
"""Within float32; JSON has numbers beyond any float."""

_CONTENTS = {field.name for field in (schema.SENTENCES, schema.MESSAGES, schema.TOKENS, schema.INPUT_IDS)}
_HINTS = (schema.GROUPS, schema.PROMPT_LENGTHS, schema.PROMPTS, schema.LABELS, schema.STEPS)
_JSON = (schema.LABELS, schema.TEACHER_PROMPTS, schema.TEACHERS)
_NUMPY = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32, "BF16": np.uint16, "FP16": np.float16}


def to_request(request: InferRequest, info: ModelInfo) -> ScoreRequest:
    """Returns the request that the tensors carry; raises InvalidRequest, which names the input, output or row at fault.

    Token rows are int64 and may be read-only views of the request's body. The service checks single rows (ids outside
    the vocabulary, no tokens, too many), and scores the others.
    """
    inputs = request.inputs
    if not inputs:
        raise InvalidRequest("the request has no inputs: it needs a list of at least one tensor")
    raw_text = inputs.pop("", None)
    if raw_text is not None:
        raw_text.name = schema.SENTENCES.name
        inputs[raw_text.name] = raw_text
    check_names(request, info)
    contents = inputs.keys() & _CONTENTS
    is_teacher = schema.LOGPROBS.has(info)
    # To a teacher, sentences may be responses to messages.
    is_apart = is_teacher and contents == {schema.SENTENCES.name, schema.MESSAGES.name}
    if len(contents) != 1 and not is_apart:
        choices = [name for name in schema.inputs_of(info) if name in _CONTENTS]
        got = " and ".join(sorted(contents)) or "none of them"
        raise InvalidRequest(f"exactly one of the inputs {', '.join(choices)} is needed; the request has {got}")
    content = inputs[schema.SENTENCES.name if is_apart else contents.pop()]
    num_rows = content.shape[0] if content.shape else 0
    if num_rows == 0:
        raise InvalidRequest(f"input '{content.name}' is an empty batch: shape {list(content.shape)}")
    if num_rows > MAX_ROWS:
        check_count(num_rows, f"input '{content.name}'")

    level = request.count("priority") if "priority" in request.parameters else 0
    score = ScoreRequest(timeout_s=request.timeout_s, priority=DEFAULT_PRIORITY_LEVEL - level if level else 0)
    if content.name in (schema.SENTENCES.name, schema.MESSAGES.name):
        for field in (schema.LENGTHS, schema.PARENTS):
            if field.name in inputs:
                raise InvalidRequest(f"input '{field.name}' goes with tokens, not with {content.name}")
        for field in (schema.SENTENCES, schema.MESSAGES):
            if field.name in inputs:
                setattr(score, field.at, _read_rows(field, inputs[field.name], num_rows))
    else:
        score.tokens = _token_rows(content, inputs.get(schema.LENGTHS.name), info)
        score.width = content.shape[1]
        if schema.PARENTS.name in inputs:
            score.tokens = _paths(request, info)
            score.width = max(map(len, score.tokens))
    for field in _HINTS:
        if field.name in inputs:
            setattr(score, field.at, _read_rows(field, inputs[field.name], num_rows))
    score.wants_rewards = request.outputs is None or schema.REWARDS.name in request.outputs
    score.is_whole = request.outputs is None or schema.ERRORS.name not in request.outputs
    if is_teacher:
        score.asks = _to_queries(request, num_rows)
    return score


def to_reply(reply: ScoreReply, request: InferRequest, info: ModelInfo) -> InferReply:
    """Returns the tensors that answer `request`.

    Raises the first failed row's error, prefixed with the row, unless the output `errors` was requested; failed rows
    are NaN then. If the attributes are among the tensors, the parameter `attribute_names` names their columns, unless
    the names are ambiguous.
    """
    if schema.PARENTS.name in request.inputs:
        reply = _of_segments(reply, _forest(request))
    requested = request.outputs
    if requested is None or schema.ERRORS.name not in requested:
        scores_of(reply)
    if schema.LOGPROBS.has(info):
        wanted = _teacher_outputs(request)
    elif requested is None:
        wanted = [field for field in schema.outputs_of(info).values() if field.is_listed]
    else:
        wanted = [schema.MODEL_OUTPUTS[name] for name in requested]
    outputs = [made for field in wanted if (made := _output(field, reply, request, info)) is not None]
    parameters = {"weights_version": reply.weights_version}
    columns = next((one.names for one in reply.results if isinstance(one, Score)), ()) or info.attribute_names
    is_clear = len({*columns}) == len(columns) > 0 and "," not in "".join(columns)
    if is_clear and any(tensor.name == schema.ATTRIBUTES.name for tensor in outputs):
        parameters["attribute_names"] = ",".join(columns)
    return InferReply(info.name, MODEL_VERSION, outputs, request.id, parameters)


def table_bytes(reply: Any, info: Info) -> int:
    """Returns about the bytes of the answer's largest table, 0 if it has only a few numbers a sample.

    All rows of a table are as long as the longest.
    """
    if not isinstance(reply, ScoreReply) or not isinstance(info, ModelInfo):
        return 0
    if schema.LOGPROBS.has(info):
        said = [r.answer.num_bytes for r in reply.results if isinstance(r, Score) and r.answer is not None]
        return len(said) * max(said, default=0)
    return _NUMBER_BYTES * len(reply.results) * max(reply.lengths, default=0) if info.is_by_token else 0


def prompt_groups(prompts: Iterable[str]) -> np.ndarray:
    """Returns the group of each prompt, int64.

    Equal prompts have equal groups in every request and process, since some trainers send each rollout alone.
    """
    prompts = list(prompts)
    # A prompt of many responses is hashed once. The encoder refuses lone surrogates later.
    groups = {prompt: zlib.crc32(prompt.encode("utf-8", "surrogatepass")) for prompt in dict.fromkeys(prompts)}
    return np.array([groups[prompt] for prompt in prompts], np.int64)


def scores_of(reply: ScoreReply) -> list[Score]:
    """Returns the reply's scores; raises the first failed row's error, prefixed with the row."""
    scores = []
    for i, result in enumerate(reply.results):
        if isinstance(result, GuerdonError):
            raise named(f"row {i}", result)
        scores.append(result)
    return scores


def _texts(tensor: Tensor) -> list[str]:
    if tensor.datatype != "BYTES":
        raise InvalidRequest(f"input '{tensor.name}' must be BYTES, not {tensor.datatype}")
    if tensor.shape not in ((len(tensor.data),), (len(tensor.data), 1)):
        raise InvalidRequest(f"input '{tensor.name}' must have shape [B, 1] or [B], not {list(tensor.shape)}")
    texts = []
    for i, element in enumerate(tensor.data):
        if len(element) > MAX_STRING_BYTES:
            raise InvalidRequest(
                f"input '{tensor.name}', row {i}: {len(element):,} bytes, at most {MAX_STRING_BYTES:,} are accepted"
            )
        try:
            texts.append(bytes(element).decode())
        except UnicodeDecodeError as e:
            raise InvalidRequest(f"input '{tensor.name}', row {i}: not valid UTF-8 at byte {e.start}") from e
    return texts


def _read_rows(field: Field, tensor: Tensor, num_rows: int) -> Any:
    """Returns an input with one row a sample as the request has it; raises InvalidRequest naming the input and row."""
    if field.datatype == "BYTES":
        texts = _texts(tensor)
        if len(texts) != num_rows:
            raise InvalidRequest(f"input '{tensor.name}' has {len(texts)} rows for {num_rows} samples")
        if field is schema.MESSAGES:
            return [_conversation(i, value) for i, value in enumerate(_jsons(tensor, texts))]
        return _jsons(tensor, texts) if field in _JSON else texts
    if field.axes == "B 1":
        return integer_per_row(tensor, num_rows)
    numbers = integers(tensor)
    if numbers.ndim != 2 or len(numbers) != num_rows:
        raise InvalidRequest(f"input '{tensor.name}' must have shape [{num_rows}, K], not {list(tensor.shape)}")
    return [row[row != field.pad] for row in numbers]


def _jsons(tensor: Tensor, texts: list[str]) -> list[Any]:
    """The JSON value in each of the tensor's texts."""
    check_values(list(tensor.data), f"input '{tensor.name}'")
    values = []
    for row, text in enumerate(texts):
        try:
            if len(text) > PIECE:
                values.append(parse(text.encode(), f"input '{tensor.name}', row {row}"))
            else:
                values.append(msgspec.json.decode(text))  # orjson would make floats of integers beyond 64 bits
        except RecursionError as e:
            raise InvalidRequest(too_deep(f"input '{tensor.name}', row {row}")) from e
        except msgspec.MsgspecError as e:
            is_messages = tensor.name == schema.MESSAGES.name
            hint = "" if is_messages else "; write text in quotes, and null if there is none"
            raise InvalidRequest(f"input '{tensor.name}', row {row}: not valid JSON: {e}{hint}") from e
        check_depth(values[-1], f"input '{tensor.name}', row {row}")
    return values


def _conversation(row: int, messages: Any) -> list[Message]:
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and "role" in message for message in messages)
    ):
        raise InvalidRequest(
            f"input '{schema.MESSAGES.name}', row {row}: must be a JSON list of at least one object with role and "
            "content"
        )
    return messages


def _token_rows(tensor: Tensor, lengths: Tensor | None, info: ModelInfo) -> list[np.ndarray]:
    ids = integers(tensor)
    if ids.ndim != 2:
        raise InvalidRequest(f"input '{tensor.name}' must have shape [B, T], not {list(tensor.shape)}")
    num_rows, width = ids.shape
    if lengths is not None:
        ends = integer_per_row(lengths, num_rows)
        wrong = np.flatnonzero((ends < 0) | (ends > width))
        if len(wrong):
            raise InvalidRequest(
                f"input '{lengths.name}', row {wrong[0]}: length {ends[wrong[0]]} is not from 0 to {width}, "
                f"the width of {tensor.name}"
            )
    elif tensor.name == schema.TOKENS.name:
        raise InvalidRequest(
            f"input '{tensor.name}' needs '{schema.LENGTHS.name}' [B, 1] beside it: padding looks like tokens"
        )
    elif width == 0:
        raise InvalidRequest(f"input '{tensor.name}' has rows of no tokens: shape {list(tensor.shape)}")
    else:
        ends = np.full(num_rows, width)
        if info.eos_token_id is not None and not schema.LOGPROBS.has(info):
            is_eos = ids == info.eos_token_id
            ends = np.where(is_eos.any(axis=1), is_eos.argmax(axis=1) + 1, width)
    return [row[:end] for row, end in zip(ids, ends.tolist(), strict=True)]


def _paths(request: InferRequest, info: ModelInfo) -> list[np.ndarray]:
    """Returns the tokens of each path of the request's trees; raises InvalidRequest for what does not go with them."""
    parents, rewards = schema.PARENTS.name, schema.REWARDS.name
    for name in request.inputs:
        if name not in (schema.TOKENS.name, schema.LENGTHS.name, parents):
            raise InvalidRequest(f"inputs '{parents}' and '{name}' are both given: segments go without {name}")
    if rewards in (info.outputs if request.outputs is None else request.outputs):
        raise InvalidRequest(
            f"output '{rewards}' is of whole sequences, and input '{parents}' makes rows segments: request the outputs "
            "that are needed without it"
        )
    return _forest(request).paths(integers(request.inputs[schema.TOKENS.name]))


def _forest(request: InferRequest) -> Forest:
    num_rows, width = request.inputs[schema.TOKENS.name].shape
    parents, lengths = (
        integer_per_row(request.inputs[field.name], num_rows) for field in (schema.PARENTS, schema.LENGTHS)
    )
    return Forest.of(parents, lengths, width)


def _of_segments(reply: ScoreReply, forest: Forest) -> ScoreReply:
    """Returns the reply to paths as one to segments: each has its values on its home, or that path's error."""
    results: list[Score | GuerdonError] = []
    for home, start, length in zip(forest.homes, forest.starts, forest.lengths, strict=True):
        result = reply.results[home]
        if isinstance(result, Score):
            assert result.values is not None
            result = Score(float("nan"), values=result.values[start : start + length])
        results.append(result)
    return dataclasses.replace(reply, results=results, lengths=forest.lengths.tolist())


def _to_queries(request: InferRequest, num_rows: int) -> list[LogprobQuery]:
    """Returns what a teacher is asked about each sample; raises InvalidRequest if the request contradicts itself.

    `reading` checks numbers against the model and the samples.
    """
    wanted, top_k = set(_teacher_outputs(request)), request.count("top_k")
    of_top = wanted & {schema.TOP_IDS, schema.TOP_LOGPROBS, schema.REST}
    if of_top and not top_k:
        name = min(field.name for field in of_top)
        raise InvalidRequest(f"output '{name}' needs the parameter top_k, how many ids to give for each token")
    targets = request.inputs.get(schema.TARGET_IDS.name)
    if schema.TARGET_LOGPROBS in wanted and targets is None:
        raise InvalidRequest(
            f"output '{schema.TARGET_LOGPROBS.name}' needs the input {schema.TARGET_IDS.name}, the ids of each position"
        )
    temperature = request.parameters.get("temperature", 1.0)
    if type(temperature) not in (int, float) or abs(temperature) > _LARGEST_TEMPERATURE:
        raise InvalidRequest(f"parameter 'temperature' is {shown(temperature)}; it must be a number above 0")
    query = LogprobQuery(
        start=request.count("start") if "start" in request.parameters else None,
        top_k=top_k if of_top or schema.NEXT_IDS in wanted else 0,
        temperature=float(temperature),
        with_logprobs=schema.LOGPROBS in wanted,
        with_entropy=schema.ENTROPY in wanted,
        with_ranks=schema.RANKS in wanted,
        with_rest=schema.REST in wanted,
        with_next=not wanted.isdisjoint({schema.NEXT_IDS, schema.NEXT_LOGPROBS}),
        with_hidden=not wanted.isdisjoint({schema.HIDDEN_STATES, schema.HIDDEN_OFFSETS}),
        rounds_hidden=_rounds_hidden(request),
    )
    queries = [query] * num_rows
    for field, key, read in (
        (schema.TEACHER_PROMPTS, "prompt", own_prompt),
        (schema.TEACHERS, "teachers", named_teachers),
    ):
        if (tensor := request.inputs.get(field.name)) is not None:
            values = enumerate(_read_rows(field, tensor, num_rows))
            found = [read(value, f"input '{tensor.name}', row {row},") for row, value in values]
            changes: list[Any] = [{key: value} for value in found]
            queries = [dataclasses.replace(one, **change) for one, change in zip(queries, changes, strict=True)]
    if targets is None or schema.TARGET_LOGPROBS not in wanted:
        return queries
    ids = integers(targets)
    if ids.ndim not in (2, 3) or len(ids) != num_rows or not ids.shape[-1]:
        raise InvalidRequest(
            f"input '{targets.name}' must have shape [{num_rows}, K], the same ids for every token of a sample, or "
            f"[{num_rows}, tokens, K], not {list(targets.shape)}"
        )
    return [query.with_given(row) for query, row in zip(queries, ids, strict=True)]


def _teacher_outputs(request: InferRequest) -> list[Field]:
    """Returns the requested outputs; if the request names none, those that its parameters and inputs ask for."""
    if request.outputs is not None:
        return [schema.MODEL_OUTPUTS[name] for name in request.outputs]
    found = [schema.LOGPROBS, schema.LOGPROB_COUNTS]
    if request.count("top_k"):
        found += [schema.TOP_IDS, schema.TOP_LOGPROBS]
    if schema.TARGET_IDS.name in request.inputs:
        found.append(schema.TARGET_LOGPROBS)
    return found


def _rounds_hidden(request: InferRequest) -> bool:
    """Whether the request asks for hidden states in bfloat16; raises InvalidRequest for any other dtype."""
    value = request.parameters.get("hidden_dtype")
    if value not in (None, "bfloat16"):
        raise InvalidRequest(
            f"parameter 'hidden_dtype' is {shown(value)}; it can be 'bfloat16', and without it hidden states come in "
            "the model's own dtype"
        )
    return value is not None


def _output(field: Field, reply: ScoreReply, request: InferRequest, info: ModelInfo) -> Tensor | None:
    """Returns the output, None if there are scores and none has it, unless a kind's answers have it by its row."""
    name, results = field.name, reply.results
    if field is schema.REWARDS and not info.merges_attributes:
        attributes = _output(schema.ATTRIBUTES, reply, request, info)
        if attributes is not None:
            return dataclasses.replace(attributes, name=name)
    if field is schema.EXCEEDED:
        return Tensor.of(name, np.zeros((len(results), 1), np.int32))
    if field is schema.OUT_LENGTHS:
        return Tensor.of(name, np.array(reply.lengths, np.int64)[:, None])
    if field is schema.ERRORS:
        return Tensor.of_texts(name, [str(r) if isinstance(r, GuerdonError) else "" for r in results])
    parts = field.parts_of(results)
    found = [part for part in parts if part is not None]
    if not found and not field.is_answered and any(isinstance(result, Score) for result in results):
        return None
    if field is schema.HIDDEN_STATES:
        datatype = "BF16" if _rounds_hidden(request) else field.datatype_of(info)
        states = np.concatenate([np.empty((0, info.hidden_size), _NUMPY[datatype]), *found])
        return Tensor(name, datatype, states.shape, states)
    if field is schema.HIDDEN_OFFSETS:
        return Tensor.of(name, np.cumsum([0, *(0 if part is None else len(part) for part in parts)], dtype=np.int64))
    if field.axes in ("B 1", "B R"):  # a number, or how many there are
        lacking = np.nan if field.datatype == "FP32" else 0
        numbers = [lacking if part is None else len(part) if isinstance(part, np.ndarray) else part for part in parts]
        column = np.array(numbers, _NUMPY[field.datatype])
        is_flat = field is schema.REWARDS and schema.INPUT_IDS.name in request.inputs
        return Tensor.of(name, column if is_flat else column[:, None])
    width = max(map(len, found), default=0) if field.is_answered else _width(field, found, reply, request, info)
    beyond = max(part.shape for part in found)[1:] if found else ()
    table = np.full((len(results), width, *beyond), field.pad, _NUMPY[field.datatype])
    for out, part in zip(table, parts, strict=True):
        if part is not None:
            out[: len(part)] = part
        elif field.datatype == "FP32":
            out[:] = np.nan
    return Tensor.of(name, table)


def _width(field: Field, found: list[Any], reply: ScoreReply, request: InferRequest, info: ModelInfo) -> int:
    """Returns the columns of a table of what every kind's scores have; raises InvalidRequest if it is too large."""
    least = len(info.attribute_names) if field.name == schema.ATTRIBUTES.name else 1  # if all rows failed
    width = max(map(len, found), default=least or 1)
    content = request.inputs.get(schema.TOKENS.name) or request.inputs.get(schema.INPUT_IDS.name)
    if field is schema.VALUES and content is not None:
        width = content.shape[1]
    elif field is schema.VALUES and found:
        width = max(width, *reply.lengths)
    if len(reply.results) * width > _MAX_NUMBERS and content is None:
        raise InvalidRequest(
            f"{len(reply.results):,} rows, the longest of {width:,}, make a table of {field.name} that is larger than "
            f"{_MAX_NUMBERS:,} numbers; send fewer texts in a request, or texts of like length"
        )
    return width
