"""A function that answers in the middle of a response: what it writes is read, and learnt by nobody."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from actor import environments
from actor.rollouts import rollout
from actor.runs import parts, tiny_policy
from guerdon.actor.experience import Experience, measure
from guerdon.actor.generation import TransformersGenerator, check_environment
from guerdon.actor.ppo import ppo_advantages
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.actor.update import update
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.errors import CheckpointError, ConfigError, RunFailed
from guerdon.settings.actors import PolicyConfig, PPOConfig, PPORunConfig, RolloutConfig, check_actor
from guerdon.training.policy_trainer import PolicyTrainer

STOPS = list("aeinot")


@pytest.fixture(scope="module", params=["llama", "gptj"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that decodes packed, and one that decodes padded."""
    return zoo.tokenizer(zoo.language_model(request.param, tmp_path_factory.mktemp("policy")))


def trainer_of(folder: Path) -> PolicyTrainer:
    config = PolicyConfig(model=str(folder), learning_rate=1e-2, weight_decay=0.0)
    return PolicyTrainer(load_policy(config), config)


def generated(trainer: PolicyTrainer, prompts: list[Prompt], name: str, **more: Any) -> list[Rollout]:
    config = RolloutConfig(environment=f"actor.environments:{name}", **{"max_new_tokens": 40, "stop": STOPS, **more})
    groups = TransformersGenerator(trainer.loaded, trainer.engine).generate(prompts, num=3, config=config, seed=(1,))
    return sorted((made for group in groups for made in group), key=lambda made: (made.group, made.index))


def some_prompts() -> list[Prompt]:
    numbers = np.random.default_rng(0)
    return [Prompt(i, numbers.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n), "") for i, n in enumerate((5, 9, 3))]


def test_what_the_function_writes_is_read_by_the_policy(folder: Path) -> None:
    trainer = trainer_of(folder)
    tool = trainer.loaded.tokenizer.encode(environments.TOOL, add_special_tokens=False)
    rollouts = generated(trainer, some_prompts(), "twice", max_new_tokens=120)
    answered = [made for made in rollouts if made.observed is not None and made.observed.sum() == 2 * len(tool)]
    assert len(answered) > 4 and any(made.is_end for made in answered)
    for made in answered:
        response = made.tokens[made.prompt_length :]
        assert made.observed is not None and response[made.observed].tolist() == tool * 2
        assert made.mask.tolist() == [0.0 if seen else 1.0 for seen in made.observed]
        turns = np.flatnonzero(np.diff(made.observed.astype(int)) == 1)
        for last in turns:  # the policy's own token before each answer completes the stop text
            assert set(STOPS) & set(trainer.loaded.tokenizer.decode(response[last : last + 1]))
    # The trainer reads the whole sequence, and finds each sampled token as likely as the engine did.
    for made in rollouts:
        made.reward = 0.0
    own = measure(trainer, rollouts, 1.0, "k1", {})
    torch.testing.assert_close(own.logprobs * own.mask, own.engine_logprobs, atol=1e-4, rtol=1e-4)


def test_a_function_may_add_nothing_or_more_than_there_is_room_for(folder: Path) -> None:
    trainer, prompts = trainer_of(folder), some_prompts()
    for made in generated(trainer, prompts, "silent"):
        assert made.observed is None and (made.has_eos or made.response_length == 40)
    for made in generated(trainer, prompts, "endless"):
        assert made.observed is None or (made.response_length == 40 and made.observed[-1])
        assert made.is_end == made.has_eos


@pytest.mark.parametrize(
    ("name", "message"), [("broken", "KeyError: 'no such tool'"), ("numeric", "returned int; it must return text")]
)
def test_a_function_that_fails_ends_the_run(name: str, message: str, folder: Path) -> None:
    with pytest.raises(RunFailed, match=message):
        generated(trainer_of(folder), some_prompts(), name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": []}, "but rollouts.stop has no text at which it is called"),
        ({"engine": "vllm"}, "but rollouts.engine is vllm"),
    ],
)
def test_settings_that_contradict_an_environment(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    rollouts = {"environment": "actor.environments:twice", "stop": STOPS, **settings}
    with pytest.raises(ConfigError, match=message):
        check_actor(PPORunConfig(**parts(tiny_policy(tmp_path), tmp_path / "out", steps=1, rollouts=rollouts)))


def test_it_is_checked_before_a_model_is_loaded() -> None:
    with pytest.raises(CheckpointError, match=r"cannot import actor\.environments:missing"):
        check_environment(RolloutConfig(environment="actor.environments:missing"))
    ranks: Any = SimpleNamespace(tensor_size=2)
    with pytest.raises(ConfigError, match="2 tensor-parallel ranks generate"):
        check_environment(RolloutConfig(environment="actor.environments:twice"), ranks)
    check_environment(RolloutConfig(), ranks)


def observing(response: list[int], observed: list[bool], **more: Any) -> Rollout:
    made = rollout([9, 4], response, **more)
    made.observed = np.array(observed)
    return made


def test_observed_tokens_have_no_gradient_and_no_step_of_gae(folder: Path) -> None:
    values = [0.0, 1.0, 2.0, 70.0, 80.0, 4.0, 0.0]
    with_tool = observing([7, 8, 5, 6, 3], [False, False, True, True, False], reward=3.0, values=values)
    without = rollout([9, 4], [7, 8, 3], reward=3.0, values=[0.0, 1.0, 2.0, 4.0, 0.0])
    config = PPOConfig(kl_coefficient=0.0, gamma=0.5, lam=0.5, whiten_advantages=False, loss_aggregation="token-mean")
    zeros = [torch.zeros(1, len(made.tokens) - 2) for made in (with_tool, without)]
    tables = [
        ppo_advantages(Experience.of([made], zero, zero, zero, "k1"), config)
        for made, zero in zip((with_tool, without), zeros, strict=True)
    ]
    for long, short in zip(*tables, strict=True):
        assert long.tolist() == [[*short[0, :2].tolist(), 0.0, 0.0, short[0, 2].item()]]
    # The policy's step is that of a loss without the observed tokens' log-probs, wherever they are in the response.
    trainer = trainer_of(folder)
    experience = measure(trainer, [with_tool], 1.0, "k1", {})
    update(trainer, experience, torch.tensor([[1.0, 1.0, 1e9, 1e9, 1.0]]), config, RolloutConfig(), {})
    after = measure(trainer, [with_tool], 1.0, "k1", {})
    assert ((after.logprobs - experience.logprobs) * after.mask).sum() > 0
    plain = trained_plainly(folder, with_tool)
    for own, want in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        assert (own - want).norm() <= 1e-4 * want.norm()


def trained_plainly(folder: Path, made: Rollout) -> torch.nn.Module:
    """The model after a step of AdamW on the mean of minus the log-probs of the three tokens that were sampled."""
    model, config = AutoModelForCausalLM.from_pretrained(folder).eval(), PolicyConfig()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=tuple(config.betas), weight_decay=0.0)  # type: ignore[arg-type]
    logits = model(torch.from_numpy(made.tokens)[None]).logits[0]
    logprobs = torch.log_softmax(logits, -1)[torch.arange(len(made.tokens) - 1), made.tokens[1:]]
    (-logprobs[[1, 2, 5]].mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.gradient_clip_val)
    optimiser.step()
    return model
