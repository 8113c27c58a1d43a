"""What NeMo Gym's `/compare` asks and gets, without a server."""

from typing import Any

import numpy as np
import pytest

from guerdon.core import ModelInfo, Score
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.judge_core import ComparedReply, Comparisons, GroupRequest
from guerdon.wire import bodies
from guerdon.wire.forms import ALL_FORMS
from guerdon.wire.forms.form import FormRequest

NAMES = ("right", "brief", "other_mass", "disagreed")
JUDGE = ModelInfo("judge", "judge", ("rewards", "attributes"), attribute_names=NAMES, takes_messages=True)
HISTORY = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]


def said(*texts: str, kind: str = "message", **more: Any) -> dict[str, Any]:
    return {"type": kind, "content": [{"type": "output_text", "text": text} for text in texts], **more}


def read(*outputs: list[Any], history: list[Any] = HISTORY, **more: Any) -> FormRequest:
    responses = [{"id": "r", "output": output} for output in outputs]
    return ALL_FORMS["/compare"].read(
        bodies.write({"conversation_history": history, "response_objs": responses, **more}), {}
    )


def test_responses_become_answers_to_one_conversation() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hidden"}]}
    call = {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "1"}
    asked = read([thought, said("4", "!", role="assistant")], [said("Let me add."), call, said("5")], [thought])
    request = asked.request
    assert isinstance(request, GroupRequest) and request.messages is not None and request.labels is None
    assert [one[-1] for one in request.messages] == [
        {"role": "assistant", "content": text} for text in ("4!", "Let me add.\n\n5", "")
    ]
    assert all(one[:-1] == HISTORY for one in request.messages)
    assert request.groups is not None and {*request.groups.tolist()} == {0}


def test_a_principle_is_every_samples_label() -> None:
    principled = ModelInfo("judge", "judge", attribute_names=NAMES, takes_labels=True)
    asked = read([said("4")], [said("5")], principle="Be brief.")
    assert asked.request is not None and asked.request.labels == ["Be brief."] * 2
    asked.check(principled)
    with pytest.raises(InvalidRequest, match="judge has no place for a principle"):
        asked.check(JUDGE)
    with pytest.raises(InvalidRequest, match="which is the principle here"):
        read([said("4")], [said("5")], principle="").check(principled)


def test_only_judges_that_compare_answer() -> None:
    for kind, names in (("judge", NAMES[:-1]), ("sum", NAMES)):
        with pytest.raises(InvalidRequest, match="rm does not compare"):
            read([said("4")], [said("5")]).check(ModelInfo("rm", kind, attribute_names=names))


def test_the_reply_has_rewards_verdicts_and_gyms_statistics() -> None:
    scores: list[Any] = [Score(0.5, np.zeros(4, np.float32)), Score(-0.5, np.zeros(4, np.float32))]
    comparisons = Comparisons(np.array([[0, 1]]), np.array([[0.8, 0.5]]), np.array([[False, True]]))
    asked = read([said("4")], [said("5")])
    told = bodies.parse(
        bodies.write(asked.to_reply(ComparedReply(scores, [1, 1], "1", comparisons=comparisons), JUDGE))
    )
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
        asked.to_reply(ComparedReply(scores, [1, 1], "1", comparisons=comparisons), JUDGE)


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
        read([said("4")], [said("5")], [said("6")], **body)
    with pytest.raises(InvalidRequest, match="response_objs"):
        read()
    with pytest.raises(InvalidRequest, match=r"response_objs\[0\].output\[0\].content\[0\] is no text"):
        read([{"type": "message", "content": [{"type": "image"}]}])
