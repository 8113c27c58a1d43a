from dataclasses import replace

import numpy as np
import pytest

from guerdon.core import Score, Truncation
from guerdon.errors import EmptyBatch, InvalidRequest
from guerdon.wire.forms import FORMS
from wire.asking import MANY, SUM, ask, reply

PATH = "/predict"


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
    assert ask(PATH, {"inputs": inputs}).request.texts == texts
    rows = [[{"score": 0.1, "label": "LABEL_0"}] for _ in texts]
    assert reply(PATH, {"inputs": inputs}, *[Score(0.1)] * len(texts)) == (rows[0] if single else rows)


def test_an_empty_batch_is_teis_own_error():
    with pytest.raises(EmptyBatch, match=r"^inputs is an empty list") as e:
        ask(PATH, {"inputs": []})
    status, body = FORMS[PATH].to_error(e.value)
    assert (status, body.error_type) == (400, "Empty")


def test_pairs_of_one_prompt_are_of_one_group():
    request = ask(PATH, {"inputs": [["a", "b"], ["a", "c"], ["b", "c"]]}).request
    assert request.prompts == ["a", "a", "b"]
    assert request.groups[0] == request.groups[1] != request.groups[2]
    assert ask(PATH, {"inputs": [["a"], ["b", "c"]]}).request.groups is None


def test_labels_stand_highest_first():
    score = Score(0.5, attributes=np.array([0.25, 2.0, 0.25], np.float32))
    names = [(row["label"], row["score"]) for row in reply(PATH, {"inputs": "a"}, score, info=MANY)]
    assert names == [("brief", 2.0), ("helpful", 0.25), ("kind", 0.25)]
    score.attributes = score.attributes[:2]
    components = {"components": {"helpful": 0.25, "brief": 2.0}}
    assert reply(PATH, {"inputs": "a"}, score, info=SUM) == [{"score": 0.5, "label": "LABEL_0", **components}]


@pytest.mark.parametrize(
    ("options", "query", "expected", "several"),
    [
        ({}, {}, 2.0, [2.0, 2.0]),
        ({"raw_scores": None}, {}, 2.0, [2.0, 2.0]),
        ({"raw_scores": True}, {}, 2.0, [2.0, 2.0]),
        ({"raw_scores": False}, {}, 0.880797, [0.5, 0.5]),
        ({}, {"raw_scores": "false"}, 0.880797, [0.5, 0.5]),
        ({"parameters": {}}, {}, 2.0, [2.0, 2.0]),
        ({"parameters": {"function_to_apply": "none", "top_k": 1}}, {}, 2.0, [2.0, 2.0]),
        ({"parameters": {"function_to_apply": "sigmoid"}}, {}, 0.880797, [0.880797, 0.880797]),
        ({"parameters": {"function_to_apply": "softmax"}}, {}, 1.0, [0.5, 0.5]),
        ({"raw_scores": True, "parameters": {"function_to_apply": "sigmoid"}}, {}, 2.0, [2.0, 2.0]),
    ],
)
def test_an_activation_is_applied_if_the_client_asks_for_it(options, query, expected, several):
    body = {"inputs": "a", **options}
    assert reply(PATH, body, Score(2.0), **query)[0]["score"] == pytest.approx(expected, abs=1e-6)
    score = Score(2.0, attributes=np.array([2.0, 2.0], np.float32))
    info = replace(MANY, attribute_names=("helpful", "brief"))
    assert [row["score"] for row in reply(PATH, body, score, info=info, **query)] == pytest.approx(several, abs=1e-6)


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
    assert ask(PATH, {"inputs": "a", **options}).request.truncation == truncation


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "the body has no 'inputs'"),
        ({"inputs": None}, "inputs is null"),
        ({"inputs": 5}, "inputs is 5"),
        ({"inputs": []}, "inputs is an empty list"),
        ({"inputs": ["a", "b", "c"]}, "inputs has 3 strings"),
        ({"inputs": ["a", 5]}, "inputs[1] is 5"),
        ({"inputs": ["a", ["b"]]}, "inputs[1] is a list"),
        ({"inputs": [5]}, "inputs[0] is 5"),
        ({"inputs": [["a"], "b"]}, "inputs[1] is a string; a batch is a list of lists"),
        ({"inputs": [["a"], []]}, "inputs[1] has 0 strings"),
        ({"inputs": [["a"], ["b", None]]}, "inputs[1][1] is null"),
        ({"inputs": [[["a"]]]}, "inputs[0][0] is a list"),
        ({"inputs": "a", "truncate": "yes"}, "truncate is a string; send true or false"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction is 'up'; send left or right"),
        ({"inputs": "a", "raw_scores": 1}, "raw_scores is 1"),
        ({"inputs": "a", "parameters": ["x"]}, "parameters is a list"),
        ({"inputs": "a", "parameters": {"function_to_apply": "tanh"}}, "parameters.function_to_apply is 'tanh'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(body, message):
    with pytest.raises(InvalidRequest) as e:
        ask(PATH, body)
    assert message in str(e.value)
