"""Shared by all forms of other servers' protocols: a form's parts, keys that bodies share, and reading samples."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw

from guerdon.core import Message, ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.judge_core import GroupKey
from guerdon.messages import plain
from guerdon.wire import bodies, schema, unknown_keys
from guerdon.wire.bodies import MAX_ROWS, Octets, check_depth, kind_of, kinds_of, to_ids
from guerdon.wire.score_tensors import prompt_groups

MAX_JOINED = 1 << 24
"""Most characters of one prompt joined with all its responses: the body itself is much smaller then."""

_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"

SOME = Meta(min_length=1, max_length=MAX_ROWS)
TokenId = Annotated[int, Meta(ge=0, le=2**63 - 1, description="a token id, which is a whole number from 0 up")]
Text = Annotated[str, Meta(description="a string")]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number")]
Texts = Annotated[str | Annotated[list[Text], SOME], Meta(description="a string, or a list of strings")]
Ids = Annotated[
    Annotated[list[TokenId | list[TokenId]], SOME], Meta(description="a list of token ids, or a list of such lists")
]
TextsOrIds = Annotated[
    str | Annotated[list[Annotated[str | TokenId | list[TokenId], Meta(description=_KINDS)]], SOME],
    Meta(description=_KINDS),
]
_OBJECT = {"properties": {"role": {"type": "string"}}, "required": ["role"]}
Conversation = Annotated[
    list[Annotated[dict[str, Any], Meta(description="an object with role and content", extra_json_schema=_OBJECT)]],
    Meta(min_length=1, max_length=MAX_ROWS, description="a list of objects with role and content"),
]
GroupName = Annotated[str | int, Meta(description="a string or a whole number, equal in all calls of a group")]
ModelName = Annotated[str | None, Meta(description="a served model's name, or leave it out for the first one")]
Switch = Annotated[Literal["true", "false"], Meta(description="true or false")] | None
"""A switch in the URL."""


class Url(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The keys after the URL's `?`; others are refused, so that a misspelt one is not lost."""

    model: str = ""


class TokensUrl(Url, kw_only=True, forbid_unknown_fields=True):
    add_special_tokens: Switch = None


class Keys(msgspec.Struct, kw_only=True):
    """An object in a body; refuses keys that are not supported, or misspelt (`unknown_keys`). Errors show `example`.

    `no_model` is the name that the peer's clients send if they mean none.
    """

    example: ClassVar[str] = "{}"
    no_model: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, (reason, fine) in refused_keys(type(self)).items():
            if (value := getattr(self, name)) and value not in fine:
                raise InvalidRequest(f"{name} is not supported: {reason}")


Asked = TypeVar("Asked", bound=Keys)


@functools.cache
def refused_keys(kind: type[Keys]) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Returns the keys that are not supported, each with the reason, and with values that are fine all the same."""
    metas = [(field.name, getattr(field.type, "__metadata__", ())) for field in msgspec.structs.fields(kind)]
    found = [(name, meta.extra) for name, several in metas for meta in several if "refused" in (meta.extra or {})]
    return {name: (extra["refused"], extra["fine"]) for name, extra in found}


def refuses(names: str, reason: str, *fine: Any) -> Callable[[type[Asked]], type[Asked]]:
    """Decorates an object with keys that would change the answer, unless they ask for nothing or are `fine`.

    Errors and the API's description give the `reason`.
    """
    extra, none = {"refused": reason, "fine": fine}, {"type": "null"}
    key = Annotated[Any, Meta(description=f"not supported: {reason}", extra=extra, extra_json_schema=none)]
    fields = [(name, key, None) for name in names.split()]

    def decorate(kind: type[Asked]) -> type[Asked]:
        about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        made: Any = msgspec.defstruct(kind.__name__, fields, bases=(kind,), namespace=about, kw_only=True)
        return made

    return decorate


class Body(Keys, kw_only=True):
    """The keys of every body."""

    model: ModelName = None


class GroupBody(Body, kw_only=True):
    """The keys of a body with samples that a judge may compare with those of other calls."""

    group: GroupName | None = None
    group_size: Annotated[int, Meta(ge=1, le=MAX_ROWS, description="a whole number from 1 up")] | None = None


def one_of(body: Keys, first: str, second: str, them: str = "them") -> tuple[str, Any]:
    """Returns the one of two keys that the body has, with its value; raises InvalidRequest."""
    found = {name: value for name in (first, second) if (value := getattr(body, name)) not in (None, UNSET)}
    if len(found) != 1:
        has = f"{first} and {second}" if found else f"neither {first} nor {second}"
        raise InvalidRequest(f"the body has {has}; send one of {them}, in an object such as {body.example}")
    return next(iter(found.items()))


def check_logprobs(info: ModelInfo) -> None:
    """Raises InvalidRequest if the model is no teacher."""
    if not schema.LOGPROBS.has(info):
        raise InvalidRequest(
            f"{info.name} gives {', '.join(info.outputs)} and no log-probs; name a teacher, as guerdon serve-teacher "
            "serves one"
        )


def check_rewards(info: ModelInfo) -> None:
    """Raises InvalidRequest if the model gives no rewards."""
    if not schema.REWARDS.has(info):
        raise InvalidRequest(f"{info.name} gives {', '.join(info.outputs)} and no rewards; name another model")


@dataclass(slots=True, eq=False)
class FormRequest:
    """One request in a form: its samples, what writes the reply, and its model if that is not the body's `model`.

    `request` is None if the body has no samples; `to_reply` then gets a reply without results. `to_reply` raises a
    failed sample's error. `check` runs before anything is computed, and raises InvalidRequest if the model cannot
    answer. `output` replaces the form's own. With `fails_apart` the reply tells each sample's own error. `num_tables`
    is how many tables the reply makes of the samples' arrays, with all rows as long as the longest. An empty `model`
    is the default one.
    """

    request: ScoreRequest | None
    to_reply: Callable[[ScoreReply, ModelInfo], Any]
    check: Callable[[ModelInfo], None] = check_rewards
    output: str = ""
    num_tables: int = 0
    fails_apart: bool = False
    model: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """What some `paths` of another server's protocol take and answer; `peer` names that server.

    It reads `bodies` and `url` and writes `replies`, which are structs; `choose` picks one of several `bodies`. `error`
    is the struct of its errors; `to_error` returns one with its status. Requests that name no model get the first that
    gives `output`.
    """

    peer: str
    bodies: tuple[type[Keys], ...]
    url: type[Url]
    replies: tuple[Any, ...]
    to_request: Callable[[Any, Any], FormRequest]
    error: type[msgspec.Struct]
    to_error: Callable[[GuerdonError], tuple[int, msgspec.Struct]]
    choose: Callable[[Octets], type[Keys]] | None = None
    output: str = schema.REWARDS.name
    paths: tuple[str, ...] = ()

    def read(self, body: Octets, query: Mapping[str, str]) -> FormRequest:
        """Returns the request in the body and the URL's query; raises InvalidRequest."""
        parsed, url = read_body(self, body, query)
        asked = self.to_request(parsed, url)
        asked.model = asked.model or ("" if parsed.model in (None, parsed.no_model) else parsed.model)
        if asked.request is not None:
            asked.request.is_whole = not asked.fails_apart
            if isinstance(parsed, GroupBody) and parsed.group is not None:
                asked.request.cohort = GroupKey(repr(parsed.group), parsed.group_size or 0)
        return asked


def read_body(form: Any, body: Octets, query: Mapping[str, str]) -> tuple[Any, Any]:
    """Returns the body and the URL as the form has them; a switch in the URL counts if the body leaves it out."""
    parsed: Any = unknown_keys.read(body, form.choose(body) if form.choose else form.bodies[0])
    url = bodies.convert(query, form.url, "the URL")
    for name in url.__struct_fields__:
        if name != "model" and getattr(parsed, name, "") is None and getattr(url, name) is not None:
            setattr(parsed, name, getattr(url, name) == "true")
    return parsed, url


ToError = Callable[[GuerdonError], tuple[int, msgspec.Struct]]


def serves(
    paths: str,
    peer: str,
    *replies: Any,
    to_error: ToError,
    output: str = schema.REWARDS.name,
) -> Callable[[Callable[[Any, Any], FormRequest]], Form]:
    """Makes a function of a body and a URL the form of some paths; its annotations say which it reads."""

    def decorate(to_request: Callable[[Any, Any], FormRequest]) -> Form:
        body, url, _ = typing.get_type_hints(to_request).values()
        _, error = typing.get_args(typing.get_type_hints(to_error)["return"])
        return Form(peer, (body,), url, replies, to_request, error, to_error, None, output, tuple(paths.split()))

    return decorate


def forms_of(*modules: ModuleType) -> dict[str, Form]:
    """Returns the forms that the modules define, by the paths that serve them."""
    found = [form for module in modules for form in vars(module).values() if isinstance(form, Form)]
    return {path: form for form in found for path in form.paths}


def either(paths: str, peer: str, first: Form, first_keys: str, second: Form, second_keys: str, refusal: str) -> Form:
    """Returns the form of paths that take the bodies of two forms: the second's if the body has one of its keys."""

    def to_request(body: Any, url: Any) -> FormRequest:
        return (second if isinstance(body, second.bodies) else first).to_request(body, url)

    return dataclasses.replace(
        first,
        peer=peer,
        bodies=(*first.bodies, *second.bodies),
        replies=(*first.replies, *second.replies),
        to_request=to_request,
        choose=choose_by(first_keys, first.bodies[0], second_keys, second.bodies[0], refusal),
        paths=tuple(paths.split()),
    )


def choose_by(
    keys: str, kind: type[Keys], more_keys: str, more: type[Keys], refusal: str
) -> Callable[[Octets], type[Keys]]:
    """Returns what chooses between two bodies of one path: `more` if the body has one of its keys.

    Raises InvalidRequest with the `refusal` if it has keys of both.
    """
    names = [*keys.split(), *more_keys.split()]
    only_keys = msgspec.defstruct(
        "_Keys", [(name, Raw, Raw(b"null")) for name in names], namespace={"example": kind.example}
    )

    def choose(body: Octets) -> type[Keys]:
        found = bodies.read(body, only_keys)
        of_kind, of_more = (
            any(bytes(getattr(found, name)) != b"null" for name in some.split()) for some in (keys, more_keys)
        )
        if of_kind and of_more:
            raise InvalidRequest(f"the body has keys of {refusal}")
        return more if of_more else kind

    return choose


# --- samples -------------------------------------------------------------------------------------------------------


def to_samples(value: str | list[Any], name: str) -> ScoreRequest:
    """Returns the samples of a key of texts or token ids; raises InvalidRequest if its list holds several kinds."""
    if isinstance(value, str):
        return ScoreRequest(texts=[value])
    kind = type(value[0])
    if kinds_of(value) != {kind}:
        i = next(i for i, entry in enumerate(value) if type(entry) is not kind)
        raise InvalidRequest(f"{name}[{i}] is {kind_of(value[i])}, {name}[0] {kind_of(value[0])}; send {_KINDS}")
    if kind is str:
        return ScoreRequest(texts=value)
    return ScoreRequest(tokens=[to_ids(row) for row in (value if kind is list else [value])])


def is_single(value: str | list[Any]) -> bool:
    """Whether a key of texts or token ids holds one sample instead of a list of samples."""
    return isinstance(value, str) or not isinstance(value[0], str | list)


def to_texts(value: str | list[str]) -> list[str]:
    """Returns one string or a list of strings as a list."""
    return [value] if isinstance(value, str) else value


def check_conversation(messages: list[Message], name: str) -> list[Message]:
    """Returns the messages if each has a role; raises InvalidRequest. Contents are checked when they are scored."""
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{name}[{i}].role is {kind_of(message.get('role'))}; send a string, such as user")
    check_depth(messages, name)
    return messages


def of_conversation(conversation: list[Message]) -> ScoreRequest:
    """Returns the conversation as a sample, grouped with those that differ only in the assistant's last message."""
    prompt = conversation[:-1] if conversation[-1]["role"] == "assistant" else conversation
    try:
        contents = repr([(message["role"], message["content"]) for message in plain(prompt)])
    except InvalidRequest:  # the sample's own error, which the service raises in its row
        return ScoreRequest(messages=[conversation])
    return ScoreRequest(messages=[conversation], groups=prompt_groups([contents]))


def pair_samples(prompts: list[str], responses: list[str]) -> ScoreRequest:
    """Returns a pair of each response and its prompt, or the only one; the two are tokenised apart.

    Raises InvalidRequest if one prompt before all responses makes far more text than was sent.
    """
    if len(prompts) == 1:
        num_characters = len(prompts[0]) * len(responses) + sum(map(len, responses))
        if num_characters > MAX_JOINED:
            raise InvalidRequest(
                f"one prompt of {len(prompts[0]):,} characters before each of {len(responses):,} responses makes "
                f"{num_characters:,} characters, at most {MAX_JOINED:,} are accepted; send fewer responses in a request"
            )
        prompts = prompts * len(responses)
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return ScoreRequest(
        texts=texts, prompts=prompts, groups=prompt_groups(prompts), splits=[len(prompt) for prompt in prompts]
    )
