"""Settings from YAML: what is taken, and what is refused with help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guerdon.config import ModelConfig, ServerConfig, check, from_mapping, read_yaml
from guerdon.errors import ConfigError


def test_a_mapping_becomes_nested_settings() -> None:
    config = from_mapping(ServerConfig, {"port": 8000, "grpc_port": None, "models": [{"model": "m", "mean": 1}]})
    assert config == ServerConfig(port=8000, grpc_port=None, models=[ModelConfig(model="m", mean=1.0)])
    assert isinstance(config.models[0].mean, float)


@pytest.mark.parametrize(
    ("data", "message", "help_text"),
    [
        ({"prot": 1}, "unknown setting prot", "known here: critic, grpc_port, host"),
        ({"models": [{"model": "m"}, {"nmae": "x"}]}, "unknown setting models[1].nmae", "attribute_weights"),
        ({"port": "5555"}, "port is '5555'", "type int"),
        ({"port": True}, "port is True", "type int"),
        ({"models": {"model": "m"}}, "models must be a list", "- item"),
        ({"models": ["m"]}, "models[0] must be a mapping, not str", "key: value"),
        ({"models": [{"dtype": "int8"}]}, "models[0].dtype is 'int8'", "auto, float32, bfloat16, float16"),
        ({"models": [{"attribute_weights": [1, "a"]}]}, "models[0].attribute_weights[1] is 'a'", "type float"),
        ([1], "the file must be a mapping, not list", "key: value"),
    ],
)
def test_what_is_wrong_is_named(data: Any, message: str, help_text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(ServerConfig, data)
    assert message in str(caught.value)
    assert help_text in caught.value.help


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ServerConfig(port=-1), "port is -1"),
        (ServerConfig(grpc_port=65536), "grpc_port is 65536"),
        (ServerConfig(max_requests=0), "max_requests is 0"),
        (ModelConfig(max_length=0), "max_length is 0"),
        (ModelConfig(max_batch_tokens=-5), "max_batch_tokens is -5"),
        (ModelConfig(std=0.0), "std is 0"),
        (ModelConfig(std=float("nan")), "std is nan"),
    ],
)
def test_values_out_of_range_are_refused(settings: ModelConfig | ServerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(settings)


def test_defaults_are_in_range() -> None:
    check(ServerConfig())
    check(ModelConfig())


def test_yaml_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml"):
        read_yaml(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("port: [1,\nmodels: x")
    with pytest.raises(ConfigError, match="line 2"):
        read_yaml(broken)


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read_yaml(tmp_path / "empty.yaml") == {}
