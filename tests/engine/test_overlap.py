"""Nothing on the way from tokens to scores waits for the device, so that it is never idle between micro-batches."""

import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.engine import microbatches
from guerdon.engine.attention import registry
from guerdon.engine.engine import Engine
from guerdon.engine.microbatches import all_to_device, to_device
from guerdon.engine.packing import PackedBatch
from guerdon.settings.config import ModelConfig

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CPU = torch.device("cpu")


class NothingRead(TorchDispatchMode):
    """Raises if the host needs an operator's result, for which it would wait on a GPU."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "unique_dim", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITING, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def build(folder: Path, **config: Any) -> Engine:
    engine = build_scorer(ModelConfig(model=str(folder), max_batch_tokens=150, **config))
    assert isinstance(engine, Engine)
    return engine


def sequences() -> list[Sequence]:
    """Several micro-batches' worth, each with a step."""
    return [
        Sequence(row, steps=np.array([len(row) - 1]))
        for row in zoo.rows(groups=((40, 4), (25, 3), (60, 2), (70, 3), (90, 2)))
    ]


@pytest.mark.parametrize(
    ("name", "kind", "config"),
    [
        ("llama", "seqcls", {}),
        ("gemma2", "seqcls", {}),
        ("gpt2", "seqcls", {}),
        ("bert", "seqcls", {}),
        ("modernbert", "seqcls", {}),
        ("llama", "tokcls", {}),
        ("llama", "tokcls", {"num_labels": 2}),
    ],
)
def test_a_score_reads_no_number_before_all_is_launched(name: str, kind: str, config: dict, tmp_path: Path) -> None:
    engine = build(zoo.checkpoint(name, tmp_path / name, kind, **config))
    assert engine.path.startswith("packed"), engine.info.why
    with NothingRead():
        results = engine.score(sequences())
    assert all(isinstance(result, Score) for result in results)
    with pytest.raises(AssertionError, match="waits"), NothingRead():
        torch.ones(1).item()


def test_the_next_micro_batch_is_planned_before_this_ones_states_are_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"))
    told: list[str] = []
    pack, sent, run = microbatches.pack, microbatches.all_to_device, engine.run_trunk

    def packed(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for batch in pack(*args, **kwargs):
            told.append("packed")
            yield batch

    monkeypatch.setattr(microbatches, "pack", packed)
    monkeypatch.setattr(microbatches, "all_to_device", lambda *args: told.append("sent") or sent(*args))
    engine.run_trunk = lambda **inputs: told.append("run") or run(**inputs)  # type: ignore[func-returns-value]
    with engine.no_gradients():
        told.extend("read" for _ in engine.run(engine.plan([s.tokens for s in sequences()])))
    count = told.count("run")
    assert count > 2
    prepared = ["packed", "sent"]
    assert told == [*prepared, *["run", *prepared, "read"] * (count - 1), "run", "read"]


def test_states_that_were_read_are_gone_when_the_next_are_computed(tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"))
    seen: list[weakref.ref] = []
    run = engine.run_trunk

    def running(**inputs: Any) -> Any:
        assert all(gone() is None for gone in seen)
        return run(**inputs)

    engine.run_trunk = running
    with engine.no_gradients():
        all_states = engine.run(engine.plan([s.tokens for s in sequences()]))
        while (states := next(all_states, None)) is not None:
            seen.append(weakref.ref(states.hidden))
            del states
    assert len(seen) > 2


def test_the_cache_of_a_batch_is_freed_before_its_states_are_read(tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"))
    derived: list[weakref.ref] = []
    run = engine.run_trunk

    def running(**inputs: Any) -> Any:
        batch = registry.attended()
        assert isinstance(batch, PackedBatch)
        batch.cache["a table"] = table = torch.zeros(1)
        derived.append(weakref.ref(table))
        return run(**inputs)

    engine.run_trunk = running
    with engine.no_gradients():
        for _ in engine.run(engine.plan([s.tokens for s in sequences()])):
            assert all(gone() is None for gone in derived)
    assert len(derived) > 2


def test_arrays_travel_together_and_share_no_memory() -> None:
    first, second = np.arange(3), np.arange(2)
    first.flags.writeable = False
    one, two = all_to_device([first, second], CPU)
    second[:] = 9
    assert one.tolist() == [0, 1, 2] and two.tolist() == [0, 1] and one.dtype == torch.int64
    assert to_device(np.array([[True, False]]), CPU).tolist() == [[True, False]]


def test_arrays_go_to_whatever_device_there_is() -> None:
    meta = torch.device("meta")
    assert to_device(np.arange(3), meta).device == meta
    assert [x.device for x in all_to_device([np.arange(3), np.arange(2)], meta)] == [meta, meta]


@needs_cuda
@pytest.mark.parametrize("kind", ["seqcls", "tokcls"])
def test_on_a_gpu_a_score_waits_once(kind: str, tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama", kind), device="cuda")
    assert engine.path.startswith("packed"), engine.info.why
    asked = sequences()
    engine.score(asked)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.score(asked)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) == 1, waits
