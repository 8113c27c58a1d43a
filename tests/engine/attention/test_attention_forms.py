"""The table of attention's forms: which forms support a need, their checks, and models that run with them.

A written-out kernel stands in for FlashAttention, so that models go by the forms of a GPU on a CPU.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zoo
from attended import CASES, WrittenOut
from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine.attention import forms as attention_forms
from guerdon.engine.attention import registry, varlen
from guerdon.engine.attention.forms import (
    BY_SEGMENT,
    AttentionForm,
    Need,
    candidates,
    check_form,
    choose_form,
    need_of,
    noting_skipped,
)
from guerdon.engine.attention.patterns import CAUSAL, FULL
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.engine.engine import Engine
from guerdon.engine.layers import recompute_activations
from guerdon.engine.native.library import kernels
from guerdon.engine.packing import pack
from guerdon.settings.config import ModelConfig
from tiers import of_each_kind, slow_but


def need(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **others: Any) -> Need:
    """What a plain causal layer of an 8B model asks, and `others`."""
    plain: dict[str, Any] = {
        "heads": 32, "kv_heads": 8, "size": 128, "value_size": 128, "causal": True, "reach": CAUSAL, "softcap": None,
        "sinks": False, "shared": True, "copies": False, "gradients": False, "with_flash": device == "cuda",
    }  # fmt: skip
    return Need(device=torch.device(device), dtype=dtype, **plain | others)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        (need(), ["varlen", "cascade", "flex"]),
        (need(gradients=True), ["varlen", "cascade", "flex"]),
        (need(copies=True), ["cascade", "flex", "varlen"]),
        (need(copies=True, sinks=True), ["cascade", "varlen"]),
        (need(shared=False), ["varlen", "flex"]),
        (need(shared=False, causal=False, reach=FULL), ["varlen", "flex"]),
        (need(reach=(4095, 0)), ["varlen", "flex"]),
        (need(reach=(4095, 0), copies=True), ["flex", "varlen"]),
        (need(reach=None), ["flex"]),
        (need(softcap=50.0), ["flex"]),
        (need(sinks=True, reach=(127, 0)), ["varlen"]),
        (need(sinks=True, dtype=torch.float32), []),
        (need(dtype=torch.float32), ["flex"]),
        (need(with_flash=False), ["flex"]),
        (need(size=512, value_size=512), ["flex"]),
        (need(size=192), ["flex"]),
        (need(size=8, value_size=8), ["varlen", "cascade"]),
        (need("cpu"), ["native", "cascade"]),
        (need("cpu", torch.float32, shared=False), ["native", "cascade"]),
        (need("cpu", torch.float32, gradients=True), ["native", "cascade"]),
        (need("cpu", softcap=50.0, gradients=True), []),
        (need("cpu", torch.float64), ["cascade"]),
        (need("cpu", reach=None), []),
        (need("cpu", reach=None, chunk=64), ["native"]),
        (need("cpu", causal=False, reach=FULL), ["native"]),
        (need("cpu", reach=FULL), ["native"]),
        (need("cpu", reach=(4095, 0)), ["native"]),
        (need("cpu", softcap=50.0), ["native"]),
        (need("cpu", sinks=True), ["native"]),
        (need("cpu", size=192), ["native"]),
        (need("mps", with_flash=False), []),
    ],
)
def test_which_forms_there_are_for_what_is_asked(what: Need, names: list[str]) -> None:
    names = [name for name in names if name != "native" or kernels() is not None]
    assert [form.name for form in candidates(what)] == [*names, "by_segment"]


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing chosen yet, and nothing tried."""
    forget()
    yield
    forget()


def forget() -> None:
    attention_forms._choose_form.cache_clear()
    attention_forms._check_once.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they may pass")
@pytest.mark.usefixtures("fresh")
def test_forms_that_raise_are_left_out_and_say_why() -> None:
    for _ in range(2):  # the second time they are known
        with noting_skipped() as left_out:
            assert choose_form(need()) is BY_SEGMENT
        assert list(left_out) == ["varlen", "cascade", "flex"]
        assert all(why and "\n" not in why for why in left_out.values())
    with noting_skipped() as left_out:
        assert choose_form(need("cpu")) is candidates(need("cpu"))[0]
    assert not left_out


@pytest.fixture
def tried(fresh: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Need]]:
    """Every form passes; what was tried is in the list."""
    told: list[tuple[str, Need]] = []
    monkeypatch.setattr(attention_forms, "check_form", lambda form, what: told.append((form.name, what)))
    return told


def test_a_form_is_tried_once_for_all_batches_and_windows(tried: list[tuple[str, Need]]) -> None:
    for shared, copies in ((False, False), (True, False)):
        for reach in ((4095, 0), (511, 0)):
            assert choose_form(need(shared=shared, copies=copies, reach=reach)).name == "varlen"
    # And what batches would go by that copy more.
    assert [name for name, _ in tried] == ["varlen", "flex"]
    assert all(what.shared for _, what in tried)
    assert choose_form(need(copies=True, reach=(4095, 0))).name == "flex" and len(tried) == 2
    assert choose_form(need()).name == choose_form(need(shared=False)).name == "varlen"
    assert choose_form(need(gradients=True)).name == "varlen"
    assert choose_form(need(shared=False, causal=False, reach=FULL)).name == "varlen"
    assert [(name, what.reach, what.gradients) for name, what in tried[2:]] == [
        ("varlen", CAUSAL, False), ("cascade", CAUSAL, False), ("varlen", CAUSAL, True), ("cascade", CAUSAL, True),
        ("varlen", FULL, False),
    ]  # fmt: skip


def test_a_window_is_tried_when_rows_are_too_short_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = pack([np.arange(10), np.arange(7)], budget=99, share=False)
    told: list[Need] = []
    monkeypatch.setattr(registry, "choose_form", lambda what: told.append(what) or choose_form(what))  # type: ignore[func-returns-value]
    pattern = CASES["window"].pattern
    assert pattern is not None and pattern.window is not None and pattern.window > batch.max_length
    for device, reaches in (("meta", [pattern.reach, CAUSAL]), ("cpu", [CAUSAL])):
        q, k, v = (torch.zeros(1, n, batch.num_tokens, 16, device=device) for n in (4, 1, 1))
        told.clear()
        with registry.attending(batch):
            out, _ = registry.packed_attention(torch.nn.Module(), q, k, v, pattern)
        assert out.shape == (1, batch.num_tokens, 4, 16)
        assert [what.reach for what in told] == reaches


def test_copies_are_counted_as_far_as_the_window_reaches() -> None:
    random = np.random.default_rng(0)
    prompt = random.integers(0, 99, 400)
    rows = [np.concatenate([prompt, random.integers(0, 99, 4)]) for _ in range(20)]
    (batch,) = pack(rows, budget=9999, share=True)
    q, k, v = (torch.zeros(1, n, batch.num_tokens, 16) for n in (4, 1, 1))
    for reach, copies in ((CAUSAL, True), ((399, 0), True), ((20, 0), False), (None, True), (CAUSAL, True)):
        what = need_of(batch, q, k, v, True, reach)
        assert what.shared and what.copies is copies


def stand_in(change: Callable[[dict], dict] = dict, kernel: WrittenOut | None = None) -> AttentionForm:
    """`varlen` with a kernel for CPUs, its arguments changed."""

    def compute(batch: Any, q: Any, k: Any, v: Any, scale: Any, need: Need, pattern: Any, sinks: Any) -> Tensor:
        given = change({"scale": scale, "reach": need.reach, "sinks": sinks})
        return varlen.varlen(batch, q, k, v, **given, kernel=kernel or WrittenOut())

    return AttentionForm("varlen", lambda need: need.reach is not None and not need.softcap, compute)


class LosesKeys(WrittenOut):
    """Its output is right, its gradients of keys are not."""

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().backward(*args)
        return dq, torch.zeros_like(dk), dv


SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "size": 16, "value_size": 16}
TRIED = [
    need("cpu", torch.float32, gradients=gradients, **SMALL, **others)
    for gradients in (False, True)
    for others in (
        {}, {"reach": (4095, 0)}, {"sinks": True}, {"shared": False}, {"shared": False, "causal": False, "reach": FULL},
        {"shared": False, "causal": False, "reach": (64, 64)},
    )
]  # fmt: skip


@pytest.mark.parametrize("what", TRIED)
def test_a_form_that_agrees_passes_its_trial(what: Need) -> None:
    assert check_form(stand_in(), what) is None


@pytest.mark.parametrize("others", [{}, {"reach": None}, {"reach": (4095, 0)}, {"softcap": 50.0}])
def test_flex_passes_its_trial(others: dict[str, Any]) -> None:
    assert check_form(attention_forms.FLEX, need("cpu", torch.float32, **SMALL, **others)) is None


def test_a_form_that_is_wrong_fails_its_trial() -> None:
    plain, windowed, _, alone, *_ = TRIED
    longer = stand_in(lambda given: given | {"reach": (given["reach"][0] + 1, 0)})
    assert "differs" in str(check_form(longer, windowed))
    assert "differs" in str(check_form(stand_in(lambda given: given | {"scale": 1.1 * given["scale"]}), plain))
    assert "differs" in str(check_form(stand_in(lambda given: given | {"reach": FULL}), alone))
    wrong = stand_in(kernel=LosesKeys())
    assert check_form(wrong, plain) is None
    assert "differs" in str(check_form(wrong, need("cpu", torch.float32, gradients=True, **SMALL)))


def test_no_memory_says_nothing_about_a_form(fresh: None) -> None:
    tries = []

    def compute(*args: Any) -> Tensor:
        tries.append(args)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("no memory")
        return stand_in().compute(*args)

    form, what = AttentionForm("varlen", lambda _: True, compute), TRIED[0]
    with pytest.raises(torch.OutOfMemoryError):
        attention_forms._check_once(form, what)
    assert attention_forms._check_once(form, what) is None is attention_forms._check_once(form, what)
    assert len(tries) == 2


def test_a_trial_within_a_checkpointed_layer_leaves_no_trace() -> None:
    tried = []

    def layer(x: Tensor) -> Tensor:
        if not tried:  # the layer computes again what it did then, without the check
            tried.append(check_form(stand_in(), need("cpu", torch.float32, gradients=True, **SMALL)))
        return x * x

    x = torch.ones(3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert tried == [None] and x.grad is not None and x.grad.tolist() == [2, 2, 2]


# ------------------------------------------------------------------------------------------------ in models

FLEX_ON_CPU = AttentionForm("flex", lambda need: not need.sinks and not need.gradients, attention_forms.FLEX.compute)
LIKE_A_GPU = {
    "llama": "varlen", "mistral-sliding": "varlen", "gemma3": "varlen", "gpt-oss": "varlen", "gpt2": "varlen",
    "bert": "varlen", "modernbert": "varlen", "gemma2": "flex", "llama4": "flex",
}  # fmt: skip


def make_rows() -> list[np.ndarray]:
    rows = zoo.rows(2, groups=((40, 4), (25, 3), (60, 1)))
    return [*rows, rows[0][:1].copy()]


@pytest.fixture
def like_a_gpu(fresh: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forms of a GPU in a CPU's place, as far as they go; the names of those that run are in the list."""
    ran: list[str] = []

    def noted(form: AttentionForm) -> AttentionForm:
        def compute(*args: Any) -> Tensor:
            ran.append(form.name)
            return form.compute(*args)

        return AttentionForm(form.name, form.supports, compute)

    forms = [noted(form) for form in (stand_in(), FLEX_ON_CPU, BY_SEGMENT)]
    monkeypatch.setattr(attention_forms, "candidates", lambda what: [form for form in forms if form.supports(what)])
    return ran


@pytest.mark.parametrize("name", of_each_kind(LIKE_A_GPU))
def test_models_score_the_same_by_the_forms_of_a_gpu(name: str, tmp_path: Path, like_a_gpu: list[str]) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = make_rows()
    engine = build_scorer(ModelConfig(model=str(folder)))
    assert engine.info.path == ("packed" if name in zoo.ENCODERS else "packed+shared"), engine.info.why
    like_a_gpu.clear()
    got = np.array([r.reward for r in engine.score([Sequence(row) for row in rows])])  # type: ignore[union-attr]
    assert LIKE_A_GPU[name] in like_a_gpu and "by_segment" not in like_a_gpu
    want = zoo.reference(folder, rows)
    assert np.abs(got - want).max() <= 1e-4 * want.std()


@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "mistral-sliding", "gpt-oss"]))
def test_models_train_the_same_by_the_forms_of_a_gpu(name: str, tmp_path: Path, like_a_gpu: list[str]) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    loaded = load_critic(ModelConfig(model=str(folder)))
    recompute_activations(loaded.trunk)
    engine = Engine(loaded)
    like_a_gpu.clear()
    rows = make_rows()
    slopes = []
    for path in ("packed+shared", "single"):
        engine.path = path
        engine.use(path)
        engine.trunk.zero_grad()
        for _, values in engine.values(rows):
            torch.cat(values).square().sum().backward()
        slopes.append({n: p.grad.clone() for n, p in engine.trunk.named_parameters() if p.grad is not None})
    assert set(like_a_gpu) == {"varlen"}
    least = 1e-3 * max(x.norm() for x in slopes[1].values())
    for n, want in slopes[1].items():
        assert (slopes[0][n] - want).norm() <= 1e-4 * max(want.norm(), least), n
