"""What holds for every form: its URL, its errors, its numbers, and bodies that no client sends."""

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guerdon import errors
from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.errors import InvalidRequest, SampleFailed, UnknownModel
from guerdon.wire import bodies, kserve
from guerdon.wire.bodies import MAX_DEPTH
from guerdon.wire.forms import FORMS, openai
from guerdon.wire.forms.labels import activated
from tiers import slow_but
from wire.asking import CRITIC, RM, ask, reply, reply_bytes

ONE = {
    "/get_reward": {"query": ["a"]},
    "/batch_reward": {"items": [{"prompt": "a", "response": "b"}]},
    "/reward": {"prompt": "a", "response": "b"},
    "/v1/score/evaluation": {"messages": ["a"]},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/encode": {"text": "a"},
    "/v1/embeddings": {"input": "a"},
    "/predict": {"inputs": "a"},
    "/rerank": {"query": "a", "texts": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": "b"},
}
"""The shortest body of each form."""

SEVERAL = {
    "/get_reward": {"query": ["a", "b"]},
    "/batch_reward": {"items": [{"prompt": "a", "response": "b"}] * 2},
    "/classify": {"input": ["a", "b"]},
    "/pooling": {"input": ["a", "b"]},
    "/score": {"text_1": "a", "text_2": ["b", "c"]},
    "/encode": {"text": ["a", "b"]},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/predict": {"inputs": [["a"], ["b"]]},
    "/rerank": {"query": "a", "texts": ["b", "c"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
}
EVERY = pytest.mark.parametrize("path", FORMS)


@EVERY
def test_an_unknown_key_in_the_url_is_refused(path):
    assert ask(path, ONE[path], model="rm").request is not None
    with pytest.raises(InvalidRequest, match=r"^the URL has the unknown key 'modle'; it takes model"):
        ask(path, ONE[path], modle="rm")


@pytest.mark.parametrize(
    ("path", "body", "query", "message"),
    [
        ("/get_reward", ONE["/get_reward"], {"extra_log": "false"}, r"it takes model, extra_logs, ending$"),
        ("/get_reward", ONE["/get_reward"], {"extra_logs": "0"}, "extra_logs is '0'; send true or false"),
        ("/classify", {"input": "a"}, {"raw_scores": "false"}, r"it takes model, add_special_tokens, use_activation,"),
        ("/classify", {"input": "a"}, {"use_activation": "yes"}, "use_activation is 'yes'; send true or false"),
        ("/reward", ONE["/reward"], {"key": "components"}, "key=components, the key of a sum's parts"),
    ],
)
def test_wrong_keys_in_the_url_are_named(path, body, query, message):
    with pytest.raises(InvalidRequest, match=message):
        ask(path, body, **query)


def test_a_switch_in_the_url_counts_if_the_body_leaves_it_out():
    assert ask("/classify", {"input": "a"}, add_special_tokens="true").request.add_special_tokens
    body = {"input": "a", "add_special_tokens": False}
    assert not ask("/classify", body, add_special_tokens="true").request.add_special_tokens
    query = {"add_special_tokens": "true", "raw_scores": "true", "truncate": "true"}
    request = ask("/predict", ONE["/predict"], **query).request
    assert request.truncation is not None and request.add_special_tokens
    assert not ask("/predict", ONE["/predict"]).request.add_special_tokens


@EVERY
def test_a_model_may_be_named_and_other_keys_are_ignored(path):
    assert ask(path, ONE[path] | {"model": "./my-rm", "extra": 1, "user": None}).model == "./my-rm"
    for nothing in (None, ""):
        assert ask(path, ONE[path] | {"model": nothing}).model == ""
    with pytest.raises(InvalidRequest, match=r"^model is 0; send a served model's name, or leave it out"):
        ask(path, ONE[path] | {"model": 0})


@EVERY
@pytest.mark.parametrize(("body", "what"), [([], "a list"), (None, "null"), ("x", "a string"), (0.5, "0.5")])
def test_a_body_that_is_no_object(path, body, what):
    with pytest.raises(InvalidRequest, match=f"^the body is {what}; send an object such as {{"):
        ask(path, body)


@pytest.mark.parametrize("path", SEVERAL)
def test_a_failed_sample_fails_the_request_and_names_its_row(path):
    with pytest.raises(SampleFailed, match="row 1: not finite"):
        reply(path, SEVERAL[path], Score(1.0), SampleFailed("not finite"))


@EVERY
def test_a_failed_sample_alone_fails_the_request(path):
    with pytest.raises(SampleFailed, match=r"^row 0: not finite$"):
        reply(path, ONE[path], SampleFailed("not finite"))


@EVERY
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1e39])
def test_a_number_beyond_float32_is_a_failed_sample(path, reward):
    with pytest.raises(SampleFailed, match="not a finite number of float32"):
        reply(path, ONE[path], Score(reward))


@EVERY
def test_numbers_are_float32_in_their_fewest_digits(path):
    assert b"0.33333334" in reply_bytes(path, ONE[path], Score(1 / 3))


@EVERY
def test_a_model_without_rewards_is_refused_before_it_computes(path):
    ask(path, ONE[path]).check(RM)
    if path != "/pooling":
        with pytest.raises(InvalidRequest, match="critic_infer gives values and no rewards; name another model"):
            ask(path, ONE[path]).check(CRITIC)


KSERVE = {"/get_reward", "/batch_reward", "/reward", "/v1/score/evaluation"}
TEI = {
    UnknownModel: (404, "Validation"),
    InvalidRequest: (422, "Validation"),
    errors.PayloadTooLarge: (413, "Validation"),
    SampleFailed: (424, "Backend"),
    errors.ServerFault: (424, "Backend"),
    errors.Overloaded: (429, "Overloaded"),
    errors.Unavailable: (503, "Unhealthy"),
    errors.DeadlineExceeded: (504, "Backend"),
}


@EVERY
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "BadRequestError"),
        (UnknownModel("x"), 404, "NotFoundError"),
        (errors.PayloadTooLarge("x"), 413, "Request Entity Too Large"),
        (SampleFailed("x"), 500, "InternalServerError"),
        (errors.ServerFault("x"), 500, "InternalServerError"),
        (errors.Unavailable("x"), 503, "Service Unavailable"),
        (errors.Overloaded("x", 1.0), 503, "Service Unavailable"),
        (errors.DeadlineExceeded("x"), 504, "Gateway Timeout"),
        (errors.StorageFailed("x"), 507, "StorageFailed"),
    ],
)
def test_errors_are_reported_as_the_peer_reports_them(path, error, status, kind):
    expected = {"message": "x", "type": kind, "param": None, "code": status}
    if path in KSERVE:
        status, expected = error.http, {"error": "x"}
    elif path == "/predict":
        status, name = TEI.get(type(error), (error.http, "Backend"))
        expected = {"error": "x", "error_type": name}
    elif path == "/v1/embeddings":
        expected = {"object": "error", **expected}
    else:
        expected = {"error": expected}
    found, content = FORMS[path].to_error(error)
    assert (found, orjson.loads(bodies.write(content))) == (status, expected)


def test_a_long_error_is_cut():
    """A model's name of 100 MB came back in the reply."""
    for to_error in (kserve.to_error, openai.to_error, *(form.to_error for form in FORMS.values())):
        assert len(bodies.write(to_error(InvalidRequest("x" * 100_000))[1])) < 2200


def test_the_list_of_models():
    function = ModelInfo("callable", "function")
    listed = orjson.loads(bodies.write(openai.list_models([RM, CRITIC, function], 17)))
    assert listed["object"] == "list"
    assert [(m["id"], m["root"], m["max_model_len"], m["object"], m["created"]) for m in listed["data"]] == [
        ("rm", "org/rm", 512, "model", 17),
        ("critic_infer", "org/rm", 512, "model", 17),
        ("callable", "callable", None, "model", 17),
    ]


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth > 1 else []


DEEP = orjson.loads(b"[" * 500 + b"]" * 500)


def test_messages_and_labels_may_be_nested_as_deep_as_the_server_keeps():
    message = {"role": "user", "content": "a", "tool_calls": nested(MAX_DEPTH - 2)}
    assert ask("/classify", {"messages": [message]}).request.messages == [[message]]
    body = {"prompt": [message], "response": "b", "label": nested(MAX_DEPTH - 1)}
    assert ask("/reward", body).request.references == [body["label"]]
    for deeper in ({"label": nested(MAX_DEPTH)}, {"prompt": [message | {"tool_calls": nested(MAX_DEPTH)}]}):
        with pytest.raises(InvalidRequest, match="nested deeper than 64"):
            ask("/reward", body | deeper)


SAMPLES = ["input", "messages", "text", "input_ids", "inputs", "text_1", "text_2"]
OPTIONS = [
    *("rid", "request_id", "parameters", "truncate_prompt_tokens", "truncation_side", "truncate", "use_activation"),
    *("raw_scores", "priority", "task", "encoding_format", "add_special_tokens", "model"),
]


@pytest.mark.parametrize("path", slow_but([*FORMS][::3], FORMS))
def test_no_key_of_any_form_may_hold_too_much_nesting(path):
    deep = b"[" * 500 + b"]" * 500
    for key in {"x", "user", "label", "labels", "prompts", *OPTIONS, *SAMPLES, *ONE[path]}:
        for value in (b"%s", b'{"x":%s}', b'[{"role":"user","content":%s}]'):
            body = orjson.dumps(ONE[path] | {key: "@"}).replace(b'"@"', value % deep)
            try:
                read = FORMS[path].read(body, {})
            except InvalidRequest:
                continue
            assert read.request is not None
            assert read.request.references is None
            assert bodies.write(read.to_reply(ScoreReply([Score(0.5)], [1], "v"), RM))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), children),
    max_leaves=5,
)
TEXTS = st.just("a") | st.lists(st.just("a"), min_size=1, max_size=2)


@pytest.mark.parametrize("path", slow_but([*FORMS][::3], FORMS))
@settings(max_examples=60)
@given(
    samples=st.dictionaries(st.sampled_from(SAMPLES), TEXTS | JSON, max_size=3),
    options=st.dictionaries(st.sampled_from(OPTIONS), JSON, max_size=1),
)
def test_no_body_does_worse_than_be_refused(path, samples, options):
    try:
        read = ask(path, samples | options)
    except InvalidRequest:
        return
    assert len(read.request) > 0
    assert reply_bytes(path, samples | options, *[Score(0.5)] * len(read.request))


@settings(max_examples=60)
@given(reward=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_form_writes_the_same_number(reward):
    for path in ("/classify", "/pooling", "/score", "/v1/embeddings", "/encode", "/predict"):
        found = reply(path, ONE[path], Score(reward))
        row = found[0] if isinstance(found, list) else found.get("data", [found])[0]
        value = next(row[name] for name in ("probs", "data", "score", "embedding") if name in row)
        assert np.float32(value if path in ("/score", "/predict") else value[0]) == np.float32(reward)


@pytest.mark.filterwarnings("error")
def test_no_number_is_too_large_for_a_sigmoid():
    assert activated(np.float32([[-1000.0], [0.0], [1000.0]]), "sigmoid").tolist() == [[0.0], [0.5], [1.0]]
