"""Where a GPU has no memory left: at the start that is an error, and no reason to run the model in another way."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from guerdon.engine import generating
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.placement import check_memory
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.engine import Engine
from guerdon.engine.generating import DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.engine.microbatches import Batcher
from guerdon.errors import TooLarge
from guerdon.settings.config import LanguageModelConfig, ModelConfig

GPU = torch.device("cuda", 0)


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee the documentation")


@pytest.mark.parametrize("path", ["single", "packed+shared", "packed"])
def test_a_self_check_without_memory_chooses_nothing(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, tried = Batcher.plan, []

    def short(batcher: Batcher, by: str, *args: Any) -> Any:
        tried.append(by)
        if by == path:
            full()
        if by == "packed+shared":
            raise NotImplementedError("so that others are tried")
        return plan(batcher, by, *args)

    loaded = load_critic(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path))))
    monkeypatch.setattr(Batcher, "plan", short)
    with pytest.raises(
        TooLarge, match=r"too little memory for the self-check: CUDA out of memory\. Tried to allocate 20\.00 MiB\.$"
    ) as e:
        Engine(loaded)
    assert tried[-1] == path and "--device" in e.value.help


def test_a_decoder_without_memory_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(LanguageModelConfig(model=str(zoo.language_model("llama", tmp_path))))
    engine = LanguageEngine(policy)
    monkeypatch.setattr(generating.PackedDecoder, "begin", full)
    with pytest.raises(TooLarge, match="CUDA out of memory"):
        DecoderChoice(policy, engine)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Fakes a GPU with so many bytes free, and so many in PyTorch's cache."""

    def tell(free_bytes: int, kept_bytes: int) -> None:
        free = [free_bytes]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, free_bytes + kept_bytes))

    return tell


def test_memory_that_pytorch_caches_counts_as_free(tmp_path: Path, gpu: Callable[[int, int], None]) -> None:
    checkpoint = open_checkpoint(str(zoo.checkpoint("llama", tmp_path)))
    own_bytes = 2 * sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    gpu(own_bytes - 8, 8)
    check_memory(checkpoint, torch.bfloat16, GPU)
    gpu(own_bytes - 8, 7)
    with pytest.raises(TooLarge, match="are free on cuda:0"):
        check_memory(checkpoint, torch.bfloat16, GPU)
