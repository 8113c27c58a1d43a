"""Rollouts by vLLM: the weights that it is given, and where it and a GPU are there, what it makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from guerdon.actor.generation import make_generator
from guerdon.actor.rollouts import Prompt
from guerdon.actor.settings import PolicyConfig, RolloutConfig
from guerdon.actor.vllm import VllmGenerator, merged_weights
from guerdon.engine.policies import load_policy
from guerdon.errors import ConfigError
from guerdon.training.policy import PolicyTrainer

INSTALLED = importlib.util.find_spec("vllm") is not None


def trainer(folder: Path, **settings: object) -> PolicyTrainer:
    zoo.tokenizer(folder)
    zoo.language_model("llama", folder, hidden_size=128, num_attention_heads=2, num_key_value_heads=2)
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


@pytest.mark.skipif(INSTALLED, reason="vLLM is installed")
def test_without_vllm_the_run_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not installed") as refused:
        make_generator(trainer(tmp_path / "model"), RolloutConfig(engine="vllm"))
    assert "guerdon[vllm]" in refused.value.help


def test_log_probs_that_vllm_cannot_tell_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only as they are after top_k"):
        VllmGenerator(trainer(tmp_path / "model").policy, RolloutConfig(engine="vllm", temperature=0.8, top_k=5))


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
    want = policy.logprobs([r.tokens for r in rollouts], np.array([r.prompt_length for r in rollouts])).numpy()
    for rollout, row in zip(rollouts, want, strict=True):
        np.testing.assert_allclose(rollout.logprobs, row[: rollout.response_length], atol=0.1)
