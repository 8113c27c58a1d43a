"""NeMo Gym's resources server: `/verify` scores one rollout, `/compare` compares the responses to a conversation.

`/aggregate_metrics` gives statistics of verified rollouts, over all of them and for each task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.judge_core import DISAGREED, Comparisons, GroupKey, GroupRequest, JudgedReply
from guerdon.messages import answered, plain
from guerdon.wire import bodies
from guerdon.wire.bodies import MAX_ROWS, check_depth, digest, kind_of
from guerdon.wire.forms import form
from guerdon.wire.forms.labels import attributes_of, number, rewards_of
from guerdon.wire.kserve import ErrorBody, to_error

LABEL_KEYS = ("label", "expected_answer", "ground_truth", "answer", "verifier_metadata")
"""Keys of a row that may hold the label, in order of preference, unless the URL names one."""

FAILURE_CLASS = "judge_failed"
"""Gym writes rows of a failure class into a separate file, and can verify rows of this class again."""

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The types of a message's parts that are text, and the key that has it."""

_TASK, _ROLLOUT, _FAILURE = "_ng_task_index", "_ng_rollout_index", "_ng_failure_class"
_GROUP = ("_ng_group_id", "_ng_group_attempt", _TASK)
"""Keys that Gym adds to a rollout; those that name its group."""

_NESTED = ("reward_components", "components")
"""Objects whose numbers count as well, each under its own name after theirs."""

_BEST, _WORST = 1, 6
"""Gym's ranking, if the first response is much better, and if the second is."""

_LARGEST = float(np.finfo(np.float64).max) / MAX_ROWS
"""Larger numbers are left out, since their sum may be infinite."""


class VerifyUrl(form.Url, kw_only=True, forbid_unknown_fields=True):
    """With `label`, the row's key of that name holds the label."""

    label: str = ""


class ResponsesParams(msgspec.Struct, kw_only=True):
    """The policy's request; other keys are ignored."""

    example: ClassVar[str] = '{"input": "a prompt"}'
    input: Annotated[str | form.Conversation, Meta(description="a string, or a list of messages and other items")]
    instructions: str | None = None


class PolicyResponse(msgspec.Struct, kw_only=True):
    """The policy's answer, in the items of OpenAI's Responses API."""

    example: ClassVar[str] = '{"output": [{"type": "message", "role": "assistant", "content": "a response"}]}'
    output: list[dict[str, Any]]


class VerifyBody(form.GroupBody, kw_only=True):
    """One rollout. Its further keys are the row's, and come back in the reply."""

    example: ClassVar[str] = (
        '{"responses_create_params": {"input": "a prompt"}, "response": {"output": [{"type": "message", "role": '
        '"assistant", "content": "a response"}]}}'
    )
    responses_create_params: ResponsesParams
    response: PolicyResponse


class VerifyReply(msgspec.Struct, kw_only=True):
    """Keys added to the row. A masked sample's reward, 0, is no score: the sample failed.

    `instance_config` is the row's, with `mask_sample`, which NeMo-RL reads there. The `reward_components` sum to the
    reward; `components` are a sum's or judge's as they are.
    """

    reward: np.float32
    mask_sample: bool
    instance_config: dict[str, Any]
    reward_components: dict[str, float] | UnsetType = UNSET
    components: dict[str, np.float32] | UnsetType = UNSET
    failure_kind: str | UnsetType = UNSET
    failure_reason: str | UnsetType = UNSET
    failure_class: str | UnsetType = msgspec.field(default=UNSET, name="_ng_failure_class")


class MetricsBody(msgspec.Struct, kw_only=True):
    """Rollouts as `/verify` returned them, without the policy's texts."""

    example: ClassVar[str] = '{"verify_responses": [{"_ng_task_index": 0, "reward": 0.5}]}'
    verify_responses: list[dict[str, Any]]


class AggregateMetrics(msgspec.Struct):
    """Numbers by name, such as `mean/reward`: of each task, of all rollouts, and those to show first."""

    group_level_metrics: list[dict[str, Any]]
    agent_metrics: dict[str, Any]
    key_metrics: dict[str, Any]


_OURS = {field.encode_name for field in msgspec.structs.fields(VerifyReply)}


@dataclass(frozen=True, slots=True)
class VerifyForm(form.Form):
    """The form whose reply repeats the body."""

    def read(self, body: bodies.Octets, query: Mapping[str, str]) -> form.FormRequest:
        """Returns the request in the body and the URL's query; raises InvalidRequest."""
        return self.to_request(bodies.read(body, dict[str, Any]), bodies.convert(query, VerifyUrl, "the URL"))


@dataclass(frozen=True, slots=True)
class Answer:
    """A path that is answered without a model: by POST with a `body`, by GET without one.

    `to_reply` raises InvalidRequest.
    """

    summary: str
    body: Any
    reply: Any
    to_reply: Callable[[bodies.Octets], Any]


def conversation_of(params: ResponsesParams, response: PolicyResponse) -> list[Message]:
    """Returns the prompt's messages and one of the assistant's, with all texts of the response.

    Reasoning, tool calls and their outputs are left out; the developer's messages are the system's. Raises
    InvalidRequest if a message is no text, or the response has none.
    """
    messages: list[Message] = []
    if params.instructions:
        messages.append({"role": "system", "content": params.instructions})
    if isinstance(params.input, str):
        messages.append({"role": "user", "content": params.input})
    else:
        for i, item in enumerate(params.input):
            if _is_message(item):
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append({"role": role, "content": text_of(item, f"responses_create_params.input[{i}]")})
    texts = [
        text_of(item, f"response.output[{i}]")
        for i, item in enumerate(response.output)
        if _is_message(item) and item["role"] == "assistant"
    ]
    if not texts:
        raise InvalidRequest("the response has no message of the assistant's, so that there is nothing to score")
    return [*messages, {"role": "assistant", "content": "\n\n".join(texts)}]


def _is_message(item: Mapping[str, Any]) -> bool:
    return item.get("type", "message") == "message" and isinstance(item.get("role"), str)


def text_of(item: Mapping[str, Any], where: str) -> str:
    """Returns a message's text; raises InvalidRequest with `where` it is if it has other parts."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content is {kind_of(content)}; send a string, or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get(_TEXTS.get(kind)) if isinstance(kind, str) else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}.content[{i}] is no text, and models here read only text")
        texts.append(text)
    return "".join(texts)


def _verify(row: dict[str, Any], url: VerifyUrl) -> form.FormRequest:
    body = bodies.convert(row, VerifyBody, "the body")
    check_depth(row, "the body")
    request, unread = None, None
    try:
        request = form.of_conversation(conversation_of(body.responses_create_params, body.response))
        keys = [url.label] if url.label else LABEL_KEYS
        label = next((row[name] for name in keys if row.get(name) is not None), None)
        request.references = None if label is None else [label]
        request.cohort = _cohort(body, row, request)
    except InvalidRequest as e:  # the sample's own error, as if it had come from the model
        unread = e

    def to_reply(reply: ScoreReply, info: ModelInfo) -> dict[str, Any]:
        config = row.get("instance_config")
        told = _told(unread or reply.results[0], info, config if isinstance(config, dict) else {})
        added = {field.encode_name: getattr(told, field.name) for field in msgspec.structs.fields(told)}
        kept = {name: value for name, value in row.items() if name not in _OURS}
        return kept | {name: value for name, value in added.items() if value is not UNSET}

    return form.FormRequest(request, to_reply, model=body.model or "")


def _cohort(body: VerifyBody, row: Mapping[str, Any], request: ScoreRequest) -> GroupKey:
    """Returns the rollout's group: its own, or rollouts of the same task, prompt and label."""
    assert request.messages is not None
    place = row.get(_ROLLOUT)
    about = body.group
    if about is None:
        about = digest(([row.get(name) for name in _GROUP], request.messages[0][:-1], request.references))
    return GroupKey(repr(about), body.group_size or 0, place if isinstance(place, int) else None)


def _told(result: Score | GuerdonError, info: ModelInfo, config: dict[str, Any]) -> VerifyReply:
    try:
        if isinstance(result, GuerdonError):
            raise result
        reward, components = number(result.reward), attributes_of(result, info)
    except GuerdonError as e:
        return VerifyReply(
            reward=np.float32(0),
            mask_sample=True,
            instance_config={**config, "mask_sample": True},
            failure_kind=type(e).__name__,
            failure_reason=bodies.cut(str(e)),
            failure_class=FAILURE_CLASS,
        )
    shares = {
        name: weight * float(components[name])
        for name, weight in zip(components, info.attribute_weights, strict=False)
        if weight
    }
    return VerifyReply(
        # NeMo-RL stops if the two differ, be it in the last digits of components that nearly cancel.
        reward=np.float32(math.fsum(shares.values())) if shares else reward,
        mask_sample=False,
        instance_config={**config, "mask_sample": False},
        reward_components=shares or UNSET,
        components=components or UNSET,
    )


# --- statistics ----------------------------------------------------------------------------------------------------


def _aggregate(body: MetricsBody) -> AggregateMetrics:
    """Returns the statistics of each number that rollouts have; failed rollouts are counted, and left out."""
    tasks: dict[Any, list[Mapping[str, Any]]] = {}
    for row in body.verify_responses:
        index = row.get(_TASK)
        tasks.setdefault(index if isinstance(index, int) else 0, []).append(row)
    overall = _statistics_of(body.verify_responses) if body.verify_responses else {}
    return AggregateMetrics(
        [{_TASK: index, **_statistics_of(rows)} for index, rows in sorted(tasks.items())],
        overall,
        {name: value for name, value in overall.items() if name.startswith("mean/")},
    )


def _statistics_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    scored = [row for row in rows if not row.get("mask_sample") and row.get(_FAILURE) is None]
    for row in scored:
        for name, value in _numbers(row):
            columns.setdefault(name, []).append(value)
    found: dict[str, Any] = {"num_rollouts": len(rows), "num_failed_rollouts": len(rows) - len(scored)}
    for name, values in columns.items():
        numbers = np.asarray(values, np.float64)
        found |= {
            f"mean/{name}": float(numbers.mean()),
            f"max/{name}": float(numbers.max()),
            f"min/{name}": float(numbers.min()),
            f"median/{name}": float(np.median(numbers)),
            # Gym's: of the sample, and 0 for a single rollout.
            f"std/{name}": float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0,
        }
    return found


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields each finite number of a rollout by its name: its own, its components', and its token counts."""
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    objects = [("", row), ("", usage), *((f"{name}/", row.get(name)) for name in _NESTED)]
    for prefix, inner in objects:
        for name, value in inner.items() if isinstance(inner, dict) else ():
            is_number = isinstance(value, bool | int | float) and abs(value) <= _LARGEST
            if is_number and not name.startswith("_") and name != "mask_sample":
                yield prefix + name, float(value)


FORMS: dict[str, form.Form] = {
    "/verify": VerifyForm(
        "NeMo Gym's resources server", (VerifyBody,), VerifyUrl, (VerifyReply,), _verify, ErrorBody, to_error
    )
}
"""The form whose reply repeats the body, by its path."""

ANSWERS = {
    "/seed_session": Answer(
        "Begins a NeMo Gym session, of which nothing is kept", dict[str, Any], dict[str, Any], lambda _: {}
    ),
    "/aggregate_metrics": Answer(
        "Statistics of NeMo Gym's rollouts, without the failed ones",
        MetricsBody,
        AggregateMetrics,
        lambda body: _aggregate(bodies.read(body, MetricsBody)),
    ),
    "/reverify_mode": Answer(
        "Whether rollouts may be verified again", None, Literal["stateless"], lambda _: "stateless"
    ),
}
"""The paths beside it that ask no model."""


# --- comparisons ---------------------------------------------------------------------------------------------------


class CompareBody(form.Body, kw_only=True):
    """A conversation without its last answer, and the responses that are compared as that answer.

    The `principle` stands where the rubric's template has `{reference}`.
    """

    example: ClassVar[str] = (
        '{"conversation_history": [{"role": "user", "content": "a prompt"}], "response_objs": [{"output": [{"type": '
        '"message", "content": [{"type": "output_text", "text": "a response"}]}]}, {"output": []}]}'
    )
    conversation_history: form.Conversation
    response_objs: Annotated[list[PolicyResponse], form.SOME]
    principle: str | None = None


class ComparisonResult(msgspec.Struct):
    """A criterion's verdict on two responses, by their places: both scores sum to 1, and `ranking` is from 1 to 6.

    `judge_idx` counts the rubric's criteria. If the two orders `disagreed`, it is a tie: 0.5, 0.5 and 3.5.
    """

    response_i: int
    response_j: int
    judge_idx: int
    score_1: float
    score_2: float
    ranking: float
    criterion: str
    disagreed: bool


class CompareReply(msgspec.Struct):
    """One reward for each response, the verdicts that they are made of, and statistics of these."""

    rewards: np.ndarray
    comparison_results: list[ComparisonResult]
    metrics: dict[str, float]


@form.serves("/compare", "NeMo Gym's genrm_compare", CompareReply, to_error=to_error, output=DISAGREED)
def _compare(body: CompareBody, url: form.Url) -> form.FormRequest:
    history = plain(form.check_conversation(body.conversation_history, "conversation_history"))
    num_characters = len(body.response_objs) * sum(len(message["content"]) for message in history)
    if num_characters > form.MAX_JOINED:
        raise InvalidRequest(
            f"conversation_history before each of {len(body.response_objs):,} responses makes {num_characters:,} "
            f"characters, at most {form.MAX_JOINED:,} are accepted; send fewer responses in a request"
        )
    texts = [  # empty without a message of the assistant's; reasoning and tool calls are left out
        "\n\n".join(
            text_of(item, f"response_objs[{i}].output[{j}]")
            for j, item in enumerate(response.output)
            if item.get("type", "message") == "message" and item.get("role", "assistant") == "assistant"
        )
        for i, response in enumerate(body.response_objs)
    ]
    request = GroupRequest(
        messages=[answered(history, text) for text in texts],
        groups=np.zeros(len(texts), np.int64),
        references=[body.principle] * len(texts) if body.principle else None,
    )

    def check(info: ModelInfo) -> None:
        if not info.has_components or DISAGREED not in info.attribute_names:
            raise InvalidRequest(f"{info.name} does not compare; name a judge whose rubric has `compare`")
        if body.principle and not info.takes_labels:
            raise InvalidRequest(
                f"{info.name} has no place for a principle: write {{reference}} where its template should have it, or "
                "send none"
            )
        if info.takes_labels and not body.principle:
            raise InvalidRequest(
                f"the template of {info.name} has a {{reference}}, which is the principle here: send one"
            )

    def to_reply(reply: ScoreReply, info: ModelInfo) -> CompareReply:
        assert isinstance(reply, JudgedReply) and reply.comparisons is not None
        verdicts = reply.comparisons.verdicts.ravel()
        scores = np.concatenate([verdicts, 1 - verdicts])
        statistics = {
            "mean_individual_score": float(scores.mean()),
            "std_individual_score": float(scores.std()),
            "tiebreak_usage_rate": float((verdicts == 0.5).mean()),
            "disagreement_rate": float(reply.comparisons.disagreed.mean()),
        }
        return CompareReply(rewards_of(reply), [*_results(reply.comparisons, info)], statistics)

    return form.FormRequest(request, to_reply, check)


def _results(comparisons: Comparisons, info: ModelInfo) -> Iterator[ComparisonResult]:
    for (i, j), verdicts, disagreed in zip(
        comparisons.pairs.tolist(), comparisons.verdicts.tolist(), comparisons.disagreed.tolist(), strict=True
    ):
        for k, verdict in enumerate(verdicts):
            ranking = _WORST - (_WORST - _BEST) * verdict
            name = info.attribute_names[k]
            yield ComparisonResult(i, j, k, verdict, 1 - verdict, ranking, name, disagreed[k])
