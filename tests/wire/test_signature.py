from __future__ import annotations

import numpy as np
from pytriton.model_config.parser import ModelConfigParser

from guerdon.core import ModelInfo
from guerdon.wire import signature

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
        "errors": ("BYTES", [-1, 1]),
    }
    assert metadata["inputs"][0] == {"name": "sentences", "datatype": "BYTES", "shape": [-1, 1]}
    assert metadata["versions"] == ["1"]
    parsed = ModelConfigParser.from_dict(signature.config(RICH))
    assert parsed.batching
    assert [spec.name for spec in parsed.outputs] == [
        "rewards", "attributes", "values", "step_rewards", "step_counts", "exceeded",
    ]  # fmt: skip
    assert {spec.name: spec.dtype for spec in parsed.inputs}["sentences"] is np.bytes_
