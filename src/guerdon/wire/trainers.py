"""The forms in which trainers ask a reward server of their own kind: OpenRLHF's and slime's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.wire.forms import Asked, Form, groups_of, kind_of, model_of, number, object_of, rewarded, told_plainly

_OPENRLHF = '{"query": ["a prompt and its response"], "prompts": ["a prompt"], "labels": [null]}'
_SLIME = '{"prompt": "a prompt", "response": " and its response", "label": null}'


def read_openrlhf(body: Any, query: Mapping[str, str]) -> Asked:
    """What OpenRLHF asks: whole texts, since 0.5.8 with their prompts and since 0.6 with their labels.

    The answer has `rewards` and `scores`, one number a text, and the components of each in `extra_logs`. The URL's
    `?extra_logs=false` leaves these out, on which OpenRLHF 0.8.3 to 0.8.11 would stop.
    """
    body = object_of(body, _OPENRLHF)
    if "query" not in body:
        raise InvalidRequest(f"the body has no 'query'; send an object such as {_OPENRLHF}")
    texts = _texts(body["query"], "query")
    prompts, labels = body.get("prompts"), body.get("labels")
    if isinstance(body["query"], str) and not isinstance(labels, list | None):
        labels = [labels]  # one sample: what is told of it may stand without a list, too
    prompts = _texts(prompts, "prompts") if prompts else None
    if labels is not None and not isinstance(labels, list):
        raise InvalidRequest(f"labels is {kind_of(labels)}; send a list with one label a text of query")
    for name, values in (("prompts", prompts), ("labels", labels)):
        if values and len(values) != len(texts):
            raise InvalidRequest(f"{name} has {len(values)} entries, query {len(texts)}; send one a text, or none")
    wants_logs = _wants(query, "extra_logs")

    def answer(reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
        scores = rewarded(reply, info)
        rewards = [number(score.reward) for score in scores]
        names = info.attribute_names if scores and wants_logs else ()
        logs = {name: [_component(score, i) for score in scores] for i, name in enumerate(names)}
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

    groups = groups_of(prompts) if prompts else None
    request = ScoreRequest(texts=texts, groups=groups, prompts=prompts, labels=labels or None) if texts else None
    return Asked(model_of(body), request, answer)


def read_slime(body: Any, query: Mapping[str, str]) -> Asked:
    """What slime asks: one sample, its prompt a text or messages.

    The answer is the bare number; with `?key=NAME` in the URL, as `--reward-key NAME` reads it, an object that has
    the number under that name, and its `components`.
    """
    body = object_of(body, _SLIME)
    for name in ("prompt", "response"):
        if name not in body:
            raise InvalidRequest(f"the body has no {name!r}; send an object such as {_SLIME}")
    prompt, response, key = body["prompt"], body["response"], query.get("key", "")
    if not isinstance(response, str):
        raise InvalidRequest(f"response is {kind_of(response)}; send a string")
    request = ScoreRequest(labels=[body["label"]] if "label" in body else None)
    if isinstance(prompt, str):
        request.texts, request.prompts, request.groups = [prompt + response], [prompt], groups_of([prompt])
    else:
        request.messages = [[*_messages(prompt), {"role": "assistant", "content": response}]]
        request.groups = groups_of([orjson.dumps(prompt).decode()])

    def answer(reply: ScoreReply, info: ModelInfo) -> Any:
        (score,) = rewarded(reply, info)
        reward = number(score.reward)
        if not key:
            return reward
        components = {name: _component(score, i) for i, name in enumerate(info.attribute_names)}
        return {"components": components, key: reward} if components else {key: reward}

    return Asked(model_of(body), request, answer)


FORMS = {"/get_reward": Form(read_openrlhf, told_plainly), "/reward": Form(read_slime, told_plainly)}
"""Each form by the path at which it is served."""


def _texts(value: Any, name: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} is {kind_of(value)}; send a list of strings")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise InvalidRequest(f"{name}[{i}] is {kind_of(text)}; send a list of strings")
    return value


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise InvalidRequest(f"prompt is {kind_of(value)}; send a string, or a list of messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise InvalidRequest(f"prompt[{i}] is no message; send an object with role and content")
    if not value:
        raise InvalidRequest("prompt has no messages; send at least one")
    return value


def _wants(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "true")
    if value not in ("true", "false"):
        raise InvalidRequest(f"the URL has {name}={value}; write {name}=true or {name}=false")
    return value == "true"


def _component(score: Score, index: int) -> np.float32:
    assert score.attributes is not None
    return number(score.attributes[index])
