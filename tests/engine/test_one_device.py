"""What runs on a GPU, on tensors without data in place of one's: no operator is given tensors of two devices, and what
is only to be launched waits for nothing. No number is right or wrong here.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zoo
from guerdon.actor.generation import Sampler
from guerdon.core import Sequence
from guerdon.engine import heads, microbatches, self_check
from guerdon.engine.attention import flex, forms, registry
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.reward_models import load_critic, load_reward_model
from guerdon.engine.engine import Engine
from guerdon.engine.generating import CachedDecoder
from guerdon.engine.logprobs import LanguageEngine
from guerdon.settings.actors import RolloutConfig
from guerdon.settings.config import LanguageModelConfig, ModelConfig

GPU = torch.device("meta")
COPIES = ("_to_copy", "copy_")


class OneDevice(TorchDispatchMode):
    """Raises if tensors are on two devices, as CUDA does, or if the host would wait for a copy.

    The host never waits for what `to_device` copies, and a number by itself may come from the host.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, given = func.overloadpacket.__name__, tree_leaves((args, kwargs, out if func in COPIES else ()))
        tensors = [x for x in given if isinstance(x, Tensor)]
        if name in COPIES:
            tensors += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        found = {x.device.type for x in tensors if x.dim() or x.device == GPU or name in COPIES}
        assert len(found) <= 1 or (name in COPIES and _is_copied_at_once()), f"{func} on {found}"
        return out


def _is_copied_at_once() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not microbatches.to_device.__code__:
        frame = frame.f_back
    return frame is not None


def as_compiled(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    """Flex attention's shape, once its functions have been called with indices that lie where the queries do."""
    mask, zero = given["block_mask"], torch.zeros((), dtype=torch.int32)
    at = torch.arange(query.shape[2], dtype=torch.int32, device=query.device)
    assert mask.mask_mod(zero, zero, at[:, None], at[None]).shape == (len(at), len(at))
    if given["score_mod"] is not None:
        assert given["score_mod"](query[0, 0, 0, 0], zero, zero, zero, zero).device == query.device
    assert {x.device for x in mask.as_tuple() if isinstance(x, Tensor)} == {query.device}
    return query[..., :1] * value.new_zeros(value.shape[3])


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, forms.Need]]]:
    """Forms are those of a GPU, and all pass their trials; what was tried is in the list. Models run packed.

    A self-check could compare nothing, nor scores be made of what has no data.
    """
    told: list[tuple[str, forms.Need]] = []
    registry.register()
    flexes = dataclasses.replace(forms.FLEX, supports=lambda need: need.size >= 16 and not need.sinks)
    monkeypatch.setattr(forms, "FLEX", flexes)
    monkeypatch.setattr(flex, "_compiled", lambda: as_compiled)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # which knows no such device
    monkeypatch.setattr(forms, "_with_flash", lambda device: device == GPU)
    monkeypatch.setattr(forms, "_check_once", lambda form, kind: told.append((form.name, kind)))
    monkeypatch.setattr(
        self_check,
        "_best_path",
        lambda engine, *_, **__: self_check._Choice("packed+shared" if engine.causal else "packed", "as is wanted"),
    )
    monkeypatch.setattr(self_check, "_sees_later", lambda forward: (False, 0.0))
    monkeypatch.setattr(heads, "to_scores", lambda head, logits, sequences: [logits] * len(sequences))
    forms._choose_form.cache_clear()
    yield told
    forms._choose_form.cache_clear()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what was copied to the host."""
    shapes: list[torch.Size] = []
    monkeypatch.setattr(Tensor, "cpu", lambda x: shapes.append(x.shape) or torch.zeros(x.shape))  # type: ignore[func-returns-value]
    return shapes


def there(loaded: Any) -> Any:
    """What was loaded on the CPU, moved."""
    loaded.trunk.to(GPU)
    loaded.head.to(GPU)
    return loaded


def sequences() -> list[Sequence]:
    """More than fit in one batch, each with a step."""
    return [Sequence(row, steps=np.array([len(row) - 1])) for row in zoo.rows(groups=((40, 4), (25, 3), (60, 2)))]


@pytest.mark.parametrize(
    ("name", "kind", "config"),
    [
        ("llama", "seqcls", {}),
        ("mistral-sliding", "seqcls", {}),
        ("gemma2", "seqcls", {"head_dim": 16}),
        ("llama4", "seqcls", {"head_dim": 16}),
        ("gpt-oss", "seqcls", {}),
        ("gpt2", "seqcls", {}),
        ("bert", "seqcls", {}),
        ("modernbert", "seqcls", {}),
        ("llama", "tokcls", {"num_labels": 2}),
    ],
)
@pytest.mark.usefixtures("tried")
def test_scores_wait_once(name: str, kind: str, config: dict, tmp_path: Path, waits: list[torch.Size]) -> None:
    folder = zoo.checkpoint(name, tmp_path / name, kind, **config)
    engine = Engine(there(load_reward_model(ModelConfig(model=str(folder), dtype="bfloat16", max_batch_tokens=150))))
    waits.clear()
    with OneDevice():
        (result, *_) = engine.score(sequences())
    assert len(waits) == 1
    assert len(result) == (sum(len(s.tokens) for s in sequences()) if kind == "tokcls" else len(sequences()))  # type: ignore[arg-type]


@pytest.mark.usefixtures("tried", "waits")
def test_values_have_gradients(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    engine = Engine(there(load_critic(ModelConfig(model=str(folder), dtype="bfloat16", max_batch_tokens=150))))
    with OneDevice():
        for numbers, values in engine.values([s.tokens for s in sequences()]):
            assert [len(x) for x in values] == [len(sequences()[i].tokens) for i in numbers]
            torch.cat(values).square().sum().backward()
    assert all(p.grad is not None and p.grad.device == GPU for p in engine.trunk.parameters())


@pytest.mark.parametrize("with_entropies", [False, True])
@pytest.mark.usefixtures("tried")
def test_logprobs_wait_for_nothing(with_entropies: bool, tmp_path: Path, waits: list[torch.Size]) -> None:
    folder = zoo.language_model("llama", tmp_path / "llama")
    policy = load_policy(LanguageModelConfig(model=str(folder), dtype="bfloat16", max_batch_tokens=150))
    policy.model.to(GPU)
    engine = LanguageEngine(policy)
    rows = [s.tokens for s in sequences()]
    with OneDevice():
        made = list(engine.logprobs(rows, np.full(len(rows), 3), 0.7, with_entropies=with_entropies))
        torch.stack([tables[0].sum() for _, *tables in made]).sum().backward()
    assert not waits and len(made) > 1
    for numbers, *tables in made:
        wanted = (len(numbers), max(map(len, rows)) - 3)
        assert all((x.shape, x.device) == (wanted, GPU) for x in tables[: 1 + with_entropies])


@pytest.mark.usefixtures("tried")
def test_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(
        LanguageModelConfig(model=str(zoo.language_model("llama", tmp_path / "llama")), dtype="bfloat16")
    )
    policy.model.to(GPU)
    engine = LanguageEngine(policy)
    settings = RolloutConfig(
        min_new_tokens=2, temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1, max_new_tokens=4
    )
    decoder, sample = CachedDecoder(policy, engine, pads=True), Sampler(settings, policy.eos_token_ids)
    # The sampler asks twice, beside a token that the host waits for anyhow; transformers asks whether a mask is needed.
    monkeypatch.setattr(Tensor, "__bool__", lambda _: True)
    with OneDevice(), engine.no_gradients(), decoder.running():
        logits = decoder.begin([s.tokens for s in sequences()[:2]], [2, 1])
        for left in (np.arange(1, 3), np.arange(2)):
            count = len(logits)
            seen = engine.to_device(np.zeros(logits.shape, dtype=bool))
            tokens, logprobs = sample(
                logits, engine.to_device(np.zeros(count)), engine.to_device(np.zeros(count, dtype=np.int64)), seen
            )
            assert tokens.device == logprobs.device == GPU and tokens.shape == logprobs.shape == (count,)
            decoder.keep(left)
            logits = decoder.step(tokens[engine.to_device(left)])
            assert logits.shape == (len(left), policy.vocab_size) and logits.device == GPU


@pytest.mark.parametrize(
    ("name", "wanted"), [("llama", {"varlen", "cascade"}), ("mistral-sliding", {"varlen", "cascade", "flex"})]
)
@pytest.mark.usefixtures("waits")
def test_no_form_is_first_tried_while_serving(
    name: str, wanted: set[str], tmp_path: Path, tried: list[tuple[str, forms.Need]]
) -> None:
    window = {"sliding_window": 100} if name == "mistral-sliding" else {}
    folder = zoo.checkpoint(name, tmp_path, head_dim=16, **window)
    engine = Engine(there(load_reward_model(ModelConfig(model=str(folder), dtype="bfloat16"))))
    at_start = list(tried)
    assert {form for form, _ in at_start} == wanted
    # One token; more than any row had at the start; and copies of many times the batch.
    random = np.random.default_rng(0)
    prompt, long = (random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in (40, 250))
    copying = [np.append(prompt, token) for token in range(zoo.FIRST_TOKEN, 200)]
    for rows in ([prompt[:1]], [long], copying):
        engine.score([Sequence(row) for row in rows])
    assert set(tried) == set(at_start)


def test_tensors_of_two_devices_are_seen() -> None:
    here, other = torch.zeros(3), torch.zeros(3, device=GPU)
    with OneDevice():
        assert (other + torch.tensor(1.0)).device == GPU
        for wrong in (
            lambda: other[torch.arange(2)],
            lambda: here.to(GPU),
            lambda: torch.nn.functional.embedding(torch.arange(2), torch.zeros(3, 4, device=GPU)),
        ):
            with pytest.raises(AssertionError, match=r"on \{'(cpu|meta)', '(cpu|meta)'\}"):
                wrong()
