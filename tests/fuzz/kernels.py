"""Random inputs to the kernels for CPUs, in buffers of exactly the size that is read, against formulas in float64.

    PYTHONPATH=src:tests python -m fuzz.kernels --seed 1 --inputs 200

`test_fuzz_kernels.py` runs this with kernels that are built with AddressSanitizer and UndefinedBehaviorSanitizer, which
end the process at the first read or write beyond a buffer. What lies between strided rows is NaN, so that reading it
shows in the output. Each input is named before it is tried: the last line says which one ended the process.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.engine.native import forest, passes
from guerdon.engine.native.library import DTYPES, find
from guerdon.engine.packing import PackedBatch, Segment
from guerdon.errors import is_out_of_memory

ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding to nearest."""
SMALLEST = {torch.float32: 2.0**-119, torch.bfloat16: 2.0**-119, torch.float16: 2.0**-24}
"""Absolute error of tiny numbers: the steps of float16; exponentials below 2^-126 are 0, and x is below 2^7 here."""
LONG_SUM = 2.0**-17
"""Relative error of the kernels' float32 sums and exponentials: 128 roundings, more than they ever add up to here."""
UNIT = torch.ones(())


class Random:
    """A generator of choices, and of tensors in buffers that end where their last number does."""

    def __init__(self, seed: str) -> None:
        self.generator = np.random.default_rng(np.frombuffer(seed.encode(), np.uint8))

    def one(self, *choices: Any) -> Any:
        return choices[self.generator.integers(len(choices))]

    def between(self, least: int, most: int) -> int:
        return int(self.generator.integers(least, most + 1))

    def floats(self, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return torch.from_numpy(self.generator.standard_normal(shape) * scale)

    def strided(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Returns numbers of that shape, the last dimension dense, the others in any order with gaps of NaN."""
        strides, stride = [0] * (len(shape) - 1) + [1], shape[-1]
        for axis in self.generator.permutation(len(shape) - 1):
            strides[axis] = stride + self.one(0, 0, 1, 3, 17)
            stride = strides[axis] * shape[axis]
        whole = torch.full((self.one(0, 1) + extent(shape, strides),), math.nan, dtype=dtype)
        view = whole.as_strided(shape, strides, len(whole) - extent(shape, strides))
        return view.copy_(self.floats(shape, scale))


def extent(shape: tuple[int, ...], strides: list[int]) -> int:
    """Returns how many numbers lie between the first and the last of a tensor, both included."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0


# ------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Tree:
    """Segments in depth-first order: lengths, and each one's parent or -1."""

    lengths: list[int]
    parents: list[int]

    def paths(self) -> list[np.ndarray]:
        """Returns the tokens that each segment's last one is preceded by, and itself, in the order of positions."""
        starts, found = np.cumsum([0, *self.lengths]), []
        for i, parent in enumerate(self.parents):
            own = np.arange(starts[i], starts[i + 1])
            found.append(own if parent < 0 else np.concatenate([found[parent], own]))
        return found

    def batch(self) -> PackedBatch:
        stops = np.cumsum(self.lengths).tolist()
        spans = [(stop - n, stop) for stop, n in zip(stops, self.lengths, strict=True)]
        ends, ancestors, positions = list(stops), [], []
        for i, parent in enumerate(self.parents):
            ancestors.append(() if parent < 0 else (*ancestors[parent], spans[parent]))
            positions.append(sum(b - a for a, b in ancestors[i]))
            while parent >= 0:
                ends[parent] = stops[i]
                parent = self.parents[parent]
        whole = [Segment(*spans[i], positions[i], ancestors[i], ends[i]) for i in range(len(spans))]
        at = [np.arange(position, position + n) for position, n in zip(positions, self.lengths, strict=True)]
        total = sum(self.lengths)
        longest = max((position + n for position, n in zip(positions, self.lengths, strict=True)), default=0)
        nothing = np.empty(0, np.int64)
        return PackedBatch(
            np.arange(total), np.concatenate(at) if at else nothing, whole, [], [], nothing, max_length=longest
        )


def random_tree(random: Random, kind: str) -> Tree:
    match kind:
        case "nothing":
            return Tree([], [])
        case "one token":
            return Tree([1], [-1])
        case "one":
            return Tree([random.between(2, 900)], [-1])
        case "thousands":
            n = random.between(1000, 4000)
            return Tree([random.one(1, 1, 1, 2, 5) for _ in range(n)], [-1] * n)
        case "deep":
            return Tree([random.one(1, 3, 17, 40) for _ in range(33)], [*range(-1, 32)])
        case "roots":
            n = random.between(1, 12)
            return Tree([random.one(1, 2, 15, 16, 17, 90, 257) for _ in range(n)], [-1] * n)
    lengths, parents, branch = [], [], []
    for i in range(random.between(2, 40)):
        branch = branch[: random.between(0, len(branch))]
        lengths.append(random.one(1, 1, 7, 16, 31, 48, 49, 130))
        parents.append(branch[-1] if branch else -1)
        branch.append(i)
    return Tree(lengths, parents)


KINDS = ("nothing", "one token", "one", "thousands", "deep", "roots", "tree", "tree", "tree")
MASKS = (forest.Mask((-1, 0)), forest.Mask((-1, -1)), *(forest.Mask((n, 0)) for n in (0, 1, 20, 300)),
         *(forest.Mask((n, n)) for n in (1, 33)), *(forest.Mask((-1, 0), chunk) for chunk in (1, 24, 256)))  # fmt: skip
SIZES = (1, 7, 8, 12, 16, 20, 24, 33, 64, 80, 96, 128, 192, 256, 512)


@dataclass(frozen=True)
class Attended:
    """One call of `forest.forest`."""

    tree: Tree
    mask: forest.Mask
    query: Tensor
    key: Tensor
    value: Tensor
    softcap: float | None
    sinks: Tensor | None
    read: np.ndarray | None

    def compute(self) -> tuple[Tensor, Tensor]:
        """Returns the output `[H,T,E]` and the logarithms of the sums `[H,T]`, NaN if a query was not read."""
        lse = torch.full(self.query.shape[:3], math.nan)
        scale = self.query.shape[3] ** -0.5
        out = forest.forest(
            self.tree.batch(), self.query, self.key, self.value, scale, self.mask, self.softcap, self.sinks, self.read,
            lse,
        )  # fmt: skip
        return out[0], lse[0]

    def sees(self, at: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns whether a query at a position sees a key at one of the same row, by the definition of the mask."""
        (before, after), chunk = self.mask.reach, self.mask.chunk
        i, j = at[:, None], keys[None]
        seen = np.ones((len(at), len(keys)), bool)
        if before >= 0:
            seen &= i - j <= before
        if after >= 0:
            seen &= j - i <= after
        return seen if chunk is None else seen & (i // chunk == j // chunk)

    def reference(self) -> tuple[Tensor, Tensor]:
        """Returns what `compute` should, in float64."""
        q, k, v = (x[0].double().numpy() for x in (self.query, self.key, self.value))
        group = len(q) // len(k)
        out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[:2], math.nan)
        read = np.ones(q.shape[1], bool)
        if self.read is not None:
            read = np.isin(np.arange(q.shape[1]), self.read)
        sinks = None if self.sinks is None else self.sinks.double().numpy()[:, None]
        for path, n in zip(self.tree.paths(), self.tree.lengths, strict=True):
            own = path[-n:]
            seen = self.sees(np.arange(len(path))[-n:], np.arange(len(path)))
            by_head, values = (x[:, path].repeat(group, 0) for x in (k, v))
            logits = q[:, own] @ by_head.transpose(0, 2, 1) * q.shape[2] ** -0.5
            if self.softcap:
                logits = self.softcap * np.tanh(logits / self.softcap)
            logits = np.where(seen, logits, -np.inf)
            largest = logits.max(2) if sinks is None else np.maximum(logits.max(2), sinks)
            weights = np.exp(logits - largest[..., None])
            total = weights.sum(2) + (0 if sinks is None else np.exp(sinks - largest))
            out[:, own] = weights @ values / total[..., None]
            lse[:, own] = largest + np.log(total)
        out[:, ~read], lse[:, ~read] = 0, math.nan
        return torch.from_numpy(out), torch.from_numpy(lse)


def random_attention(random: Random) -> Attended:
    kind = random.one(*KINDS)
    mask = random.one(*MASKS)
    if mask.reach[1]:  # rows that see what follows are not shared
        kind = random.one("one token", "one", "thousands", "roots")
    tree, dtype = random_tree(random, kind), random.one(*DTYPES)
    tokens = sum(tree.lengths)
    sizes = [n for n in SIZES if n * tokens <= 60_000 or n <= 16]
    size, value_size = random.one(*sizes), random.one(*sizes)
    kv_heads, group = random.one(1, 1, 2, 3), random.one(1, 2, 3, 7, *((50,) if tokens < 300 else ()))
    heads = kv_heads * group
    query = random.strided((1, heads, tokens, size), dtype, random.one(0.1, 1, 1, 4))
    key = random.strided((1, kv_heads, tokens, size), dtype)
    value = random.strided((1, kv_heads, tokens, value_size), dtype)
    if size == value_size and random.one(True, False, False):
        value = key
    softcap = random.one(None, None, 1.5, 30.0)
    sinks = random.one(None, random.floats((heads,)).to(dtype))
    few = random.one(0, 1, 5, tokens) if tokens else 0
    read = random.one(None, None, random.generator.integers(0, max(tokens, 1), few))
    return Attended(tree, mask, query, key, value, softcap, sinks, read)


def try_attention(random: Random) -> None:
    case = random_attention(random)
    forest.MOST_SCRATCH = random.one(1, 1 << 24)
    got, lse = case.compute()
    if not case.tree.lengths:
        assert got.shape == (case.query.shape[1], 0, case.value.shape[3])
        return
    want, want_lse = case.reference()
    dtype, largest = case.value.dtype, case.value[0].double().abs().max()
    bound = ROUNDING[dtype] * want.abs() + LONG_SUM * largest + SMALLEST[dtype]
    assert got.dtype == dtype and ((got.double() - want).abs() <= bound).all(), (got.double() - want).abs().max()
    bound = LONG_SUM * (1 + want_lse.abs())
    assert (((lse - want_lse).abs() <= bound) == ~want_lse.isnan()).all() and (lse.isnan() == want_lse.isnan()).all()
    _try_nan(random, case, got)


def _try_nan(random: Random, case: Attended, before: Tensor) -> None:
    """Breaks one token's query, key or value: what sees it is NaN, and other sequences keep their bits."""
    paths, lengths = case.tree.paths(), case.tree.lengths
    broken = random.between(0, len(lengths) - 1)
    token = int(paths[broken][-random.between(1, lengths[broken])])
    place = random.one(case.query, case.key, case.value)
    place[:, :, token] = math.nan
    after, _ = case.compute()
    sees, may_change = np.zeros((2, case.query.shape[2]), bool)
    for path, n in zip(paths, lengths, strict=True):
        at = np.flatnonzero(path == token)
        if len(at):  # the token's own segment, or one that continues it
            own = np.arange(len(path))[-n:]
            sees[path[own]] = case.sees(own, at)[:, 0]
            may_change[path[own]] = True
    if place is case.query:
        sees = np.arange(len(sees)) == token
    if place is not case.value:  # 0 x NaN: a block's other rows read the value as well
        may_change = sees
    read = np.ones(len(sees), bool) if case.read is None else np.isin(np.arange(len(sees)), case.read)
    assert after[:, sees & read].isnan().all(), "a broken token is not seen"
    assert torch.equal(after[:, ~(may_change & read)], before[:, ~(may_change & read)]), "another sequence changed"


# ------------------------------------------------------------------------------------------------ passes


def random_rows(random: Random, scale: float = 1.0, even: bool = False) -> Tensor:
    """Returns rows `[*,W]`, seldom enough numbers for threads."""
    width = 2 * random.between(1, 300) if even else random.between(1, 600)
    lead = random.one((), (0,), (1,), (random.between(2, 9),), (random.between(50, 200),), (2, random.between(1, 9)))
    return random.strided((*lead, width), random.one(*DTYPES), scale)


def check(got: Tensor | None, want: Tensor, sizes: Tensor, dtype: torch.dtype, factors: Tensor = UNIT) -> None:
    """Holds a result to the formula: `sizes` are of the numbers added for it, `factors` of those that multiply last."""
    assert got is not None and got.dtype == dtype and got.shape == want.shape
    error = (got.double() - want).abs()
    bound = 4 * (ROUNDING[dtype] + LONG_SUM) * sizes + SMALLEST[dtype] * (1 + factors.double().abs())
    assert (error <= bound).all(), (error / bound).max()


def try_norm(random: Random) -> None:
    x = random_rows(random, random.one(1e-3, 1, 100))
    weight, epsilon = random.strided(x.shape[-1:], x.dtype), random.one(1e-6, 0.1)
    wide = x.double()
    want = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.double()
    got = passes.norm(x, weight, epsilon)
    check(got, want, want.abs(), x.dtype, weight)
    _rows_stay(random, x, lambda: passes.norm(x, weight, epsilon))
    longer = random.strided((2 * x.shape[-1] + 2,), x.dtype)
    assert passes.norm(x, longer, epsilon) is None
    assert len(weight) == 1 or passes.norm(x, longer[:-2:2], epsilon) is None


ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    passes.SILU: lambda x: x * torch.sigmoid(x),
    passes.GELU_BY_TANH: lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    passes.GELU: lambda x: x * torch.special.erfc(-x / math.sqrt(2)) / 2,
    passes.SIGMOID: torch.sigmoid,
}


def try_gated(random: Random) -> None:
    gate, kind = random_rows(random, 4), random.one(*ACTIVATIONS)
    active = ACTIVATIONS[kind](gate.double())
    check(passes.activated(gate, kind), active, active.abs(), gate.dtype)
    _rows_stay(random, gate, lambda: passes.activated(gate, kind))
    up = random.strided(gate.shape, gate.dtype)
    with torch.set_grad_enabled(random.one(True, False)):  # without gradients the result replaces a dense gate
        want = ACTIVATIONS[kind](gate.double()) * up.double()
        check(passes.gated(gate, up, kind), want, want.abs(), gate.dtype, up)
        assert gate.dim() < 2 or gate.shape[0] < 2 or passes.gated(gate, up[:1], kind) is None


def try_rotated(random: Random) -> None:
    tokens, heads, size = random.one(0, 1, 7, 60), random.one(1, 2, 9), random.between(1, 260)
    x = random.strided((1, heads, tokens, size), random.one(*DTYPES))
    cosines, sines = (random.strided((1, tokens, size), x.dtype) for _ in range(2))
    got = passes.rotated(x, cosines, sines)
    if size % 2:
        assert got is None
        return
    wide, c, s = x[0].double(), cosines[0].double(), sines[0].double()
    one, two = wide.chunk(2, -1)
    turned = torch.cat([-two, one], -1)
    check(got, (wide * c + turned * s)[None], ((wide * c).abs() + (turned * s).abs())[None], x.dtype)
    assert passes.rotated(x.expand(2, -1, -1, -1), cosines, sines) is None


def _rows_stay(random: Random, x: Tensor, compute: Callable[[], Tensor | None]) -> None:
    """Breaks one row: it is NaN, and the others keep their bits."""
    rows = x.view(-1) if x.dim() == 1 else x.flatten(0, -2) if x.dim() == 2 else x[0]
    if x.dim() < 2 or not len(rows):
        return
    broken = random.between(0, len(rows) - 1)
    before, others = compute(), np.arange(len(rows)) != broken
    rows[broken] = math.nan
    after = compute()
    assert before is not None and after is not None
    before, after = (y[0] if y.dim() == 3 else y for y in (before, after))
    assert after[broken].isnan().all() and torch.equal(after[others], before[others])
    rows[broken] = 1.0


# ------------------------------------------------------------------------------------------------ the process


def overrun() -> None:
    """Calls a kernel with an output that is one number too short."""
    library, _ = find()
    assert library is not None
    x, out = torch.ones(2, 33), torch.empty(65)
    passes.norm(x, torch.ones(33), 0.1)
    library.norm(x.data_ptr(), x.data_ptr(), out.data_ptr(), 2, 33, 33, 0.1, 0, 1)


def too_large() -> None:
    """Asks for scratch that does not fit the memory: tokens apart, whose keys fill a panel each."""
    tokens, size = 100_000, 512
    whole = torch.ones(1, 1, 1, size)
    x = whole.expand(1, 1, tokens, size)
    batch = Tree([1] * tokens, [-1] * tokens).batch()
    try:
        forest.forest(batch, x, x, x[..., :8], 1.0, forest.Mask((-1, 0)))
    except RuntimeError as e:
        print("out of memory" if is_out_of_memory(e) else e)


TRIED: dict[str, Callable[[Random], None]] = {
    "attention": try_attention, "norm": try_norm, "gated": try_gated, "rotated": try_rotated,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=200, help="of each kernel")
    parser.add_argument("--only", choices=("overrun", "too_large"))
    asked = parser.parse_args()
    if asked.only:
        globals()[asked.only]()
        return
    for name, try_it in TRIED.items():
        for i in range(asked.inputs):
            seed = f"{asked.seed} {name} {i}"
            print(seed, flush=True)
            random = Random(seed)
            torch.set_num_threads(random.one(1, 2, 3))
            try_it(random)
    print(f"{asked.inputs * len(TRIED)} inputs with {find()[1]}")


if __name__ == "__main__":
    main()
