"""Models in parts on real ranks: rewards, values, log-probs, their gradients and generation equal one process."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from engine import rank_checks
from guerdon.distributed.ranks import Member, Ranks
from guerdon.engine.checkpoint import placement
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.checkpoint.weights import sharded_class
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import ModelConfig
from launched import Launched, forked
from linked_environment import linked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def prepare(folder: Path, model: str) -> None:
    """The model with a reward head and as language models, and what one process makes of them; once."""
    if (folder / model).exists():
        return
    zoo.checkpoint(model, folder / model)
    for kind in ("untied", "tied"):
        zoo.language_model(model, folder / f"{model}-{kind}", tie_word_embeddings=kind == "tied")
    rows = zoo.rows(seed=3, groups=((40, 4), (20, 2), (60, 1)), least=2)
    rows[:2] = [np.append(row, zoo.PAD) for row in rows[:2]]  # which transformers reads past
    rank_checks.prepare(folder, model, rows)


def reports(done: Launched) -> dict[str, dict[str, float]]:
    """By layout and model what differed, and by how much."""
    assert done.code == 0, done.output
    found = [json.loads(line.partition("REPORT")[2]) for line in done.output.splitlines() if "REPORT" in line]
    return {f"{layout} {model}": worst for layout, model, worst, _ in found}


def check(folder: Path, num_ranks: int, models: tuple[str, ...], *layouts: str, python: str = sys.executable) -> None:
    for model in models:
        prepare(folder, model)
    arguments = (folder, ",".join(models), *layouts)
    done = forked("engine.rank_checks", num_ranks, *arguments, timeout_s=280, python=python)
    found = reports(done)
    print(json.dumps(found, indent=1))
    assert sorted(found) == sorted(f"{layout} {model}" for layout in layouts for model in models)
    for where, worst in found.items():
        assert all(difference < 1e-5 for difference in worst.values()), (where, worst)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks(folder: Path) -> None:
    """Tensor parallel, with micro-batches and shared prompts; nothing is there but what the extra `server` brings.

    FSDP trains in tests/training/test_training_ranks.py, and in the slow ones below, with unequal numbers of rows.
    """
    check(folder, 2, ("qwen3",), "2", python=linked("server", folder / "server").python)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_in_every_layout(folder: Path) -> None:
    check(folder, 2, ("llama", "qwen3"), "2", "1", "1f")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["2", "2f", "1f"])
def test_four_ranks(folder: Path, layout: str) -> None:
    """Tensor parallel by two, twice; the same with FSDP over the two; FSDP over four."""
    check(folder, 4, ("llama", "qwen3"), layout)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_models_that_cannot_be_sharded_are_refused_on_every_rank(tmp_path: Path) -> None:
    """Each rank says in one line what is wrong and what to do, even if only one of them cannot load."""
    folder = tmp_path
    for name in ("gpt2", "bert", "llama"):
        zoo.checkpoint(name, folder / name)
    zoo.checkpoint("llama", folder / "narrow", num_key_value_heads=1)
    (folder / "llama0").symlink_to(folder / "llama")
    for rank in (0, 1):
        zoo.checkpoint("llama", folder / f"other{rank}", seed=rank)
        middle = zoo.checkpoint("llama", folder / f"middle{rank}", hidden_size=256, intermediate_size=1024)
        data = bytearray((middle / "model.safetensors").read_bytes())
        data[len(data) // 2] ^= rank
        (middle / "model.safetensors").write_bytes(data)
    names = ("gpt2", "bert", "narrow", "llamaRANK", "otherRANK", "middleRANK")
    done = forked("engine.rank_refusals", 2, folder, *names, timeout_s=250)
    assert done.code == 0, done.output
    for rank in (0, 1):
        # Each has one, of the same shapes, and together they would be neither.
        for name in (f"other{rank}", f"middle{rank}"):
            told = done.output.partition(f"REFUSED {rank} {name} the ranks would load different models")[2]
            assert f"{name}: weights is " in told.partition("\n")[0] and " on rank 1 (" in told
        assert f"REFUSED {rank} gpt2 a GPT2Model has no plan for tensor parallelism in transformers" in done.output
        assert f"REFUSED {rank} bert {folder}/bert holds an encoder (bert), which is never sharded" in done.output
        # Only rank 1 lacks this one, and rank 0 does not wait for it for ever.
        assert f"there is no folder {folder}/llama1" in done.output.partition(f"REFUSED {rank} llama{rank}")[2]
        assert f"REFUSED {rank} narrow tensor_parallel is 2, and the model's num_key_value_heads is 1" in done.output


def test_an_old_transformers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.distributed.DistributedConfig", object)
    with pytest.raises(ConfigError, match="cannot load the sharded models") as raised:
        sharded_class(None, None, Ranks(size=2, tensor_size=2))
    assert raised.value.help == "pip install 'transformers>=5.23'"


def test_memory_is_asked_for_the_parts_of_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four ranks are on each host, and each has half of the weights."""
    checkpoint, cpu = open_checkpoint(str(zoo.checkpoint("llama", tmp_path))), torch.device("cpu")
    own_bytes = 4 * sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    members = tuple(Member(rank, f"host{rank // 2}", 1) for rank in range(4))
    ranks = Ranks(size=4, tensor_size=2, members=members)
    monkeypatch.setattr(placement, "_host_bytes", lambda: own_bytes + 8)
    placement.check_memory(checkpoint, torch.float32, cpu, ranks=ranks)
    monkeypatch.setattr(placement, "_host_bytes", lambda: own_bytes - 8)
    with pytest.raises(CheckpointError, match="are free on this machine"):
        placement.check_memory(checkpoint, torch.float32, cpu, ranks=ranks)
    # Machines may have one name.
    members = tuple(Member(rank, "host", 1, f"machine{rank}") for rank in range(4))
    placement.check_memory(checkpoint, torch.float32, cpu, ranks=dataclasses.replace(ranks, members=members))


def test_layers_tick(tmp_path: Path) -> None:
    """Forwards and backwards, so that whoever watches sees that a long command gets on."""
    loaded = load_critic(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path))))
    engine, ticks = Engine(loaded), []
    assert engine.watch(lambda *_: ticks.append(1))
    ((_, (values,)),) = engine.values([zoo.rows()[0]])
    assert len(ticks) == zoo.LAYERS
    values.sum().backward()
    assert len(ticks) == 2 * zoo.LAYERS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_architectures_by_tensor_parallelism(tmp_path: Path) -> None:
    """What the self-check of a start cannot see: whether transformers' plan for the architecture is right."""
    names = ("mistral-sliding", "phi3", "gemma2", "mixtral", "gpt-oss")
    done = forked("engine.rank_zoo", 2, tmp_path, *names, timeout_s=580)
    assert done.code == 0, done.output
    found = dict(json.loads(line.partition("REPORT")[2]) for line in done.output.splitlines() if "REPORT" in line)
    assert "no plan for tensor parallelism" in found.pop("gpt-oss")
    assert len(found) == 4
    for name, worst in found.items():
        assert all(difference < 1e-5 for difference in worst.values()), (name, worst)
