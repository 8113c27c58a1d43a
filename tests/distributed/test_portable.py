"""What ranks tell each other is data: it comes back as it was, and nothing else is read."""

import collections
import dataclasses
import os
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from guerdon.actor.policy_group import Generate, GenerateMore, GenerationRound, OnTrainer, Open
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.core import Command, Score, Scored, Sequence, Signal
from guerdon.critic_core import Gae, TrainReport, TrainRequest
from guerdon.distributed import portable
from guerdon.distributed.ranks import Member
from guerdon.errors import Overloaded, SampleFailed, TrainFailed
from guerdon.settings.actors import AlgorithmConfig, PolicyConfig, RolloutConfig

TOUCHED: list[object] = []


def touch(*what: object) -> None:
    TOUCHED.append(what)


class Builds:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


class Built:
    """An object whose pickle calls a function, and gives the outcome a state."""

    def __init__(self, function: Any, args: tuple[Any, ...], state: Any) -> None:
        self.built = function, args, state

    def __reduce__(self) -> Any:
        return self.built


def named(module: str, name: str, *arguments: bytes) -> bytes:
    """A pickle that calls what it finds under that name."""
    text = b"".join(b"X" + len(a).to_bytes(4, "little") + a for a in arguments)
    found = b"".join(b"\x8c" + bytes([len(s)]) + s.encode() for s in (module, name)) + b"\x93"
    return b"\x80\x04" + found + b"(" + text + b"tR."


def same(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b) and a.shape == b.shape
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, BaseException):
        return type(a) is type(b) and a.args == b.args and vars(a) == vars(b)
    return type(a) is type(b) and a == b


ROW = np.arange(5)
PROMPT = Prompt(1, ROW, "hi", ({"role": "user", "content": "hi"},))
VALUES: list[Any] = [
    None,
    {"a": [1, 2.5, True, "ü", b"x", (None,)], "b": {1, 2}, "c": frozenset("ab"), "d": 1j, "e": 2**80},
    np.float32(1.5),
    np.zeros((3, 2), np.float32).T,
    np.array(["ab", "c"]),
    np.str_("ü"),
    np.bool_(True),
    np.zeros((0, 3), np.float16),
    np.array(7, np.uint8),
    ROW[::2],
    Path("/tmp/x"),
    Member(1, "host", 7),
    Command(Signal.FORWARD, "rm", [Sequence(ROW, reference={"x": [1]}, steps=ROW)], plain=True),
    Command(Signal.TRAIN, ask=TrainRequest("id", ROW[None], *[np.ones((1, 4), np.float32)] * 3)),
    Command(
        Signal.ESTIMATE,
        ask=TrainRequest(
            "id", ROW[None], *[np.ones((1, 4), np.float32)] * 3, updates=2, rewards=ROW[None], gae=Gae(0.5)
        ),
    ),
    Scored([Score(1.0, np.ones(2, np.float32)), SampleFailed("no")], "v"),
    TrainReport("id", 1, "v", 0.1, [0.1], 3, 0.0, float("inf"), 1.0, 1e-6, 1, 0, [0.1], 0.3, 0.4),
    Overloaded("full", 2.5),
    TrainFailed("broke", 3),
    Open(PolicyConfig(), RolloutConfig(), 3, keeps_reference=True),
    Generate([PROMPT], 2, RolloutConfig(), (1, 2), False),
    GenerationRound([[Rollout(PROMPT, 0, 0, ROW, True, np.ones(2, np.float32), "text", observed=ROW > 3)]], True),
    GenerateMore(),
    OnTrainer("logprobs", ([ROW], ROW, 1.0)),
    OnTrainer("save", (Path("/tmp/x"),), {}),
    AlgorithmConfig(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_survive_the_round_trip(value: Any) -> None:
    assert same(portable.loads(portable.dumps(value)), value)


def test_a_tensor_comes_back_as_it_was() -> None:
    for tensor in (torch.randn(3, 2), torch.ones(2, dtype=torch.bool), torch.randn(4, requires_grad=True)):
        back = portable.loads(portable.dumps([tensor]))[0]
        assert back.dtype == tensor.dtype and torch.equal(back, tensor) and back.is_leaf


ADDRESS = bytearray(struct.pack("Q", 0x4141414141))
"""Of no object."""
_RECORD: Any = np.dtype([("a", "O")]).__reduce__()
_REACHES_FAR = (3, "|", None, ("a",), {"a": (np.dtype("i8"), 1 << 40)}, 8, 1, 0)
_HIDES_OBJECTS = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
_FROM_BYTES = np.zeros(1).__reduce_ex__(5)[0]

HOSTILE: dict[str, bytes] = {
    "objects by their addresses": pickle.dumps(Builds(np.ndarray, (1,), "O", ADDRESS)),
    "a hash by an address": pickle.dumps(Builds(set, Builds(np.ndarray, (1,), "O", ADDRESS))),
    "addresses as records": pickle.dumps(
        Builds(_FROM_BYTES, bytes(ADDRESS), Built(_RECORD[0], _RECORD[1], _HIDES_OBJECTS), (1,), "C")
    ),
    "a field far away": pickle.dumps(
        Builds(_FROM_BYTES, bytes(8), Built(np.dtype, ("V8", False, True), _REACHES_FAR), (1,), "C")
    ),
    "an address as a state": pickle.dumps(
        Built(np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), (1, (1,), np.dtype("O"), False, bytes(ADDRESS)))
    ),
    "an address as a number": pickle.dumps(Builds(np.float32(1).__reduce__()[0], np.dtype("O"), bytes(ADDRESS))),
    "our array of objects": pickle.dumps(Builds(portable._array, "|O8", (1,), bytes(ADDRESS))),
    "our array of records": pickle.dumps(Builds(portable._array, "i4,i4", (1,), bytes(8))),
    "our array of more than there is": pickle.dumps(Builds(portable._array, "<f4", (3,), bytes(8))),
    "our array of another's memory": pickle.dumps(Builds(portable._array, "<f4", (2,), Builds(memoryview, bytes(8)))),
    "a set without an end": pickle.dumps(Builds(set, range(10**10))),
    "bytes without an end": pickle.dumps(Builds(bytearray, 10**10)),
    "os.system": pickle.dumps(Builds(os.system, "false")),
    "eval": pickle.dumps(Builds(eval, "1")),
    "exec": pickle.dumps(Builds(exec, "")),
    "getattr": pickle.dumps(Builds(getattr, "x", "upper")),
    "import": pickle.dumps(Builds(__import__, "os")),
    "open": pickle.dumps(Builds(open, "/etc/passwd")),
    "Popen": pickle.dumps(Builds(subprocess.Popen, ["true"])),
    "within a command": pickle.dumps(Command(Signal.FORWARD, "rm", [Sequence(ROW, reference=Builds(touch, 1))])),
    "within an array": pickle.dumps(np.array([Builds(touch, 2)], dtype=object)),
    "within an error": pickle.dumps(Builds(Overloaded, Builds(touch, 3), 1.0)),
    "as a callable's argument": pickle.dumps(collections.defaultdict(touch)),
    "numpy's load": pickle.dumps(Builds(np.load, "/tmp/x", None, True)),
    "numpy runs a string": named("numpy.testing._private.utils", "runstring", b"x", b"{}"),
    "numpy runs a command": named("numpy.f2py.compile", "compile", b"x"),
    "numpy's own eval": named("numpy.core.multiarray", "_reconstruct.__globals__", b"x"),
    "numpy's os": named("numpy.lib.npyio", "os.system", b"false"),
    "torch's load": named("torch", "load", b"/tmp/x"),
    "torch's storage": pickle.dumps(torch.ones(2)),
    "a module's import": named("guerdon.core", "np.load", b"x"),
    "another's class": named("guerdon.core", "IntEnum", b"x"),
    "a class's attribute": named("guerdon.core", "Sequence.__init__", b"x"),
    "a dunder": named("guerdon.errors", "__builtins__", b"x"),
    "a function of ours": named("guerdon.errors", "named", b"x", b"y"),
    "a module of ours": named("guerdon.__main__", "main"),
    "old pickle's name": b"cos\nsystem\n(S'false'\ntR.",
    "an extension's code": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00xQ.",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_else_is_read(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "system", touch)
    TOUCHED.clear()
    with pytest.raises((pickle.UnpicklingError, ValueError, TypeError)) as told:
        portable.loads(HOSTILE[what])
    assert not TOUCHED
    if isinstance(told.value, pickle.UnpicklingError) and what not in ("a persistent id",):
        assert "may not be exchanged between ranks" in str(told.value)


@pytest.mark.parametrize("value", [np.array([None, "x"]), np.zeros(1, "i4,i4"), np.datetime64("2026-01-01")], ids=str)
def test_arrays_that_are_neither_numbers_nor_text_are_refused(value: Any) -> None:
    with pytest.raises(pickle.PicklingError, match="may not be exchanged between ranks"):
        portable.dumps([value])


def test_received_arrays_are_writable() -> None:
    portable.loads(portable.dumps(np.zeros(3)))[0] = 1.0


def test_the_hostile_ones_would_do_harm() -> None:
    TOUCHED.clear()
    pickle.loads(HOSTILE["within a command"])  # noqa: S301 - what the list above keeps from happening
    assert TOUCHED == [(1,)]


def test_bytes_that_are_no_pickle_are_an_error() -> None:
    whole = portable.dumps(VALUES[9])
    for cut in (b"", b"x", whole[:-1], whole[:20], b"\x80\x05" + bytes(50)):
        with pytest.raises(Exception):  # noqa: B017 - whatever pickle makes of them; a rank tells it as its failure
            portable.loads(cut)


IN_A_TRAINER = {"adapters/slime_critic.py", "adapters/trl_critic.py"}
"""They run in a trainer's ranks, and exchange objects by its own collectives, as the trainer itself does."""


def test_nothing_else_in_the_package_unpickles() -> None:
    source = Path(portable.__file__).parents[1]
    users = {
        file.relative_to(source).as_posix()
        for file in source.rglob("*.py")
        if any(word in file.read_text() for word in ("pickle.load", "Unpickler", "all_gather_object", "_object_list"))
    }
    assert users == {"distributed/portable.py"} | IN_A_TRAINER
    loads = [line for file in source.rglob("*.py") for line in file.read_text().splitlines() if "torch.load(" in line]
    assert loads and all("weights_only=True" in line for line in loads)
