"""The forms in which trainers ask a reward server of their own kind: OpenRLHF's and slime's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.messages import answered
from guerdon.wire.bodies import check_depth, check_url, kind_of, model_of, object_of
from guerdon.wire.forms import Asked, Form, number, told_plainly
from guerdon.wire.labels import attributes_of
from guerdon.wire.rows import groups_of, scores_of
from guerdon.wire.samples import conversed, flag, joined, read_messages, read_texts

_OPENRLHF = '{"query": ["a prompt and its response"], "prompts": ["a prompt"], "labels": [null]}'
_SLIME = '{"prompt": "a prompt", "response": " and its response", "label": null}'


def read_openrlhf(body: Any, query: Mapping[str, str]) -> Asked:
    """What OpenRLHF asks: whole texts, since 0.5.8 with their prompts and since 0.6 with their labels.

    The answer has `rewards` and `scores`, one number a text, and the components of each in `extra_logs`. The URL's
    `?extra_logs=false` leaves these out, on which OpenRLHF 0.8.3 to 0.8.11 would stop.
    """
    body = object_of(body, _OPENRLHF)
    check_url(query, "extra_logs")
    if "query" not in body:
        raise InvalidRequest(f"the body has no 'query'; send an object such as {_OPENRLHF}")
    wants_logs = flag({}, query, "extra_logs") is not False

    def answer(reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
        scores = scores_of(reply)
        rewards = [number(score.reward) for score in scores]
        told = [attributes_of(score, info) for score in scores] if wants_logs else []
        logs = {name: [one[name] for one in told] for name in (told[0] if told else ())}
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

    # Without texts whatever else stands there is told of none.
    return Asked(model_of(body), None if body["query"] == [] else _openrlhfs(body), answer)


def read_slime(body: Any, query: Mapping[str, str]) -> Asked:
    """What slime asks: one sample, its prompt a text or messages.

    The answer is the bare number; with `?key=NAME` in the URL, as `--reward-key NAME` reads it, an object that has
    the number under that name, and its `components`.
    """
    body = object_of(body, _SLIME)
    check_url(query, "key")
    for name in ("prompt", "response"):
        if name not in body:
            raise InvalidRequest(f"the body has no {name!r}; send an object such as {_SLIME}")
    prompt, response, key = body["prompt"], body["response"], query.get("key", "")
    if key == "components":
        raise InvalidRequest("the URL has key=components, where a sum's parts stand; name another key")
    if not isinstance(response, str):
        raise InvalidRequest(f"response is {kind_of(response)}; send a string")
    if isinstance(prompt, str):
        request = joined([prompt], [response])
    elif isinstance(prompt, list):
        request = conversed(answered(read_messages(prompt, "prompt"), response))
    else:
        raise InvalidRequest(f"prompt is {kind_of(prompt)}; send a string, or a list of messages")
    request.labels = [body["label"]] if "label" in body else None
    check_depth(request.labels, "label")

    def answer(reply: ScoreReply, info: ModelInfo) -> Any:
        (score,) = scores_of(reply)
        reward = number(score.reward)
        if not key:
            return reward
        components = attributes_of(score, info)
        return {"components": components, key: reward} if components else {key: reward}

    return Asked(model_of(body), request, answer)


FORMS = {"/get_reward": Form(read_openrlhf, told_plainly), "/reward": Form(read_slime, told_plainly)}
"""Each form by the path at which it is served."""


def _openrlhfs(body: dict[str, Any]) -> ScoreRequest:
    """The texts of `query`, and what else is told of each; an empty list tells of nothing."""
    texts = read_texts(body["query"], "query")
    prompts, labels = body.get("prompts"), body.get("labels")
    if isinstance(body["query"], str) and not isinstance(labels, list | None):
        labels = [labels]  # one sample: what is told of it may stand without a list, too
    prompts = read_texts(prompts, "prompts") if prompts else None
    if labels is not None and not isinstance(labels, list):
        raise InvalidRequest(f"labels is {kind_of(labels)}; send a list with one label a text of query")
    for name, values in (("prompts", prompts), ("labels", labels)):
        if values and len(values) != len(texts):
            raise InvalidRequest(f"{name} has {len(values)} entries, query {len(texts)}; send one a text, or none")
    check_depth(labels, "labels")
    return ScoreRequest(
        texts=texts, groups=groups_of(prompts) if prompts else None, prompts=prompts, labels=labels or None
    )
