"""The swap of live weights: memory, who waits, what brings the old weights back, and a server that dies amid it."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
import yaml
from safetensors.numpy import load_file, save_file

import zoo
from guerdon import InvalidRequest, RetryPolicy, RewardClient, ServerFault, TeacherClient, Unavailable, WeightsClient
from guerdon.assembly import PLAIN, Parts, build_service
from guerdon.client import weights_client
from guerdon.distributed.commands import Worker
from guerdon.server.runtime import RunningServer
from guerdon.server.service import Service
from guerdon.server.weight_updates import WeightUpdates
from guerdon.settings.config import ModelConfig, ServerConfig, TeacherConfig
from guerdon.wire.forms.vllm_control import InitInfo
from launched import Launch
from served import running
from server.helpers import wait_until
from server.swapping import ROWS, checkpoints, held, until, version
from server.swapping import serving as serving_old
from test_ranks_served import serving

ONCE = RetryPolicy(tries=1)
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
WEIGHTS = 4 * SIZES["num_hidden_layers"] * (2 * 512 * 512 + 3 * 512 * 1536)
"""The least bytes of such a model in float32: attention's and the feed-forward's matrices."""
Tensors = dict[str, np.ndarray]


def changed(folder: Path, seed: int = 1) -> Tensors:
    """Other weights for the checkpoint in the folder."""
    rng, own = np.random.default_rng(seed), load_file(folder / "model.safetensors")
    return {n: t + 0.05 * rng.standard_normal(t.shape).astype(t.dtype) for n, t in own.items()}


def written(folder: Path, made: Path, tensors: Tensors) -> Path:
    """The folder's checkpoint with these weights."""
    shutil.copytree(folder, made)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def broken(tensors: Tensors) -> Tensors:
    return {name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}


def score(url: str) -> tuple[str, list[float]]:
    with RewardClient(url, policy=ONCE) as client:
        scores = client.score(tokens=ROWS)
        return scores.weights_version, list(scores.rewards)


# ------------------------------------------------------------------------------------------- in this process


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return zoo.checkpoint("llama", tmp_path / "rm")


@contextmanager
def served(base: Path, parts: Parts = PLAIN, **more: Any) -> Iterator[tuple[RunningServer, Service]]:
    made: list[Service] = []

    def build(config: ServerConfig) -> Service:
        made.append(build_service(config, parts))
        return made[0]

    with running(ModelConfig(model=str(base)), build=build, weight_transfer=str(base), **more) as server:
        yield server, made[0]


def test_requests_wait_for_the_new_weights_and_those_before_have_the_old(base: Path, tmp_path: Path) -> None:
    """Also one that was read before the swap and is queued after it, /sleep amid it, and a second /finish."""
    new = changed(base)
    wanted = [zoo.reference(folder, ROWS) for folder in (base, written(base, tmp_path / "new", new))]
    with (
        served(base) as (server, service),
        RewardClient(server.http_url) as client,
        httpx.Client(base_url=server.http_url, timeout=120) as http,
    ):
        old, versions = score(server.http_url)[0], []
        send = WeightsClient(server.http_url)
        with held(service):
            before = client.submit(tokens=ROWS)
            wait_until(lambda: service.loops.depth()["reward_model"][0] == len(ROWS))
            updating = threading.Thread(target=lambda: versions.append(send(new)))
            updating.start()
            wait_until(lambda: http.get("/is_sleeping").json()["levels"] == {"reward_model": 1})
            after = [client.submit(tokens=ROWS) for _ in range(3)]
            for path in ("/sleep", "/wake_up"):
                refused = http.post(path)
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            assert not any(future.done() for future in after)
        updating.join()
        assert before.result().weights_version == old
        np.testing.assert_allclose(before.result().rewards, wanted[0], atol=1e-5)
        for future in after:
            assert future.result().weights_version == versions[0] != old
            np.testing.assert_allclose(future.result().rewards, wanted[1], atol=1e-5)
        again = http.post("/finish_weight_update")
        assert again.status_code == 400 and "no update of reward_model is open" in again.text
        assert not http.get("/is_sleeping").json()["is_sleeping"]


@pytest.mark.parametrize("beside", [False, True])
def test_weights_that_fail_the_check_bring_back_the_old_ones(base: Path, beside: bool) -> None:
    with served(base) as (server, service):
        before = score(server.http_url)
        for kept in service.loops.of["reward_model"]._group._scorers.values():  # type: ignore[attr-defined]
            with pytest.raises(InvalidRequest, match="serves on as before"):
                WeightsClient(server.http_url, beside=beside)(broken(changed(base)))
            assert score(server.http_url) == before
            assert service.loops.of["reward_model"]._group._scorers["reward_model"] is kept  # type: ignore[attr-defined]


def test_a_full_disk_loads_them_beside_and_the_log_says_so(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(base) as (server, _), caplog.at_level(logging.WARNING):
        monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
        assert WeightsClient(server.http_url)(changed(base)) == score(server.http_url)[0]
        assert "cannot be put away, so the new ones are loaded beside them" in caplog.text


def test_a_model_that_sleeps_is_updated_later_and_a_paused_one_stays_paused(base: Path) -> None:
    with served(base) as (server, _), httpx.Client(base_url=server.http_url, timeout=120) as http:
        send = WeightsClient(server.http_url, policy=ONCE)
        http.post("/sleep", params={"level": "1"})
        with pytest.raises(Unavailable, match="asleep"):
            send(changed(base))
        http.post("/wake_up")
        http.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
        http.post("/start_weight_update").raise_for_status()
        file = (base / "model.safetensors").read_bytes()
        http.post("/update_weights", content=file).raise_for_status()
        http.post("/sleep", params={"level": "2"})
        assert http.post("/finish_weight_update").status_code == 503
        http.post("/wake_up")
        assert http.post("/finish_weight_update").status_code == 200
        http.post("/sleep", params={"level": "0"})
        version = send(changed(base))
        assert http.get("/is_sleeping").json()["levels"] == {"reward_model": 0}
        http.post("/wake_up")
        assert score(server.http_url)[0] == version


@pytest.mark.slow
def test_two_trainers_at_once(base: Path, tmp_path: Path) -> None:
    """The second replaces the first, whose tensors never reach it."""
    new = changed(base, 2)
    names = list(new)
    is_amid, go_on = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in changed(base, 1).items():
            if name == names[-1]:
                is_amid.set()
                go_on.wait()
            yield name, tensor

    with served(base) as (server, _):
        failed: list[Exception] = []

        def first() -> None:
            try:
                WeightsClient(server.http_url)(slowly())
            except InvalidRequest as e:
                failed.append(e)

        trainer = threading.Thread(target=first)
        trainer.start()
        assert is_amid.wait(120)
        version = WeightsClient(server.http_url)(new)
        go_on.set()
        trainer.join()
        assert "no update" in str(failed[0])
        served_version, rewards = score(server.http_url)
        assert served_version == version
        np.testing.assert_allclose(rewards, zoo.reference(written(base, tmp_path / "new", new), ROWS), atol=1e-5)


def test_an_average_is_with_what_serves_and_not_with_an_earlier_saves_shards(base: Path, tmp_path: Path) -> None:
    new, own = changed(base), load_file(base / "model.safetensors")
    save_file({name: 9 * tensor for name, tensor in own.items()}, base / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(own, "model-00001-of-00001.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    mean = written(base, tmp_path / "mean", {name: (own[name] + new[name]) / 2 for name in own})
    with served(base) as (server, _):
        WeightsClient(server.http_url, ema=0.5)(new)
        np.testing.assert_allclose(score(server.http_url)[1], zoo.reference(mean, ROWS), atol=1e-5)


def test_a_folder_that_was_deleted_or_written_to_meanwhile(base: Path) -> None:
    """The old weights serve, and what no longer serves is not averaged with."""
    new = changed(base)

    def slowly() -> Iterator[tuple[str, np.ndarray]]:
        yield from new.items()
        shutil.rmtree(base)

    with served(base) as (server, _):
        with (base / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\0\0")
        before = score(server.http_url)
        with pytest.raises(InvalidRequest, match="was written to since reward_model was loaded"):
            WeightsClient(server.http_url, ema=0.5)(new)
        assert score(server.http_url) == before
        with pytest.raises(InvalidRequest, match="whole checkpoint's folder"):
            WeightsClient(server.http_url)(slowly())
        assert score(server.http_url) == before


@pytest.mark.slow
async def test_a_folder_that_was_written_to_as_it_was_loaded_or_before_a_load_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = checkpoints(tmp_path)
    after_loading = [(old / "model.safetensors").touch]

    def scorer(*args: Any) -> Any:
        loaded = PLAIN.scorer(*args)
        if after_loading:
            after_loading.pop()()
        return loaded

    def refuse(*_: object) -> None:
        raise OSError("no switch")

    async with serving_old(tmp_path, parts=dataclasses.replace(PLAIN, scorer=scorer)) as service:

        def check() -> None:
            service.repository.check_unchanged("reward_model", old)

        with pytest.raises(InvalidRequest, match="was written to since"):
            check()
        with monkeypatch.context() as patched:
            patched.setattr(Worker, "_switch", refuse)
            with pytest.raises(ServerFault, match="no switch"):
                await service.repository.load("reward_model", None)
        with pytest.raises(InvalidRequest, match="was written to since"):
            check()
        after_loading.append((old / "model.safetensors").touch)
        await service.repository.load("reward_model", None)
        with pytest.raises(InvalidRequest, match="was written to since"):
            check()
        await service.repository.load("reward_model", None)
        check()


@pytest.mark.slow
async def test_a_finish_that_is_cancelled_leaves_the_swap_its_folder(tmp_path: Path) -> None:
    _, new = checkpoints(tmp_path)
    async with serving_old(tmp_path) as service:
        old, entry = version(service), service.catalog.entries["reward_model"]
        updates = WeightUpdates(service.repository, str(tmp_path))
        updates.init("reward_model", InitInfo())
        update_id = await updates.start("reward_model")
        assert await updates.add("reward_model", update_id, str(new / "model.safetensors")) == 0
        with held(service):
            finishing = asyncio.create_task(updates.finish("reward_model", update_id, ""))
            await until(lambda: entry.sleep is not None)
            finishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await finishing
        await until(lambda: entry.sleep is None)
        assert version(service) != old and updates._open["reward_model"].folder.is_dir()


@pytest.mark.slow
def test_small_steps_add_up_in_bfloat16(tmp_path: Path) -> None:
    """Each step is a fifth of bfloat16's precision: averaged in bfloat16, no step would change a weight."""
    base = zoo.language_model("llama", tmp_path / "lm", tie_word_embeddings=False)
    own = load_file(base / "model.safetensors")
    own = {name: np.where(tensor == 0, np.float32(0.01), tensor) for name, tensor in own.items()}
    save_file(own, base / "model.safetensors", {"format": "pt"})
    want = own["lm_head.weight"].astype(np.float64)
    with (
        running(TeacherConfig(model=str(base), dtype="bfloat16"), weight_transfer=str(base)) as server,
        TeacherClient(server.http_url) as client,
    ):
        send = WeightsClient(server.http_url, ema=0.8)
        first = client.head().weight
        for _ in range(6):  # towards weights 4 thousandths larger, of which bfloat16 sees steps of 4 to 8
            version = send({name: tensor * np.float32(1.004) for name, tensor in own.items()})
            want = (0.8 * want + 0.2 * own["lm_head.weight"].astype(np.float32) * np.float32(1.004)).astype(np.float32)
            want = want.astype(np.float64)
        head = client.head()
        assert head.weights_version == version
    got, before = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (head.weight, first))
    np.testing.assert_allclose(got, want, rtol=2**-8)  # rounded once
    assert 0.2 < (got != before).mean() < 0.9


# ------------------------------------------------------------------------------------- in processes of its own


@contextmanager
def launched(tmp_path: Path, nproc: int = 1, **more: Any) -> Iterator[tuple[Launch, str, Path]]:
    """`guerdon serve` of a model of 100 MiB that takes live weights."""
    base = zoo.checkpoint("llama", tmp_path / "rm", **SIZES)
    settings = {"models": [{"model": str(base)}], "weight_transfer": str(tmp_path), "port": 0, "grpc_port": None}
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(settings | more))
    with serving("--config", tmp_path / "server.yaml", nproc=nproc) as (launch, url):
        yield launch, url, base


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are sent one by one: a few pieces, as many as a busy server has not yet let go, are no model here."""
    monkeypatch.setattr(weights_client, "_PIECE_BYTES", 1 << 20)


def own_bytes(process: psutil.Process) -> int:
    """The process's memory without mapped files, which the system takes back at will."""
    told = process.memory_info()
    return int(told.rss - told.shared)


def peak(process: psutil.Process, work: Callable[[], object]) -> int:
    """The most bytes that the process had more than before, while `work` ran."""
    before, most, is_over = own_bytes(process), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.005):
            most = max(most, own_bytes(process))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        work()
    finally:
        is_over.set()
        watching.join()
    return most - before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_update_has_one_model_in_memory(small_pieces: None, tmp_path: Path) -> None:
    """The arithmetic: the new one beside the old is at least WEIGHTS; a third of them is room for a few tensors.

    The largest tensor has 3 MiB. Gaps where weights were brought into another order, of some 40 MiB, are seen. That
    `beside` is seen shows that the watcher sees whole models.
    """
    with launched(tmp_path) as (launch, url, base):
        send, new, process = WeightsClient(url), changed(base), launch.rank(0)
        score(url), send(new)  # what the first update itself leaves behind
        assert peak(process, lambda: send(changed(base, 2))) < WEIGHTS / 3
        with pytest.raises(InvalidRequest, match="serves on as before"):
            send(broken(new))
        assert peak(process, lambda: WeightsClient(url, beside=True)(new)) > WEIGHTS * 0.9


def amid_a_swap(url: str, new: Tensors) -> list[threading.Thread]:
    """Sends an update and asks for scores, and returns when the swap has begun."""

    def ask(work: Callable[[], object]) -> None:
        with contextlib.suppress(Unavailable):  # the server ends
            work()

    send = WeightsClient(url, policy=ONCE)
    threads = [threading.Thread(target=ask, args=(lambda: send(new),))]
    threads[0].start()
    wait_until(lambda: httpx.get(url + "/is_sleeping", timeout=120).json()["is_sleeping"])
    threads += [threading.Thread(target=ask, args=(lambda: score(url),)) for _ in range(2)]
    for thread in threads[1:]:
        thread.start()
    return threads


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_amid_a_swap_serves_its_folder_after_the_next_start(number: int, tmp_path: Path) -> None:
    with launched(tmp_path) as (launch, url, base):
        first, new = score(url), changed(base)
        threads = amid_a_swap(url, new)
        launch.rank(0).send_signal(number)
        code = launch.torchrun.wait(120)
        for thread in threads:
            thread.join()
        assert (code == 0) == (number == signal.SIGTERM), launch.output()
        assert number == signal.SIGKILL or "Traceback" not in launch.output(), launch.output()
    with serving("--config", tmp_path / "server.yaml", nproc=1) as (_, url):
        assert score(url) == first


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_swap_in_place_or_keep_the_old(small_pieces: None, tensor_parallel: int, tmp_path: Path) -> None:
    with launched(tmp_path, 2, tensor_parallel=tensor_parallel) as (launch, url, base):
        send, new = WeightsClient(url, policy=ONCE), changed(base)
        before = score(url)
        with pytest.raises(InvalidRequest, match="serves on as before"):
            send(broken(new))
        assert score(url) == before
        assert send(new) == score(url)[0] != before[0]
        peaks = [peak(launch.rank(i), lambda: send(new)) for i in range(2)]
        assert max(peaks) < WEIGHTS / tensor_parallel / 2 + (8 << 20), peaks
        assert_rewards(score(url)[1], written(base, tmp_path / "new", new))
        launch.rank(1).rlimit(psutil.RLIMIT_FSIZE, (1 << 20, psutil.RLIM_INFINITY))  # its disk alone is full
        newer = changed(base, 2)
        version = send(newer)
        assert "so the new ones are loaded beside them: rank 1" in launch.output(), launch.output()
        served_version, rewards = score(url)
        assert served_version == version
        assert_rewards(rewards, written(base, tmp_path / "newer", newer))
        launch.rank(0).terminate()
        assert launch.torchrun.wait(120) == 0, launch.output()
        assert "Traceback" not in launch.output(), launch.output()


def assert_rewards(rewards: list[float], folder: Path) -> None:
    """Fails if they stand four times farther from float64's than plain float32 itself does."""
    exact = zoo.reference(folder, ROWS, torch.float64)
    rounding = np.abs(zoo.reference(folder, ROWS) - exact).max()
    np.testing.assert_allclose(rewards, exact, atol=4 * rounding, rtol=0)
