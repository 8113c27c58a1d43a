from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import orjson
import pytest

from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.errors import InvalidRequest, Overloaded, SampleFailed, ServerFault
from guerdon.wire import schema
from guerdon.wire.score_tensors import prompt_groups, scores_of, to_reply, to_request
from guerdon.wire.tensors import InferReply, InferRequest, Tensor

INFO = ModelInfo("rm", "test", eos_token_id=2, takes_messages=True)
RICH = replace(INFO, outputs=("rewards", "attributes", "values", "step_rewards"), attribute_names=("a", "b"))
TOKENS = np.array([[5, 6, 7, 0], [8, 9, 0, 0]])
LENGTHS = np.array([[3], [2]])


def request(outputs: list[str] | None = None, parameters: dict | None = None, **arrays) -> InferRequest:
    tensors = {}
    for name, value in arrays.items():
        tensors[name] = Tensor.of_texts(name, value) if isinstance(value, list) else Tensor.of(name, np.asarray(value))
    return InferRequest(tensors, dict.fromkeys(outputs) if outputs else None, "id", parameters or {})


def rows(score_request) -> list[list[int]]:
    return [row.tolist() for row in score_request.tokens]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:, 0]])
def test_tokens_are_cut_to_their_lengths(dtype, lengths):
    asked = to_request(request(tokens=TOKENS.astype(dtype), sequence_lengths=lengths.astype(dtype)), INFO)
    assert rows(asked) == [[5, 6, 7], [8, 9]]
    assert all(row.dtype == np.int64 for row in asked.tokens)


def test_input_ids_end_with_their_first_eos_unless_lengths_say_otherwise():
    ids = np.array([[5, 2, 2, 2], [5, 6, 7, 8], [2, 5, 2, 2]], np.int32)
    assert rows(to_request(request(input_ids=ids), INFO)) == [[5, 2], [5, 6, 7, 8], [2]]
    assert rows(to_request(request(input_ids=ids), replace(INFO, eos_token_id=None))) == ids.tolist()
    given = request(input_ids=ids, sequence_lengths=np.array([3, 4, 2]))
    assert rows(to_request(given, INFO)) == [[5, 2, 2], [5, 6, 7, 8], [2, 5]]


def test_texts_and_messages():
    assert to_request(request(sentences=["a", "ü"]), INFO).texts == ["a", "ü"]
    flat = InferRequest({"sentences": Tensor("sentences", "BYTES", (2,), [b"a", b"b"])})
    assert to_request(flat, INFO).texts == ["a", "b"]
    conversation = [{"role": "user", "content": "hi"}]
    assert to_request(request(messages=[orjson.dumps(conversation).decode()]), INFO).messages == [conversation]
    raw = InferRequest({"": Tensor("", "BYTES", (1, 1), [b"raw"])})
    for content in ({}, {"content": None}, {"content": 3}, {"content": [{"type": "text", "text": "x"}]}):
        odd = [{"role": "assistant", **content}]
        texts = [orjson.dumps(messages).decode() for messages in (conversation, odd)]
        assert to_request(request(messages=texts), INFO).messages == [conversation, odd], "told in its row"
    assert to_request(raw, INFO).texts == ["raw"]


def test_hints_steps_and_parameters():
    asked = to_request(
        request(
            tokens=TOKENS,
            sequence_lengths=LENGTHS,
            group_ids=np.array([[4], [4]]),
            prompt_lengths=np.array([2, 1]),
            step_positions=np.array([[0, 2], [1, -1]]),
            parameters={"timeout": 1_500_000, "priority": 1},
        ),
        RICH,
    )
    assert asked.groups.tolist() == [4, 4]
    assert asked.prompt_lengths.tolist() == [2, 1]
    assert [row.tolist() for row in asked.steps] == [[0, 2], [1]]
    assert asked.timeout_s == 1.5
    to_request(request(sentences=["a"], parameters={"sequence_id": 3, "triton_empty": True}), INFO)  # Triton's own
    levels = [to_request(request(sentences=["a"], parameters={"priority": n}), INFO).priority for n in (1, 2, 0)]
    assert levels == sorted(levels, reverse=True)
    assert levels[-1] == 0
    assert to_request(request(sentences=["a"], parameters={"timeout": 0}), INFO).timeout_s is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "no inputs"),
        ({"sequence_lengths": LENGTHS}, "exactly one of .* has none"),
        ({"sentences": ["a", "b"], "tokens": TOKENS, "sequence_lengths": LENGTHS}, "sentences and tokens"),
        ({"tokens": TOKENS}, "needs 'sequence_lengths'"),
        ({"nonsense": TOKENS}, "unknown input 'nonsense'; model 'rm' takes sentences, messages, tokens"),
        ({"tokens": TOKENS[:0], "sequence_lengths": LENGTHS[:0]}, "empty batch"),
        ({"sentences": []}, "empty batch"),
        ({"tokens": np.int64(3), "sequence_lengths": LENGTHS}, "empty batch"),
        ({"tokens": TOKENS[0], "sequence_lengths": LENGTHS}, r"shape \[B, T\], not \[4\]"),
        ({"tokens": TOKENS, "sequence_lengths": LENGTHS[:1]}, r"'sequence_lengths' must have shape \[2, 1\]"),
        ({"tokens": TOKENS, "sequence_lengths": np.array([3, 5])}, "row 1: length 5 is not from 0 to 4"),
        ({"tokens": TOKENS, "sequence_lengths": np.array([-1, 2])}, "row 0: length -1"),
        ({"tokens": TOKENS.astype(np.float32), "sequence_lengths": LENGTHS}, "'tokens' must be INT64 or INT32"),
        ({"tokens": ["5", "6"], "sequence_lengths": LENGTHS}, "'tokens' must be INT64 or INT32, not BYTES"),
        ({"tokens": TOKENS, "sequence_lengths": LENGTHS.astype(np.uint8)}, "'sequence_lengths' must be INT64"),
        ({"input_ids": TOKENS[:, :0]}, "no tokens"),
        ({"sentences": TOKENS}, "'sentences' must be BYTES, not INT64"),
        ({"sentences": ["a"], "sequence_lengths": np.array([1])}, "goes with tokens"),
        ({"messages": ["{"]}, "row 0: not valid JSON"),
        ({"messages": ["[]"]}, "row 0: must be a JSON list"),
        ({"messages": ['[{"content": "a"}]']}, "row 0: must be a JSON list of at least one object with role"),
        ({"sentences": ["a"], "group_ids": np.array([[1, 2]])}, r"'group_ids' must have shape \[1, 1\]"),
        ({"sentences": ["a"], "prompt_lengths": np.array([1, 2])}, r"'prompt_lengths' must have shape \[1, 1\]"),
        ({"sentences": ["a"], "step_positions": np.array([1])}, r"'step_positions' must have shape \[1, K\]"),
        ({"sentences": ["a"], "parameters": {"timeout": "5"}}, "parameter 'timeout' is '5'"),
        ({"sentences": ["a"], "parameters": {"priority": -1}}, "parameter 'priority' is -1"),
        ({"sentences": ["a"], "parameters": {"temprature": 2}}, "unknown parameter 'temprature'; requests take timeo"),
        ({"sentences": ["a"], "outputs": ["nonsense"]}, "unknown output 'nonsense'; model 'rm' gives rewards"),
    ],
)
def test_each_wrong_request_has_its_own_error(arrays, message):
    with pytest.raises(InvalidRequest, match=message):
        to_request(request(**arrays), RICH)


def test_text_must_be_utf8_and_of_the_right_shape():
    with pytest.raises(InvalidRequest, match="row 1: not valid UTF-8 at byte 1"):
        to_request(InferRequest({"sentences": Tensor("sentences", "BYTES", (2, 1), [b"a", b"a\xff"])}), INFO)
    with pytest.raises(InvalidRequest, match=r"shape \[B, 1\] or \[B\], not \[1, 2\]"):
        to_request(InferRequest({"sentences": Tensor("sentences", "BYTES", (1, 2), [b"a", b"b"])}), INFO)


def test_a_model_refuses_what_it_does_not_take():
    with pytest.raises(InvalidRequest, match="unknown input 'sentences'"):
        to_request(request(sentences=["a"]), replace(INFO, takes_text=False))
    with pytest.raises(InvalidRequest, match="unknown input 'step_positions'"):
        to_request(request(sentences=["a"], step_positions=np.array([[1]])), INFO)


def outputs_of(reply: InferReply) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in reply.outputs}


def test_all_outputs_of_a_rich_model():
    results = [
        Score(1.5, np.float32([1, 2]), np.float32([1, 2, 3]), np.float32([2, 3])),
        Score(-2, np.float32([3, 4]), np.float32([4, 5]), np.float32([4])),
    ]
    asked = request(tokens=TOKENS, sequence_lengths=LENGTHS)
    reply = to_reply(ScoreReply(results, [3, 2], "9"), asked, RICH)
    found = outputs_of(reply)
    assert list(found) == ["rewards", "attributes", "values", "step_rewards", "step_counts", "exceeded"]
    assert found["rewards"].data.tolist() == [[1.5], [-2]]
    assert found["attributes"].data.tolist() == [[1, 2], [3, 4]]
    assert found["values"].data.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert np.array_equal(found["step_rewards"].data, [[2, 3], [4, np.nan]], equal_nan=True)
    assert found["step_counts"].data.tolist() == [[2], [1]]
    assert found["exceeded"].data.tolist() == [[0], [0]]
    assert {t.name: t.datatype for t in reply.outputs}["exceeded"] == "INT32"
    assert (reply.model_name, reply.id) == ("rm", "id")
    assert reply.parameters == {"weights_version": "9", "attribute_names": "a,b"}
    text = to_reply(ScoreReply(results, [3, 2], "9"), request(["values"], sentences=["a", "b"]), RICH)
    assert outputs_of(text)["values"].shape == (2, 3)


@pytest.mark.parametrize("names", [(), ("a", "b, or c"), ("a", "a")])
def test_attributes_are_named_if_requested_and_unambiguous(names):
    reply = ScoreReply([Score(1.5, np.float32([1, 2]))], [3], "9")
    plain = {"weights_version": "9"}
    assert to_reply(reply, request(outputs=["rewards"], sentences=["x"]), RICH).parameters == plain
    told = to_reply(reply, request(outputs=["rewards", "attributes"], sentences=["x"]), RICH).parameters
    assert told == plain | {"attribute_names": "a,b"}
    info = replace(RICH, attribute_names=names)
    assert to_reply(reply, request(outputs=["attributes"], sentences=["x"]), info).parameters == plain


TOLD = replace(INFO, takes_prompts=True, takes_labels=True)


def test_prompts_are_text_and_labels_any_json():
    asked = to_request(request(sentences=["a", "b"], prompts=["ü", ""], labels=['{"x":[1]}', "null"]), TOLD)
    assert asked.prompts == ["ü", ""]
    assert asked.references == [{"x": [1]}, None]
    tokens = request(tokens=TOKENS, sequence_lengths=LENGTHS, labels=["1", '"two"'])
    assert to_request(tokens, TOLD).references == [1, "two"]


@pytest.mark.parametrize(
    ("told", "info", "says"),
    [
        ({"labels": ["1"]}, TOLD, "input 'labels' has 1 rows for 2 samples"),
        ({"labels": ["1", "forty two"]}, TOLD, "input 'labels', row 1: not valid JSON: .*write text in quotes"),
        ({"labels": np.array([[1], [2]])}, TOLD, "input 'labels' must be BYTES, not INT64"),
        ({"prompts": ["1"] * 3}, TOLD, "input 'prompts' has 3 rows for 2 samples"),
        ({"prompts": ["1", "2"]}, INFO, "unknown input 'prompts'"),
        ({"labels": ["1", "2"]}, replace(TOLD, takes_labels=False), "unknown input 'labels'"),
    ],
)
def test_what_is_wrong_with_prompts_and_labels_is_named(told, info, says):
    with pytest.raises(InvalidRequest, match=says):
        to_request(request(sentences=["a", "b"], **told), info)


def test_only_what_is_requested_is_sent_and_what_is_not_there_is_left_out():
    reply = ScoreReply([Score(1)], [2], "1")
    asked = request(["exceeded", "rewards", "step_rewards", "values"], tokens=TOKENS[:1], sequence_lengths=LENGTHS[:1])
    assert list(outputs_of(to_reply(reply, asked, RICH))) == ["exceeded", "rewards"]
    trlx = to_reply(reply, request(input_ids=TOKENS[:1]), INFO)
    assert outputs_of(trlx)["rewards"].shape == (1,)


def test_a_failed_row_fails_the_request_unless_errors_are_asked_for():
    def reply() -> ScoreReply:
        scores = [Score(1, values=np.float32([1, 2, 3])), SampleFailed("the reward is not finite")]
        return ScoreReply(scores, [3, 2], "1")

    arrays = {"tokens": TOKENS, "sequence_lengths": LENGTHS}
    with pytest.raises(SampleFailed, match=r"^row 1: the reward is not finite$"):
        to_reply(reply(), request(**arrays), RICH)
    with pytest.raises(SampleFailed, match=r"^row 1: "):
        to_reply(reply(), request(["rewards"], **arrays), RICH)
    found = outputs_of(to_reply(reply(), request(["rewards", "values", "errors"], **arrays), RICH))
    assert np.array_equal(found["rewards"].data, [[1], [np.nan]], equal_nan=True)
    assert found["errors"].data == [b"", b"the reward is not finite"]
    assert found["errors"].shape == (2, 1)
    assert found["values"].data[0].tolist() == [1, 2, 3, 0]
    assert np.isnan(found["values"].data[1]).all()


def test_attributes_of_rows_that_all_failed_keep_their_names():
    failed = ScoreReply([SampleFailed("no"), SampleFailed("no")], [3, 2], "1")
    asked = request(["rewards", "attributes", "errors"], tokens=TOKENS, sequence_lengths=LENGTHS)
    reply = to_reply(failed, asked, RICH)
    assert reply.parameters["attribute_names"] == "a,b"
    assert np.isnan(outputs_of(reply)["attributes"].data).all() and outputs_of(reply)["attributes"].shape == (2, 2)


def test_rows_that_all_failed_have_every_output_that_was_asked_for():
    failed = ScoreReply([SampleFailed("no"), SampleFailed("no")], [3, 2], "1")
    outputs = ["rewards", "attributes", "values", "step_rewards", "step_counts", "sequence_lengths", "errors"]
    for arrays, width in (
        ({"tokens": TOKENS, "sequence_lengths": LENGTHS}, 4),
        ({"input_ids": TOKENS}, 4),
        ({"sentences": ["a", "b"]}, 1),
    ):
        found = outputs_of(to_reply(failed, request(outputs, **arrays), RICH))
        assert list(found) == outputs
        assert found["values"].shape == (2, width) and np.isnan(found["values"].data).all()
        assert found["step_rewards"].shape == (2, 1) and np.isnan(found["step_rewards"].data).all()
        assert found["step_counts"].data.tolist() == [[0], [0]]


def test_groups_are_the_same_in_every_process():
    assert prompt_groups(["a", "ü", "", "a"]).tolist() == [3904355907, 1675192789, 0, 3904355907]
    assert prompt_groups([]).tolist() == []


def test_what_is_no_proper_text_has_a_group_too():
    assert len({*prompt_groups(["\ud800", "\ud801", "?"]).tolist()}) == 3


def test_an_error_that_befell_many_requests_is_told_to_each_as_its_own():
    shared = ServerFault("the server cannot compute any more")
    for _ in range(3):
        with pytest.raises(ServerFault, match=r"^row 1: the server cannot compute any more$"):
            scores_of(ScoreReply([Score(1.0), shared], [1, 1], "v"))
    assert str(shared) == "the server cannot compute any more"
    with pytest.raises(Overloaded) as told:
        scores_of(ScoreReply([Overloaded("full", 2.5)], [1], "v"))
    assert told.value.retry_after_s == 2.5


def test_an_output_may_be_one_number_of_the_kinds_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    share = schema.Field("share", "FP32", "B 1", "answer.share", lambda info: True, "a share")
    monkeypatch.setitem(schema.MODEL_OUTPUTS, "share", share)
    results = [Score(1.0, answer=SimpleNamespace(share=0.5)), SampleFailed("no share")]
    asked = request(["share", "errors"], sentences=["a", "b"])
    found = outputs_of(to_reply(ScoreReply(results, [1, 1], "9"), asked, INFO))
    np.testing.assert_array_equal(found["share"].data, np.float32([[0.5], [np.nan]]))
