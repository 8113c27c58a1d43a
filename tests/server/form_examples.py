"""One request of each form, and where its answer has the score or the error."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from guerdon import errors
from guerdon.errors import GuerdonError, InvalidRequest, Overloaded, SampleFailed, ServerFault, UnknownModel


@dataclass(frozen=True)
class Example:
    """`body(text)` asks for the score of a text, `score` and `error` find it, or what went wrong, in the answer.

    `statuses` are those that the form has in place of KServe's.
    """

    path: str
    body: Callable[[str], Any]
    score: Callable[[Any], float]
    error: Callable[[Any], str] = lambda told: told["error"]
    statuses: dict[type[GuerdonError], int] = field(default_factory=dict)
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.path

    def ask(self, client: httpx.Client, text: str, query: str = "", **more: Any) -> httpx.Response:
        """The answer to a request for the text's score; `more` are further keys of its body."""
        return client.post(self.path + query, json=self.body(text) | more)

    def status(self, kind: type[GuerdonError]) -> int:
        """The status by which it tells such an error."""
        return next((self.statuses[k] for k in kind.__mro__ if k in self.statuses), kind.http)

    def scored(self, response: httpx.Response) -> float:
        """The score in an answer; fails the test where it is none."""
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        score = self.score(response.json())
        assert type(score) is float, response.text
        return score

    def refused(self, response: httpx.Response, kind: type[GuerdonError]) -> str:
        """The error's text; fails the test where status or shape are not those of such an error."""
        assert response.status_code == self.status(kind), response.text
        assert response.headers["content-type"] == "application/json"
        assert issubclass(getattr(errors, response.headers["guerdon-error"]), kind)
        assert "Traceback" not in response.text
        text = self.error(response.json())
        assert type(text) is str
        return text


def _in_object(told: dict[str, Any]) -> str:
    return told["error"]["message"]


def _of_labels(told: list[dict[str, Any]]) -> float:
    """The score of the first label, wherever it stands."""
    return next(entry["score"] for entry in told if entry["label"] in ("LABEL_0", "length"))


def _pair(text: str) -> dict[str, str]:
    return {"text_1": text[:1], "text_2": text[1:]}


def _ranked(text: str) -> dict[str, Any]:
    return {"query": text[:1], "documents": [text[1:]]}


_UNKNOWN = {UnknownModel: 404}
_TEI = {InvalidRequest: 422, UnknownModel: 404, Overloaded: 429, SampleFailed: 424, ServerFault: 424}

EXAMPLES = [
    Example("/get_reward", lambda text: {"query": [text]}, lambda told: told["rewards"][0]),
    Example("/v1/score/evaluation", lambda text: {"messages": [text]}, lambda told: told["scores"][0]),
    Example(
        "/batch_reward",
        lambda text: {"items": [{"prompt": text[:1], "response": text[1:]}]},
        lambda told: told["rewards"][0]["reward"],
    ),
    Example("/reward", lambda text: {"prompt": text[:1], "response": text[1:]}, lambda told: told),
    Example(
        "/classify",
        lambda text: {"input": [text], "use_activation": False},
        lambda told: told["data"][0]["probs"][0],
        _in_object,
        _UNKNOWN,
    ),
    Example(
        "/classify",
        lambda text: {"text": [text]},
        lambda told: told[0]["embedding"][0],
        _in_object,
        _UNKNOWN,
        "/classify of SGLang",
    ),
    Example(
        "/pooling",
        lambda text: {"input": [text], "task": "classify"},
        lambda told: told["data"][0]["data"][0],
        _in_object,
        _UNKNOWN,
    ),
    Example("/score", _pair, lambda told: told["data"][0]["score"], _in_object, _UNKNOWN),
    Example("/v1/score", _pair, lambda told: told["data"][0]["score"], _in_object, _UNKNOWN),
    Example("/encode", lambda text: {"text": text}, lambda told: told["embedding"][0], _in_object, _UNKNOWN),
    Example(
        "/v1/embeddings",
        lambda text: {"input": text},
        lambda told: told["data"][0]["embedding"][0],
        lambda told: told["message"],
        _UNKNOWN,
    ),
    *(
        Example(path, _ranked, lambda told: told["results"][0]["relevance_score"], _in_object, _UNKNOWN)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Example(
        "/rerank",
        lambda text: {"query": text[:1], "texts": [text[1:]]},
        lambda told: told[0]["score"],
        _in_object,
        _UNKNOWN,
        "/rerank of TEI",
    ),
    Example("/predict", lambda text: {"inputs": text}, _of_labels, statuses=_TEI),
]
