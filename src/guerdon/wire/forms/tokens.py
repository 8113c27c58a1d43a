"""The forms that ask about a model and its tokens: `/tokenize` and `/detokenize` as vLLM, `/info` as TEI has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import Message, ModelInfo, Truncation
from guerdon.errors import EmptyBatch, InvalidRequest
from guerdon.wire import bodies
from guerdon.wire.bodies import Octets
from guerdon.wire.forms import form
from guerdon.wire.forms.labels import labels_of

MAX_TEXT = 1 << 17
"""Most characters of a request's texts together, and most ids."""
MAX_SPANS = 1 << 15
"""The same of TEI's form, whose answer is up to a hundred times as large: writing it holds the GIL."""

_ID_BYTES, _TOKEN_BYTES = 64, 512
"""Memory of an id while it is written, alone and with its text and place."""


class TokenSpan(msgspec.Struct):
    """A token of a text, with its characters from `start` to before `stop`.

    Those around the text, which the tokenizer adds, are `special`, and have no place.
    """

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


@runtime_checkable
class TextTokenizer(Protocol):
    """The tokenizer's interface for these forms; thread-safe."""

    def has_special_tokens(self, text: str) -> bool: ...

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray | InvalidRequest]: ...

    def spans(self, text: str, add_special_tokens: bool) -> list[tuple[Any, ...]] | InvalidRequest: ...

    def render_as(self, conversation: list[Message], *, adds_prompt: bool, continues: bool) -> str | InvalidRequest: ...

    def decode(self, tokens: np.ndarray) -> str: ...

    def names_of(self, tokens: np.ndarray) -> list[str]: ...


@form.refuses(
    "chat_template chat_template_kwargs tools", "the checkpoint's own chat template is applied, to the messages alone"
)
@form.refuses("mm_processor_kwargs media_io_kwargs", "models here read only text")
class TokenizeBody(form.Body, kw_only=True):
    """A text, with special tokens as where it is scored, or messages, which the chat template renders."""

    example: ClassVar[str] = '{"prompt": "a text"}'
    prompt: str | UnsetType = UNSET
    messages: form.Conversation | UnsetType = UNSET
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@form.refuses("prompt_name", "models have no named prompts here")
class TEITokenizeBody(form.Body, kw_only=True):
    """One text, or several."""

    example: ClassVar[str] = '{"inputs": ["a text"]}'
    inputs: Annotated[
        str | Annotated[list[Annotated[str, Meta(description="a string")]], Meta(max_length=bodies.MAX_ROWS)],
        Meta(description="a string, or a list of strings"),
    ]
    add_special_tokens: bool | None = None


class DetokenizeBody(form.Body, kw_only=True):
    example: ClassVar[str] = '{"tokens": [5, 6]}'
    tokens: Annotated[list[form.TokenId], form.SOME]


class TokenizeReply(msgspec.Struct):
    """`max_model_len` is null if the model's length is not bounded."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct):
    prompt: str


class InfoLabels(msgspec.Struct):
    id2label: dict[str, str]
    label2id: dict[str, int]


class InfoReply(msgspec.Struct):
    """TEI's info on the model (`reranker` with one output, else `classifier`) and the server."""

    model_id: str
    model_sha: str
    model_dtype: str
    model_type: dict[str, InfoLabels]
    max_concurrent_requests: int
    max_input_length: int | None
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    max_batch_requests: None = None
    sha: None = None
    docker_label: None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its model, empty for the first with a tokenizer, the memory of its answer, and what makes that."""

    model: str
    num_bytes: int
    answer: Callable[[TextTokenizer, ModelInfo], Any]


@dataclass(frozen=True, slots=True)
class TokenForm:
    """One path: the bodies and the URL's keys that `read` reads, and its replies; `choose` picks one of the bodies."""

    summary: str
    bodies: tuple[type[form.Body], ...]
    url: type[form.Url]
    replies: tuple[Any, ...]
    to_asked: Callable[[Any], Asked]
    choose: Callable[[Octets], type[form.Keys]] | None = None

    def read(self, body: Octets, query: Mapping[str, str]) -> Asked:
        """Returns the query; raises InvalidRequest."""
        parsed, url = form.read_body(self, body, query)
        asked = self.to_asked(parsed)
        return asked if asked.model else Asked(url.model, asked.num_bytes, asked.answer)


def _adds(wanted: bool | None, text: str, tokenizer: TextTokenizer, info: ModelInfo) -> bool:
    """Whether special tokens are added to a text, by default as where the model scores it."""
    return info.reads_pairs and not tokenizer.has_special_tokens(text) if wanted is None else wanted


def _of_vllm(body: TokenizeBody) -> Asked:
    form.one_of(body, "prompt", "messages")
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest("add_generation_prompt and continue_final_message are both true; send one of them")
    if isinstance(body.messages, UnsetType):
        size = len(body.prompt) if isinstance(body.prompt, str) else 0
    else:
        size = len(repr(form.check_conversation(body.messages, "messages")))
    _check_size(size)

    def answer(tokenizer: TextTokenizer, info: ModelInfo) -> TokenizeReply:
        text, wanted = body.prompt, body.add_special_tokens
        if not isinstance(body.messages, UnsetType):
            adds_prompt = body.add_generation_prompt is not False and not body.continue_final_message
            continues = body.continue_final_message
            text = _or_raise(tokenizer.render_as(body.messages, adds_prompt=adds_prompt, continues=continues))
            wanted = bool(wanted)
        assert isinstance(text, str)
        ids = _or_raise(tokenizer.encode([text], _adds(wanted, text, tokenizer, info))[0])
        names = tokenizer.names_of(ids) if body.return_token_strs else None
        return TokenizeReply(len(ids), info.max_length, ids.tolist(), names)

    return Asked(body.model or "", size * _ID_BYTES, answer)


def _of_tei(body: TEITokenizeBody) -> Asked:
    texts = form.to_texts(body.inputs)
    if not texts:
        raise EmptyBatch("inputs is an empty list; send at least one text")
    size = sum(map(len, texts))
    _check_size(size, MAX_SPANS)

    def answer(tokenizer: TextTokenizer, info: ModelInfo) -> list[list[TokenSpan]]:
        rows = (tokenizer.spans(text, _adds(body.add_special_tokens, text, tokenizer, info)) for text in texts)
        return [[TokenSpan(*one) for one in _or_raise(row)] for row in rows]

    return Asked(body.model or "", size * _TOKEN_BYTES, answer)


def _detokenize(asked: DetokenizeBody) -> Asked:
    _check_size(len(asked.tokens))

    def answer(tokenizer: TextTokenizer, info: ModelInfo) -> DetokenizeReply:
        if info.vocab_size is not None and (highest := max(asked.tokens)) >= info.vocab_size:
            raise InvalidRequest(
                f"token id {highest} is outside the vocabulary of {info.name} (0 to {info.vocab_size - 1})"
            )
        return DetokenizeReply(tokenizer.decode(bodies.to_ids(asked.tokens)))

    return Asked(asked.model or "", len(asked.tokens) * _ID_BYTES, answer)


def describe(info: ModelInfo, **server: Any) -> InfoReply:
    """Returns TEI's `/info`; `server` has the server's settings in it."""
    labels = labels_of(info, max(1, len(info.attribute_names)))
    names = InfoLabels({str(i): name for i, name in enumerate(labels)}, {name: i for i, name in enumerate(labels)})
    return InfoReply(
        model_id=info.source or info.name,
        model_sha=info.weights_version,
        model_dtype=info.dtype,
        model_type={"classifier" if len(labels) > 1 else "reranker": names},
        max_input_length=info.max_length,
        **server,
    )


def _check_size(count: int, most: int = MAX_TEXT) -> None:
    if count > most:
        raise InvalidRequest(
            f"the request has {count:,} characters or ids, and at most {most:,} are tokenised without a score; "
            "send fewer"
        )


def _or_raise(made: Any) -> Any:
    if isinstance(made, InvalidRequest):
        raise made
    return made


FORMS: dict[str, TokenForm] = {
    "/tokenize": TokenForm(
        "The token ids of a text or of messages, in vLLM's and TEI's form",
        (TokenizeBody, TEITokenizeBody),
        form.TokensUrl,
        (TokenizeReply, list[list[TokenSpan]]),
        lambda body: (_of_tei if isinstance(body, TEITokenizeBody) else _of_vllm)(body),
        form.choose_by("", TokenizeBody, "inputs", TEITokenizeBody, ""),
    ),
    "/detokenize": TokenForm(
        "The text of token ids, in vLLM's form", (DetokenizeBody,), form.Url, (DetokenizeReply,), _detokenize
    ),
}
"""The forms that ask a model's tokenizer, by path; errors are vLLM's."""
INFO = "/info"
"""The path of TEI's description of a model; `?model=` names it."""
