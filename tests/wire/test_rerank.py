"""`/rerank` in vLLM's form, which Cohere's and Jina's clients speak, and in TEI's: orders, keys and refusals."""

import math
from typing import Any

import numpy as np
import pytest

from guerdon.core import Score, Truncation
from guerdon.errors import InvalidRequest, SampleFailed
from wire.asking import SUM, ask, reply

PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
QUERY, DOCUMENTS = "q", ["a", "b", "c", "d"]
SCORES = [Score(-1.0), Score(2.0), Score(-3.0), Score(2.0)]
OF_VLLM: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}
OF_TEI: dict[str, Any] = {"query": QUERY, "texts": DOCUMENTS}


def order(told: Any) -> list[int]:
    return [row["index"] for row in (told["results"] if isinstance(told, dict) else told)]


@pytest.mark.parametrize("path", PATHS)
def test_documents_stand_highest_first_as_in_vllm(path: str) -> None:
    told = reply(path, OF_VLLM | {"request_id": "7"}, *SCORES)
    assert told == {
        "id": "score-7",
        "model": "rm",
        "usage": {
            "prompt_tokens": 18,
            "total_tokens": 18,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "results": [
            {"index": i, "document": {"text": DOCUMENTS[i], "multi_modal": None}, "relevance_score": SCORES[i].reward}
            for i in (1, 3, 0, 2)
        ],
    }


@pytest.mark.parametrize("top_n", [None, -1, 0, 1, 3, 4, 9])
def test_top_n_keeps_the_highest_and_all_if_it_is_below_one(top_n: int | None) -> None:
    want = [1, 3, 0, 2][: top_n if top_n and top_n > 0 else None]
    told = reply("/v2/rerank", OF_VLLM | {"top_n": top_n}, *SCORES)
    assert order(told) == want
    assert told["usage"]["total_tokens"] == 18  # all were read


@pytest.mark.parametrize("returned", [None, True, False])
def test_documents_are_left_out_if_the_client_says_so(returned: bool | None) -> None:
    rows = reply("/v1/rerank", OF_VLLM | {"return_documents": returned}, *SCORES)["results"]
    assert all(("document" in row) is (returned is not False) for row in rows)


@pytest.mark.parametrize("returned", [None, True, False])
def test_texts_stand_highest_first_as_in_tei(returned: bool | None) -> None:
    """Of equal scores TEI gives the last one first, and texts only if the client asks for them."""
    rows = reply("/rerank", OF_TEI | {"return_text": returned}, *SCORES)
    text = (lambda i: {"text": DOCUMENTS[i]}) if returned else (lambda i: {})
    assert rows == [{"index": i, **text(i), "score": SCORES[i].reward} for i in (3, 1, 0, 2)]


@pytest.mark.parametrize("raw", [None, True, False])
def test_teis_scores_are_raw_unless_they_are_asked_for_otherwise(raw: bool | None) -> None:
    rows = reply("/rerank", OF_TEI | {"raw_scores": raw}, *SCORES)
    want = [1 / (1 + math.exp(-x)) if raw is False else x for x in (2.0, 2.0, -1.0, -3.0)]
    assert [row["score"] for row in rows] == pytest.approx(want, rel=1e-6)


def test_query_and_documents_are_pairs_of_one_group() -> None:
    for path, body in (("/rerank", OF_VLLM), ("/rerank", OF_TEI), ("/v1/rerank", OF_VLLM)):
        request = ask(path, body).request
        assert request is not None and request.texts == ["qa", "qb", "qc", "qd"]
        assert request.prompts == ["q"] * 4 and request.splits == [1] * 4
        assert request.groups is not None and len({*request.groups}) == 1
        assert request.add_special_tokens is None and request.truncation is None


def test_documents_are_texts_objects_with_text_or_parts() -> None:
    parts = {"content": [{"type": "text", "text": "d"}, "e"]}
    body = {"query": {"text": "q"}, "documents": ["a", {"text": "b", "title": "of another field"}, parts]}
    request = ask("/v1/rerank", body).request
    assert request is not None and request.texts == ["qa", "qb", "qd\ne"]
    rows = reply("/v1/rerank", body, *[Score(0.0)] * 3)["results"]
    assert [row["document"]["text"] for row in rows] == ["a", "b", "d\ne"]
    request = ask("/v2/rerank", {"query": "q", "documents": {"text": "a"}}).request
    assert request is not None and request.texts == ["qa"]


def test_teis_options_reach_the_model() -> None:
    for direction, side in (("left", "left"), ("Left", "left"), ("Right", "right"), (None, "right")):
        body = OF_TEI | {"truncate": True, "truncation_direction": direction, "add_special_tokens": True}
        request = ask("/rerank", body).request
        assert request is not None and request.truncation == Truncation(None, side) and request.add_special_tokens
    request = ask("/rerank", OF_TEI | {"truncate": False, "truncation_direction": "left"}).request
    assert request is not None and request.truncation is None


def test_a_sum_has_its_components_in_each_row() -> None:
    scores = [Score(x, attributes=np.array([x, 0.5], np.float32)) for x in (0.25, 0.75)]
    components = [{"helpful": 0.75, "brief": 0.5}, {"helpful": 0.25, "brief": 0.5}]
    told = reply("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, *scores, info=SUM)
    assert [row["components"] for row in told["results"]] == components
    told = reply("/rerank", {"query": "q", "texts": ["a", "b"]}, *scores, info=SUM)
    assert [row["components"] for row in told] == components


@pytest.mark.parametrize("body", [OF_VLLM, OF_TEI])
@pytest.mark.parametrize("last", [Score(math.nan), SampleFailed("not finite")])
def test_a_document_without_a_score_fails_the_ranking(body: Any, last: Any) -> None:
    with pytest.raises(SampleFailed, match=r"not (a )?finite"):
        reply("/rerank", body, *SCORES[:3], last)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/rerank", {"query": "q"}, "the body has no 'documents'"),
        ("/rerank", {"documents": ["a"]}, "the body has no 'query'"),
        ("/rerank", OF_VLLM | OF_TEI, "the body has keys of vLLM's form and of TEI's"),
        ("/v1/rerank", OF_TEI, "the body has no 'documents'"),
        ("/rerank", {"query": "q", "documents": []}, "documents is an empty list"),
        ("/rerank", {"query": "q", "texts": []}, "texts is an empty list"),
        ("/rerank", {"query": "q", "texts": "a"}, "texts is a string"),
        ("/rerank", {"query": ["q"], "documents": ["a"]}, "query is a list"),
        ("/v2/rerank", {"query": "q", "documents": ["a", 5]}, "documents[1] is 5"),
        ("/v2/rerank", {"query": "q", "documents": ["a", {}]}, "documents[1] has no text and content"),
        (
            "/v2/rerank",
            {"query": "q", "documents": [{"text": "a", "content": ["b"]}]},
            "documents[0] has both text and content",
        ),
        ("/v2/rerank", OF_VLLM | {"top_n": "2"}, "top_n is a string"),
        ("/v2/rerank", OF_VLLM | {"rank_fields": ["title"]}, "rank_fields is not supported"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(path: str, body: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        ask(path, body)
    assert str(e.value).startswith(message)


def test_switches_of_vllm_in_the_url_are_refused_beside_teis_body() -> None:
    for name in ("use_activation", "softmax", "activation"):
        with pytest.raises(InvalidRequest, match=f"the URL has the key '{name}'"):
            ask("/rerank", OF_TEI, **{name: "true"})
