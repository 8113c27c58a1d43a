import numpy as np
import pytest

from guerdon.core import ModelInfo
from guerdon.critic_core import Operation, OperationInfo
from guerdon.wire import signature

ModelConfigParser = pytest.importorskip(
    "pytriton.model_config.parser", reason="nvidia-pytriton is not installed"
).ModelConfigParser

OUTPUTS = ("rewards", "attributes", "values", "step_rewards")
RICH = ModelInfo("rm", "test", outputs=OUTPUTS, attribute_names=("a", "b"))


def test_metadata_lists_errors_and_the_config_does_not():
    metadata = signature.metadata(RICH)
    assert {entry["name"]: (entry["datatype"], entry["shape"]) for entry in metadata["outputs"]} == {
        "rewards": ("FP32", [-1, 1]),
        "attributes": ("FP32", [-1, 2]),
        "values": ("FP32", [-1, -1]),
        "step_rewards": ("FP32", [-1, -1]),
        "step_counts": ("INT64", [-1, 1]),
        "exceeded": ("INT32", [-1, 1]),
        "sequence_lengths": ("INT64", [-1, 1]),
        "errors": ("BYTES", [-1, 1]),
    }
    assert metadata["inputs"][0] == {"name": "sentences", "datatype": "BYTES", "shape": [-1, 1]}
    assert metadata["versions"] == ["1"]
    parsed = ModelConfigParser.from_dict(signature.config(RICH, 1000))
    assert parsed.batching
    assert [spec.name for spec in parsed.outputs] == [
        "rewards", "attributes", "values", "step_rewards", "step_counts", "exceeded",
    ]  # fmt: skip
    assert {spec.name: spec.dtype for spec in parsed.inputs}["sentences"] is np.bytes_


def test_prompts_and_labels_are_inputs_if_a_function_reads_them():
    def inputs(**takes: bool) -> list[str]:
        info = ModelInfo("f", "function", takes_tokens=False, **takes)
        parsed = ModelConfigParser.from_dict(signature.config(info, 1000))
        assert [spec.name for spec in parsed.inputs] == [e["name"] for e in signature.metadata(info)["inputs"]]
        assert all(spec.dtype is np.bytes_ and spec.optional for spec in parsed.inputs if spec.name in takes)
        return [spec.name for spec in parsed.inputs]

    common = ["sentences", "group_ids", "prompt_lengths"]
    assert inputs() == common
    assert inputs(takes_prompts=True) == [*common, "prompts"]
    assert inputs(takes_prompts=True, takes_labels=True) == [*common, "prompts", "labels"]


def operation(name: Operation) -> OperationInfo:
    return OperationInfo(f"critic_{name}", name, "critic")


def test_a_critics_values_stand_under_nemo_aligners_names():
    alone = ModelInfo("critic_infer", "critic", outputs=("values",))
    parsed = ModelConfigParser.from_dict(signature.config(alone, 1000))
    assert [(spec.name, spec.dtype, spec.shape) for spec in parsed.outputs] == [
        ("values", np.float32, (-1,)),
        ("exceeded", np.int32, (1,)),
    ]
    assert [entry["name"] for entry in signature.metadata(alone)["outputs"]] == [
        "values", "exceeded", "sequence_lengths", "errors",
    ]  # fmt: skip
    combined = ModelInfo("critic_infer", "critic", outputs=("values", "rewards"))
    assert signature.config(combined, 1000)["output"][1] == {"name": "rewards", "data_type": "TYPE_FP32", "dims": [1]}


@pytest.mark.parametrize("name", [Operation.TRAIN, Operation.VALIDATE])
def test_training_takes_whole_tensors_and_gives_the_loss(name):
    parsed = ModelConfigParser.from_dict(signature.config(operation(name), 1000))
    assert not parsed.batching
    assert [(spec.name, spec.dtype, spec.shape, spec.optional) for spec in parsed.inputs] == [
        ("tokens", np.int64, (-1, -1), False),
        ("returns", np.float32, (-1, -1), False),
        ("prev_values", np.float32, (-1, -1), False),
        ("mask", np.float32, (-1, -1), False),
    ]
    assert [(spec.name, spec.dtype, spec.shape) for spec in parsed.outputs] == [("loss_mean", np.float32, (1,))]
    metadata = signature.metadata(operation(name))
    assert metadata["outputs"] == [
        {"name": "loss_mean", "datatype": "FP32", "shape": [1]},
        {"name": "report", "datatype": "BYTES", "shape": [1]},
        {"name": "advantages", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "returns", "datatype": "FP32", "shape": [-1, -1]},
    ]
    # Rewards stand for others, and a client of the config sends all that it lists.
    names = ["tokens", "returns", "prev_values", "mask", "rewards", "parents", "sequence_lengths"]
    assert [entry["name"] for entry in metadata["inputs"]] == names
    assert metadata["inputs"][-2] == {"name": "parents", "datatype": "INT64", "shape": [-1, 1]}


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "more"),
    [
        (Operation.SAVE, ["dummy_var", "metrics"], ["status"], ["report"]),
        (Operation.LOAD, ["dummy_var", "checkpoint"], ["status"], ["report"]),
        (Operation.OFFLOAD, ["dummy_var"], ["status"], []),
        (Operation.ONLOAD, ["dummy_var"], ["status"], []),
        (Operation.STATE, ["dummy_var"], ["state"], []),
    ],
)
def test_each_other_operation_needs_no_input(name, inputs, outputs, more):
    parsed = ModelConfigParser.from_dict(signature.config(operation(name), 1000))
    assert not parsed.batching
    assert [(spec.name, spec.optional) for spec in parsed.inputs] == [(i, True) for i in inputs]
    assert [spec.name for spec in parsed.outputs] == outputs
    metadata = signature.metadata(operation(name))
    assert [entry["name"] for entry in metadata["outputs"]] == [*outputs, *more]
    assert (metadata["name"], metadata["inputs"][0]["shape"]) == (f"critic_{name}", [1])
