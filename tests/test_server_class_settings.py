"""NeMo-Aligner's server classes: invalid batch settings, and read-only arrays."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http

import test_critic_server_trainer as critic
import test_reward_model_server as reward
from guerdon.errors import ConfigError
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig

MAKE: list[Callable[..., Any]] = [reward.make, critic.make]


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Records all warnings, of all threads and also repeated ones."""
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield seen
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_queue_delay_microseconds", -1),
        ("max_queue_delay_microseconds", math.nan),
        ("max_queue_delay_microseconds", math.inf),
        ("strip_sequence_length_to_multiple", 0),
        ("strip_sequence_length_to_multiple", -8),
    ],
)
def test_invalid_batch_settings_are_refused(make: Callable[..., Any], name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}") as refused:
        make(**{name: value})
    assert refused.value.help.startswith("give ")


@pytest.mark.parametrize("make", MAKE)
def test_the_smallest_settings_are_accepted(make: Callable[..., Any]) -> None:
    make(max_queue_delay_microseconds=0, strip_sequence_length_to_multiple=1)
    make(max_queue_delay_microseconds=0.5, strip_sequence_length_to_multiple=None)


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
@pytest.mark.parametrize("make", MAKE)
def test_rows_of_a_request_cause_no_warning(
    make: Callable[..., Any], module: Any, warned: list[warnings.WarningMessage]
) -> None:
    server, config = make(), ServerConfig(port=0, grpc_port=0)
    arrays = {"tokens": np.full((3, 5), 7), "sequence_lengths": np.full((3, 1), 5)}
    with RunningServer(server.build_service(), config) as running:
        url = running.http_url if module is tritonclient.http else running.grpc_url or ""
        with module.InferenceServerClient(url.partition("://")[2]) as client:
            inputs = [module.InferInput(name, array.shape, "INT64") for name, array in arrays.items()]
            for made, array in zip(inputs, arrays.values(), strict=True):
                made.set_data_from_numpy(array)
            client.infer("reward_model" if make is reward.make else "critic_infer", inputs)
    assert not [warning for warning in warned if "not writable" in str(warning.message)]


def test_read_only_arrays_cause_no_warning(warned: list[warnings.WarningMessage]) -> None:
    tokens, lengths = np.full((2, 5), 7), np.full((2, 1), 5)
    tokens.flags.writeable = lengths.flags.writeable = False
    _, values = critic.make().run_inference({"inputs": tokens, "sequence_length": lengths})
    rewards = reward.make().infer(tokens=tokens, sequence_lengths=lengths)["rewards"]
    assert values.shape == (2, 5) and rewards.tolist() == [[35.0], [35.0]]
    assert not [warning for warning in warned if "not writable" in str(warning.message)]
