"""Attention of new tokens over prompts that are stored once, against attention over whole rows written out."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from guerdon.engine.decoding import FIRST_CAPACITY, Decoding
from guerdon.engine.packing import indices, pack
from tiers import slow_but

HEADS, KV_HEADS, SIZE, VALUE_SIZE = 6, 2, 8, 4
LAYERS = ("first", "second")


@dataclass
class Row:
    """All keys and values of a row so far, of each layer `[K,T,D]`."""

    keys: dict[str, Tensor]
    values: dict[str, Tensor]


class Driven:
    """A cache, and beside it every row by itself."""

    def __init__(self, allows: Callable | None = None, softcap: float | None = None, sinks: Tensor | None = None):
        self.decoding, self.rows = Decoding(), []
        self._how = allows, softcap, sinks
        self._random = torch.Generator().manual_seed(0)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def begin(self, lengths: list[int], counts: list[int]) -> None:
        """Prompts that all begin alike, so that packing shares what they begin with."""
        tokens = np.arange(10, 10 + max(lengths))
        batches = list(pack([tokens[:n] for n in lengths], budget=sum(lengths) // 2, share=True))
        self.decoding.begin(lengths, counts)
        prompts: dict[int, Row] = {}
        for batch in batches:
            self.decoding.prompts = batch
            keys = {layer: self._draw(KV_HEADS, batch.num_tokens, SIZE) for layer in LAYERS}
            values = {layer: self._draw(KV_HEADS, batch.num_tokens, VALUE_SIZE) for layer in LAYERS}
            for layer in LAYERS:
                self.decoding.store(layer, keys[layer][None], values[layer][None])
            for i, row in enumerate(batch.rows):
                at = torch.from_numpy(indices(batch.spans[i]))
                prompts[row] = Row({n: x[:, at] for n, x in keys.items()}, {n: x[:, at] for n, x in values.items()})
        self.decoding.prompts = None
        for i, count in enumerate(counts):
            self.rows += [Row(dict(prompts[i].keys), dict(prompts[i].values)) for _ in range(count)]

    def step(self) -> None:
        """One token more for every row; asserts that each sees what it should."""
        assert self.decoding.positions.tolist() == [row.keys["first"].shape[1] for row in self.rows]
        self.decoding.advance()
        for layer in LAYERS:
            count = len(self.rows)
            query, key = self._draw(1, HEADS, count, SIZE), self._draw(1, KV_HEADS, count, SIZE)
            value = self._draw(1, KV_HEADS, count, VALUE_SIZE)
            got = self.decoding.attend(layer, query, key, value, 0.3, *self._how)
            for i, row in enumerate(self.rows):
                row.keys[layer] = torch.cat([row.keys[layer], key[0, :, i : i + 1]], 1)
                row.values[layer] = torch.cat([row.values[layer], value[0, :, i : i + 1]], 1)
                want = self._written_out(query[0, :, i], row.keys[layer], row.values[layer])
                torch.testing.assert_close(got[0, :, i], want, rtol=1e-4, atol=1e-5)

    def keep(self, rows: list[int]) -> None:
        self.decoding.keep(np.array(rows, dtype=np.int64))
        self.rows = [self.rows[i] for i in rows]

    def _written_out(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """`[H,D]` of one row's query `[H,D]`."""
        allows, softcap, sinks = self._how
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (keys, values))
        logits = (keys @ query[..., None])[..., 0] * 0.3
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        if allows is not None:
            at = torch.arange(keys.shape[1])
            logits = logits.masked_fill(~allows(0, 0, at[-1], at), float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks[:, None]], 1)
        return (torch.softmax(logits, -1)[:, None, : keys.shape[1]] @ values)[:, 0]


def window(_: object, __: object, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & (key > query - 9)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"allows": window},
        {"softcap": 1.5},
        {"sinks": torch.linspace(-1, 2, HEADS)},
        {"allows": window, "softcap": 1.0},
    ],
    ids=["plain", "window", "softcap", "sinks", "window and softcap"],
)
@pytest.mark.parametrize("seed", slow_but((0,), range(4)))
def test_each_row_sees_its_prompt_and_itself(how: dict, seed: int) -> None:
    random, driven = np.random.default_rng(seed), Driven(**how)
    driven.begin([20, 35, 8, 300], [3, 1, 2, 4])  # in two blocks: 300 is far from the others
    for t in range(FIRST_CAPACITY + 10):
        driven.step()
        if t in (3, 20):
            driven.begin(random.integers(1, 60, 3).tolist(), random.integers(1, 4, 3).tolist())
        if t % 6 == 5 and len(driven.rows) > 3:
            staying = random.random(len(driven.rows)) < 0.75
            staying[-1] = True
            driven.keep(np.flatnonzero(staying).tolist())


def test_whole_prompts_and_cohorts_leave() -> None:
    driven = Driven()
    driven.begin([12, 20, 30], [2, 2, 2])
    driven.step()
    driven.begin([15, 9], [1, 3])
    driven.step()
    driven.keep([0, 1, 4, 7, 9])  # the second and the fourth prompt have none left
    driven.step()
    driven.keep([3, 4])  # nor has the first cohort
    driven.step()
    assert len(driven.decoding.cohorts) == 1
    driven.keep([])
    assert driven.decoding.cohorts == []
    driven.begin([4], [2])
    driven.step()
