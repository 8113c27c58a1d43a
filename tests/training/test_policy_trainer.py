"""What a step of the policy changes, reports and leaves out; its reference; adapters; and its checkpoints."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policies import LR, PlainPolicy, at_responses, build, caught_gradients, rollouts, weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import zoo
from guerdon.engine import self_check
from guerdon.engine.checkpoint import placement
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.errors import CheckpointError, ServerFault
from guerdon.settings.actors import PolicyConfig
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, PolicyLossStats, reinforce_loss
from guerdon.training.lora import is_adapter
from guerdon.training.optimiser import moment_bytes
from guerdon.training.policy_trainer import Loss, PolicyTrainer, StepReport
from tiers import of_each_kind, slow_but
from training.critics import same

ROWS, PROMPTS, _ = rollouts()
WIDTH = max(len(row) - start for row, start in zip(ROWS, PROMPTS, strict=True))
LENGTHS = torch.tensor([len(row) for row in ROWS]) - torch.from_numpy(PROMPTS)
MASK = (torch.arange(WIDTH) < LENGTHS[:, None]).float()
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {}),
    "tied": ("gemma2", {}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "lora": ("llama", {"lora": 4}),
    "lora-bfloat16": ("qwen2", {"lora": 4, "dtype": "bfloat16"}),
    "8bit": ("llama", {"optimizer": "adamw_8bit", "dtype": "bfloat16"}),
    "schedule": ("qwen3", {"lr_schedule": "cosine", "warmup_steps": 2, "total_steps": 12}),
    "experts": ("mixtral", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.language_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def shared(folder: Path) -> PolicyTrainer:
    """A policy that has learnt, of tests that ask for nothing of what became of it before."""
    trainer = build(folder, keeps_reference=False)
    step(trainer)
    return trainer


@pytest.fixture(scope="module")
def kept_of_shared(shared: PolicyTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(shared, tmp_path_factory.mktemp("shared") / "kept")


def reinforce(advantages: torch.Tensor, mask: torch.Tensor = MASK) -> Loss:
    aggregation = Aggregation("token-mean", GlobalCounts.of(mask))
    return lambda logprobs, _, at: reinforce_loss(logprobs, advantages[at], mask[at], aggregation)


def step(trainer: PolicyTrainer, seed: int = 0, temperature: float = 1.0) -> StepReport:
    """One step on advantages of this seed."""
    advantages = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed))
    return trainer.step(ROWS, PROMPTS, reinforce(advantages), temperature=temperature)


def no_gradients(trainer: PolicyTrainer) -> bool:
    return all(parameter.grad is None for parameter in trainer.model.parameters())


# ------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_steps_are_those_of_plain_torch(clip: float, folder: Path) -> None:
    settings = {"lr_schedule": "linear", "warmup_steps": 1, "total_steps": 5}
    trainer, plain = build(folder, keeps_reference=False, gradient_clip_val=clip, **settings), PlainPolicy(folder)
    adamw = torch.optim.AdamW(plain.model.parameters(), lr=LR, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
    before = weights(trainer)
    for seed, rate in enumerate([0.0, LR, 0.75 * LR]):
        report = step(trainer, seed)
        logprobs, _, _ = plain.logprobs(ROWS, PROMPTS)
        advantages = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed))
        adamw.zero_grad()
        loss = -(at_responses(logprobs, ROWS, PROMPTS) * advantages * MASK).sum() / MASK.sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), clip or math.inf)
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        assert report.learning_rate == pytest.approx(rate)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5) and report.grad_norm > 0.1
        assert report.stats.loss == pytest.approx(loss.item(), rel=1e-4)
        assert report.stats.sum_mask == MASK.sum() and not report.skipped and report.num_micro_batches > 1
    assert trainer.step_count == 3 and trainer.learning_rate == pytest.approx(0.5 * LR)
    for name, parameter in plain.model.named_parameters():
        moved = (parameter - before[name]).norm()
        assert (trainer.model.get_parameter(name) - parameter).norm() <= 1e-3 * moved, name
    assert no_gradients(trainer)


def test_every_row_comes_once_and_at_the_batchs_width(folder: Path) -> None:
    trainer, seen = build(folder, keeps_reference=False), []
    whole = trainer.logprobs(ROWS, PROMPTS).logprobs

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor | None, members: np.ndarray) -> Any:
        seen.extend(members.tolist())
        assert members.dtype == np.int64 and entropies is None
        torch.testing.assert_close(logprobs.detach(), whole[members], rtol=1e-5, atol=1e-6)
        return logprobs.sum() * 0, PolicyLossStats(sum_mask=1.0)

    trainer.step(ROWS, PROMPTS, loss)
    assert sorted(seen) == list(range(len(ROWS)))


def test_a_step_without_a_token_that_counts_changes_nothing(folder: Path) -> None:
    trainer = build(folder, keeps_reference=False)
    before, version = weights(trainer), trainer.weights_version
    nothing = torch.zeros_like(MASK)
    report = trainer.step(ROWS, PROMPTS, reinforce(nothing, nothing))
    assert report.skipped and same(weights(trainer), before) and trainer.step_count == 0
    assert trainer.weights_version == version and no_gradients(trainer)


def test_a_gradient_that_is_not_finite_changes_nothing(folder: Path) -> None:
    trainer = build(folder, keeps_reference=False)
    step(trainer)
    before = weights(trainer)
    advantages = torch.zeros_like(MASK)
    advantages[3, 1] = math.inf
    report = trainer.step(ROWS, PROMPTS, reinforce(advantages))
    assert report.skipped and not math.isfinite(report.grad_norm)
    assert same(weights(trainer), before) and trainer.step_count == 1 and no_gradients(trainer)
    assert not step(trainer, 1).skipped


def test_a_failed_step_leaves_weights_and_no_gradients(folder: Path) -> None:
    trainer = build(folder, keeps_reference=False)
    before = weights(trainer)

    def loss(logprobs: torch.Tensor, _: Any, members: np.ndarray) -> Any:
        if 0 in members:
            raise torch.OutOfMemoryError("no memory left")
        return logprobs.sum(), PolicyLossStats(sum_mask=1.0)

    with pytest.raises(torch.OutOfMemoryError):
        trainer.step(ROWS, PROMPTS, loss)
    assert same(weights(trainer), before) and no_gradients(trainer) and trainer.step_count == 0


def test_weights_of_a_step_that_failed_inside_the_optimiser_are_refused(folder: Path, tmp_path: Path) -> None:
    trainer = build(folder, keeps_reference=False)
    rows, starts, _ = rollouts()
    trainer.save(tmp_path)
    trainer.accumulate(rows, starts, lambda logprobs, *_: (logprobs.sum(), PolicyLossStats(sum_mask=1.0)))
    apply = trainer._optimiser.apply

    def breaks(norm: float) -> None:
        apply(norm)
        raise torch.OutOfMemoryError("no room")

    trainer._optimiser.apply = breaks  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        trainer.apply()
    for use in (trainer.apply, lambda: trainer.logprobs(rows, starts), lambda: trainer.save(tmp_path)):
        with pytest.raises(ServerFault, match="a step broke off inside the optimiser"):
            use()
    trainer.load(tmp_path)
    trainer.logprobs(rows, starts)


def test_a_prompt_without_a_token_is_refused(folder: Path) -> None:
    trainer = build(folder, keeps_reference=False)
    with pytest.raises(ValueError, match="at least one token"):
        trainer.logprobs(ROWS, np.where(np.arange(len(ROWS)) == 2, 0, PROMPTS))


def test_a_row_of_one_token_has_no_log_probs(folder: Path) -> None:
    trainer = build(folder, keeps_reference=False)
    want = trainer.logprobs(ROWS, PROMPTS).logprobs
    got = trainer.logprobs([ROWS[0][:1], *ROWS], np.array([1, *PROMPTS])).logprobs
    assert (got[0] == 0).all()
    torch.testing.assert_close(got[1:], want, rtol=1e-5, atol=1e-6)
    assert trainer.logprobs([ROWS[0][:1]], np.array([1])).logprobs.shape == (1, 0)


def test_versions_count_the_steps(folder: Path) -> None:
    trainer = build(folder, keeps_reference=False)
    begun = trainer.weights_version
    step(trainer)
    assert trainer.weights_version == f"{begun}+1"


def test_an_offloaded_policy_comes_back_unchanged(folder: Path) -> None:
    one, other = (build(folder, keeps_reference=False, dtype="bfloat16") for _ in range(2))
    for trainer in (one, other):
        step(trainer)
    one.offload_optimizer()
    one.onload_optimizer()
    assert step(one, 1) == step(other, 1) and same(weights(one), weights(other))


# ------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("settings", slow_but(({}, {"lora": 4}), [{}, {"lora": 4}, {"dtype": "bfloat16"}]), ids=str)
def test_the_reference_stays_what_the_policy_was(settings: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    trainer = build(folder, **settings)
    before = trainer.logprobs(ROWS, PROMPTS, 0.8).logprobs
    torch.testing.assert_close(trainer.reference_logprobs(ROWS, PROMPTS, 0.8), before, rtol=0, atol=0)
    step(trainer)
    assert (trainer.logprobs(ROWS, PROMPTS, 0.8).logprobs - before).abs().max() > 1e-3
    assert torch.equal(trainer.reference_logprobs(ROWS, PROMPTS, 0.8), before)
    # Also behind a resume, and learning goes on after it was asked for.
    (tmp_path / "kept").mkdir()
    trainer.save(tmp_path / "kept")
    again = build(folder, **settings)
    again.load(tmp_path / "kept")
    assert torch.equal(again.reference_logprobs(ROWS, PROMPTS, 0.8), before)
    assert step(again, 3) == step(trainer, 3) and same(weights(again), weights(trainer))


def test_without_a_reference_the_model_is_loaded_once(folder: Path) -> None:
    assert build(folder, keeps_reference=False)._reference is None
    assert build(folder, lora=4)._reference is None
    assert build(folder)._reference is not None


def test_the_reference_runs_by_the_policys_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "GRADIENT_TOLERANCE", {torch.float32: -1.0})  # as if gradients were others
    trainer = build(folder)
    assert trainer.engine.path == "shared"
    assert torch.equal(trainer.reference_logprobs(ROWS, PROMPTS), trainer.logprobs(ROWS, PROMPTS).logprobs)


def test_memory_must_have_room_for_the_reference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_weights = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    needed = num_weights * (4 + 4 + 4 + 8)  # weights, their copy, gradients, moments
    config = PolicyConfig(model=str(folder))
    monkeypatch.setattr(placement, "_host_bytes", lambda: needed)
    load_policy(config, moment_bytes=moment_bytes(config))
    monkeypatch.setattr(placement, "_host_bytes", lambda: needed - 1)
    with pytest.raises(CheckpointError, match="with its optimiser's state and a frozen copy"):
        load_policy(config, moment_bytes=moment_bytes(config))
    monkeypatch.setattr(placement, "_host_bytes", lambda: num_weights * 4)
    lora = PolicyConfig(model=str(folder), lora=2)
    load_policy(lora, moment_bytes=moment_bytes(lora))


# ------------------------------------------------------------------------------------------- adapters


@pytest.mark.slow
def test_adapters_begin_as_the_seed_has_them_and_leave_other_random_numbers_alone(folder: Path) -> None:
    config = PolicyConfig(model=str(folder), lora=2)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, same_seed, other = (weights(PolicyTrainer(load_policy(config), config, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(one, same_seed)
    assert {n for n in one if not torch.equal(one[n], other[n])} == {n for n in one if "lora_A" in n}


@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "gemma2"]))
def test_adapters_learn_what_peft_in_plain_torch_does(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = zoo.language_model(name, tmp_path)
    trainer, plain = build(folder, lora=4, lora_alpha=8.0), PlainPolicy(folder)
    settings = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear")
    plain.model = peft.get_peft_model(plain.model, settings)
    begun = weights(trainer)
    own = {n.removeprefix("base_model.model."): p for n, p in plain.model.named_parameters() if p.requires_grad}
    assert own.keys() == trainer._trained.keys() == {n for n in begun if is_adapter(n)}
    with torch.no_grad():
        for parameter_name, parameter in own.items():
            parameter.copy_(begun[parameter_name])
    adamw = torch.optim.AdamW(own.values(), lr=LR, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
    caught = caught_gradients(trainer)
    for seed in range(2):
        step(trainer, seed, temperature=0.7)
        logprobs, _, _ = plain.logprobs(ROWS, PROMPTS, 0.7)
        advantages = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed))
        adamw.zero_grad()
        (-(at_responses(logprobs, ROWS, PROMPTS) * advantages * MASK).sum() / MASK.sum()).backward()
        largest = max(p.grad.norm() for p in own.values())
        for parameter_name, parameter in own.items():
            assert (caught[parameter_name] - parameter.grad).norm() <= 1e-5 * max(
                parameter.grad.norm(), 1e-2 * largest
            ), parameter_name
        torch.nn.utils.clip_grad_norm_(own.values(), 1.0)
        adamw.step()
        with torch.no_grad():  # the next gradients are taken at the same place
            for parameter_name, parameter in own.items():
                assert (trainer.model.get_parameter(parameter_name) - parameter).norm() <= 2e-3 * parameter.norm()
                parameter.copy_(trainer.model.get_parameter(parameter_name))
    after = weights(trainer)
    assert {n for n in begun if not torch.equal(begun[n], after[n])} == own.keys()


# ------------------------------------------------------------------------------------------- checkpoints


def saved(trainer: PolicyTrainer, folder: Path) -> Path:
    folder.mkdir()
    trainer.save(folder)
    return folder


@pytest.mark.parametrize("kind", slow_but([*KINDS][::3], KINDS))
def test_training_on_from_it_is_training_without_interruption(kind: str, tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    if kind == "8bit":
        pytest.importorskip("bitsandbytes")
    folder = zoo.language_model(name, tmp_path / "base")
    first, second = (build(folder, keeps_reference=False, **settings) for _ in range(2))
    for seed in range(2):
        step(first, seed)
    torch.manual_seed(7)
    kept = saved(first, tmp_path / "kept")
    drawn, told = torch.rand(3), first.logprobs(ROWS, PROMPTS).logprobs
    report = step(first, 2)

    step(second, 5)  # what it had become before is forgotten
    second.load(kept)
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(second.logprobs(ROWS, PROMPTS).logprobs, told)
    assert second.step_count == 2
    assert step(second, 2) == report
    assert same(weights(second), weights(first))
    ends = [saved(trainer, tmp_path / str(i)) for i, trainer in enumerate((first, second))]
    for path in ends[0].iterdir():
        if path.name != "rng.safetensors":
            assert path.read_bytes() == (ends[1] / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", of_each_kind([*zoo.DECODERS, *zoo.LANGUAGE_MODELS]))
def test_plain_transformers_reads_the_policy_and_its_tokenizer(name: str, tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.language_model(name, tmp_path / "base"))
    trainer = build(folder, keeps_reference=False)
    few = ROWS[:3], PROMPTS[:3]
    trainer.step(*few, lambda logprobs, *_: (logprobs.sum(), PolicyLossStats(sum_mask=1.0)))
    kept = saved(trainer, tmp_path / "kept")
    got, found = AutoModelForCausalLM.from_pretrained(kept, output_loading_info=True)
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(dict(got.named_parameters()), weights(trainer))
    # What transformers makes of the files: its own class for qwen2 adds a token to any vocabulary.
    assert AutoTokenizer.from_pretrained(kept).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    again = build(kept, keeps_reference=False)
    got, want = (one.logprobs(*few).logprobs for one in (again, trainer))
    assert torch.equal(got, want) and again.step_count == 0


@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "gemma2", "gpt2"]))
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_transformers_and_peft_read_the_adapters(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = zoo.tokenizer(zoo.language_model(name, tmp_path / "base"))
    trainer = build(folder, lora=4)
    for seed in range(2):
        step(trainer, seed)
    kept = saved(trainer, tmp_path / "kept")
    want = trainer.logprobs(ROWS, PROMPTS).logprobs
    assert (want - trainer.reference_logprobs(ROWS, PROMPTS)).abs().max() > 1e-3
    plain = PlainPolicy(folder)
    for model in (
        AutoModelForCausalLM.from_pretrained(kept),
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), kept),
    ):
        plain.model = model.eval()
        with torch.no_grad():
            logprobs, _, _ = plain.logprobs(ROWS, PROMPTS)
        torch.testing.assert_close(at_responses(logprobs, ROWS, PROMPTS), want, rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(kept).get_vocab() == trainer.tokenizer.get_vocab()


def test_tied_weights_are_written_once_and_nothing_is_a_pickle(tmp_path: Path) -> None:
    folder = zoo.language_model("gemma2", tmp_path / "base")
    kept = saved(build(folder, keeps_reference=False), tmp_path / "kept")
    stored = load_file(kept / "model.safetensors")
    assert "model.embed_tokens.weight" in stored and "lm_head.weight" not in stored
    assert {path.suffix for path in kept.iterdir()} == {".json", ".safetensors"}
    assert json.loads((kept / "config.json").read_text())["architectures"] == ["Gemma2ForCausalLM"]


@pytest.mark.parametrize(
    ("made", "runs", "what"),
    [
        ({}, {"dtype": "bfloat16"}, "dtype float32, this run has bfloat16"),
        ({}, {"lora": 2}, "lora None"),
        ({"lora": 4}, {"lora": 2}, "lora 4"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    made: Any, runs: Any, what: str, folder: Path, kept_of_shared: Path, tmp_path: Path
) -> None:
    kept = saved(build(folder, **made), tmp_path / "kept") if made else kept_of_shared
    with pytest.raises(CheckpointError, match=what) as caught:
        build(folder, keeps_reference=False, **runs).load(kept)
    assert "run.output_dir" in caught.value.help


def test_a_checkpoint_of_another_model_is_refused(kept_of_shared: Path, tmp_path: Path) -> None:
    other = build(zoo.language_model("llama", tmp_path / "other", seed=5), keeps_reference=False)
    before = weights(other)
    with pytest.raises(CheckpointError, match="policy that began from another model"):
        other.load(kept_of_shared)
    assert same(weights(other), before)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    file: str, damage: str, shared: PolicyTrainer, kept_of_shared: Path, tmp_path: Path
) -> None:
    kept = Path(shutil.copytree(kept_of_shared, tmp_path / "kept"))
    path = kept / file
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    step(shared, 1)
    before, count = weights(shared), shared.step_count
    with pytest.raises(CheckpointError, match="kept"):
        shared.load(kept)
    assert same(weights(shared), before) and shared.step_count == count
