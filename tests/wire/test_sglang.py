import base64

import numpy as np
import pytest

from guerdon.core import Score
from guerdon.errors import InvalidRequest
from wire.asking import MANY, SUM, ask, reply

NATIVE = pytest.mark.parametrize("path", ["/classify", "/encode"])


@NATIVE
def test_a_sample_by_itself_is_answered_without_a_list(path):
    for alone in ({"text": "a"}, {"input_ids": [5, 6]}):
        assert reply(path, {**alone, "rid": "x"}, Score(0.1)) == {
            "embedding": [0.1],
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": "length", "length": 0},
                "prompt_tokens": 3,
                "weight_version": "v7",
                "e2e_latency": 0.75,
            },
        }
    for listed in ({"text": ["a"]}, {"input_ids": [[5, 6]]}):
        (row,) = reply(path, listed, Score(0.1))
        assert row["embedding"] == [0.1]


@NATIVE
def test_samples_and_their_ids(path):
    assert ask(path, {"text": ["a", "b"], "input_ids": None}).request.texts == ["a", "b"]
    assert [row.tolist() for row in ask(path, {"input_ids": [[5, 6], [7]]}).request.tokens] == [[5, 6], [7]]
    rows = reply(path, {"text": ["a", "b"], "rid": ["x", "y"]}, Score(1.0), Score(2.0))
    assert [(r["embedding"], r["meta_info"]["id"], r["meta_info"]["prompt_tokens"]) for r in rows] == [
        ([1.0], "x", 3),
        ([2.0], "y", 4),
    ]
    rows = reply(path, {"text": ["a", "b"], "rid": "x"}, Score(1.0), Score(2.0))
    assert [row["meta_info"]["id"] for row in rows] == ["x_0", "x_1"]
    rows = reply(path, {"text": ["a", "b"]}, Score(1.0), Score(2.0))
    assert len({row["meta_info"]["id"] for row in rows}) == 2


def test_models_and_options():
    for path, body in (("/encode", {"text": "a"}), ("/v1/embeddings", {"input": "a"})):
        assert ask(path, body).model == ask(path, body | {"model": "default"}).model == ""
        assert ask(path, body | {"model": "rm"}).model == "rm"
        assert ask(path, body | {"priority": 3}).request.priority == 3
        assert not ask(path, body).request.add_special_tokens
        assert ask(path, body | {"add_special_tokens": True}).request.add_special_tokens
        assert ask(path, body, add_special_tokens="true").request.add_special_tokens


def test_several_attributes_and_sums():
    score = Score(0.5, attributes=np.array([0.25, 2.0, 1.0], np.float32))
    found = reply("/classify", {"text": "a"}, score, info=MANY)
    assert (found["embedding"], found["reward"]) == ([0.25, 2.0, 1.0], 0.5)
    score.attributes = score.attributes[:2]
    assert reply("/classify", {"text": "a"}, score, info=SUM)["embedding"] == [0.5]
    (row,) = reply("/v1/embeddings", {"input": "a"}, score, info=SUM)["data"]
    assert (row["embedding"], row["components"]) == ([0.5], {"helpful": 0.25, "brief": 2.0})


def test_embeddings():
    assert reply("/v1/embeddings", {"input": ["a", "b"], "model": "rm"}, Score(0.1), Score(-2.0)) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.1]},
            {"object": "embedding", "index": 1, "embedding": [-2.0]},
        ],
        "model": "rm",
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 7,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        },
    }
    found = reply("/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"}, Score(0.1))
    assert np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4") == np.float32(0.1)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/encode", {}, "neither text nor input_ids"),
        ("/encode", {"rid": "x", "text": None}, "neither text nor input_ids"),
        ("/encode", {"text": "a", "input_ids": [5]}, "text and input_ids; send one of the two"),
        ("/classify", {"text": "a", "input_ids": [5]}, "text and input_ids; send one of the two"),
        ("/classify", {"text": "a", "input": "b"}, "keys of vLLM's form and of SGLang's"),
        ("/encode", {"text": 5}, "text is 5"),
        ("/encode", {"text": []}, "text is an empty list"),
        ("/encode", {"text": [5]}, "text[0] is 5"),
        ("/encode", {"text": [["q", "d"]]}, "text[0] is a list"),
        ("/encode", {"text": "q", "is_cross_encoder_request": True}, "send the pairs to /score"),
        ("/encode", {"text": [["q", "d"]], "is_cross_encoder_request": True}, "send pairs to /score as text_1 and"),
        ("/encode", {"input_ids": []}, "input_ids is an empty list"),
        ("/encode", {"input_ids": "a"}, "input_ids is a string"),
        ("/encode", {"input_ids": ["a"]}, "input_ids[0] is a string"),
        ("/encode", {"input_ids": [[5], [True]]}, "input_ids[1][0] is a boolean"),
        ("/encode", {"input_ids": [5, [6]]}, "input_ids[1] is a list"),
        ("/encode", {"text": "a", "image_data": "x.png"}, "image_data is not supported"),
        ("/encode", {"text": "a", "lora_path": "x"}, "lora_path is not supported"),
        ("/encode", {"text": "a", "return_pooled_hidden_states": True}, "return_pooled_hidden_states is not supported"),
        ("/encode", {"text": ["a", "b"], "rid": ["x"]}, "rid is a list of 1; send a string, or a list of 2"),
        ("/encode", {"text": ["a", "b"], "rid": ["x", 5]}, "rid[1] is 5"),
        ("/encode", {"text": "a", "rid": 5}, "rid is 5"),
        ("/encode", {"text": "a", "priority": 1.5}, "priority is 1.5"),
        ("/v1/embeddings", {}, "the body has no 'input'"),
        ("/v1/embeddings", {"input": []}, "input is an empty list"),
        ("/v1/embeddings", {"input": [{"text": "a"}]}, "input[0] is an object"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format is 'bytes'"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4}, "dimensions is not supported"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(path, body, message):
    with pytest.raises(InvalidRequest) as e:
        ask(path, body)
    assert message in str(e.value)
