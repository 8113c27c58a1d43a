"""Rollouts by vLLM: the weights that it gets, and its samples, if vLLM and a GPU are there."""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from guerdon.actor.generation import make_generator
from guerdon.actor.rollouts import Prompt
from guerdon.actor.vllm_generator import VllmGenerator, merged_weights
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.errors import ConfigError
from guerdon.settings.actors import PolicyConfig, RolloutConfig
from guerdon.training.policy_trainer import PolicyTrainer

INSTALLED = importlib.util.find_spec("vllm") is not None


def trainer(folder: Path, **settings: object) -> PolicyTrainer:
    zoo.tokenizer(folder)
    zoo.language_model("qwen2", folder, hidden_size=128, num_attention_heads=2, num_key_value_heads=2)  # has biases
    config = PolicyConfig(model=str(folder), **settings)
    return PolicyTrainer(load_policy(config), config, keeps_reference=False)


def changed(policy: PolicyTrainer) -> PolicyTrainer:
    """With other weights, as after some steps."""
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name or ("lora" not in name and parameter.requires_grad):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return policy


@pytest.mark.parametrize("settings", [{}, {"lora": 4}, {"lora": 4, "lora_targets": r".*\.(q|v)_proj"}], ids=str)
def test_merged_weights_are_the_models_under_its_checkpoints_names(settings: dict, tmp_path: Path) -> None:
    policy = changed(trainer(tmp_path / "model", **settings))
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    tokens = torch.arange(5, 30)[None]
    with torch.inference_mode(), policy.engine.plain_attention():
        want = policy.model(tokens).logits
        assert (other(tokens).logits - want).abs().max() > 0.1
        other.load_state_dict(dict(merged_weights(policy.model)), strict=True)
        torch.testing.assert_close(other(tokens).logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*zoo.DECODERS, *zoo.LANGUAGE_MODELS])
def test_the_names_are_those_of_the_checkpoint_whatever_the_model_calls_its_weights(name: str, tmp_path: Path) -> None:
    folder = zoo.language_model(name, tmp_path)
    stored = zoo.tensors(folder)
    made = dict(merged_weights(load_policy(PolicyConfig(model=str(folder))).model))
    assert made.keys() == stored.keys()
    assert all(torch.equal(made[key], stored[key]) for key in made)


class Vllm(types.ModuleType):
    """What the generator calls of vLLM, with an engine that notes the requests and refuses the third."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("vllm")
        self.added: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.drawn: list[int] = []
        self.model_executor = MagicMock()
        self.LLM = lambda **_: types.SimpleNamespace(llm_engine=self)
        self.TokensPrompt = self.SamplingParams = types.SimpleNamespace
        monkeypatch.setitem(sys.modules, "vllm", self)

    def add_request(self, name: str, _: Any, parameters: Any) -> None:
        if len(self.added) == 2:
            raise RuntimeError("the engine is full")
        self.added[name] = parameters

    def step(self) -> list[Any]:
        """All that is asked for, finished with the tokens that are `drawn`."""
        logprobs = [{token: types.SimpleNamespace(logprob=-1.0)} for token in self.drawn]
        made = types.SimpleNamespace(token_ids=self.drawn, logprobs=logprobs, finish_reason="stop")
        return [types.SimpleNamespace(request_id=name, finished=True, outputs=[made]) for name in self.added]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names

    def reset_prefix_cache(self) -> None:
        pass


def asked_of(*lengths: int) -> list[Prompt]:
    return [Prompt(i, np.full(n, zoo.FIRST_TOKEN), "") for i, n in enumerate(lengths)]


def test_requests_ask_for_what_there_is_room_for_and_none_outlives_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = Vllm(monkeypatch)
    generator = make_generator(trainer(tmp_path / "model"), RolloutConfig(engine="vllm"))
    config = RolloutConfig(max_new_tokens=16, min_new_tokens=9)
    with pytest.raises(RuntimeError, match="full"):
        list(generator.generate(asked_of(20, zoo.MAX_LENGTH - 5, 20), num=1, config=config, seed=(0, 1)))
    assert [(p.max_tokens, p.min_tokens) for p in vllm.added.values()] == [(16, 9), (5, 5)]
    assert set(vllm.added) <= set(vllm.aborted)
    with pytest.raises(ConfigError, match=f"prompt 1 has {zoo.MAX_LENGTH} tokens"):
        list(generator.generate(asked_of(20, zoo.MAX_LENGTH), num=1, config=config, seed=(0, 1)))


@pytest.mark.parametrize("last", [zoo.EOS, zoo.FIRST_TOKEN])
def test_an_eos_is_told_from_a_stop_text(last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(monkeypatch)
    vllm.drawn = [zoo.FIRST_TOKEN, last]
    generator = make_generator(trainer(tmp_path / "model"), RolloutConfig(engine="vllm"))
    ((rollout,),) = generator.generate(asked_of(20), num=1, config=RolloutConfig(), seed=(0, 1))
    assert rollout.is_end and rollout.has_eos == (last == zoo.EOS)


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_without_vllm_the_run_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not installed") as refused:
        make_generator(trainer(tmp_path / "model"), RolloutConfig(engine="vllm"))
    assert "pip install '.[vllm]'" in refused.value.help


def test_log_probs_that_vllm_cannot_tell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only after top_k"):
        VllmGenerator(trainer(tmp_path / "model").loaded, RolloutConfig(engine="vllm", temperature=0.8, top_k=5))


@pytest.mark.slow
@pytest.mark.skipif(not (INSTALLED and torch.cuda.is_available()), reason="needs vLLM and a GPU")
@pytest.mark.parametrize("settings", [{}, {"lora": 4}], ids=str)
def test_vllm_generates_with_the_weights_as_they_are(settings: dict, tmp_path: Path) -> None:
    policy = trainer(tmp_path / "model", device="cuda", dtype="bfloat16", **settings)
    generator = make_generator(policy, RolloutConfig(engine="vllm"))
    config, random = RolloutConfig(max_new_tokens=16), np.random.default_rng(0)
    asked = [Prompt(i, random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, 20), "") for i in range(4)]
    changed(policy)
    generator.sync()
    groups = list(generator.generate(asked, num=4, config=config, seed=(0, 1)))
    assert sorted(group[0].group for group in groups) == [0, 1, 2, 3]
    rollouts = [rollout for group in groups for rollout in group]
    want = policy.logprobs([r.tokens for r in rollouts], np.array([r.prompt_length for r in rollouts])).logprobs.numpy()
    for rollout, row in zip(rollouts, want, strict=True):
        np.testing.assert_allclose(rollout.logprobs, row[: rollout.response_length], atol=0.1)
