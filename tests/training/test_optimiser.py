"""The optimiser against torch's own AdamW, its schedule against transformers', its masters against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import get_scheduler

from guerdon.distributed.ranks import Ranks
from guerdon.errors import ConfigError
from guerdon.settings.config import CriticConfig
from guerdon.training.optimiser import Optimiser, schedule_factor


def parameters(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> dict[str, nn.Parameter]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"wide": (64, 96), "narrow": (7,)}
    return {name: nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for name, shape in shapes.items()}


def backward(parameters: dict[str, nn.Parameter], seed: int) -> None:
    """Leaves noise as gradients."""
    random = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        noise = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
        (parameter * noise).sum().backward()


def step(optimiser: Optimiser, parameters: dict[str, nn.Parameter], seed: int) -> float:
    backward(parameters, seed)
    norm = optimiser.gradient_norm()
    optimiser.apply(norm)
    return norm


@pytest.mark.parametrize("largest", [0.0, 1.0, 1e6])
def test_float32_steps_are_bitwise_those_of_torch(largest: float) -> None:
    own, plain = parameters(), parameters()
    optimiser = Optimiser(own, CriticConfig(learning_rate=1e-2, gradient_clip_val=largest, weight_decay=0.1))
    adamw = torch.optim.AdamW(plain.values(), lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    for seed in range(3):
        norm = step(optimiser, own, seed)
        adamw.zero_grad()
        backward(plain, seed)
        assert norm == torch.nn.utils.clip_grad_norm_(plain.values(), largest or float("inf")).item()
        adamw.step()
    assert all(torch.equal(own[name], plain[name]) for name in own)
    assert all(parameter.grad is None for parameter in own.values())
    assert optimiser.step == 3


def test_gradients_are_collected_after_a_move_has_lost_the_hooks() -> None:
    """As `Module.to` moves sharded parameters: by another tensor, whose hooks are its own."""
    own, plain = ({"half": nn.Parameter(torch.ones(3, dtype=torch.bfloat16))} for _ in range(2))
    optimisers = [Optimiser(some, CriticConfig(learning_rate=0.1)) for some in (own, plain)]
    for seed in range(2):
        if seed == 0:
            torch.utils.swap_tensors(own["half"], nn.Parameter(own["half"].detach().clone()))
        for optimiser, some in zip(optimisers, (own, plain), strict=True):
            for part in range(2):
                backward(some, 2 * seed + part)
                # Only the first time, for then there is a hook again.
                assert (some["half"].grad is not None) == (some is own and seed == part == 0)
                optimiser.collect()
                assert some["half"].grad is None
        norms = [optimiser.gradient_norm() for optimiser in optimisers]
        assert norms[0] == norms[1] > 0
        for optimiser, norm in zip(optimisers, norms, strict=True):
            optimiser.apply(norm)
    assert torch.equal(own["half"], plain["half"]) and not torch.equal(own["half"].float(), torch.ones(3))
    own["half"].grad = torch.ones_like(own["half"])
    with pytest.raises(AssertionError, match="not collected"):
        optimisers[0].apply(1.0)


def test_a_step_is_not_watched() -> None:
    """It may take long, and has nothing in it that ticks."""
    own, ranks, waits = parameters(), Ranks(), []
    optimiser = Optimiser(own, CriticConfig(), ranks)
    optimiser._adamw.register_step_pre_hook(lambda *_: waits.append(ranks.doing.num_waits))
    step(optimiser, own, 0)
    assert waits == [1] and ranks.doing.num_waits == 0


def test_gradients_add_up_and_can_be_dropped() -> None:
    own = parameters()
    optimiser = Optimiser(own, CriticConfig())
    backward(own, 0)
    one = optimiser.gradient_norm()
    backward(own, 0)
    assert optimiser.gradient_norm() == pytest.approx(2 * one)
    optimiser.free()
    assert optimiser.gradient_norm() == 0


def test_half_precision_has_masters_in_which_small_steps_add_up() -> None:
    dtype = torch.bfloat16
    half, full = parameters(dtype), {n: nn.Parameter(p.detach().float()) for n, p in parameters(dtype).items()}
    config = CriticConfig(learning_rate=1e-5)
    optimisers = [Optimiser(half, config), Optimiser(full, config)]
    begun = {name: parameter.detach().clone() for name, parameter in half.items()}
    for seed in range(4):
        for own, optimiser in zip((half, full), optimisers, strict=True):
            # The gradients of float32 parameters are those of half precision, so that only the sums can differ.
            for again in (seed, seed + 100):
                random = torch.Generator().manual_seed(again)
                for parameter in own.values():
                    noise = torch.randn(parameter.shape, generator=random).to(dtype)
                    (parameter * noise.to(parameter.dtype)).sum().backward()
            optimiser.apply(optimiser.gradient_norm())
    for name in half:
        master = optimisers[0].tensors()[f"{name}/master"]
        assert torch.equal(master, full[name].detach())
        assert torch.equal(half[name].detach(), master.to(dtype))
        assert (master != begun[name].float()).float().mean() > 0.98
        assert half[name].grad is None
    # Most steps are below the precision that the parameters have themselves.
    assert (half["wide"] == begun["wide"]).float().mean() > 0.5


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("constant_with_warmup", CriticConfig(warmup_steps=0)),
        ("constant_with_warmup", CriticConfig(warmup_steps=4)),
        ("linear", CriticConfig(lr_schedule="linear", warmup_steps=4, total_steps=11)),
        ("cosine", CriticConfig(lr_schedule="cosine", warmup_steps=3, total_steps=11)),
        ("cosine", CriticConfig(lr_schedule="cosine", total_steps=11)),
    ],
)
def test_the_schedule_is_that_of_transformers(name: str, config: CriticConfig) -> None:
    adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs: Any = get_scheduler(name, adamw, config.warmup_steps, config.total_steps)
    for step in range(12):
        assert schedule_factor(config, step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        adamw.step()
        theirs.step()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_after_its_end_the_schedule_stays_at_0(schedule: Any) -> None:
    config = CriticConfig(lr_schedule=schedule, total_steps=5)
    assert schedule_factor(config, 4) > 0
    assert [schedule_factor(config, step) for step in (5, 6, 8, 100)] == [0.0] * 4


def test_the_end_of_the_schedule_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    own = parameters()
    optimiser = Optimiser(own, CriticConfig(lr_schedule="linear", warmup_steps=2, total_steps=4))
    told = []
    for seed in range(6):
        step(optimiser, own, seed)
        told.append(caplog.text.count("the learning rate is 0: the schedule ended at step 4"))
    assert told == [0, 0, 0, 1, 1, 1]


def test_a_constant_rate_of_0_ends_no_schedule(caplog: pytest.LogCaptureFixture) -> None:
    own = parameters()
    step(Optimiser(own, CriticConfig(learning_rate=0.0)), own, 0)
    assert not caplog.text


def test_each_step_has_the_rate_that_was_announced() -> None:
    own = parameters()
    optimiser = Optimiser(own, CriticConfig(learning_rate=0.1, warmup_steps=2, weight_decay=0.0))
    moved = []
    for seed in range(4):
        announced, before = optimiser.learning_rate, own["narrow"].detach().clone()
        step(optimiser, own, seed)
        moved.append((announced, (own["narrow"].detach() - before).abs().max().item()))
    assert [rate for rate, _ in moved] == pytest.approx([0.0, 0.05, 0.1, 0.1])
    assert moved[0][1] == 0 and 0.01 < moved[1][1] <= 0.06 and moved[2][1] > 0.03


def test_8_bit_state_is_small_and_steps_are_nearly_those_of_32_bits() -> None:
    pytest.importorskip("bitsandbytes")
    own, plain = parameters(), parameters()
    config = CriticConfig(learning_rate=1e-2, optimizer="adamw_8bit")
    small, full = Optimiser(own, config), Optimiser(plain, CriticConfig(learning_rate=1e-2))
    begun = own["wide"].detach().clone()
    for seed in range(5):
        step(small, own, seed)
        step(full, plain, seed)
    assert small.tensors()["wide/state1"].dtype == torch.uint8
    # Fewer than 4096 elements are not worth it: they keep 32 bits.
    torch.testing.assert_close(own["narrow"], plain["narrow"], rtol=0, atol=1e-5)
    error = (own["wide"] - plain["wide"]).norm() / (plain["wide"] - begun).norm()
    assert 0 < error < 0.2


def test_8_bits_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError) as caught:
        Optimiser(parameters(), CriticConfig(optimizer="adamw_8bit"))
    assert "pip install '.[8bit]'" in caught.value.help


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_one_continues_bitwise(kind: Any, dtype: torch.dtype) -> None:
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    config = CriticConfig(learning_rate=1e-2, optimizer=kind, warmup_steps=3)
    own, other = parameters(dtype), parameters(dtype, seed=9)
    first, second = Optimiser(own, config), Optimiser(other, config)
    for seed in range(3):
        step(first, own, seed)
    kept = {name: tensor.clone() for name, tensor in first.tensors().items()}
    step(second, other, 77)  # what it was before is forgotten
    for name, parameter in own.items():
        other[name].data.copy_(parameter.data)
    second.restore(3, kept.__getitem__)
    for seed in range(3, 6):
        step(first, own, seed)
        step(second, other, seed)
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert all(torch.equal(tensor, second.tensors()[name]) for name, tensor in first.tensors().items())
    assert first.learning_rate == second.learning_rate


class Moves(TorchFunctionMode):
    """Records the devices of the tensors that `Tensor.to` is called on, for machines without a GPU."""

    moved: set[int]

    def __enter__(self) -> Moves:
        self.moved = set()
        return super().__enter__()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to:
            self.moved.add(args[0].data_ptr())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_everything_but_the_parameters_moves(kind: Any) -> None:
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    half = parameters(torch.bfloat16)
    optimiser = Optimiser(half, CriticConfig(optimizer=kind))
    state = {t.data_ptr() for name, t in optimiser.tensors().items() if kind == "adamw" or not name.endswith("/step")}
    with Moves() as moves:
        optimiser.move(torch.device("cpu"))
    assert state <= moves.moved
    assert not moves.moved & {parameter.data_ptr() for parameter in half.values()}
