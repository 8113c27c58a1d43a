"""Models on several devices of one process: they compute at the same time, and nothing else changes.

`cpu:0` and `cpu:1` are two devices to guerdon, as two GPUs are. A model stands still within its forward until another
has come: with one loop for all, it would stand there for ever.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rewarding
import zoo
from guerdon.assembly import Parts, build_scorer, build_service, build_trainer
from guerdon.cli import console
from guerdon.client import RetryPolicy, RewardClient
from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.critic_core import TrainReport
from guerdon.distributed import computing
from guerdon.engine import host
from guerdon.errors import RanksLost, ServerFault, Unavailable
from guerdon.server import runtime
from guerdon.server.batching.loops import by_device
from guerdon.server.runtime import RunningServer
from guerdon.server.service import Service
from guerdon.settings.config import ComponentConfig, CriticConfig, ModelConfig, RewardConfig, ServerConfig
from server.batching.test_out_of_memory import DEAD, WHY
from server.swapping import rewards, until, version
from training.plain import request

ROWS = zoo.rows(4)
MAX_S = 60.0
"""How long a model stands still before its test has failed."""

Hook = Callable[[], Any]


class Gate:
    """Holds up every forward of a model until it opens."""

    def __init__(self) -> None:
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.is_reached.set()
        assert self.is_open.wait(MAX_S), "nobody opened"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices")
    for seed, name in enumerate(("a", "b", "c")):
        zoo.tokenizer(zoo.checkpoint("llama", folder / name, seed=seed))
    return folder


def built(
    root: Path, devices: dict[str, str], hooks: dict[str, Hook] | None = None, critic: str = ""
) -> tuple[Service, ServerConfig]:
    """The checkpoints `a` and `b` on their `devices`, `total`, their sum, and a critic if it has a device.

    Each of `hooks` is called before every forward of its model, once all are loaded; a critic's name is `critic`.
    """
    hooks = hooks or {}

    def hooked(made: Any, name: str) -> Any:
        if name in hooks:
            hook = hooks.pop(name)
            getattr(made, "engine", made).trunk.register_forward_pre_hook(lambda *_: (hook(), None)[1])
        return made

    parts = Parts(
        scorer=lambda config, ranks: hooked(build_scorer(config, ranks), config.name),
        trainer=lambda config, ranks: hooked(build_trainer(config, ranks), config.name),
    )
    models = [ModelConfig(model=str(root / name), name=name, device=device) for name, device in devices.items()]
    total = RewardConfig(name="total", components=[ComponentConfig(model=name) for name in devices])
    learner = CriticConfig(model=str(root / "a"), device=critic, learning_rate=0.01) if critic else None
    config = ServerConfig(
        models=models, rewards=[total], critic=learner, model_repository=str(root), port=0, grpc_port=None
    )
    return build_service(config, parts), config


@contextlib.asynccontextmanager
async def serving(
    root: Path, devices: dict[str, str], hooks: dict[str, Hook] | None = None, critic: str = ""
) -> AsyncIterator[Service]:
    """The service of `built`, started."""
    service, _ = built(root, devices, hooks, critic)
    service.start()
    try:
        yield service
    finally:
        await asyncio.to_thread(service.stop)


async def score(service: Service, name: str) -> ScoreReply:
    return await service.score(name, ScoreRequest(tokens=ROWS))


async def reached(*gates: Gate) -> None:
    await until(lambda: all(gate.is_reached.is_set() for gate in gates))


TWO = {"a": "cpu:0", "b": "cpu:1"}
ONE = {"a": "cpu", "b": "cpu"}


async def test_two_devices_compute_at_the_same_time_and_score_as_one(root: Path) -> None:
    async with serving(root, ONE) as service:
        wanted = {name: rewards(await score(service, name)) for name in ("a", "b", "total")}
    meeting = threading.Barrier(2)
    async with serving(root, TWO, dict.fromkeys("ab", lambda: meeting.wait(MAX_S))) as service:
        a, b = await asyncio.gather(score(service, "a"), score(service, "b"))
        total = await score(service, "total")
    for name, reply in (("a", a), ("b", b), ("total", total)):
        np.testing.assert_array_equal(rewards(reply), wanted[name])


async def test_models_of_one_device_share_a_loop(root: Path) -> None:
    for devices in ({"a": "cpu", "b": "cpu:0"}, {"a": "auto", "b": "auto"}):
        async with serving(root, devices) as service:
            assert service.loops.of["a"] is service.loops.of["b"] and len(service.loops.places) == 1


def test_places_are_devices_and_one_for_all_functions() -> None:
    def model(name: str, device: str, kind: str = "sequence classification") -> tuple[ModelConfig, ModelInfo]:
        return ModelConfig(model=name, name=name), ModelInfo(name, kind, device=device)

    models = [model("a", "cuda"), model("b", "cuda:1"), model("c", "cuda:0"), model("d", "cpu")]
    models += [model("e", "cpu", "function"), model("f", "cpu", "function")]
    found = {place: [info.name for _, info in some] for place, some in by_device(models).items()}
    assert found == {"cuda:0": ["a", "c"], "cuda:1": ["b"], "cpu:0": ["d"], "functions": ["e", "f"]}
    lines = [console.describe_model(info) for _, info in (models[1], models[4])]
    assert lines == [
        "b: sequence classification, float32 on cuda:1, weights 1, single",
        "e: function, weights 1, single",
    ]
    assert console.describe_places(found) == (
        "at the same time compute: cuda:0 (a, c), cuda:1 (b), cpu:0 (d), functions (e, f)"
    )


@pytest.fixture
def function_held() -> Iterator[None]:
    rewarding.hold.clear()
    try:
        yield
    finally:
        rewarding.hold.set()


@pytest.mark.usefixtures("function_held")
async def test_a_function_holds_up_no_model_but_all_functions(root: Path) -> None:
    models = [ModelConfig(model=str(root / "a"), name="a")]
    models += [ModelConfig(model="rewarding:brevity", name="brevity"), ModelConfig(model="rewarding:length", name="l")]
    service = build_service(ServerConfig(models=models))
    service.start()
    waiting = asyncio.create_task(service.score("brevity", ScoreRequest(texts=["WAIT"])))
    await until(rewarding.is_held.is_set)
    length = asyncio.create_task(score(service, "l"))
    assert len((await score(service, "a")).results) == len(ROWS)
    assert service.loops.depth()["l"][0] == len(ROWS) and not waiting.done() and not length.done()
    rewarding.hold.set()
    assert rewards(await waiting) == [np.float32(-0.04)] and rewards(await length).tolist() == [*map(len, ROWS)]
    await asyncio.to_thread(service.stop)


async def test_a_reward_does_not_wait_for_a_critics_train_step(root: Path) -> None:
    gate = Gate()
    async with serving(root, {"a": "cpu:0"}, {"critic": gate}, critic="cpu:1") as service:
        training = asyncio.create_task(service.call("critic_train", request(ROWS)))
        await reached(gate)
        assert service.loops.requests()["critic_infer"] == (1, 0)
        scored = await score(service, "a")
        assert not training.done()
        gate.is_open.set()
        report = await training
        assert isinstance(report, TrainReport) and report.step == 1
    np.testing.assert_allclose(rewards(scored), zoo.reference(root / "a", ROWS), atol=1e-5)


async def test_a_model_is_swapped_while_a_critic_trains_and_scores_meanwhile(root: Path) -> None:
    gate = Gate()
    async with serving(root, {"a": "cpu:0"}, {"critic": gate}, critic="cpu:1") as service:
        old = version(service, "a")
        training = asyncio.create_task(service.call("critic_train", request(ROWS)))
        await reached(gate)
        loading = asyncio.create_task(service.repository.load("a", "c"))
        await until(lambda: computing.HERE.is_building)  # waits for the train step
        assert (await score(service, "a")).weights_version == old
        gate.is_open.set()
        new = await loading
        await training
        scored = await score(service, "a")
        assert scored.weights_version == new != old
    np.testing.assert_allclose(rewards(scored), zoo.reference(root / "c", ROWS), atol=1e-5)


async def test_what_both_compute_at_the_end_is_answered(root: Path) -> None:
    gates = {"a": Gate(), "b": Gate()}
    async with serving(root, TWO, {**gates}) as service:
        asked = [asyncio.create_task(score(service, name)) for name in ("a", "b", "total")]
        await reached(*gates.values())
        stopping = asyncio.create_task(asyncio.to_thread(service.stop, MAX_S))
        await until(lambda: not service.ready)
        for gate in gates.values():
            gate.is_open.set()
        await stopping
        assert all(len(reply.results) == len(ROWS) for reply in await asyncio.gather(*asked))
        assert not service.is_computing and service.loss is None


async def test_what_both_compute_too_long_fails_on_both(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guerdon.server.batching.loops._BREAKS_S", 0.2)
    gates = {"a": Gate(), "b": Gate()}
    async with serving(root, TWO, {**gates}) as service:
        asked = [asyncio.create_task(score(service, name)) for name in ("a", "b", "a", "b")]
        await reached(*gates.values())
        await asyncio.to_thread(service.end_after_loss, runtime.shutdown_error(0.0))
        for task in asked:
            with pytest.raises(RanksLost, match="withdrawn"):
                await task
        assert service.is_computing
        for gate in gates.values():
            gate.is_open.set()


async def test_a_device_that_dies_ends_the_server_and_the_other_answers_first(root: Path) -> None:
    gate = Gate()

    def die() -> None:
        raise DEAD

    async with serving(root, TWO, {"a": gate, "b": die}) as service:
        asked = asyncio.create_task(score(service, "a"))
        await reached(gate)
        assert all(isinstance(result, ServerFault) for result in (await score(service, "b")).results)
        async with asyncio.timeout(MAX_S):
            await service.ending.wait()
        with pytest.raises(ServerFault, match=WHY):
            service.check_ready()
        gate.is_open.set()
        assert rewards(await asked).shape == (len(ROWS),)
    assert isinstance(service.loss, ServerFault) and WHY in str(service.loss) and not service.is_computing


@pytest.mark.slow
def test_a_device_that_dies_does_not_leave_what_another_computes_too_long_without_an_answer(root: Path) -> None:
    gate = Gate()

    def die() -> None:
        raise DEAD

    server = RunningServer(*built(root, TWO, {"a": gate, "b": die}), grace_s=0.1)
    once = RetryPolicy(tries=1)
    try:
        with RewardClient(server.http_url, "a", policy=once) as a, RewardClient(server.http_url, "b", policy=once) as b:
            asked = a.submit(tokens=ROWS)
            assert gate.is_reached.wait(MAX_S)
            assert all(WHY in str(error) for error in b.score(tokens=ROWS).errors)
            with pytest.raises(Unavailable, match="withdrawn"):
                asked.result(MAX_S)
    finally:
        gate.is_open.set()
        server.close()
    assert isinstance(server._error, ServerFault) and WHY in str(server._error)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    host._num_threads.cache_clear()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        host._num_threads.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("four_threads")
async def test_two_loops_on_the_cpu_divide_its_cores(root: Path) -> None:
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((threading.get_ident(), torch.get_num_threads()))

    for devices, wanted in ((ONE, [4]), (TWO, [2, 2]), (TWO, [2, 2])):
        seen.clear()
        async with serving(root, devices, {"a": look, "b": look}) as service:
            await score(service, "total")
        assert [count for _, count in sorted(set(seen))] == wanted
        assert torch.get_num_threads() == wanted[0]  # a critic's journal is replayed on this thread
