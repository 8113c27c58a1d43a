"""Low-rank adapters: only they and the head learn, by the same numbers as peft's own model in plain torch."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import LR, build, same, values, weights
from plain import PlainCritic, difference, request
from safetensors.torch import load_file

import zoo
from guerdon import cli
from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.engine import Engine
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import ConfigError, Exit
from guerdon.settings.actors import PolicyConfig
from guerdon.settings.config import AdapterConfig, LanguageModelConfig, ModelConfig, TeacherConfig
from guerdon.training.lora import is_adapter
from guerdon.training.policy_trainer import PolicyTrainer
from tiers import of_each_kind, slow_but

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out")
peft = pytest.importorskip("peft")

ROWS = zoo.rows(0, ((40, 5), (20, 3), (3, 3)))


@pytest.mark.parametrize("name", slow_but(("llama", "gpt2"), ["llama", "gpt2", "gemma2", "mixtral"]))
def test_it_begins_as_the_model_and_only_adapters_and_head_move(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    trainer = build(folder, lora=4)
    np.testing.assert_allclose(values(trainer, ROWS), values(build(folder), ROWS), atol=1e-6)
    before = weights(trainer)
    assert trainer.train(request(ROWS), 2).num_steps == 2  # the first one moves only what is not multiplied by zeros
    after = weights(trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if is_adapter(name) or name.startswith("head.")}
    state = trainer.state()
    assert state["num_trainable"] == sum(after[name].numel() for name in moved) < state["num_parameters"]


@pytest.mark.slow
def test_critics_share_their_base_when_they_are_served(tmp_path: Path) -> None:
    """Values and rewards of two trained critics, over one base, are those of each alone."""
    folder, wanted = zoo.checkpoint("llama", tmp_path / "base"), []
    for seed in (0, 1):
        trainer = build(folder, lora=4, mean=0.5, std=2.0)
        trainer.train(request(zoo.rows(seed)), 3)
        (kept := tmp_path / f"critic{seed}").mkdir()
        trainer.save(kept)
        wanted.append(values(trainer, ROWS))
    adapters = [AdapterConfig(name=f"critic{i}", model=str(tmp_path / f"critic{i}")) for i in (0, 1)]
    engine: Any = build_scorer(ModelConfig(model=str(folder), adapters=adapters))
    found = engine.score([Sequence(row, adapter=i) for i in (0, 1) for row in ROWS])
    got = np.concatenate([one.values for one in found])
    assert np.abs(wanted[0] - wanted[1]).max() > 1e-4
    np.testing.assert_allclose(got, np.concatenate(wanted), rtol=1e-5, atol=1e-5)
    assert found[0].reward == pytest.approx(found[0].values[-1])


def test_it_begins_the_same_at_every_start_and_leaves_other_random_numbers_alone(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    torch.manual_seed(1)
    one = weights(build(folder, lora=4))
    drawn = torch.rand(1)
    torch.manual_seed(2)
    assert same(weights(build(folder, lora=4)), one)
    torch.manual_seed(1)
    build(folder)
    assert torch.equal(torch.rand(1), drawn)


def test_no_gpu_is_used_for_a_trunk_on_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: asked.append(device) or torch.get_rng_state())  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    build(zoo.checkpoint("llama", tmp_path), lora=4)
    assert not asked


def plain_lora(
    folder: Path, begun: dict[str, torch.Tensor], rank: int, alpha: float, dtype: torch.dtype = torch.float32
) -> PlainCritic:
    """Returns peft's own model of plain transformers, with adapters as they began in the trainer."""
    plain = PlainCritic(folder, lr=LR, dtype=dtype)
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear")
    plain.trunk = peft.get_peft_model(plain.trunk, settings, autocast_adapter_dtype=False).to(dtype)
    named = {f"trunk.{n.removeprefix('base_model.model.')}": p for n, p in plain.trunk.named_parameters()}
    plain.parameters = {n: p for n, p in named.items() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in plain.parameters.items():
            parameter.copy_(begun[name])
    plain.parameters["head.module.0.weight"] = plain.head.weight
    plain.optimiser = torch.optim.AdamW(plain.parameters.values(), lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    return plain


@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "gemma2"]))
def test_every_adapter_learns_what_peft_in_plain_torch_does(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    trainer = build(folder, lora=4, lora_alpha=8.0)
    begun = weights(trainer)
    plain = plain_lora(folder, begun, 4, 8.0)
    exact = plain_lora(folder, begun, 4, 8.0, torch.float64)
    asked = request(ROWS)
    report = trainer.train(asked)
    losses, norms = plain.train(asked, 5)
    exact.train(asked, 5)
    assert len(losses) == 3
    np.testing.assert_allclose(report.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(report.grad_norm, norms[-1], rtol=1e-4)
    got = weights(trainer)
    for key, parameter in plain.parameters.items():
        # An adapter's B begins at 0. AdamW's first steps are as large for a gradient of rounding noise as for another:
        # plain float32 is itself that far from float64.
        noise = difference(parameter.detach(), exact.parameters[key].detach())
        assert difference(got[key], exact.parameters[key].detach()) <= max(1e-5, 3 * noise), key


@pytest.mark.slow
def test_half_precision_trunks_have_float32_adapters(tmp_path: Path) -> None:
    trainer = build(zoo.checkpoint("llama", tmp_path), lora=4, dtype="bfloat16")
    trainer.train(request(ROWS), 1)
    for name, parameter in trainer.engine.trunk.named_parameters():
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16)


def test_the_file_is_pefts_own(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "base")
    trainer = build(folder, lora=4)
    assert trainer.train(request(ROWS)).num_steps > 1  # the first one moves only what is not multiplied by zeros
    kept = tmp_path / "kept"
    kept.mkdir()
    trainer.save(kept)
    assert json.loads((kept / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    plain = PlainCritic(folder, lr=LR)
    plain.trunk = peft.PeftModel.from_pretrained(plain.trunk, kept)
    with torch.no_grad():
        plain.head.weight.copy_(load_file(kept / "value_head.safetensors")["score.weight"])
        want = np.concatenate([plain.values(row).numpy() for row in ROWS])
    np.testing.assert_allclose(values(trainer, ROWS), want, atol=1e-4 * want.std())


@pytest.mark.parametrize("kind", slow_but(("seqcls",), ("seqcls", "openrlhf-critic", "trlx-critic", "trl")))
def test_a_critic_that_learnt_by_adapters_is_served_and_learns_on(kind: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2" if kind == "trlx-critic" else "llama", tmp_path / "base", kind)
    trainer = build(folder, lora=4, mean=0.5, std=2.0)
    trainer.train(request(ROWS))
    (tmp_path / "kept").mkdir()
    trainer.save(tmp_path / "kept")
    want = values(trainer, ROWS)
    served = Engine(load_reward_model(ModelConfig(model=str(tmp_path / "kept"))))
    got = np.concatenate([score.values for score in served.score([Sequence(row) for row in ROWS])])
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert served.info.weights_version != load_reward_model(ModelConfig(model=str(folder))).info.weights_version
    assert cli.main(["convert", str(tmp_path / "kept"), str(tmp_path / "whole")]) == Exit.DONE
    for again in (tmp_path / "kept", tmp_path / "whole"):  # as a critic of full weights
        critic = build(again)
        np.testing.assert_allclose(values(critic, ROWS), want, atol=1e-5)
        (again / "next").mkdir()
        critic.train(request(ROWS))
        critic.save(again / "next")
        np.testing.assert_allclose(values(build(again / "next"), ROWS), values(critic, ROWS), atol=1e-6)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_policy_that_learnt_by_adapters_is_served_as_a_teacher(tied: bool, tmp_path: Path) -> None:
    base = zoo.tokenizer(zoo.language_model("llama", tmp_path / "base", tie_word_embeddings=tied))
    policy = PolicyTrainer(load_policy(PolicyConfig(model=str(base))), PolicyConfig(lora=4))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * is_adapter(name))
    (tmp_path / "kept").mkdir()
    policy.save(tmp_path / "kept")
    settings = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["base_model_name_or_path"]) == ("CAUSAL_LM", str(base))
    plain = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "kept").eval()
    teacher = TeacherEngine(load_policy(TeacherConfig(model=str(tmp_path / "kept"))))
    for row, score in zip(ROWS, teacher.score([Sequence(row) for row in ROWS]), strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.from_numpy(row)[None]).logits[0]
        want = torch.log_softmax(logits, -1)[range(len(row) - 1), row[1:]]
        np.testing.assert_allclose(score.answer.logprobs, want.numpy(), rtol=1e-5, atol=1e-5)
    settings["task_type"] = None  # as guerdon 0.2 wrote it
    (tmp_path / "kept" / "adapter_config.json").write_text(json.dumps(settings))
    assert load_policy(LanguageModelConfig(model=str(tmp_path / "kept"))).origin.adapter.startswith("LORA, rank 4")


@pytest.mark.parametrize(("name", "model"), [("mamba", "MambaModel"), ("llama4", "Llama4TextModel")])
def test_a_model_that_peft_cannot_adapt_is_refused(name: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"peft cannot adapt a {model} by lora_targets all-linear: ") as caught:
        build(zoo.checkpoint(name, tmp_path), lora=4)
    assert "lora_targets" in caught.value.help and "remove lora" in caught.value.help


@pytest.mark.parametrize("targets", ["no_such_layer", "(", ".*norm"])
def test_targets_that_are_no_layers_are_refused(targets: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"by lora_targets {re.escape(targets)}"):
        build(zoo.checkpoint("llama", tmp_path), lora=4, lora_targets=targets)


def test_only_the_targets_are_adapted_and_the_start_says_how_much_that_is(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    trainer = build(zoo.checkpoint("llama4", tmp_path), lora=4, lora_targets=r".*\.(q|k|v|o)_proj")
    adapted = {name.split(".")[-4] for name, _ in trainer.engine.trunk.named_parameters() if is_adapter(name)}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    before = weights(trainer)
    trainer.train(request(ROWS), 1)
    assert not same(weights(trainer), before)
    # Both layers have 3072 weights in these; the other matrices are the experts', the router's and an MLP's.
    share = 2 * 3072 / sum(
        p.numel() for n, p in trainer.engine.trunk.named_parameters()
        if p.dim() > 1 and not is_adapter(n) and "embed" not in n
    )  # fmt: skip
    assert f"1,824 of 42,368 parameters are trained: adapters on {share:.1%} of the layers' weights" in caplog.text


@pytest.mark.parametrize("name", of_each_kind(zoo.DECODERS))
def test_every_decoder_learns_by_adapters_or_says_why_not(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    if name in ("mamba", "llama4"):
        with pytest.raises(ConfigError, match="peft cannot adapt"):
            build(folder, lora=2)
        return
    trainer = build(folder, lora=2)
    before = weights(trainer)
    assert trainer.train(request(ROWS[:4])).num_steps > 0
    assert not same(weights(trainer), before)


def test_without_peft_it_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError) as caught:
        build(zoo.checkpoint("llama", tmp_path), lora=4)
    assert "pip install '.[lora]'" in caught.value.help
