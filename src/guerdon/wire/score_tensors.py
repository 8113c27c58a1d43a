"""Scores as tensors: turns inputs into a request, and scores into outputs."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, named
from guerdon.trees import Forest
from guerdon.wire import teacher_tensors
from guerdon.wire.bodies import MAX_ROWS, check_count, check_depth, check_values, parse, too_deep
from guerdon.wire.long_json import MAX_STRING_BYTES, PIECE
from guerdon.wire.signature import MODEL_VERSION, check_names, known_inputs
from guerdon.wire.tensors import InferReply, InferRequest, Tensor, integer_per_row, integers

DEFAULT_PRIORITY_LEVEL = 100
"""The priority level of requests that name none. Triton's levels count down: 1 goes first."""

_MAX_NUMBERS = 1 << 26
"""Most numbers in one output, whose rows are as long as the longest: many more than the characters sent."""

_NUMBER_BYTES = 4

_CONTENTS = {"sentences", "messages", "tokens", "input_ids"}


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
        raw_text.name = "sentences"
        inputs["sentences"] = raw_text
    check_names(request.inputs, request.outputs, info)
    contents = inputs.keys() & _CONTENTS
    # To a teacher, sentences may be responses to messages.
    is_apart = contents == {"sentences", "messages"} and "logprobs" in info.outputs
    if len(contents) != 1 and not is_apart:
        choices = [name for name in known_inputs(info) if name in _CONTENTS]
        got = " and ".join(sorted(contents)) or "none of them"
        raise InvalidRequest(f"exactly one of the inputs {', '.join(choices)} is needed; the request has {got}")
    content = inputs["sentences" if is_apart else contents.pop()]
    num_rows = content.shape[0] if content.shape else 0
    if num_rows == 0:
        raise InvalidRequest(f"input '{content.name}' is an empty batch: shape {list(content.shape)}")
    if num_rows > MAX_ROWS:
        check_count(num_rows, f"input '{content.name}'")

    level = request.count("priority") if "priority" in request.parameters else 0
    score = ScoreRequest(timeout_s=request.timeout_s, priority=DEFAULT_PRIORITY_LEVEL - level if level else 0)
    if content.name in ("sentences", "messages"):
        for name in ("sequence_lengths", "parents"):
            if name in inputs:
                raise InvalidRequest(f"input '{name}' goes with tokens, not with {content.name}")
        texts = _texts(content)
        if content.name == "messages":
            score.messages = _conversations(content, texts)
        else:
            score.texts = texts
        if is_apart:
            score.messages = _conversations(inputs["messages"], _row_texts(inputs["messages"], num_rows))
    else:
        score.tokens = _token_rows(content, inputs.get("sequence_lengths"), info)
        score.width = content.shape[1]
        if "parents" in inputs:
            score.tokens = _paths(request, info)
            score.width = max(map(len, score.tokens))
    score.wants_rewards = request.outputs is None or "rewards" in request.outputs
    if "group_ids" in inputs:
        score.groups = integer_per_row(inputs["group_ids"], num_rows)
    if "prompt_lengths" in inputs:
        score.prompt_lengths = integer_per_row(inputs["prompt_lengths"], num_rows)
    if "prompts" in inputs:
        score.prompts = _row_texts(inputs["prompts"], num_rows)
    if "labels" in inputs:
        score.labels = _jsons(inputs["labels"], _row_texts(inputs["labels"], num_rows))
    if "step_positions" in inputs:
        score.steps = _step_rows(inputs["step_positions"], num_rows)
    score.is_whole = request.outputs is None or "errors" not in request.outputs
    if "logprobs" in info.outputs:
        score.queries = teacher_tensors.to_queries(request, num_rows)
    return score


def to_reply(reply: ScoreReply, request: InferRequest, info: ModelInfo) -> InferReply:
    """Returns the tensors that answer `request`.

    Raises the first failed row's error, prefixed with the row, unless the output `errors` was requested; failed rows
    are NaN then. If the attributes are among the tensors, the parameter `attribute_names` names their columns, unless
    the names are ambiguous.
    """
    if "parents" in request.inputs:
        reply = _of_segments(reply, _forest(request))
    requested = request.outputs
    if requested is None or "errors" not in requested:
        scores_of(reply)
    outputs: list[Tensor] = []
    is_teacher = "logprobs" in info.outputs
    for name in teacher_tensors.usual_outputs(request) if is_teacher else requested or (*info.outputs, "exceeded"):
        outputs += _output(name, reply, request, info)
        if name == "step_rewards" and requested is None:
            outputs += _output("step_counts", reply, request, info)
    parameters = {"weights_version": reply.weights_version}
    names = info.attribute_names
    is_clear = len({*names}) == len(names) > 0 and "," not in "".join(names)
    if is_clear and any(tensor.name == "attributes" for tensor in outputs):
        parameters["attribute_names"] = ",".join(names)
    return InferReply(info.name, MODEL_VERSION, outputs, request.id, parameters)


def table_bytes(reply: ScoreReply, info: ModelInfo) -> int:
    """Returns about the bytes of the answer's largest table, 0 if it has only a few numbers a sample.

    All rows of a table are as long as the longest.
    """
    if "logprobs" in info.outputs:
        said = [r.logprobs.num_bytes for r in reply.results if isinstance(r, Score) and r.logprobs is not None]
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


def _row_texts(tensor: Tensor, num_rows: int) -> list[str]:
    texts = _texts(tensor)
    if len(texts) != num_rows:
        raise InvalidRequest(f"input '{tensor.name}' has {len(texts)} rows for {num_rows} samples")
    return texts


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
            hint = "; write text in quotes, and null if there is none" if tensor.name == "labels" else ""
            raise InvalidRequest(f"input '{tensor.name}', row {row}: not valid JSON: {e}{hint}") from e
        check_depth(values[-1], f"input '{tensor.name}', row {row}")
    return values


def _conversations(tensor: Tensor, texts: list[str]) -> list[list[Message]]:
    return [_conversation(i, value) for i, value in enumerate(_jsons(tensor, texts))]


def _conversation(row: int, messages: Any) -> list[Message]:
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and "role" in message for message in messages)
    ):
        raise InvalidRequest(
            f"input 'messages', row {row}: must be a JSON list of at least one object with role and content"
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
                f"input 'sequence_lengths', row {wrong[0]}: length {ends[wrong[0]]} is not from 0 to {width}, "
                f"the width of {tensor.name}"
            )
    elif tensor.name == "tokens":
        raise InvalidRequest("input 'tokens' needs 'sequence_lengths' [B, 1] beside it: padding looks like tokens")
    elif width == 0:
        raise InvalidRequest("input 'input_ids' has rows of no tokens: shape " + str(list(tensor.shape)))
    else:
        ends = np.full(num_rows, width)
        if info.eos_token_id is not None and "logprobs" not in info.outputs:
            is_eos = ids == info.eos_token_id
            ends = np.where(is_eos.any(axis=1), is_eos.argmax(axis=1) + 1, width)
    return [row[:end] for row, end in zip(ids, ends.tolist(), strict=True)]


def _paths(request: InferRequest, info: ModelInfo) -> list[np.ndarray]:
    """Returns the tokens of each path of the request's trees; raises InvalidRequest for what does not go with them."""
    for name in request.inputs:
        if name not in ("tokens", "sequence_lengths", "parents"):
            raise InvalidRequest(f"inputs 'parents' and '{name}' are both given: segments go without {name}")
    if "rewards" in (info.outputs if request.outputs is None else request.outputs):
        raise InvalidRequest(
            "output 'rewards' is of whole sequences, and input 'parents' makes rows segments: request the outputs that "
            "are needed without it"
        )
    return _forest(request).paths(integers(request.inputs["tokens"]))


def _forest(request: InferRequest) -> Forest:
    num_rows, width = request.inputs["tokens"].shape
    parents, lengths = (integer_per_row(request.inputs[name], num_rows) for name in ("parents", "sequence_lengths"))
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


def _step_rows(tensor: Tensor, num_rows: int) -> list[np.ndarray]:
    positions = integers(tensor)
    if positions.ndim != 2 or len(positions) != num_rows:
        raise InvalidRequest(f"input 'step_positions' must have shape [{num_rows}, K], not {list(tensor.shape)}")
    return [row[row != -1] for row in positions]


def _output(name: str, reply: ScoreReply, request: InferRequest, info: ModelInfo) -> list[Tensor]:
    """The output as a list of one tensor; empty if there are scores, and none has it."""
    if name == "rewards" and not info.merges_attributes:
        for attributes in _output("attributes", reply, request, info):
            return [dataclasses.replace(attributes, name=name)]
    results = reply.results
    num_rows = len(results)
    if "logprobs" in info.outputs and (said := teacher_tensors.output(name, results, request, info)) is not None:
        return [said]
    if name == "rewards":
        rewards = np.array([r.reward if isinstance(r, Score) else np.nan for r in results], np.float32)
        return [Tensor.of(name, rewards if "input_ids" in request.inputs else rewards.reshape(num_rows, 1))]
    if name == "exceeded":
        return [Tensor.of(name, np.zeros((num_rows, 1), np.int32))]
    if name == "sequence_lengths":
        return [Tensor.of(name, np.array(reply.lengths, np.int64).reshape(num_rows, 1))]
    if name == "errors":
        return [Tensor.of_texts(name, [str(r) if isinstance(r, GuerdonError) else "" for r in results])]
    rows = _rows(results, "steps" if name in ("step_rewards", "step_counts") else name)
    has_rows = any(row is not None for row in rows)
    if not has_rows and any(isinstance(result, Score) for result in results):
        return []
    if name == "step_counts":
        counts = np.array([0 if row is None else len(row) for row in rows], np.int64)
        return [Tensor.of(name, counts.reshape(num_rows, 1))]
    least = len(info.attribute_names) if name == "attributes" else 1  # if all rows failed
    width = max((len(row) for row in rows if row is not None), default=least or 1)
    content = request.inputs.get("tokens") or request.inputs.get("input_ids")
    if name == "values" and content is not None:
        width = content.shape[1]
    elif name == "values" and has_rows:
        width = max(width, *reply.lengths)
    if num_rows * width > _MAX_NUMBERS and content is None:
        raise InvalidRequest(
            f"{num_rows:,} rows, the longest of {width:,}, make a table of {name} that is larger than "
            f"{_MAX_NUMBERS:,} numbers; send fewer texts in a request, or texts of like length"
        )
    table = np.full((num_rows, width), 0 if name == "values" else np.nan, np.float32)
    for out, row, result in zip(table, rows, results, strict=True):
        if row is not None:
            out[: len(row)] = row
        elif isinstance(result, GuerdonError):
            out[:] = np.nan
    return [Tensor.of(name, table)]


def _rows(results: list[Score | GuerdonError], attribute: str) -> list[np.ndarray | None]:
    return [getattr(result, attribute) if isinstance(result, Score) else None for result in results]
