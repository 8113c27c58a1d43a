"""Settings from YAML and Python: which are accepted, and what errors say."""

import math
import typing
from pathlib import Path
from typing import Any

import pytest

from guerdon.errors import ConfigError
from guerdon.settings.config import (
    AdapterConfig,
    ComponentConfig,
    CriticConfig,
    ModelConfig,
    RewardConfig,
    ServerConfig,
)
from guerdon.settings.fields import check_settings, from_mapping
from guerdon.settings.yaml_files import read_yaml


def test_a_mapping_becomes_nested_settings() -> None:
    config = from_mapping(ServerConfig, {"port": 8000, "grpc_port": None, "models": [{"model": "m", "mean": 1}]})
    assert config == ServerConfig(port=8000, grpc_port=None, models=[ModelConfig(model="m", mean=1.0)])
    assert isinstance(config.models[0].mean, float)


@pytest.mark.parametrize(
    ("data", "message", "help_text"),
    [
        ({"prot": 1}, "unknown setting prot", "critic, dashboard, dashboard_samples, data_parallel"),
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
def test_mistakes_are_named(data: Any, message: str, help_text: str) -> None:
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
        (ServerConfig(request_timeout_s=0.0), "request_timeout_s is 0"),
        (
            ServerConfig(models=[ModelConfig(), ModelConfig(name="b", recheck_share=7.0)]),
            r"models\[1\]\.recheck_share is 7",
        ),
        (ServerConfig(critic=CriticConfig(std=-1.0)), r"critic\.std is -1"),
        (ServerConfig(critic=CriticConfig(save_every=1)), r"critic\.save_every is 1.* no folder"),
        (ModelConfig(max_length=0), "max_length is 0"),
        (ModelConfig(max_batch_tokens=-5), "max_batch_tokens is -5"),
        (ModelConfig(std=0.0), "std is 0"),
        (ModelConfig(std=float("nan")), "std is nan"),
    ],
)
def test_values_out_of_range_are_refused(settings: ModelConfig | ServerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(settings)


def test_defaults_are_in_range() -> None:
    check_settings(ServerConfig())
    check_settings(ModelConfig())
    check_settings(CriticConfig())


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cls", [ModelConfig, CriticConfig, ServerConfig])
def test_every_number_is_finite(cls: type, number: float) -> None:
    checked = 0
    for name, hint in typing.get_type_hints(cls).items():
        kinds = {hint, *typing.get_args(hint)}
        if kinds & {float, list[float]}:
            value = number if float in {hint, *typing.get_args(hint)} and hint != list[float] else [0.5, number]
            with pytest.raises(ConfigError, match=f"{name} is .*(inf|nan)") as caught:
                check_settings(cls(**{name: value}))
            assert caught.value.help == "give a finite number"
            checked += 1
    assert checked >= 1


def test_a_critic_refuses_float16() -> None:
    with pytest.raises(ConfigError, match="float16") as caught:
        check_settings(CriticConfig(dtype="float16"))
    assert "bfloat16 or float32" in caught.value.help
    check_settings(ModelConfig(dtype="float16"))


@pytest.mark.parametrize(
    ("best", "mode", "resolved"),
    [
        ("loss", "auto", "min"),
        ("reward", "auto", "max"),
        ("explained_variance", "auto", "max"),
        (None, "auto", "max"),
        ("loss", "max", "max"),
        ("reward", "min", "min"),
    ],
)
def test_the_best_loss_is_the_smallest_by_default(best: Any, mode: Any, resolved: str) -> None:
    assert CriticConfig(keep_best=best, keep_best_mode=mode).best_mode == resolved


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward_revision": "v2"}, "reward_revision is v2.* no reward model"),
        ({"reward_pooling": "mean"}, "reward_pooling is mean.* no reward model"),
        ({"reward_mean": 0.0}, "reward_mean is 0.0.* no reward model"),
        ({"reward_std": 2.0}, "reward_std is 2.0.* no reward model"),
        ({"reward_attribute_weights": [1.0]}, "reward_attribute_weights is .*.* no reward model"),
        ({"reward_model": "r", "reward_std": 0.0}, "reward_std is 0"),
    ],
)
def test_settings_that_need_a_reward_model(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(CriticConfig(**settings))


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ModelConfig(model="m", attribute_weights=[0.0, 0.0]), "attribute_weights"),
        (
            ModelConfig(model="m", adapters=[AdapterConfig("a", "b", attribute_weights=[0.0])]),
            r"adapters\[0\]\.attribute_weights",
        ),
        (CriticConfig(model="m", reward_model="r", reward_attribute_weights=[0.0, -0.0]), "reward_attribute_weights"),
    ],
)
def test_weights_that_make_every_reward_0_are_refused(config: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*, by which every reward is 0"):
        check_settings(config)


def summed(*components: dict[str, Any], **more: Any) -> ServerConfig:
    models = [{"model": "m", "name": "a"}, {"model": "n", "name": "b"}]
    given = {"models": models, "rewards": [{"components": list(components), **more}]}
    return typing.cast(ServerConfig, from_mapping(ServerConfig, given))


def test_a_sum_of_rewards() -> None:
    config = summed({"model": "a", "normalize": "given", "mean": 1}, {"model": "b", "weight": 0, "clip": 2})
    check_settings(config)
    a, b = config.rewards[0].components
    assert (config.rewards[0].name, a.weight, a.normalize, a.mean, a.std) == ("reward_model", 1.0, "given", 1.0, None)
    assert (b.weight, b.normalize, b.clip) == (0.0, "none", 2.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (summed(), r"rewards\[0\] has no components"),
        (summed({"model": "c"}), r"rewards\[0\]\.components\[0\]\.model is 'c'.*not in `models:`"),
        (summed({"weight": 1}), r"components\[0\]\.model is ''"),
        (summed({"model": "a"}, {"model": "a"}), r"rewards\[0\] has a twice"),
        (summed({"model": "a", "weight": 0}), r"rewards\[0\]: all weights are 0"),
        (summed({"model": "a"}, clip=0), r"rewards\[0\]\.clip is 0"),
        (summed({"model": "a", "clip": -1}), r"components\[0\]\.clip is -1"),
        (summed({"model": "a", "weight": math.nan}), r"components\[0\]\.weight is nan"),
        (summed({"model": "a", "normalize": "given"}), "normalize is given.* neither mean nor std"),
        (summed({"model": "a", "mean": 0}), r"components\[0\]\.mean is 0.*normalize is none"),
        (summed({"model": "a", "normalize": "running", "std": 2}), r"\.std is 2.*normalize is running"),
        (summed({"model": "a", "normalize": "given", "std": 0}), r"rewards\[0\]\.components\[0\]\.std is 0"),
        (summed({"model": "a"}, name="b"), "two models are named b"),
        (
            ServerConfig(critic=CriticConfig(), models=[ModelConfig(name="critic_save")]),
            "two models are named critic_s",
        ),
        (ServerConfig(rewards=[RewardConfig(components=[ComponentConfig("a")])]), "not in `models:`"),
    ],
)
def test_invalid_sums(config: ServerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_settings(config)
    assert caught.value.help


def test_unreadable_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml"):
        read_yaml(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("port: [1,\nmodels: x")
    with pytest.raises(ConfigError, match="line 2"):
        read_yaml(broken)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models:\n- {model: f, name: a, name: b}\n", "name is given twice"),
        ("port: 1\nmodels: []\nport: 2\n", "port is given twice"),
    ],
)
def test_duplicate_keys_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_yaml(tmp_path / "twice.yaml")


def test_a_key_may_override_a_merged_one(tmp_path: Path) -> None:
    (tmp_path / "merged.yaml").write_text("a: &a {x: 1, y: 2}\nc: &c {z: 3}\nb: {<<: *a, y: 3}\nd: {<<: [*a, *c]}\n")
    merged = read_yaml(tmp_path / "merged.yaml")
    assert (merged["b"], merged["d"]) == ({"x": 1, "y": 3}, {"x": 1, "y": 2, "z": 3})


@pytest.mark.parametrize("name", ["a,b", "a/b", "", "a b", "a?", "a;b=c", "a\n"])
def test_invalid_model_names(name: str) -> None:
    models = [ModelConfig(model="x", name="fine-1.5_b")]
    for config in (
        ServerConfig(models=[*models, ModelConfig(model="x", name=name)]),
        ServerConfig(models=models, rewards=[RewardConfig(name, [ComponentConfig("fine-1.5_b")])]),
        ServerConfig(critic=CriticConfig(model="x", name=name or "/")),
    ):
        with pytest.raises(ConfigError, match="cannot be a model's name"):
            check_settings(config)
    check_settings(ServerConfig(models=models))


def test_a_component_may_not_have_the_name_of_the_sum() -> None:
    config = ServerConfig(models=[ModelConfig(model="x", name="score")])
    check_settings(config)
    config.rewards = [RewardConfig("total", [ComponentConfig("score")])]
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.components\[0\]\.model is score"):
        check_settings(config)


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read_yaml(tmp_path / "empty.yaml") == {}


def test_choices_from_python_are_checked_and_named_by_their_section() -> None:
    with pytest.raises(ConfigError, match=r"policy\.optimizer is 'sgd'") as caught:
        check_settings(CriticConfig(optimizer="sgd"), "policy.")  # type: ignore[arg-type]
    assert caught.value.help == "choose one of adamw, adamw_8bit"
    with pytest.raises(ConfigError, match=r"policy\.betas is"):
        check_settings(CriticConfig(betas=[2.0, 0.9]), "policy.")


MISTAKEN = """
prot: 8000
request_timeout_s: soon
models:
  - model: m
    dtype: float32
  - {model: n, name: n,
     nmae: x, max_length: 0}
critic:
  model: c
  betas: [0.9, 0.98]
  loss_clip_val: -1
"""


def test_all_mistakes_in_a_file_are_listed_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(MISTAKEN)
    with pytest.raises(ConfigError) as caught:
        from_mapping(ServerConfig, read_yaml(file))
    assert str(caught.value) == "5 settings are wrong"
    assert caught.value.__notes__ == [
        f"{file}, line 2: unknown setting prot; did you mean port?",
        f"{file}, line 3: request_timeout_s is 'soon'; give a value of type float",
        f"{file}, line 8: unknown setting models[1].nmae; did you mean name?",
        f"{file}, line 8: models[1].max_length is 0; give at least 1",
        f"{file}, line 12: critic.loss_clip_val is -1.0; give at least 0",
    ]


def test_a_single_mistake_in_a_file_is_the_error(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("models:\n- {model: m}\nprot: 1\n")
    with pytest.raises(ConfigError, match=r"server\.yaml, line 3: unknown setting prot$") as caught:
        from_mapping(ServerConfig, read_yaml(file))
    assert caught.value.help.startswith("did you mean port? known here: ")
    file.write_text("models: {model: m}\n")
    with pytest.raises(ConfigError, match=r"server\.yaml, line 1: models must be a list"):
        from_mapping(ServerConfig, read_yaml(file))


def test_all_contradictions_are_listed() -> None:
    critic = CriticConfig(model="c", lr_schedule="linear", save_every=3)
    with pytest.raises(ConfigError) as caught:
        check_settings(ServerConfig(dashboard=False, dashboard_samples=True, critic=critic))
    assert [note.partition(" is ")[0] for note in caught.value.__notes__] == [
        "critic.lr_schedule",
        "critic.save_every",
        "dashboard_samples",
    ]
