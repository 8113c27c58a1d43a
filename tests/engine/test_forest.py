"""The native attention against attention written out in float64, and its bits in any company."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attended import CASES, SCALE, Case, tensors, tree, visible, written_out
from guerdon.engine.attention.forms import NATIVE, candidates, need_of
from guerdon.engine.attention.patterns import cut
from guerdon.engine.native import forest as native
from guerdon.engine.native.library import find
from guerdon.engine.packing import PackedBatch, Segment, indices, pack
from tiers import slow_but

pytestmark = pytest.mark.skipif(find()[0] is None, reason=f"no kernels: {find()[1]}")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Largest norm of the difference, relative to the output's: half precision rounds the output once."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attention(
    batch: PackedBatch, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, case: Case, read: np.ndarray | None = None
) -> Tensor:
    """The native form's output, as the registry calls it."""
    pattern, reach = cut(case.pattern, case.causal, batch.max_length)
    some = sinks if case.sinks else None
    need = need_of(batch, q, k, v, case.causal, reach, case.softcap, some, None if pattern is None else pattern.chunk)
    assert candidates(need)[0] is NATIVE
    if read is not None:
        assert NATIVE.of_few is not None
        return NATIVE.of_few(batch, read, q, k, v, SCALE, need, some)
    return NATIVE.compute(batch, q, k, v, SCALE, need, pattern, some)


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_alone(*lengths: int) -> PackedBatch:
    (batch,) = pack([np.arange(n) for n in lengths], budget=10**9, share=False)
    return batch


@pytest.mark.parametrize("dtype", slow_but((torch.float32,), TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "kv_heads", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", slow_but([*CASES][::2], CASES))
def test_outputs_equal_attention_written_out(name: str, kv_heads: int, dtype: torch.dtype) -> None:
    case = CASES[name]
    for share in (True, False) if case.causal else (False,):
        batch = tree(3, share=share, longest=90 if kv_heads == 2 and dtype == torch.float32 else 30)
        q, k, v, sinks, _ = tensors(batch, kv_heads=kv_heads, dtype=dtype)
        want = written_out(batch, *(x.double() for x in (q, k, v, sinks)), case)
        got = attention(batch, q, k, v, sinks, case)
        assert got.dtype == dtype and relative(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (24, 16), (20, 7), (192, 128), (64, 512), (512, 64)])
def test_any_head_and_value_size(size: int, value_size: int) -> None:
    batch = tree(1)
    q, k = (numbers(1, n, batch.num_tokens, size, seed=n) / size**0.5 for n in (6, 3))
    v = numbers(1, 3, batch.num_tokens, value_size, seed=9)
    got = attention(batch, q, k, v, torch.zeros(6), CASES["plain"])
    want = written_out(batch, q.double(), k.double(), v.double(), None, CASES["plain"])
    assert got.shape == (1, 6, batch.num_tokens, value_size) and relative(got, want) <= 2e-6


@pytest.mark.parametrize("heads", [1, 7, 71])
def test_more_heads_of_a_group_than_a_block_has_rows(heads: int) -> None:
    batch = rows_alone(30, 1, 70)
    q, k, v = (numbers(1, n, 101, 16, seed=n) for n in (heads, 1, 1))
    want = written_out(batch, q.double(), k.double(), v.double(), None, CASES["plain"])
    assert relative(attention(batch, q, k, v, torch.zeros(heads), CASES["plain"]), want) <= 2e-6


def test_small_logits_survive_a_soft_cap() -> None:
    case, batch = Case(softcap=50.0), rows_alone(300)
    q, k, v = (numbers(1, 2, 300, 16, seed=n) * scale for n, scale in ((1, 0.02), (2, 1), (3, 1)))
    want = written_out(batch, q.double(), k.double(), v.double(), None, case)
    assert relative(attention(batch, q, k, v, torch.zeros(2), case), want) <= 1e-6


def test_large_logits_neither_overflow_nor_vanish() -> None:
    batch = rows_alone(600)
    q, k, v = (numbers(1, 2, 600, 16, seed=n) * scale for n, scale in ((1, 300), (2, 10), (3, 1)))
    want = written_out(batch, q.double(), k.double(), v.double(), None, CASES["plain"])
    assert relative(attention(batch, q, k, v, torch.zeros(2), CASES["plain"]), want) <= 1e-3


def test_strides_of_any_kind() -> None:
    batch = tree(2)
    n = batch.num_tokens
    whole = numbers(1, n, 3 * 4, 48)
    merged = [x.transpose(1, 2) for x in whole.split(4, 2)]
    by_head = [x.contiguous() for x in merged]
    backwards = [x.contiguous().transpose(2, 3).contiguous().transpose(2, 3) for x in merged]
    want = attention(batch, *by_head, torch.zeros(4), CASES["plain"])
    for some in (merged, backwards):
        assert torch.equal(attention(batch, *some, torch.zeros(4), CASES["plain"]), want)


# ------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", slow_but((torch.float32,), TOLERANCE), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_any_company(name: str, dtype: torch.dtype) -> None:
    """Alone, shared or not, among others, as one of few queries, with one thread or three."""
    case, random = CASES[name], np.random.default_rng(0)
    prompt = random.integers(0, 99, 333)
    rows = [np.concatenate([prompt[:n], random.integers(0, 99, m)]) for n in (40, 200, 333) for m in (1, 5, 90, 700)]
    rows += [random.integers(0, 99, n) for n in (1, 2, 17, 400)]
    tables = [numbers(99 * 1100, heads * 16, seed=heads).to(dtype) for heads in (6, 2, 3)]  # by token and position

    def outputs(some: list[int], share: bool, *, last: bool = False) -> list[Tensor]:
        (batch,) = pack([rows[i] for i in some], budget=10**9, share=share)
        at = torch.from_numpy(batch.tokens * 1100 + batch.positions)
        q, k, v = (x[at].reshape(1, len(at), -1, 16).transpose(1, 2) for x in tables)
        v = torch.cat([v[:, :2], v[:, 2:, :, :]], 1)[:, :2]
        out = attention(batch, q, k, v, torch.linspace(-1, 2, 6).to(dtype), case, batch.last if last else None)
        spans = {row: batch.spans[i] for i, row in enumerate(batch.rows)}
        return [out[0, :, indices(spans[i])[-1:] if last else indices(spans[i])] for i in range(len(some))]

    everything = list(range(len(rows)))
    want = outputs(everything, case.causal)
    for i in everything:
        assert torch.equal(outputs([i], False)[0], want[i])
    for got, whole in zip(outputs(everything, case.causal, last=True), want, strict=True):
        assert torch.equal(got[:, 0], whole[:, -1])
    shuffled = random.permutation(len(rows)).tolist()
    for share in (False, case.causal):
        torch.set_num_threads(3)
        for i, got in zip(shuffled, outputs(shuffled, share), strict=True):
            assert torch.equal(got, want[i])
        torch.set_num_threads(1)


def test_heads_in_groups_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tree(4)
    q, k, v, sinks, _ = tensors(batch, kv_heads=4, dtype=torch.float32)
    case = CASES["window and sinks"]
    want = attention(batch, q, k, v, sinks, case)
    monkeypatch.setattr(native, "MOST_SCRATCH", 1)
    assert torch.equal(attention(batch, q, k, v, sinks, case), want)


def test_training_has_the_bits_of_serving() -> None:
    batch = tree(5)
    q, k, v, *_ = tensors(batch, dtype=torch.float32)
    want = attention(batch, q, k, v, torch.zeros(4), CASES["plain"])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.equal(attention(batch, *leaves, torch.zeros(4), CASES["plain"]), want)


def test_the_log_sum_exp_is_that_of_all_logits() -> None:
    batch = tree(6)
    q, k, v, *_ = tensors(batch, dtype=torch.float32)
    lse = torch.empty(q.shape[:3])
    native.forest(batch, q, k, v, SCALE, native.Mask((-1, 0)), lse=lse)
    logits = (q.double() @ k.double().transpose(2, 3) * SCALE).masked_fill(~visible(batch, CASES["plain"]), -torch.inf)
    assert (lse - torch.logsumexp(logits, 3)).abs().max() < 2e-6


# -------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_row_breaks_no_other(place: int, bad: float) -> None:
    (batch,) = pack([np.r_[np.arange(50), np.arange(n, 3 * n)] for n in (60, 70, 80)], budget=10**9, share=True)
    inputs = tensors(batch, dtype=torch.float32)[:3]
    want = attention(batch, *inputs, torch.zeros(4), CASES["plain"])
    own = indices(batch.spans[1])[50:]
    inputs[place] = inputs[place].clone()
    inputs[place][:, :, own[3]] = bad
    got = attention(batch, *inputs, torch.zeros(4), CASES["plain"])
    others = np.setdiff1d(np.arange(batch.num_tokens), own)
    assert torch.equal(got[:, :, others], want[:, :, others])
    assert got[:, :, own[3]].isnan().all() or (place and bad == float("inf"))
    if place:
        assert not torch.equal(got[:, :, own[-1]], want[:, :, own[-1]])


def test_a_row_of_nan_with_any_payload_is_nan() -> None:
    batch = rows_alone(40)
    q, k, v = (numbers(1, 1, 40, 16, seed=n) for n in range(3))
    q[:, :, 7] = torch.tensor([0x7FC12345], dtype=torch.int32).view(torch.float32)
    assert attention(batch, q, k, v, torch.zeros(1), CASES["plain"])[0, 0, 7].isnan().all()


def test_many_segments_and_a_deep_chain() -> None:
    many = rows_alone(*[1] * 10_000)
    q, k, v = (numbers(1, n, 10_000, 8, seed=n) for n in (2, 1, 1))
    assert torch.allclose(attention(many, q, k, v, torch.zeros(2), CASES["plain"]), v.expand(-1, 2, -1, -1))
    starts = np.arange(0, 900, 3)
    spans = [(int(a), int(a) + 3) for a in starts]
    segments = [Segment(a, b, a, tuple(spans[:i]), 900) for i, (a, b) in enumerate(spans)]
    whole = np.arange(900)
    deep = PackedBatch(whole, whole, segments, [0], [tuple(spans)], np.array([899]), 900)
    q, k, v = (numbers(1, n, 900, 8, seed=n) for n in (2, 1, 1))
    want = attention(rows_alone(900), q, k, v, torch.zeros(2), CASES["plain"])
    assert torch.equal(attention(deep, q, k, v, torch.zeros(2), CASES["plain"]), want)


def test_no_tokens_and_no_queries() -> None:
    batch = rows_alone(5)
    q, k, v = (numbers(1, 2, 5, 8, seed=n) for n in range(3))
    assert not attention(batch, q, k, v, torch.zeros(2), CASES["plain"], np.empty(0, np.int64)).any()
    nothing = PackedBatch(*(np.empty(0, np.int64),) * 2, [], [], [], np.empty(0, np.int64), 0)
    none = [x[:, :, :0] for x in (q, k, v)]
    assert native.forest(nothing, *none, 1.0, native.Mask((-1, 0))).shape == (1, 2, 0, 8)


def test_scratch_that_does_not_fit_is_an_error_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rows_alone(5)
    q, k, v = (numbers(1, 2, 5, 8, seed=n) for n in range(3))
    empty = torch.empty

    def refuse(*args: object, **more: object) -> Tensor:
        if len(args) == 1 and isinstance(args[0], int):
            raise MemoryError
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(MemoryError):
        attention(batch, q, k, v, torch.zeros(2), CASES["plain"])


# ----------------------------------------------------------------------------------------- the process


@pytest.mark.slow
def test_one_openmp_runtime_is_in_the_process() -> None:
    code = (
        "import torch; from guerdon.engine.native.library import kernels\n"
        "assert kernels() is not None\n"
        "maps = open('/proc/self/maps').read().splitlines()\n"
        "print(len({line.split()[5] for line in maps if 'gomp' in line or 'iomp' in line or 'libomp' in line}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "build"), slow_but(("default",), [("avx512", "avx512"), ("avx2", "avx2"), ("default", "baseline")])
)
def test_pytorchs_level_chooses_the_build(level: str, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX512", "AVX2") or level == "avx512" != capability.lower():
        pytest.skip("a processor without this build")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", level)
    code = "from guerdon.engine.native.library import find; print(find()[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{build}\n"


def test_without_kernels_the_other_forms_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tree(0)
    q, k, v, *_ = tensors(batch, dtype=torch.float32)
    monkeypatch.setattr("guerdon.engine.attention.forms.kernels", lambda: None)
    need = need_of(batch, q, k, v, True, (-1, 0))
    assert [form.name for form in candidates(need)] == ["cascade", "by_segment"]


def test_the_kernels_are_beside_their_sources() -> None:
    library, build = find()
    assert library is not None and Path(library._name).name == f"kernels_{build}.so"
