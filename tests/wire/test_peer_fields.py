"""No field of a peer's request is lost in silence: it is honoured, refused by its name, or known to be harmless."""

import base64
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from guerdon.core import Score, Truncation
from guerdon.errors import InvalidRequest
from guerdon.wire import bodies
from guerdon.wire.forms.form import Body, Keys, refused_keys
from wire.asking import ask, reply
from wire.peer_fields import REQUESTS, Request

EVERY = pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.peer)


def names_of(kind: type[Keys]) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


@EVERY
def test_every_field_of_the_peer_is_accounted_for(request_: Request) -> None:
    ours, refused = names_of(request_.kind), set(refused_keys(request_.kind))
    honoured, harmless = set(request_.honoured.split()), set(" ".join(request_.harmless.values()).split())
    assert honoured <= ours - refused
    assert set(request_.refused.split()) <= refused
    assert not harmless & ours
    assert not honoured & harmless


@EVERY
def test_a_refused_field_is_named_and_may_ask_for_nothing(request_: Request) -> None:
    example = orjson.loads(request_.kind.example)  # type: ignore[attr-defined]
    for name in request_.refused.split():
        with pytest.raises(InvalidRequest, match=f"^{name} is not supported: "):
            bodies.read(orjson.dumps(example | {name: ["a"]}), request_.kind)
        for nothing in (None, False, 0, "", [], {}, *refused_keys(request_.kind)[name][1]):
            bodies.read(orjson.dumps(example | {name: nothing}), request_.kind)


SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "vLLM's classify": ("/classify", {"input": ["ab"]}),
    "SGLang's classify": ("/classify", {"text": ["ab"]}),
    "pooling": ("/pooling", {"input": ["ab"]}),
    "score": ("/score", {"text_1": "a", "text_2": ["b"]}),
    "v1 score": ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    "rerank": ("/rerank", {"query": "a", "documents": ["b"]}),
    "v1 rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    "v2 rerank": ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    "encode": ("/encode", {"text": ["ab"]}),
    "embeddings": ("/v1/embeddings", {"input": ["ab"]}),
}
"""Every form of vLLM's and SGLang's that asks for scores."""

FORMS = pytest.mark.parametrize(("path", "body"), SCORES.values(), ids=SCORES)


def numbers(told: Any) -> list[float]:
    """Every number of a score in an answer."""
    if isinstance(told, list):
        return [number for one in told for number in numbers(one)]
    if not isinstance(told, dict):
        return []
    found = [told[name] for name in ("probs", "embedding", "score", "relevance_score") if name in told]
    found += [told["data"]] if isinstance(told.get("data"), list) and isinstance(told["data"][0], float) else []
    flat = [number for one in found for number in (one if isinstance(one, list) else [one])]
    return flat + numbers(list(told.values()))


@FORMS
def test_truncation_and_special_tokens_reach_the_model(path: str, body: dict[str, Any]) -> None:
    asked = ask(path, body | {"truncate_prompt_tokens": 7}).request
    assert asked is not None and asked.truncation == Truncation(7, "right")
    asked = ask(path, body | {"truncate_prompt_tokens": -1, "truncation_side": "left"}).request
    assert asked is not None and asked.truncation == Truncation(None, "left")
    for wanted in (True, False):
        for asked in (
            ask(path, body | {"add_special_tokens": wanted}).request,
            ask(path, body, add_special_tokens=str(wanted).lower()).request,
        ):
            assert asked is not None and asked.add_special_tokens is wanted
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"padding": "max_length"}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            ask(path, body | wrong)


@FORMS
def test_the_activation_is_applied_where_it_is_asked_for(path: str, body: dict[str, Any]) -> None:
    sigmoid = pytest.approx([1 / (1 + np.exp(-1.5))], rel=1e-6)
    for name in ("use_activation", "softmax", "activation"):
        assert numbers(reply(path, body | {name: True}, Score(1.5))) == sigmoid
        assert numbers(reply(path, body, Score(1.5), **{name: "true"})) == sigmoid
        assert numbers(reply(path, body | {name: False}, Score(1.5))) == [1.5]
    assert numbers(reply(path, body, Score(1.5))) == [1.5]


def test_embeddings_are_encoded_as_asked() -> None:
    for endianness, dtype in (("little", "<f4"), ("big", ">f4"), ("native", "=f4"), (None, "=f4")):
        body = {"input": ["a"], "encoding_format": "base64", "endianness": endianness, "use_activation": True}
        (row,) = reply("/v1/embeddings", body, Score(1.5))["data"]
        decoded = np.frombuffer(base64.b64decode(row["embedding"]), dtype)
        assert decoded == pytest.approx([1 / (1 + np.exp(-1.5))], rel=1e-6)


def test_bodies_of_forms_are_those_of_the_table() -> None:
    """A form that is added has its peer's fields listed; trainers' own forms take what their pages tell."""
    from guerdon.wire.forms import FORMS, TEACHER_FORMS, TOKEN_FORMS

    found = {
        kind
        for form in (*FORMS.values(), *TEACHER_FORMS.values(), *TOKEN_FORMS.values())
        for kind in form.bodies
        if issubclass(kind, Body)
    }
    own = "reward_services"
    trainers = {kind for kind in found if kind.__module__.endswith(own)}
    assert found - trainers == {request.kind for request in REQUESTS if issubclass(request.kind, Body)}
