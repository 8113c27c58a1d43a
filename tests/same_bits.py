"""Compares the bits of a model's results alone, in any batch, in any order, and with one, two and three threads."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from guerdon.core import Score


def bits(result: Any) -> dict[str, bytes]:
    """The bytes of all numbers of a score or of several, by name."""
    if isinstance(result, list):
        return {f"{name} of {i}": value for i, one in enumerate(result) for name, value in bits(one).items()}
    assert isinstance(result, Score), result
    found = dict(_arrays(result))
    assert found
    return {name: np.ascontiguousarray(array).tobytes() for name, array in found.items()}


def _arrays(made: Any) -> Iterator[tuple[str, np.ndarray]]:
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if dataclasses.is_dataclass(value):
            yield from _arrays(value)
        elif value is not None:
            yield field.name, np.asarray(value)


def assert_same_bits(make: Callable[[int], Callable[[list[Any]], list[Any]]], samples: list[Any]) -> None:
    """Compares one batch with each sample alone, small batches, a shuffled part, and other numbers of threads.

    `make` returns what scores samples, in batches of at most so many tokens.
    """
    random = np.random.default_rng(0)
    torch.set_num_threads(1)
    large, small = make(4096), make(64)
    want = [bits(result) for result in large(samples)]
    different: dict[str, int] = {}

    def compare(what: str, got: list[Any], which: list[int]) -> None:
        for result, i in zip(got, which, strict=True):
            for name, value in bits(result).items():
                key = f"{name}, {what}"
                different[key] = different.get(key, 0) + (value != want[i][name])

    everything = list(range(len(samples)))
    compare("small batches", small(samples), everything)
    some = random.permutation(len(samples))[: len(samples) // 2].tolist()
    compare("a shuffled part", large([samples[i] for i in some]), some)
    compare("alone", [large([sample])[0] for sample in samples], everything)
    for number in (2, 3):
        torch.set_num_threads(number)
        compare(f"{number} threads", large(samples), everything)
    compare("alone, 3 threads", [large([sample])[0] for sample in samples], everything)
    wrong = {key: count for key, count in different.items() if count}
    assert not wrong, f"of {len(samples)} differ: {wrong}"
