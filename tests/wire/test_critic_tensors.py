"""A critic's operations as tensors and back."""

import dataclasses
import math

import numpy as np
import pytest

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.critic_core import CheckpointInfo, ControlRequest, CriticState, Gae, Operation, OperationInfo, TrainReport
from guerdon.errors import InvalidRequest
from guerdon.wire import critic_tensors, kserve
from guerdon.wire.tensors import InferRequest, Tensor

TOKENS = np.array([[5, 6, 7, 0], [8, 9, 1, 2]])
TARGET = np.arange(6, dtype=np.float32).reshape(2, 3)
TRAIN = {"tokens": TOKENS, "returns": TARGET, "prev_values": TARGET + 1, "mask": np.ones((2, 3), np.float32)}
REPORT = TrainReport("a", 3, "w+3", 0.5, [0.25, 0.75], 6, 0.1, 0.2, 1.5, 9e-6, 2, 0, [], 0.3, 0.4)
CHECKPOINT = CheckpointInfo("checkpoint-000001-step-3", 1, 3, "w+3", {"loss": 0.5})
STATE = CriticState(3, "w+3", 9e-6, False, True, 0, 10, 10, [CHECKPOINT])


def info(operation: Operation) -> OperationInfo:
    return OperationInfo(f"critic_{operation}", operation, "critic")


def request(arrays: dict, outputs: list[str] | None = None, **parameters) -> InferRequest:
    tensors = {}
    for name, value in arrays.items():
        if isinstance(value, list):
            tensors[name] = Tensor(name, "BYTES", (len(value),), value)
        else:
            tensors[name] = Tensor.of(name, np.asarray(value))
    return InferRequest(tensors, dict.fromkeys(outputs) if outputs else None, "7", parameters)


@pytest.mark.parametrize("operation", [Operation.TRAIN, Operation.VALIDATE])
@pytest.mark.parametrize("dtypes", [(np.int64, np.float32), (np.int32, np.float64), (np.int64, np.float16)])
def test_a_train_request_is_read_as_int64_and_float32(operation, dtypes):
    arrays = {name: value.astype(dtypes[name != "tokens"]) for name, value in TRAIN.items()}
    asked = kserve.to_request(request(arrays, train_id="a-1", timeout=2_500_000), info(operation))
    assert (asked.id, asked.timeout_s, len(asked)) == ("a-1", 2.5, 2)
    assert asked.tokens.dtype == np.int64
    for name, expected in TRAIN.items():
        assert getattr(asked, name).tolist() == expected.tolist()
        assert getattr(asked, name).dtype == (np.int64 if name == "tokens" else np.float32)


def test_the_protocols_own_id_does_not_name_a_train_request():
    asked = kserve.to_request(request(TRAIN), info(Operation.TRAIN))
    assert (asked.id, asked.timeout_s) == ("", None)


def test_a_number_beyond_float32_is_infinite_and_no_number_of_its_own():
    returns = TARGET.astype(np.float64)
    returns[1, 2] = 1e300
    asked = kserve.to_request(request(TRAIN | {"returns": returns}), info(Operation.TRAIN))
    assert math.isinf(asked.returns[1, 2])


WIDE = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": None, "returns": None}, "needs the inputs tokens, returns, .*; missing: returns, mask$"),
        ({"values": TARGET}, "unknown input 'values'; model 'critic_train' takes tokens, returns, .*, rewards"),
        ({"rewards": TARGET}, "'rewards' and 'returns' are both given: of rewards the critic makes returns"),
        ({"rewards": TARGET, "returns": None}, "'rewards' and 'prev_values' are both given"),
        ({"tokens": TOKENS[0]}, r"'tokens' must have shape \[N, T\], not \[4\]"),
        ({"tokens": TOKENS[:0]}, r"'tokens' has shape \[0, 4\]: at least one row"),
        ({"tokens": TOKENS[:, :1]}, r"'tokens' has shape \[2, 1\]"),
        ({"tokens": TOKENS.astype(np.float32)}, "'tokens' must be INT64 or INT32, not FP32"),
        ({"returns": WIDE}, r"'returns' must have shape \[N, T-1\] = \[2, 3\] beside tokens \[2, 4\], not \[2, 4\]"),
        ({"prev_values": WIDE}, r"'prev_values' .* not \[2, 4\]: column t concerns the action at token t\+1"),
        ({"mask": TARGET[:1]}, r"'mask' .* not \[1, 3\]"),
        ({"mask": TARGET.reshape(1, 2, 3)}, r"'mask' .* not \[1, 2, 3\]"),
        ({"mask": TARGET.astype(np.int64)}, "'mask' must be FP32, FP64, FP16 or BF16, not INT64"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message):
    arrays = {name: value for name, value in (TRAIN | change).items() if value is not None}
    with pytest.raises(InvalidRequest, match=message):
        kserve.to_request(request(arrays), info(Operation.TRAIN))


def rewarded(change: dict | None = None, outputs: list[str] | None = None, **parameters) -> InferRequest:
    arrays = {"tokens": TOKENS, "rewards": TARGET, "mask": TRAIN["mask"]} | (change or {})
    given = {"gamma": 1, "lam_critic": 0.5} | parameters
    made = request({name: value for name, value in arrays.items() if value is not None}, outputs)
    made.parameters.update({name: value for name, value in given.items() if value is not None})
    return made


@pytest.mark.parametrize("operation", [Operation.TRAIN, Operation.VALIDATE])
def test_rewards_stand_in_place_of_returns_and_previous_values(operation):
    asked = kserve.to_request(rewarded(lam_alpha=0.05), info(operation))
    assert asked.gae == Gae(1.0, 0.5, None, 0.05) and type(asked.gae.gamma) is float
    assert asked.rewards.tolist() == TARGET.tolist() and asked.rewards.dtype == np.float32
    assert asked.returns.shape == asked.prev_values.shape == (2, 0) and asked.advantages is None
    asked = kserve.to_request(rewarded({"rewards": np.float64([[1], [2]])}, lam_policy=0.9), info(operation))
    assert (asked.rewards.tolist(), asked.gae) == ([[1], [2]], Gae(1.0, 0.5, 0.9))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (rewarded(gamma=None), "the input rewards needs the parameter gamma"),
        (rewarded(lam_critic=None), "the input rewards needs the parameter lam_critic"),
        (rewarded(lam_policy="1"), "parameter 'lam_policy' is '1'; it must be a number"),
        (rewarded(gamma=True), "parameter 'gamma' is True; it must be a number"),
        (rewarded(lam_alpha=10**400), "parameter 'lam_alpha' is 10.*; it must be a number"),
        (rewarded({"mask": None}), "needs the inputs tokens, mask, rewards; missing: mask$"),
        (
            rewarded({"rewards": TARGET[:, :2]}),
            r"'rewards' must have shape \[N, T-1\] = \[2, 3\] or \[N, 1\] = \[2, 1\] b",
        ),
        (rewarded({"rewards": TARGET[0]}), r"'rewards' must have shape .* not \[3\]"),
        (request(TRAIN, lam_alpha=0.5), "parameter 'lam_alpha' goes with the input rewards, which is missing"),
        (request(TRAIN, ["advantages"]), "output 'advantages' needs the input rewards"),
    ],
)
def test_what_does_not_go_with_rewards_is_said(asked, message):
    with pytest.raises(InvalidRequest, match=message):
        kserve.to_request(asked, info(Operation.TRAIN))


def test_advantages_and_returns_are_tensors_and_not_in_the_report():
    report = dataclasses.replace(REPORT, advantages=TARGET, returns=TARGET + 1)
    reply = kserve.to_reply(report, rewarded(), info(Operation.TRAIN))
    found = {tensor.name: tensor for tensor in reply.outputs}
    assert list(found) == ["loss_mean", "report", "advantages", "returns"]
    assert found["advantages"].data.tolist() == TARGET.tolist() and found["advantages"].datatype == "FP32"
    assert found["returns"].data.tolist() == (TARGET + 1).tolist()
    assert b"advantages" not in found["report"].data[0]
    back = critic_tensors.from_json(TrainReport, found["report"].data[0])
    assert back == REPORT and back.advantages is None


def test_an_id_is_a_text():
    with pytest.raises(InvalidRequest, match="'train_id' is 5; it must be a text"):
        kserve.to_request(request(TRAIN, train_id=5), info(Operation.TRAIN))


@pytest.mark.parametrize("operation", [o for o in Operation if o not in (Operation.TRAIN, Operation.VALIDATE)])
@pytest.mark.parametrize("arrays", [{}, {"dummy_var": np.array([0])}])
def test_other_operations_need_no_tensor_and_take_nemo_aligners(operation, arrays):
    assert kserve.to_request(request(arrays), info(operation)) == ControlRequest(operation)


def test_save_takes_metrics_and_load_a_name():
    asked = kserve.to_request(request({"metrics": [b'{"reward": 1, "kl": 0.5}']}, timeout=1), info(Operation.SAVE))
    assert asked == ControlRequest(Operation.SAVE, metrics={"reward": 1.0, "kl": 0.5}, timeout_s=1e-6)
    asked = kserve.to_request(request({"checkpoint": [b"checkpoint-000002-step-9"]}), info(Operation.LOAD))
    assert asked.checkpoint == "checkpoint-000002-step-9"
    assert kserve.to_request(request({"checkpoint": [b""]}), info(Operation.LOAD)).checkpoint is None


@pytest.mark.parametrize(
    ("operation", "arrays", "message"),
    [
        (Operation.SAVE, {"metrics": [b"{"]}, "'metrics' is not valid JSON"),
        (Operation.SAVE, {"metrics": [b"[1]"]}, "a JSON object of names and numbers"),
        (Operation.SAVE, {"metrics": [b'{"a": true}']}, "a JSON object of names and numbers"),
        (Operation.SAVE, {"metrics": [b"{}", b"{}"]}, r"'metrics' must be BYTES \[1\], not BYTES \[2\]"),
        (Operation.SAVE, {"checkpoint": [b"a"]}, "unknown input 'checkpoint'; .* takes dummy_var, metrics"),
        (Operation.LOAD, {"checkpoint": np.array([1])}, r"'checkpoint' must be BYTES \[1\], not INT64 \[1\]"),
        (Operation.LOAD, {"checkpoint": [b"\xff"]}, "'checkpoint': not valid UTF-8 at byte 0"),
        (Operation.STATE, {"nonsense": np.array([1])}, "unknown input 'nonsense'"),
    ],
)
def test_each_wrong_control_request_has_its_own_error(operation, arrays, message):
    with pytest.raises(InvalidRequest, match=message):
        kserve.to_request(request(arrays), info(operation))


def test_an_output_that_is_not_there_is_refused():
    with pytest.raises(
        InvalidRequest, match="unknown output 'values'; model 'critic_train' gives loss_mean, report, advantages"
    ):
        kserve.to_request(request(TRAIN, ["values"]), info(Operation.TRAIN))


def outputs_of(answer, operation: Operation, outputs: list[str] | None = None) -> dict[str, Tensor]:
    reply = kserve.to_reply(answer, request({}, outputs), info(operation))
    assert (reply.model_name, reply.id) == (f"critic_{operation}", "7")
    assert reply.parameters == ({} if answer is None else {"weights_version": "w+3"})
    return {tensor.name: tensor for tensor in reply.outputs}


def test_training_answers_its_loss_and_its_report():
    found = outputs_of(REPORT, Operation.TRAIN)
    assert list(found) == ["loss_mean", "report"]
    assert (found["loss_mean"].datatype, found["loss_mean"].shape) == ("FP32", (1,))
    assert found["loss_mean"].data.tolist() == [0.5]
    assert critic_tensors.from_json(TrainReport, found["report"].data[0]) == REPORT
    assert list(outputs_of(REPORT, Operation.VALIDATE, ["loss_mean"])) == ["loss_mean"]


def test_other_operations_answer_a_status_of_zero_and_what_they_have():
    for operation, answer, names in (
        (Operation.SAVE, CHECKPOINT, ["status", "report"]),
        (Operation.LOAD, CHECKPOINT, ["status", "report"]),
        (Operation.LOAD, None, ["status"]),
        (Operation.OFFLOAD, None, ["status"]),
        (Operation.ONLOAD, None, ["status"]),
    ):
        found = outputs_of(answer, operation)
        assert list(found) == names
        assert (found["status"].datatype, found["status"].data.tolist()) == ("INT64", [0])
    assert (
        critic_tensors.from_json(CheckpointInfo, outputs_of(CHECKPOINT, Operation.SAVE)["report"].data[0]) == CHECKPOINT
    )
    found = outputs_of(STATE, Operation.STATE)
    assert list(found) == ["state"]
    assert critic_tensors.from_json(CriticState, found["state"].data[0]) == STATE


def test_numbers_that_are_not_finite_come_back_as_nan():
    report = TrainReport("a", 0, "w", np.float32(1.5), [math.nan], 1, 0.0, math.nan, math.inf, 0.0, 0, 1)
    back = critic_tensors.from_json(TrainReport, critic_tensors.to_json(report))
    assert (back.loss, back.num_skipped) == (1.5, 1)
    assert math.isnan(back.explained_variance) and math.isnan(back.grad_norm) and math.isnan(back.losses[0])


def test_an_older_sides_report_lacks_what_is_new():
    text = critic_tensors.to_json(REPORT).replace(b',"pass_losses":[],"value_mean":0.3,"return_mean":0.4', b"")
    assert b"pass_losses" not in text and b"value_mean" not in text
    back = critic_tensors.from_json(TrainReport, text)
    assert math.isnan(back.value_mean) and math.isnan(back.return_mean)
    assert dataclasses.replace(back, value_mean=0.3, return_mean=0.4) == REPORT


@pytest.mark.parametrize("updates", [0, -1, 1.5, "2", True, 2**64])
def test_the_number_of_passes_is_a_whole_number(updates):
    asked = request(TRAIN)
    asked.parameters["updates"] = 3
    assert kserve.to_request(asked, info(Operation.TRAIN)).updates == 3
    with pytest.raises(InvalidRequest, match="'updates' is 3, but 'critic_validate' makes none"):
        kserve.to_request(asked, info(Operation.VALIDATE))
    asked.parameters["updates"] = updates
    if updates == 0:
        assert kserve.to_request(asked, info(Operation.TRAIN)).updates == 0  # which the critic refuses
        return
    with pytest.raises(InvalidRequest, match=r"parameter 'updates' is .*; it must be a whole number"):
        kserve.to_request(asked, info(Operation.TRAIN))


def test_a_newer_sides_extra_key_is_left_out_and_a_missing_one_is_an_error():
    text = critic_tensors.to_json(CHECKPOINT)
    assert critic_tensors.from_json(CheckpointInfo, text[:-1] + b',"more":1}') == CHECKPOINT
    for wrong in (b"{}", b"[]", b"3", b"{"):
        with pytest.raises(ValueError):
            critic_tensors.from_json(CheckpointInfo, wrong)


def test_scores_go_the_same_way():
    model = ModelInfo("critic_infer", "critic", outputs=("values",))
    asked = request({"tokens": TOKENS, "sequence_lengths": np.array([[3], [4]])})
    assert isinstance(kserve.to_request(asked, model), ScoreRequest)
    rows = [Score(math.nan, values=np.float32([1, 2, 3])), Score(math.nan, values=np.float32([4, 5, 6, 7]))]
    reply = kserve.to_reply(ScoreReply(rows, [3, 4], "w+3"), asked, model)
    assert [(tensor.name, tensor.data.tolist()) for tensor in reply.outputs] == [
        ("values", [[1, 2, 3, 0], [4, 5, 6, 7]]),
        ("exceeded", [[0], [0]]),
    ]
    text = request({"sentences": [b"a", b"b"]}, ["values", "sequence_lengths"])
    reply = kserve.to_reply(ScoreReply(rows, [3, 4], "w+3"), text, model)
    assert [tensor.data.tolist() for tensor in reply.outputs][1] == [[3], [4]]


SQUARE = np.arange(8, dtype=np.float32).reshape(2, 4)
TREE = {
    "tokens": TOKENS, "returns": SQUARE, "prev_values": SQUARE, "mask": SQUARE,
    "parents": np.array([[-1], [0]]), "sequence_lengths": np.array([[3], [4]]),
}  # fmt: skip


def test_segments_of_trees_have_a_column_a_token():
    asked = kserve.to_request(request(TREE), info(Operation.TRAIN))
    assert (asked.parents.tolist(), asked.lengths.tolist()) == ([-1, 0], [3, 4])
    assert asked.parents.dtype == asked.lengths.dtype == np.int64
    assert asked.mask.tolist() == SQUARE.tolist()
    flat = {name: value for name, value in TREE.items() if name not in ("parents", "sequence_lengths")}
    one = flat | {"parents": np.array([-1, 0]), "sequence_lengths": np.array([1, 1])}
    one |= {name: value[:, :1] for name, value in flat.items()}
    assert kserve.to_request(request(one), info(Operation.VALIDATE)).tokens.shape == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": None}, "needs the inputs tokens, .*, mask, parents, sequence_lengths; missing: parents$"),
        ({"sequence_lengths": None}, "missing: sequence_lengths$"),
        (
            {"returns": TARGET},
            r"'returns' must have shape \[N, T\] = \[2, 4\] beside parents, not \[2, 3\]: column t of",
        ),
        ({"parents": np.array([[-1, 0]])}, r"'parents' must have shape \[2, 1\] or \[2\], not \[1, 2\]"),
        ({"parents": np.array([-1.0, 0.0])}, "'parents' must be INT64 or INT32, not FP64"),
        (
            {"rewards": SQUARE, "returns": None, "prev_values": None},
            "rewards and parents are both given, but GAE has no",
        ),
    ],
)
def test_what_does_not_go_with_trees_is_said(change, message):
    arrays = {name: value for name, value in (TREE | change).items() if value is not None}
    with pytest.raises(InvalidRequest, match=message):
        kserve.to_request(request(arrays), info(Operation.TRAIN))


SEGMENTS = {
    "tokens": np.array([[5, 6, 7], [8, 9, 0], [1, 0, 0]]),
    "sequence_lengths": np.array([[3], [2], [1]]),
    "parents": np.array([[-1], [0], [0]]),
}
VALUED = ModelInfo("critic_infer", "critic", outputs=("values",))


def test_segments_are_scored_by_path_and_answered_each():
    asked = request(SEGMENTS, ["values", "sequence_lengths", "errors"])
    score = kserve.to_request(asked, VALUED)
    assert [row.tolist() for row in score.tokens] == [[5, 6, 7, 8, 9], [5, 6, 7, 1]] and score.width == 5
    paths = [Score(math.nan, values=np.float32([1, 2, 3, 4, 5])), Score(math.nan, values=np.float32([1, 2, 3, 6]))]
    values, lengths, errors = kserve.to_reply(ScoreReply(paths, [5, 4], "w+3"), asked, VALUED).outputs
    assert values.data.tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0]]
    assert lengths.data.tolist() == [[3], [2], [1]] and [*errors.data] == [b"", b"", b""]
    failed = ScoreReply([InvalidRequest("no"), paths[1]], [5, 4], "w+3")
    values, _, errors = kserve.to_reply(failed, asked, VALUED).outputs
    assert [*errors.data] == [b"no", b"no", b""] and values.data[2].tolist() == [6, 0, 0]
    assert np.isnan(values.data[:2]).all()


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        ({"parents": np.array([-1, 2, 0])}, VALUED, "parents is 2 in row 1"),
        ({"parents": np.array([-1, 0])}, VALUED, r"'parents' must have shape \[3, 1\]"),
        ({"sequence_lengths": np.array([3, 0, 1])}, VALUED, "sequence_lengths is 0 in row 1"),
        ({"prompt_lengths": np.array([1, 1, 1])}, VALUED, "'parents' and 'prompt_lengths' are both given"),
        ({}, dataclasses.replace(VALUED, outputs=("values", "rewards")), "'rewards' is of whole sequences"),
        ({}, dataclasses.replace(VALUED, outputs=("rewards",)), "unknown input 'parents'"),
        (
            {"tokens": None, "sequence_lengths": None, "sentences": [b"a", b"b", b"c"]},
            VALUED,
            "'parents' goes with tokens, not with sentences",
        ),
    ],
)
def test_each_wrong_request_for_the_values_of_trees_has_its_own_error(change, model, message):
    arrays = {name: value for name, value in (SEGMENTS | change).items() if value is not None}
    with pytest.raises(InvalidRequest, match=message):
        kserve.to_request(request(arrays), model)
