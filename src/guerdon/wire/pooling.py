"""vLLM's forms `/classify`, `/pooling` and `/score`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest, Truncation
from guerdon.errors import InvalidRequest
from guerdon.wire import sglang
from guerdon.wire.bodies import check_url, model_of, object_of
from guerdon.wire.forms import Asked, Form, check_rewards, number
from guerdon.wire.labels import Activation, activated, components_of, in_base64, labels_of, more_of, numbers_of
from guerdon.wire.openai import request_id, told, usage
from guerdon.wire.rows import scores_of
from guerdon.wire.samples import (
    choice,
    conversed,
    flag,
    integer,
    joined,
    read_input,
    read_messages,
    read_text_or_parts,
    refuse,
    with_special_tokens,
)

_CLASSIFY = '{"input": ["a prompt and its response"], "use_activation": false}'
_SCORE = '{"text_1": "a prompt", "text_2": ["a response", "another one"]}'

_REFUSED = {
    "normalize": "it was removed from vLLM; use_activation is what is left of it",
    "dimensions": "a reward is no embedding that could be shortened",
    "chat_template": "the server renders messages by the checkpoint's own; send input, rendered",
    "chat_template_kwargs": "the server renders messages by the checkpoint's own template; send input, rendered",
    "add_generation_prompt": "a conversation is scored as it stands; send input, rendered",
    "continue_final_message": "a conversation is scored as it stands; send input, rendered",
}
_REFUSED_PAIRS = {
    "max_tokens_per_query": "cut the texts before they are sent",
    "max_tokens_per_doc": "cut the texts before they are sent",
    "instruction": "put it into the prompts",
    "chat_template_kwargs": "prompt and response are joined without a template",
}
_ACTIVATIONS = ("use_activation", "softmax", "activation")
"""What asks for an activation, the newest name first."""

_IN_URL = ("add_special_tokens", *_ACTIVATIONS)
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def read_classify(body: Any, query: Mapping[str, str]) -> Asked:
    """What `/classify` is asked, in vLLM's form (`input` or `messages`) or in SGLang's (`text` or `input_ids`).

    vLLM's answer has a number a label as `probs`: raw, unless `use_activation` is true.
    """
    body = object_of(body, _CLASSIFY)
    if any(body.get(name) is not None for name in ("text", "input_ids")):
        if any(body.get(name) is not None for name in ("input", "messages")):
            raise InvalidRequest("the body has keys of vLLM's form and of SGLang's; send input or messages, else text")
        return sglang.read_native(body, query)
    check_url(query, *_IN_URL)
    request, activation, answer_id = _samples(body, query), _activation(body, query), request_id(body, "request_id")

    def answer(reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
        def row(index: int, score: Score) -> dict[str, Any]:
            probs = numbers_of(score, info, activation)
            label = labels_of(info, len(probs))[int(probs.argmax())]
            return {"index": index, "label": label, "probs": probs, "num_classes": len(probs), **more_of(score, info)}

        rows = [row(i, score) for i, score in enumerate(scores_of(reply))]
        return _listed(f"classify-{answer_id}", rows, reply, info)

    return Asked(model_of(body), request, answer)


def read_pooling(body: Any, query: Mapping[str, str]) -> Asked:
    """What `/pooling` is asked: the task `classify`, or `token_classify` for a number a token or a step.

    Without a task it is the model's own. A step's numbers are its probabilities of being wrong and of being right.
    """
    body = object_of(body, _CLASSIFY)
    check_url(query, *_IN_URL)
    request, activation, answer_id = _samples(body, query), _activation(body, query), request_id(body, "request_id")
    task, encode = choice(body, "task", "classify", "token_classify"), _encoder(body)
    wants_raw = _is_activated(body, query) is False
    request.wants_rewards = task != "token_classify"

    def is_by_token(info: ModelInfo) -> bool:
        return task == "token_classify" or (task is None and _has_tokens(info))

    def check(info: ModelInfo) -> None:
        if not is_by_token(info):
            check_rewards(info)
        elif not _has_tokens(info):
            raise InvalidRequest(f"{info.name} gives no numbers for single tokens; send the task classify")
        elif wants_raw and "step_rewards" in info.outputs:
            raise InvalidRequest("step rewards are probabilities, there are no raw numbers: leave use_activation out")

    def answer(reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
        by_token = is_by_token(info)

        def row(index: int, score: Score) -> dict[str, Any]:
            if by_token:
                return {"index": index, "object": "pooling", "data": encode(_by_token(score, activation))}
            numbers = encode(numbers_of(score, info, activation))
            return {"index": index, "object": "pooling", "data": numbers, **more_of(score, info)}

        rows = [row(i, score) for i, score in enumerate(scores_of(reply))]
        return _listed(f"pooling-{answer_id}", rows, reply, info)

    return Asked(model_of(body), request, answer, check)


def read_score(body: Any, query: Mapping[str, str]) -> Asked:
    """What `/score` is asked: pairs of a prompt and a response, one prompt to many responses or one to each.

    Each pair is joined; the answer has one number a pair as `score`.
    """
    body = object_of(body, _SCORE)
    check_url(query, *_IN_URL)
    refuse(body, _REFUSED_PAIRS)
    prompts, responses = _pairs(body)
    request, activation = _with_options(joined(prompts, responses), body, query), _activation(body, query)
    answer_id = request_id(body, "request_id")

    def answer(reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
        def row(index: int, score: Score) -> dict[str, Any]:
            (told_score,) = activated(np.array([number(score.reward)]), activation)
            return {"index": index, "object": "score", "score": told_score, **components_of(score, info)}

        rows = [row(i, score) for i, score in enumerate(scores_of(reply))]
        return _listed(f"score-{answer_id}", rows, reply, info)

    return Asked(model_of(body), request, answer)


FORMS: dict[str, Form] = {
    "/classify": Form(read_classify, told),
    "/pooling": Form(read_pooling, told),
    "/score": Form(read_score, told),
    "/v1/score": Form(read_score, told),
}
"""vLLM's forms by their paths; at `/classify` it has SGLang's, too."""


def _samples(body: dict[str, Any], query: Mapping[str, str]) -> ScoreRequest:
    refuse(body, _REFUSED)
    names = [name for name in ("input", "messages") if name in body]
    if len(names) != 1:
        has = " and ".join(names) or "neither input nor messages"
        raise InvalidRequest(f"the body has {has}; send one of them, in an object such as {_CLASSIFY}")
    if names == ["input"]:
        return _with_options(read_input(body["input"], "input"), body, query)
    request = _with_options(conversed(read_messages(body["messages"], "messages")), body, query)
    if body.get("add_special_tokens"):
        raise InvalidRequest("add_special_tokens is true beside messages, whose template writes them; leave it out")
    return request


def _with_options(request: ScoreRequest, body: dict[str, Any], query: Mapping[str, str]) -> ScoreRequest:
    choice(body, "padding", "do_not_pad")
    with_special_tokens(request, body, query)
    # vLLM's lower numbers go first.
    request.priority = -(integer(body, "priority") or 0)
    max_tokens = integer(body, "truncate_prompt_tokens")
    # vLLM loads the tokenizers of pooling models so that they keep the beginning.
    side = choice(body, "truncation_side", "left", "right")
    if max_tokens is not None:
        if max_tokens < -1 or max_tokens == 0:
            raise InvalidRequest(f"truncate_prompt_tokens is {max_tokens}; send 1 or more, or -1 for the model's own")
        request.truncation = Truncation(None if max_tokens == -1 else max_tokens, "left" if side == "left" else "right")
    return request


def _pairs(body: dict[str, Any]) -> tuple[list[str], list[str]]:
    """One prompt or as many as there are responses, and these, under whichever of their names."""
    present = [names for names in _PAIRS if all(body.get(name) is not None for name in names)]
    if len(present) != 1:
        ways = ", ".join(" and ".join(names) for names in _PAIRS)
        raise InvalidRequest(f"the body has {'several' if present else 'none'} of these pairs; send one of {ways}")
    first, second = present[0]
    prompts, responses = read_text_or_parts(body[first], first), read_text_or_parts(body[second], second)
    if len(prompts) not in (1, len(responses)):
        raise InvalidRequest(
            f"{first} has {len(prompts)} entries, {second} {len(responses)}; send one {first}, or one for each"
        )
    return prompts, responses


def _is_activated(body: dict[str, Any], query: Mapping[str, str]) -> bool | None:
    """What `use_activation` asks for, or what older versions call it."""
    asked = [flag(body, query, name) for name in _ACTIVATIONS]
    return next((wanted for wanted in asked if wanted is not None), None)


def _activation(body: dict[str, Any], query: Mapping[str, str]) -> Activation | None:
    return "fitting" if _is_activated(body, query) else None


def _encoder(body: dict[str, Any]) -> Callable[[np.ndarray], Any]:
    """How numbers are written: as lists, or their bytes as base64."""
    encoding = choice(body, "encoding_format", "float", "base64")
    choice(body, "embed_dtype", "float32")
    dtype = ">f4" if choice(body, "endianness", "native", "little", "big") == "big" else "<f4"
    return (lambda numbers: in_base64(numbers, dtype)) if encoding == "base64" else (lambda numbers: numbers)


def _has_tokens(info: ModelInfo) -> bool:
    """Whether the model answers for single tokens or steps."""
    return bool({"values", "step_rewards"} & {*info.outputs})


def _by_token(score: Score, activation: Activation | None) -> np.ndarray:
    """Float32 `[K, 2]` of the steps' probabilities of being wrong and right, else `[T, 1]` of the tokens' values."""
    if score.steps is not None:
        return np.stack([1 - score.steps, score.steps], axis=1)
    assert score.values is not None
    return activated(score.values.reshape(-1, 1), activation)


def _listed(answer_id: str, rows: list[dict[str, Any]], reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
    counts = {**usage(reply), "completion_tokens_details": None}
    created = int(time.time())
    return {"id": answer_id, "object": "list", "created": created, "model": info.name, "data": rows, "usage": counts}
