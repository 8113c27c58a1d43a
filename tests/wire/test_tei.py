from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest

from guerdon import errors
from guerdon.core import ModelInfo, Score, ScoreReply, Truncation
from guerdon.errors import InvalidRequest, SampleFailed, UnknownModel
from guerdon.wire import bodies
from guerdon.wire.tei import FORMS

RM = ModelInfo("rm", "sequence-classification")
MANY = replace(RM, outputs=("rewards", "attributes"), attribute_names=("helpful", "brief", "kind"))
SUM = replace(MANY, kind="sum", attribute_names=("helpful", "brief"))


def asked(body, **query):
    return FORMS["/predict"].read(bodies.parse(orjson.dumps(body)), query)


def answered(body, *results, info: ModelInfo = RM, **query):
    reply = ScoreReply(list(results), [3] * len(results), "v7", 0.25, 0.5)
    return orjson.loads(bodies.write(asked(body, **query).answer(reply, info)))


def one(score: float) -> list[dict]:
    return [{"score": score, "label": "LABEL_0"}]


@pytest.mark.parametrize(
    ("inputs", "texts", "single"),
    [
        ("a", ["a"], True),
        (["a"], ["a"], True),
        (["a", "b"], ["ab"], True),
        ([["a"]], ["a"], False),
        ([["a"], ["b", "c"]], ["a", "bc"], False),
        ([["a", "b"], ["a", "c"]], ["ab", "ac"], False),
    ],
)
def test_texts_pairs_and_batches(inputs, texts, single):
    assert asked({"inputs": inputs}).request.texts == texts
    rows = [one(0.1) for _ in texts]
    assert answered({"inputs": inputs}, *[Score(0.1)] * len(texts)) == (rows[0] if single else rows)


def test_pairs_of_one_prompt_are_of_one_group():
    request = asked({"inputs": [["a", "b"], ["a", "c"], ["b", "c"]]}).request
    assert request.prompts == ["a", "a", "b"]
    assert request.groups[0] == request.groups[1] != request.groups[2]
    assert asked({"inputs": [["a"], ["b", "c"]]}).request.groups is None


def test_labels_stand_highest_first():
    score = Score(0.5, attributes=np.array([0.25, 2.0, 0.25], np.float32))
    names = [(row["label"], row["score"]) for row in answered({"inputs": "a"}, score, info=MANY)]
    assert names == [("brief", 2.0), ("helpful", 0.25), ("kind", 0.25)]
    score.attributes = score.attributes[:2]
    components = {"components": {"helpful": 0.25, "brief": 2.0}}
    assert answered({"inputs": "a"}, score, info=SUM) == [{"score": 0.5, "label": "LABEL_0", **components}]


@pytest.mark.parametrize(
    ("options", "expected", "several"),
    [
        ({}, 2.0, [2.0, 2.0]),
        ({"raw_scores": None}, 2.0, [2.0, 2.0]),
        ({"raw_scores": True}, 2.0, [2.0, 2.0]),
        ({"raw_scores": False}, 0.880797, [0.5, 0.5]),
        ({"parameters": {}}, 2.0, [2.0, 2.0]),
        ({"parameters": {"function_to_apply": "none", "top_k": 1}}, 2.0, [2.0, 2.0]),
        ({"parameters": {"function_to_apply": "sigmoid"}}, 0.880797, [0.880797, 0.880797]),
        ({"parameters": {"function_to_apply": "softmax"}}, 1.0, [0.5, 0.5]),
        ({"raw_scores": True, "parameters": {"function_to_apply": "sigmoid"}}, 2.0, [2.0, 2.0]),
    ],
)
def test_an_activation_is_applied_where_it_is_asked_for(options, expected, several):
    body = {"inputs": "a", **options}
    assert answered(body, Score(2.0))[0]["score"] == pytest.approx(expected, abs=1e-6)
    score = Score(2.0, attributes=np.array([2.0, 2.0], np.float32))
    info = replace(MANY, attribute_names=("helpful", "brief"))
    assert [row["score"] for row in answered(body, score, info=info)] == pytest.approx(several, abs=1e-6)


def test_the_url_tells_what_the_body_leaves_out():
    assert answered({"inputs": "a"}, Score(2.0), raw_scores="false")[0]["score"] == pytest.approx(0.880797)
    assert asked({"inputs": "a"}, add_special_tokens="true").request.add_special_tokens
    assert not asked({"inputs": "a"}).request.add_special_tokens


@pytest.mark.parametrize(
    ("options", "truncation"),
    [
        ({}, None),
        ({"truncate": None}, None),
        ({"truncate": False, "truncation_direction": "left"}, None),
        ({"truncate": True}, Truncation(None, "right")),
        ({"truncate": True, "truncation_direction": "Right"}, Truncation(None, "right")),
        ({"truncate": True, "truncation_direction": "Left"}, Truncation(None, "left")),
        ({"truncate": True, "truncation_direction": "left"}, Truncation(None, "left")),
    ],
)
def test_truncation(options, truncation):
    assert asked({"inputs": "a", **options}).request.truncation == truncation


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a", "the body is a string"),
        ({}, "the body has no 'inputs'"),
        ({"inputs": None}, "inputs is null"),
        ({"inputs": 5}, "inputs is a number"),
        ({"inputs": []}, "inputs is an empty list"),
        ({"inputs": ["a", "b", "c"]}, "inputs has 3 strings"),
        ({"inputs": ["a", 5]}, "inputs[1] is a number"),
        ({"inputs": ["a", ["b"]]}, "inputs[1] is a list"),
        ({"inputs": [5]}, "inputs[0] is a number"),
        ({"inputs": [["a"], "b"]}, "inputs[1] is a string; a batch is a list of lists"),
        ({"inputs": [["a"], []]}, "inputs[1] has 0 strings"),
        ({"inputs": [["a"], ["b", None]]}, "inputs[1][1] is null"),
        ({"inputs": [[["a"]]]}, "inputs[0][0] is a list"),
        ({"inputs": "a", "truncate": "yes"}, "truncate is a string"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction is 'up'"),
        ({"inputs": "a", "raw_scores": 1}, "raw_scores is a number"),
        ({"inputs": "a", "parameters": ["x"]}, "parameters is a list"),
        ({"inputs": "a", "parameters": {"function_to_apply": "tanh"}}, "function_to_apply is 'tanh'"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(body, message):
    with pytest.raises(InvalidRequest) as told:
        asked(body)
    assert message in str(told.value)


def test_a_failed_sample_fails_the_request():
    with pytest.raises(SampleFailed, match="row 1: not finite"):
        answered({"inputs": [["a"], ["b"]]}, Score(1.0), SampleFailed("not finite"))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 422, "Validation"),
        (UnknownModel("x"), 404, "Validation"),
        (errors.PayloadTooLarge("x"), 413, "Validation"),
        (SampleFailed("x"), 424, "Backend"),
        (errors.ServerFault("x"), 424, "Backend"),
        (errors.Overloaded("x", 1.0), 429, "Overloaded"),
        (errors.Unavailable("x"), 503, "Unhealthy"),
        (errors.DeadlineExceeded("x"), 504, "Backend"),
    ],
)
def test_errors_are_told_as_tei_tells_them(error, status, kind):
    assert FORMS["/predict"].told(error) == (status, {"error": "x", "error_type": kind})
