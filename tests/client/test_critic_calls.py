"""A critic's calls as tensors and back."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from guerdon import errors
from guerdon.client.calls import ModelSignature, make_request
from guerdon.client.critic_calls import make_train_request, prepare_control, prepare_infer, prepare_train
from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.critic_core import (
    CheckpointInfo,
    ControlRequest,
    CriticState,
    Gae,
    Operation,
    OperationInfo,
    TrainReport,
    TrainRequest,
)
from guerdon.wire import kserve, signature
from guerdon.wire.tensors import InferReply, Tensor

CRITIC = ModelInfo("critic_infer", "critic", outputs=("values",))
COMBINED = ModelInfo("critic_infer", "critic", outputs=("values", "rewards"))
TRAIN = OperationInfo("critic_train", Operation.TRAIN, "critic")
REPORT = TrainReport("a", 3, "w+3", 0.5, [0.25, 0.75], 6, 0.1, 0.2, 1.5, 9e-6, 2, 0, [0.5], 0.3, 0.4)
CHECKPOINT = CheckpointInfo("checkpoint-000001-step-3", 1, 3, "w+3", {"loss": 0.5})
STATE = CriticState(3, "w+3", 9e-6, False, True, 0, 10, 10, [CHECKPOINT])


def described(info: ModelInfo | OperationInfo) -> ModelSignature:
    return ModelSignature.from_metadata(signature.metadata(info))


def test_rows_are_padded_to_the_longest_and_copied() -> None:
    tokens = [np.array([5, 6, 7, 8]), [9, 10]]
    returns = [np.array([1.0, 2.0, 3.0]), [4]]
    request = make_train_request(tokens, returns, returns, [[0, 1, 1], [True]])
    assert request.tokens.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert request.returns.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert request.mask.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert (request.tokens.dtype, request.prev_values.dtype, request.mask.dtype) == (np.int64, np.float32, np.float32)
    assert len(request.id) == 32
    returns[0][0] = 9.0
    assert request.returns[0, 0] == 1.0


def test_arrays_are_rows_of_one_length() -> None:
    tokens, target = np.arange(8).reshape(2, 4).astype(np.int32), np.ones((2, 3))
    request = make_train_request(tokens, target, target, target, "mine")
    assert request.tokens.tolist() == tokens.tolist()
    assert (request.id, request.tokens.shape, request.mask.shape) == ("mine", (2, 4), (2, 3))
    target[:] = 5
    assert request.mask.tolist() == [[1, 1, 1], [1, 1, 1]]


FORMS = {
    "lists": ([[5, 6, 7, 8], [9, 10]], None),
    "tuples": (((5, 6, 7, 8), (9, 10)), None),
    "arrays": ([np.array([5, 6, 7, 8]), np.array([9, 10], np.int32)], None),
    "an object array": (np.array([[5, 6, 7, 8], [9, 10]], dtype=object), None),
    "a padded array": (np.array([[5, 6, 7, 8], [9, 10, 0, 0]]), [4, 2]),
    "padded lists": ([[5, 6, 7, 8], [9, 10, 0, 0]], np.array([4, 2])),
    "tensors": (torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([4, 2])),
}


@pytest.mark.parametrize("form", FORMS)
def test_training_and_values_take_the_same_forms_of_rows(form: str) -> None:
    tokens, lengths = FORMS[form]
    inferred = make_request(tokens=tokens, lengths=lengths)
    assert [row.tolist() for row in inferred.tokens or ()] == [[5, 6, 7, 8], [9, 10]]
    others = [[1.0, 2.0, 3.0], [4.0]] if lengths is None else np.array([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
    trained = make_train_request(tokens, others, others, others, lengths=lengths)
    assert trained.tokens.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    for numbers in (trained.returns, trained.prev_values, trained.mask):
        assert numbers.tolist() == [[1, 2, 3], [4, 0, 0]]


@pytest.mark.parametrize("tokens", [[], 7, "abc", [1, 2], [[1, 2], "ab"], [[1, 2], [0.5]], np.zeros((1, 2, 3), int)])
def test_training_and_values_refuse_the_same_rows_with_the_same_words(tokens: Any) -> None:
    with pytest.raises(errors.InvalidRequest) as inferred:
        make_request(tokens=tokens)
    with pytest.raises(errors.InvalidRequest) as trained:
        make_train_request(tokens, [[1]], [[1]], [[1]])
    assert str(inferred.value) == str(trained.value)


def test_lengths_go_with_tokens_only() -> None:
    with pytest.raises(errors.InvalidRequest, match="lengths go with tokens, not with texts"):
        make_request(texts=["a"], lengths=[1])


ROWS = {"tokens": [[1, 2, 3], [4, 5]], "returns": [[1, 2], [3]], "prev_values": [[1, 2], [3]], "mask": [[1, 1], [1]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "tokens must be a list of at least one sample, not empty"),
        ({"returns": [[1, 2]]}, "returns has 1 rows, tokens 2"),
        ({"mask": [[1, 1], [1, 1]]}, r"mask\[1\] has 2 entries for 2 tokens; it must have one fewer"),
        ({"prev_values": np.zeros((2, 3))}, r"prev_values\[0\] has 3 entries for 3 tokens"),
        ({"tokens": [[1, 2, 3], []]}, r"returns\[1\] has 1 entries for 0 tokens"),
        ({"tokens": [[1, 2, 3], [4.5, 1]]}, r"tokens\[1\] must be a flat list of integers"),
        ({"returns": [[1, 2], ["x"]]}, r"returns\[1\] must be a flat list of numbers"),
        ({"returns": [[1, [2]], [3]]}, r"returns\[0\] cannot be read as numbers"),
        ({"tokens": [1, 2]}, r"tokens is one sample, and must be a list of samples"),
        ({"lengths": [3]}, "lengths has 1 entries for 2 rows of tokens"),
        ({"lengths": [3, 3]}, r"lengths\[1\] is 3, and tokens\[1\] has 2 ids"),
        ({"lengths": [3, 0]}, r"lengths\[1\] is 0"),
        ({"lengths": [3, 1.5]}, "lengths must be a flat list of integers"),
        ({"lengths": [3, 2], "mask": [[1, 1], []]}, r"mask\[1\] has 0 entries for 2 tokens"),
    ],
)
def test_a_malformed_train_call_says_which_argument_and_row(change: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=message):
        make_train_request(**(ROWS | change))


def test_a_train_request_reaches_the_server_as_it_was() -> None:
    request = make_train_request(**ROWS, train_id="a-1", updates=3)
    sent = prepare_train("critic_train", request).build(described(TRAIN), 2.5)
    assert sent.outputs == {"report": True}
    got = kserve.to_request(sent, TRAIN)
    assert isinstance(got, TrainRequest)
    assert (got.id, got.timeout_s, got.updates) == ("a-1", 2.5, 3)
    for name in ROWS:
        np.testing.assert_array_equal(getattr(got, name), getattr(request, name))


def test_rewards_reach_the_server_in_place_of_returns() -> None:
    given = {name: ROWS[name] for name in ("tokens", "mask")}
    for rewards, expected in (([1, 2], [[1], [2]]), (np.ones(2), [[1], [1]]), ([[1, 2], [3]], [[1, 2], [3, 0]])):
        request = make_train_request(**given, rewards=rewards, gae=Gae(0.9, 0.8, lam_alpha=0.1), updates=2)
        sent = prepare_train("critic_train", request).build(described(TRAIN), 2.5)
        assert set(sent.inputs) == {"tokens", "rewards", "mask"}
        assert list(sent.outputs or ()) == ["report", "advantages", "returns"]
        got = kserve.to_request(sent, TRAIN)
        assert isinstance(got, TrainRequest) and got.rewards is not None
        assert (got.rewards.tolist(), got.gae, got.updates) == (expected, Gae(0.9, 0.8, None, 0.1), 2)
    assert make_train_request(**given, rewards=[1, 2]).gae == Gae(1.0, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1, 2]}, "returns is given beside rewards; give returns, prev_values and mask, or rewards and"),
        ({"mask": None}, "mask is missing; give returns"),
        ({"prev_values": None}, "prev_values is missing"),
        ({"gae": Gae()}, "gae goes with rewards, which are missing"),
        ({"returns": None, "prev_values": None, "rewards": [1, 2, 3]}, "rewards has 3 rows, tokens 2"),
        ({"returns": None, "prev_values": None, "rewards": [[1], [2]]}, r"rewards\[0\] has 1 entries for 3 tokens"),
        ({"returns": None, "prev_values": None, "rewards": [1, "x"]}, "rewards must be a flat list of numbers"),
    ],
)
def test_what_does_not_go_together_in_a_train_call_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=message):
        make_train_request(**(ROWS | change))


def test_segments_reach_the_server_with_their_parents_and_lengths() -> None:
    rows = {"tokens": [[5, 6, 7], [8]], "returns": [[0, 1, 2], [3]], "prev_values": [[0, 4, 5], [6]]}
    request = make_train_request(**rows, mask=[[0, 1, 1], [1]], parents=[-1, 0])
    got = kserve.to_request(prepare_train("critic_train", request).build(described(TRAIN), 2.5), TRAIN)
    assert isinstance(got, TrainRequest) and got.parents is not None and got.lengths is not None
    assert (got.parents.tolist(), got.lengths.tolist()) == ([-1, 0], [3, 1])
    assert (got.returns.tolist(), got.mask.tolist()) == ([[0, 1, 2], [3, 0, 0]], [[0, 1, 1], [1, 0, 0]])
    padded = make_train_request(
        np.ones((2, 3), int), *np.ones((3, 2, 3)), lengths=[3, 1], parents=np.array([-1, 0], np.int32)
    )
    assert padded.lengths is not None and padded.lengths.tolist() == [3, 1]
    assert padded.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    for change, message in (
        ({"parents": [-1]}, "parents has 1 entries for 2 rows of tokens"),
        ({"parents": [-1, 0.5]}, "parents must be a flat list of integers"),
        ({"parents": None}, r"returns\[0\] has 3 entries for 3 tokens; it must have one fewer"),
        ({"mask": [[1, 1], [1]]}, r"mask\[0\] has 2 entries for 3 tokens; beside parents it must have as many"),
        ({"rewards": [1, 2], "returns": None, "prev_values": None}, "rewards and parents are both given"),
    ):
        with pytest.raises(errors.InvalidRequest, match=message):
            make_train_request(**({**rows, "mask": [[0, 1, 1], [1]], "parents": [-1, 0]} | change))


def test_an_older_server_is_not_asked_about_trees() -> None:
    parents = np.array([-1, 0])
    trained = prepare_train("critic_train", make_train_request([[5, 6], [7]], *[[[0, 1], [1]]] * 3, parents=parents))
    valued = prepare_infer("critic_infer", make_request(tokens=[[5, 6], [7]]), parents=parents)
    for call, info in ((trained, TRAIN), (valued, CRITIC)):
        now = described(info)
        assert call.build(now, 1.0).inputs["parents"].data.tolist() == [[-1], [0]]
        older = dataclasses.replace(now, inputs={n: t for n, t in now.inputs.items() if n != "parents"})
        with pytest.raises(errors.InvalidRequest, match="takes no parents: its server is older; update it"):
            call.build(older, 1.0)


def test_advantages_come_back_beside_the_report() -> None:
    request = make_train_request(**{n: ROWS[n] for n in ("tokens", "mask")}, rewards=[1, 2])
    errand = prepare_train("critic_train", request)
    sent = errand.build(described(TRAIN), 1.0)
    table = np.arange(4, dtype=np.float32).reshape(2, 2)
    reply = kserve.to_reply(dataclasses.replace(REPORT, advantages=table, returns=table + 1), sent, TRAIN)
    report = errand.parse(reply, 0.0, 0.0)
    np.testing.assert_array_equal(report.advantages, table)
    np.testing.assert_array_equal(report.returns, table + 1)
    reply.outputs[1] = Tensor.of("advantages", table[:1])
    with pytest.raises(errors.ServerFault, match="no advantages and returns of the mask's shape"):
        errand.parse(reply, 0.0, 0.0)
    with pytest.raises(errors.ServerFault, match="no advantages and returns"):
        errand.parse(kserve.to_reply(REPORT, sent, TRAIN), 0.0, 0.0)


def test_an_older_server_is_not_asked_for_what_it_would_not_do() -> None:
    described_before = described(TRAIN)
    older = dataclasses.replace(described_before, outputs={"loss_mean": "FP32", "report": "BYTES"})
    for more in ({"updates": 2}, {"returns": None, "prev_values": None, "rewards": [1, 2]}):
        request = make_train_request(**(ROWS | more))
        prepare_train("critic_train", request).build(described_before, 1.0)
        with pytest.raises(errors.InvalidRequest, match="is an older server's, which knows neither updates nor"):
            prepare_train("critic_train", request).build(older, 1.0)
    prepare_train("critic_train", make_train_request(**ROWS)).build(older, 1.0)


def test_a_report_comes_back() -> None:
    errand = prepare_train("critic_train", make_train_request(**ROWS))
    sent = errand.build(described(TRAIN), 1.0)
    assert errand.parse(kserve.to_reply(REPORT, sent, TRAIN), 0.0, 0.0) == REPORT
    for outputs in ([], [Tensor("report", "BYTES", (1,), [b"{}"])], [Tensor("report", "BYTES", (1,), [b"nonsense"])]):
        with pytest.raises(errors.ServerFault, match="sent no 'report', or not a TrainReport"):
            errand.parse(InferReply("critic_train", "1", list(outputs)), 0.0, 0.0)


def test_a_server_that_would_train_twice_is_not_trained() -> None:
    nemo = ModelSignature("critic_train", ("1",), "python", described(TRAIN).inputs, {"loss_mean": "FP32"})
    with pytest.raises(errors.InvalidRequest, match=r"gives no report.*train on it twice"):
        prepare_train("critic_train", make_train_request(**ROWS)).build(nemo, 1.0)


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (ControlRequest(Operation.SAVE, metrics={"reward": 1.5}), CHECKPOINT),
        (ControlRequest(Operation.SAVE), None),
        (ControlRequest(Operation.LOAD, "checkpoint-000001-step-3"), CHECKPOINT),
        (ControlRequest(Operation.LOAD), None),
        (ControlRequest(Operation.OFFLOAD), None),
        (ControlRequest(Operation.ONLOAD), None),
        (ControlRequest(Operation.STATE), STATE),
    ],
)
def test_each_other_operation_there_and_back(request_: ControlRequest, answer: Any) -> None:
    info = OperationInfo(f"critic_{request_.operation}", request_.operation, "critic")
    errand = prepare_control(info.name, request_)
    sent = errand.build(described(info), 3.0)
    got = kserve.to_request(sent, info)
    assert isinstance(got, ControlRequest)
    assert (got.operation, got.checkpoint, got.metrics) == (info.operation, request_.checkpoint, request_.metrics)
    assert got.timeout_s == 3.0
    assert errand.parse(kserve.to_reply(answer, sent, info), 0.0, 0.0) == answer


def scores(rows: list[Any], info: ModelInfo, needs_rewards: bool | None = None, **samples: Any) -> Any:
    needs_rewards = "rewards" in info.outputs if needs_rewards is None else needs_rewards
    errand = prepare_infer("critic_infer", make_request(**samples), needs_rewards=needs_rewards)
    sent = errand.build(described(info), 5.0)
    assert sent.parameters["timeout"] == 5_000_000
    lengths = [0 if isinstance(row, Exception) else len(row.values) for row in rows]
    return errand.parse(kserve.to_reply(ScoreReply(rows, lengths, "w+1"), sent, info), 0.25, 0.5)


def test_values_come_without_padding_and_rewards_on_request() -> None:
    rows = [Score(1.5, values=np.float32([1, 2, 3])), Score(-2, values=np.float32([4]))]
    for samples in ({"tokens": [[7, 8, 9], [7]]}, {"texts": ["abc", "d"]}):
        found = scores(rows, CRITIC, **samples)
        assert [row.tolist() for row in found.values] == [[1, 2, 3], [4]]
        assert (found.rewards, found.errors, found.weights_version) == (None, [None, None], "w+1")
        assert (found.queue_s, found.compute_s, len(found)) == (0.25, 0.5, 2)
        assert scores(rows, COMBINED, **samples).rewards.tolist() == [1.5, -2]
        assert scores(rows, COMBINED, needs_rewards=False, **samples).rewards is None
    assert found.raise_for_failed() is found


def test_a_failed_sample_is_nan_with_its_error() -> None:
    rows = [errors.SampleFailed("no"), Score(-2, values=np.float32([4, 5]))]
    found = scores(rows, COMBINED, tokens=[[7, 8], [7, 9]])
    assert found.errors == ["no", None]
    assert np.isnan(found.values[0]).all()
    assert (len(found.values[0]), found.values[1].tolist()) == (2, [4, 5])
    assert np.array_equal(found.rewards, [np.nan, -2], equal_nan=True)
    with pytest.raises(errors.SampleFailed, match="1 of 2 samples failed; row 0: no"):
        found.raise_for_failed()
    found = scores(rows[:1], CRITIC, tokens=[[7, 8]])
    assert (found.errors, len(found.values[0])) == (["no"], 2)
    assert np.isnan(found.values[0]).all()


def test_a_value_or_reward_that_is_not_finite_is_a_failed_sample() -> None:
    rows = [Score(1, values=np.float32([1, np.nan])), Score(np.inf, values=np.float32([4, 5]))]
    found = scores(rows, COMBINED, tokens=[[7, 8], [7, 9]])
    assert found.errors == ["the server gave a value that is not finite", "the server gave no finite reward"]
    assert np.isnan(found.rewards).all()


def test_a_reply_of_another_length_is_the_servers_fault() -> None:
    errand = prepare_infer("critic_infer", make_request(tokens=[[1, 2]]))
    table = Tensor.of("values", np.zeros((2, 2), np.float32))
    for outputs in ([], [table], [Tensor.of("values", table.data[:1]), Tensor.of("rewards", table.data)]):
        with pytest.raises(errors.ServerFault, match=r"no values|values of 2 samples; 1 were|2 rewards for 1"):
            errand.parse(InferReply("critic_infer", "1", outputs), 0.0, 0.0)


def test_rewards_that_are_needed_must_be_there() -> None:
    errand = prepare_infer("critic_infer", make_request(tokens=[[1, 2]]), needs_rewards=True)
    assert "rewards" in (errand.build(described(COMBINED), 1.0).outputs or {})
    with pytest.raises(errors.InvalidRequest, match=r"'critic_infer' gives no rewards; .*--reward-model"):
        errand.build(described(CRITIC), 1.0)
