"""NeMo Gym's forms without a server: what is read of a rollout, what comes back, and `/compare`."""

import re
import statistics
from typing import Any

import numpy as np
import pytest

from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.judge_core import Comparisons, GroupRequest, JudgedReply
from guerdon.wire import bodies
from guerdon.wire.forms import ALL_FORMS, ANSWERS, gym
from guerdon.wire.forms.form import FormRequest

PLAIN = ModelInfo("rm", "checkpoint", takes_messages=True)
LINEAR = ModelInfo(
    "total", "sum", ("rewards", "attributes"), attribute_names=("a", "b", "seen"), attribute_weights=(2.0, -0.5, 0.0)
)


def part(text: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def said(*texts: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [part(text) for text in texts]}


def row(asked: Any = "What is 2+2?", output: list[Any] | None = None, **more: Any) -> dict[str, Any]:
    response = {"id": "resp", "output": [said("4")] if output is None else output}
    return {"responses_create_params": {"input": asked}, "response": response, **more}


def read(value: Any, **query: str) -> FormRequest:
    return gym.FORMS["/verify"].read(bodies.write(value), query)


def messages(value: Any) -> list[dict[str, Any]]:
    request = read(value).request
    assert request is not None and request.messages is not None
    return request.messages[0]


def reply(value: Any, result: Any, info: ModelInfo = PLAIN) -> Any:
    written = read(value).to_reply(ScoreReply([result], [1], "1"), info)
    return bodies.parse(bodies.write(written))


def test_a_rollout_becomes_a_conversation() -> None:
    assert messages(row()) == [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
    asked = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [part("What is ", "input_text"), part("2+2?", "input_text")]},
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "4"},
        said("Wait."),
        {"type": "message", "role": "user", "content": "Well?"},
    ]
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hidden"}]},
        said("Let me", " add."),
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "2"},
        {"type": "function_call_output", "call_id": "2", "output": "4"},
        {"type": "message", "role": "user", "content": "a simulated user's, which is no answer"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    value = row(asked, output)
    value["responses_create_params"]["instructions"] = "You add."
    assert messages(value) == [
        {"role": "system", "content": "You add."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "Wait."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Let me add.\n\nNo."},
    ]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (row(output=[]), "the response has no message of the assistant's, so that there is nothing to score"),
        (row(output=[{"type": "function_call", "name": "add"}]), "has no message of the assistant's"),
        (row(output=[{"role": "assistant", "content": None}]), r"response.output\[0\].content is null"),
        (
            row([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
            r"responses_create_params.input\[0\].content\[0\] is no text",
        ),
    ],
)
def test_what_cannot_be_read_fails_its_sample(value: dict[str, Any], why: str) -> None:
    asked = read(value)
    assert asked.request is None
    told = asked.to_reply(ScoreReply([], [], "1"), PLAIN)
    assert told["mask_sample"] and told["instance_config"] == {"mask_sample": True}
    assert told["failure_kind"] == "InvalidRequest" and told["_ng_failure_class"] == "judge_failed"
    assert re.search(why, told["failure_reason"])


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "the body is a list; send an object"),
        ({"response": {"output": []}}, "the body has no 'responses_create_params'; send an object such as"),
        ({"responses_create_params": {}, "response": {"output": []}}, "responses_create_params has no 'input'"),
        (row(7), r"responses_create_params.input is 7; send a string, or a list"),
        ({**row(), "response": {"output": "4"}}, "response.output is a string; send a list"),
    ],
)
def test_a_body_of_another_form_is_refused(value: Any, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read(value)
    with pytest.raises(InvalidRequest, match="unknown key"):
        read(row(), labels="x")


def test_the_label_is_the_first_known_key_or_the_one_that_is_named() -> None:
    def labels(value: dict[str, Any], **query: str) -> Any:
        request = read(value, **query).request
        assert request is not None
        return request.references

    answers = {"verifier_metadata": {"city": "Paris"}, "answer": "a", "ground_truth": ["g"], "expected_answer": "e"}
    value = row(**answers, label=None, target="t")
    assert labels(value) == ["e"]
    for name, label in (("expected_answer", ["g"]), ("ground_truth", "a"), ("answer", {"city": "Paris"})):
        del value[name]
        assert labels(value) == [label]
    assert labels(value, label="target") == ["t"]
    assert labels(value, label="missing") is None and labels(row()) is None


def test_the_reply_is_the_row_with_the_reward() -> None:
    value = row(model="rm", _ng_task_index=3, instance_config={"seed": 1}, expected_answer="4")
    told = reply(value, Score(0.1))
    assert told == {**value, "reward": 0.1, "mask_sample": False, "instance_config": {"seed": 1, "mask_sample": False}}
    assert read(value).model == "rm"


def test_components_that_make_the_reward_sum_to_it() -> None:
    attributes = np.array([0.1, 0.7, 9.0], np.float32)
    told = reply(row(), Score(-0.15, attributes), LINEAR)
    assert told["components"] == {"a": 0.1, "b": 0.7, "seen": 9.0}
    assert told["reward_components"] == pytest.approx({"a": 0.2, "b": -0.35})
    assert told["reward"] == pytest.approx(sum(told["reward_components"].values()), rel=1e-6)
    # Large components that nearly cancel: NeMo-RL refuses a reward that is not their sum to 1e-5.
    large = np.array([1e4 / 2, 2e4 - 0.01, 0], np.float32)
    told = reply(row(), Score(0.01, large), LINEAR)
    assert told["reward"] == pytest.approx(sum(told["reward_components"].values()), rel=1e-6)
    clipped = ModelInfo(
        "total", "sum", ("rewards", "attributes"), attribute_names=("a", "b", "seen"), has_components=True
    )
    told = reply(row(), Score(1.0, attributes), clipped)
    assert told["reward"] == 1.0 and "reward_components" not in told and told["components"]["seen"] == 9.0


@pytest.mark.parametrize("result", [SampleFailed("no number"), Score(float("nan"))])
def test_a_failed_sample_is_masked_and_has_no_score(result: Any) -> None:
    before = row(reward=0.9, reward_components={"a": 0.9}, components={"a": 1}, instance_config={"seed": 1})
    told = reply(before, result, LINEAR)
    assert told["reward"] == 0 and told["mask_sample"] is True
    assert told["instance_config"] == {"seed": 1, "mask_sample": True}
    assert told["failure_kind"] == "SampleFailed" and told["failure_reason"]
    assert told["_ng_failure_class"] == "judge_failed"
    assert not {"reward_components", "components"} & set(told)
    # A later success leaves nothing of the failure.
    again = reply(told, Score(0.5))
    assert again == {**row(), "reward": 0.5, "mask_sample": False, "instance_config": {"seed": 1, "mask_sample": False}}


def test_statistics_leave_failed_rollouts_out() -> None:
    rows = [
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 1.0, "mask_sample": False, "components": {"a": 2}},
        {"_ng_task_index": 1, "_ng_rollout_index": 1, "reward": 0.25, "response": {"usage": {"output_tokens": 8}}},
        {"_ng_task_index": 0, "reward": 0.5, "is_right": True},
        {"_ng_task_index": 0, "reward": 0.0, "mask_sample": True},
        {"_ng_task_index": 0, "reward": 0.0, "_ng_failure_class": "judge_failed"},
    ]
    told = bodies.parse(bodies.write(ANSWERS["/aggregate_metrics"].to_reply(bodies.write({"verify_responses": rows}))))
    overall, rewards = told["agent_metrics"], [1.0, 0.25, 0.5]
    assert overall["mean/reward"] == pytest.approx(statistics.mean(rewards))
    assert overall["std/reward"] == pytest.approx(statistics.stdev(rewards))
    assert overall["median/reward"] == 0.5 and overall["min/reward"] == 0.25 and overall["max/reward"] == 1
    assert overall["mean/components/a"] == 2 and overall["mean/output_tokens"] == 8 and overall["mean/is_right"] == 1
    assert overall["num_rollouts"] == 5 and overall["num_failed_rollouts"] == 2
    assert told["key_metrics"] == {name: value for name, value in overall.items() if name.startswith("mean/")}
    first, second = told["group_level_metrics"]
    assert (first["_ng_task_index"], first["num_rollouts"], first["num_failed_rollouts"]) == (0, 3, 2)
    assert first["mean/reward"] == 0.5 and first["std/reward"] == 0 and second["mean/reward"] == 0.625
    nothing = ANSWERS["/aggregate_metrics"].to_reply(b'{"verify_responses": []}')
    assert (nothing.agent_metrics, nothing.group_level_metrics, nothing.key_metrics) == ({}, [], {})
    with pytest.raises(InvalidRequest, match="verify_responses"):
        ANSWERS["/aggregate_metrics"].to_reply(b"{}")


NAMES = ("right", "brief", "other_mass", "disagreed")
JUDGE = ModelInfo(
    "judge", "judge", ("rewards", "attributes"), attribute_names=NAMES, takes_messages=True, has_components=True
)
HISTORY = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]


def compare_said(*texts: str, kind: str = "message", **more: Any) -> dict[str, Any]:
    return {"type": kind, "content": [{"type": "output_text", "text": text} for text in texts], **more}


def compare_read(*outputs: list[Any], history: list[Any] = HISTORY, **more: Any) -> FormRequest:
    responses = [{"id": "r", "output": output} for output in outputs]
    return ALL_FORMS["/compare"].read(
        bodies.write({"conversation_history": history, "response_objs": responses, **more}), {}
    )


def test_responses_become_answers_to_one_conversation() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hidden"}]}
    call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"}
    asked = compare_read(
        [thought, compare_said("4", "!", role="assistant")],
        [compare_said("Let me add."), call, compare_said("5")],
        [thought],
    )
    request = asked.request
    assert isinstance(request, GroupRequest) and request.messages is not None and request.references is None
    assert [one[-1] for one in request.messages] == [
        {"role": "assistant", "content": text} for text in ("4!", "Let me add.\n\n5", "")
    ]
    assert all(one[:-1] == HISTORY for one in request.messages)
    assert request.groups is not None and {*request.groups.tolist()} == {0}


def test_a_principle_is_every_samples_label() -> None:
    principled = ModelInfo("judge", "judge", attribute_names=NAMES, takes_labels=True, has_components=True)
    asked = compare_read([compare_said("4")], [compare_said("5")], principle="Be brief.")
    assert asked.request is not None and asked.request.references == ["Be brief."] * 2
    asked.check(principled)
    with pytest.raises(InvalidRequest, match="judge has no place for a principle"):
        asked.check(JUDGE)
    with pytest.raises(InvalidRequest, match="which is the principle here"):
        compare_read([compare_said("4")], [compare_said("5")], principle="").check(principled)


def test_only_judges_that_compare_answer() -> None:
    for kind, names in (("judge", NAMES[:-1]), ("sum", NAMES)):
        with pytest.raises(InvalidRequest, match="rm does not compare"):
            compare_read([compare_said("4")], [compare_said("5")]).check(ModelInfo("rm", kind, attribute_names=names))


def test_the_reply_has_rewards_verdicts_and_gyms_statistics() -> None:
    scores: list[Any] = [Score(0.5, np.zeros(4, np.float32)), Score(-0.5, np.zeros(4, np.float32))]
    comparisons = Comparisons(np.array([[0, 1]]), np.array([[0.8, 0.5]]), np.array([[False, True]]))
    asked = compare_read([compare_said("4")], [compare_said("5")])
    told = bodies.parse(bodies.write(asked.to_reply(JudgedReply(scores, [1, 1], "1", comparisons=comparisons), JUDGE)))
    assert told["rewards"] == [0.5, -0.5]
    first, second = told["comparison_results"]
    assert first == {
        "response_i": 0,
        "response_j": 1,
        "judge_idx": 0,
        "criterion": "right",
        "disagreed": False,
        "score_1": 0.8,
        "score_2": pytest.approx(0.2),
        "ranking": pytest.approx(2),
    }
    assert (second["judge_idx"], second["ranking"], second["disagreed"]) == (1, 3.5, True)
    std = np.std([0.8, 0.2, 0.5, 0.5])
    assert told["metrics"] == pytest.approx(
        {
            "mean_individual_score": 0.5,
            "std_individual_score": std,
            "tiebreak_usage_rate": 0.5,
            "disagreement_rate": 0.5,
        }
    )
    scores[1] = SampleFailed("nothing")
    with pytest.raises(SampleFailed, match="row 1: nothing"):
        asked.to_reply(JudgedReply(scores, [1, 1], "1", comparisons=comparisons), JUDGE)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"history": []}, "conversation_history"),
        ({"history": [{"content": "no role"}]}, r"conversation_history\[0\].role"),
        ({"history": [{"role": "user", "content": "x" * (1 << 23)}]}, "send fewer responses in a request"),
    ],
)
def test_what_cannot_be_read_is_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        compare_read([compare_said("4")], [compare_said("5")], [compare_said("6")], **body)
    with pytest.raises(InvalidRequest, match="response_objs"):
        compare_read()
    with pytest.raises(InvalidRequest, match=r"response_objs\[0\].output\[0\].content\[0\] is no text"):
        compare_read([{"type": "message", "content": [{"type": "image"}]}])
