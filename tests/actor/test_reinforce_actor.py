"""`ReinforceActor`: every call against plain transformers, and a whole loop of NeMo-Aligner's form."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer

import zoo
from actor.rollouts import serving
from guerdon import ReinforceActor
from guerdon.adapters.nemo_aligner import RemoteGPTRMClient
from guerdon.errors import ConfigError
from guerdon.settings.actors import PolicyConfig, RolloutConfig, TeacherServer
from guerdon.settings.config import ModelConfig, TeacherConfig
from guerdon.training.policy_trainer import PolicyTrainer
from training.policies import PlainPolicy, caught_gradients, rollouts

SAMPLING = RolloutConfig(max_new_tokens=8, temperature=0.7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("policy")))


def actor_of(folder: Path, sampling: RolloutConfig = SAMPLING, **settings: object) -> ReinforceActor:
    config = PolicyConfig(**{"model": str(folder), "learning_rate": 1e-3, "max_batch_tokens": 150, **settings})
    return ReinforceActor(config, sampling)


@pytest.fixture(scope="module")
def shared(folder: Path) -> ReinforceActor:
    """An actor of tests that change nothing in it."""
    return actor_of(folder)


def padded(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.full((len(rows), max(map(len, rows))), zoo.EOS)
    for out, row in zip(tokens, rows, strict=True):
        out[: len(row)] = torch.from_numpy(row)
    return tokens, torch.tensor([len(row) for row in rows])


def prompts_of(*rows: list[int]) -> dict[str, torch.Tensor]:
    tokens, lengths = padded([np.array(row) for row in rows])
    return {"text": tokens, "length": lengths}


def mask_of(lengths: torch.Tensor, prompt_lengths: np.ndarray) -> torch.Tensor:
    at = torch.arange(int(lengths.max()) - 1)
    return ((at >= torch.from_numpy(prompt_lengths)[:, None] - 1) & (at < lengths[:, None] - 1)).float()


def batch_of() -> tuple[dict[str, torch.Tensor], list[np.ndarray], np.ndarray]:
    """A global batch of NeMo-Aligner's form, its rows and their prompts' lengths."""
    rows, prompt_lengths, _ = rollouts()
    tokens, lengths = padded(rows)
    draw = torch.Generator().manual_seed(1)
    batch = {
        "response_tokens": tokens,
        "mask": mask_of(lengths, prompt_lengths),
        "rewards_with_kl": torch.randn(len(rows), generator=draw),
        "baseline": torch.randn(len(rows), generator=draw),
        "is_end": torch.ones(len(rows), dtype=torch.bool),
    }
    return batch, rows, prompt_lengths


def test_logprobs_of_all_tokens_or_of_the_responses(folder: Path, shared: ReinforceActor) -> None:
    actor, plain = shared, PlainPolicy(folder)
    rows, prompt_lengths, _ = rollouts()
    tokens, lengths = padded(rows)
    want, _, mask = plain.logprobs(rows, prompt_lengths, SAMPLING.temperature)
    is_there = torch.arange(tokens.shape[1] - 1) < lengths[:, None] - 1
    got = actor.get_inference_log_probs(tokens)
    assert (got.dtype, got.shape) == (torch.float32, (len(rows), tokens.shape[1] - 1))
    assert torch.allclose(got[is_there], want[is_there], atol=1e-5)
    assert (got[~is_there] < 0).all()  # the padding's own
    without_padding = actor.get_inference_log_probs(tokens, lengths)
    assert torch.allclose(without_padding, want * is_there, atol=1e-5)
    cut = actor.get_inference_log_probs(tokens, torch.where(torch.arange(len(rows)) == 1, 1, lengths))
    assert (cut[1] == 0).all() and torch.allclose(cut[2:], without_padding[2:], atol=1e-5)
    alone = actor.get_inference_log_probs(tokens, lengths[:, None], torch.from_numpy(prompt_lengths))
    assert torch.allclose(alone, want * mask, atol=1e-5)
    assert torch.equal(actor.get_init_policy_logprobs(tokens), got)


def test_a_server_may_hold_the_reference(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = zoo.tokenizer(zoo.language_model("llama", tmp_path, seed=1))
    rows, prompt_lengths, _ = rollouts()
    tokens, lengths = padded(rows)
    want, _, mask = PlainPolicy(other).logprobs(rows, prompt_lengths, SAMPLING.temperature)
    monkeypatch.delattr(PolicyTrainer, "_load_reference")
    with serving(TeacherConfig(model=str(other))) as server:
        config = PolicyConfig(model=str(folder), max_batch_tokens=150)
        actor = ReinforceActor(config, SAMPLING, reference=TeacherServer(server.http_url, timeout_s=30.0))
        got = actor.get_init_policy_logprobs(tokens, lengths, torch.from_numpy(prompt_lengths))
        assert torch.allclose(got, want * mask, atol=1e-5)
        without_prompts = actor.get_init_policy_logprobs(tokens, torch.where(torch.arange(len(rows)) == 1, 1, lengths))
        assert (without_prompts[1] == 0).all() and (without_prompts[0][: len(rows[0]) - 1] < 0).all()
        with pytest.raises(ConfigError, match="server URL 'ftp://a' is malformed"):
            ReinforceActor(config, SAMPLING, reference=TeacherServer("ftp://a"))


@pytest.mark.parametrize("lora", [None, 4])
def test_a_step_leaves_the_initial_policy_behind(folder: Path, lora: int | None) -> None:
    actor = actor_of(folder, lora=lora)
    batch, rows, _ = batch_of()
    tokens, lengths = padded(rows)
    before = actor.get_init_policy_logprobs(tokens, lengths)
    for _ in range(2):
        actor.prepare_for_training_step()
        loss, metrics = actor.get_loss_and_metrics(batch, forward_only=False)
        report = actor.finish_training_step()
    assert metrics == {"loss": loss}
    assert not report.skipped and report.grad_norm > 0 and report.learning_rate == 1e-3
    assert actor.trainer.step_count == 2
    after = actor.get_inference_log_probs(tokens, lengths)
    assert torch.equal(actor.get_init_policy_logprobs(tokens, lengths), before)
    assert (after - before).abs().max() > 1e-3


def nemo_aligners_loss(batch: dict[str, torch.Tensor], logprobs: torch.Tensor, size: int) -> torch.Tensor:
    """As MegatronGPTReinforceActorModel has it: a mean over a boolean mask for each micro-batch, and their mean."""
    losses = []
    for first in range(0, len(logprobs), size):
        rows = slice(first, first + size)
        mask, is_end = batch["mask"][rows], batch["is_end"][rows]
        advantages = (batch["rewards_with_kl"][rows] - batch["baseline"][rows])[:, None]
        terms = -1 * logprobs[rows] * advantages
        counts = (mask * is_end.view(-1, 1)).sum() > 0
        losses.append(terms[mask.bool()].mean() if counts else terms.view(-1)[0] * 0)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("ended", ["all", "some", "none"])
@pytest.mark.parametrize("divisor", [1, 2, None])
def test_loss_and_gradients_are_nemo_aligners(folder: Path, ended: str, divisor: int | None) -> None:
    batch, rows, prompt_lengths = batch_of()
    size = 1 if divisor is None else len(rows) // divisor
    batch = {name: tensor[: len(rows) // size * size] for name, tensor in batch.items()}
    rows, prompt_lengths = rows[: len(batch["mask"])], prompt_lengths[: len(batch["mask"])]
    actor, plain = actor_of(folder), PlainPolicy(folder)
    actor.micro_batch_size = None if divisor == 1 else size
    if ended != "all":
        batch["is_end"][0 if ended == "none" else 3 :] = False
    if divisor is not None:
        batch["mask"][1] = 0  # a row that is only there to fill the batch up
    batch["mask"][2] *= 0.5  # NeMo-Aligner reads only whether it is 0
    logprobs, _, _ = plain.logprobs(rows, prompt_lengths, SAMPLING.temperature)
    loss = nemo_aligners_loss(batch, logprobs, size)
    want = plain.gradients(loss)

    caught = caught_gradients(actor.trainer)
    seen, _ = actor.get_loss_and_metrics(batch, forward_only=True)
    got, metrics = actor.get_loss_and_metrics(batch, forward_only=False)
    assert got == pytest.approx(loss.item(), abs=1e-6)
    assert seen == pytest.approx(got, abs=1e-6)
    assert metrics == {"loss": got}
    report = actor.finish_training_step()
    if ended == "none":
        assert got == 0 and report.skipped
        return
    assert report.num_micro_batches > 1 or ended == "some"  # and none of the forward alone
    assert caught.keys() == want.keys()
    scale = max(gradient.norm().item() for gradient in want.values())
    for name, gradient in want.items():
        assert (caught[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * scale, name


def test_a_batch_that_micro_batches_do_not_divide_is_refused(folder: Path) -> None:
    batch, rows, _ = batch_of()
    actor = ReinforceActor(PolicyConfig(model=str(folder)), SAMPLING, micro_batch_size=len(rows) - 1)
    with pytest.raises(ValueError, match=f"a batch of {len(rows)} rows cannot be split"):
        actor.get_loss_and_metrics(batch)


@pytest.mark.parametrize("name", ["rewards_with_kl", "baseline", "is_end", "mask"])
def test_a_batch_of_other_shapes_is_refused(name: str, shared: ReinforceActor) -> None:
    batch, rows, _ = batch_of()
    batch[name] = batch[name][:, None] if name != "mask" else batch[name][:, 1:]
    with pytest.raises(ValueError, match=rf"{name} has shape \[{len(rows)}, .*: give \[{len(rows)}"):
        shared.get_loss_and_metrics(batch)


def test_a_batch_without_any_action_changes_nothing(shared: ReinforceActor) -> None:
    actor = shared
    batch, _, _ = batch_of()
    batch["mask"] = torch.zeros_like(batch["mask"])
    assert actor.get_loss_and_metrics(batch) == (0.0, {"loss": 0.0})
    assert actor.finish_training_step().skipped
    assert actor.trainer.step_count == 0


def test_what_is_inferred(folder: Path) -> None:
    actor = actor_of(folder, RolloutConfig(max_new_tokens=40, min_new_tokens=2))
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    made = actor.infer(prompts_of(*prompts), num_rollouts=20)
    tokens, lengths, is_end = made["response_tokens"], made["response_lengths"], made["is_end"]
    assert made["prompt_lengths"].tolist() == [5] * 20 + [3] * 20
    assert tokens.shape == (40, int(lengths.max()))
    assert is_end.any() and not is_end.all()
    for i, row in enumerate(tokens):
        start, end = int(made["prompt_lengths"][i]), int(lengths[i])
        assert row[:start].tolist() == prompts[i // 20]
        assert 2 <= end - start <= 40
        assert (row[end:] == zoo.EOS).all() and zoo.EOS not in row[start : end - 1]
        assert is_end[i] == (row[end - 1] == zoo.EOS)
        assert is_end[i] or end - start == 40


@pytest.mark.slow
def test_what_is_drawn_depends_on_the_steps_made_and_the_calls_since(folder: Path, tmp_path: Path) -> None:
    prompts, (batch, _, _) = prompts_of([5, 6, 7], [8, 9]), batch_of()

    def drawn(actor: ReinforceActor) -> list[list[int]]:
        return actor.infer(prompts)["response_tokens"].tolist()

    def learn(actor: ReinforceActor) -> None:
        actor.get_loss_and_metrics(batch)
        actor.finish_training_step()

    actor = actor_of(folder)
    first, second = drawn(actor), drawn(actor)
    assert first != second
    learn(actor)
    actor.save(tmp_path)
    third = drawn(actor)
    assert third not in (first, second)

    again = actor_of(folder)
    assert [drawn(again), drawn(again)] == [first, second]
    later = actor_of(folder)
    reference = later.get_init_policy_logprobs(prompts["text"])
    later.load(tmp_path)
    assert drawn(later) == third
    later.load(tmp_path)
    assert drawn(later) == third
    assert torch.equal(later.get_init_policy_logprobs(prompts["text"]), reference)
    assert torch.equal(later.get_inference_log_probs(prompts["text"]), actor.get_inference_log_probs(prompts["text"]))


@pytest.mark.slow
def test_the_seed_is_that_of_fresh_adapters_and_of_nobody_elses_numbers(folder: Path) -> None:
    state, policy = torch.get_rng_state(), PolicyConfig(model=str(folder), lora=2)
    one, other = (dict(ReinforceActor(policy, seed=seed).trainer.model.named_parameters()) for seed in (0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert {name for name in one if not torch.equal(one[name], other[name])} == {n for n in one if "lora_A" in n}


def test_the_tokenizer_has_nemos_names_too(folder: Path, shared: ReinforceActor) -> None:
    tokenizer = shared.tokenizer
    plain = AutoTokenizer.from_pretrained(folder)
    text = "Is this a good film?"
    ids = plain(text, add_special_tokens=False).input_ids
    assert tokenizer.text_to_ids(text) == ids and tokenizer.eos_id == plain.eos_token_id == zoo.EOS
    want = plain.decode(ids)
    assert tokenizer.ids_to_text([*ids, zoo.EOS]) == tokenizer.ids_to_text(torch.tensor(ids)) == want
    assert (tokenizer.eos_token, tokenizer(text), len(tokenizer)) == (plain.eos_token, plain(text), len(plain))


def test_nemos_cfg_is_told_what_to_give_instead() -> None:
    cfg = OmegaConf.create({"reinforce": {"length_params": {"max_length": 8}}, "micro_batch_size": 1})
    with pytest.raises(ConfigError, match="got DictConfig for its policy"):
        ReinforceActor(cfg, object())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_loop_of_nemo_aligners_form_raises_the_reward(folder: Path) -> None:
    actor = actor_of(folder, RolloutConfig(max_new_tokens=8), learning_rate=2e-2, offload_optimizer=True)
    prompts = prompts_of(*([i, i + 1, i + 2] for i in range(10, 16)))
    means = []
    with serving(ModelConfig(model="actor.reward_functions:even", name="reward_model")) as server:
        host, port = server.http_url.removeprefix("http://").split(":")
        client = RemoteGPTRMClient({"reward_model": {"name": "reward_model", "ip": host, "port": port}})
        for _ in range(14):
            actor.prepare_for_inference()
            rollout = actor.infer(prompts, num_rollouts=4)
            future = client.infer_rm(rollout)
            tokens, lengths = rollout["response_tokens"], rollout["response_lengths"]
            logprobs = actor.get_inference_log_probs(tokens, lengths, rollout["prompt_lengths"])
            reference = actor.get_init_policy_logprobs(tokens, lengths, rollout["prompt_lengths"])
            rewards = future.result().squeeze(1)
            actor.finish_inference()
            penalised = rewards - 0.01 * (logprobs - reference).sum(-1)
            groups = penalised.view(6, 4)
            baseline = (groups.sum(1, keepdim=True) - groups) / 3
            batch = {
                "response_tokens": tokens,
                "mask": mask_of(lengths, rollout["prompt_lengths"].numpy()),
                "rewards_with_kl": penalised,
                "baseline": baseline.view(-1),
            }
            actor.prepare_for_training()
            actor.prepare_for_training_step()
            actor.get_loss_and_metrics(batch, forward_only=False)
            actor.finish_training_step()
            actor.finish_training()
            means.append(rewards.mean().item())
    assert np.mean(means[-5:]) > np.mean(means[:5]) + 0.15


def test_settings_that_cannot_be_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="temperature is 0"):
        ReinforceActor(str(folder), RolloutConfig(temperature=0.0))
    with pytest.raises(ConfigError, match="does not say which tokens the environment wrote"):
        ReinforceActor(str(folder), RolloutConfig(stop=["tea"], environment="actor.environments:twice"))
    with pytest.raises(ConfigError, match="learning_rate"):
        ReinforceActor(PolicyConfig(model=str(folder), learning_rate=-1.0))
