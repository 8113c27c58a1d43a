"""Live weights by vLLM's four phases: which weights answered, whoever dies amid an update, and what is refused."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

import zoo
from guerdon import RewardClient, TeacherClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.access import KEYS_VARIABLE
from guerdon.settings.config import ModelConfig, TeacherConfig
from served import running
from server.swapping import ROWS
from teaching import plain
from tiers import slow_but

TRAINER = """
import sys, httpx, numpy as np
from safetensors.numpy import load_file, save
url, base, first, last = sys.argv[1], load_file(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
with httpx.Client(base_url=url, timeout=120) as http:
    http.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
    for step in range(first, last):
        rng = np.random.default_rng(step)
        print("begins", step, flush=True)
        http.post("/start_weight_update").raise_for_status()
        for name, tensor in base.items():
            new = tensor + 0.05 * rng.standard_normal(tensor.shape).astype(tensor.dtype)
            http.post("/update_weights", content=save({name: new})).raise_for_status()
        done = http.post("/finish_weight_update", json={"weight_version": str(step)}).raise_for_status().json()
        assert done["weight_version"] == str(step)
        print("done", step, done["weights_version"], flush=True)
"""


def stepped(base: Path, step: int, folder: Path) -> Path:
    """The checkpoint of the trainer's step."""
    rng, folder = np.random.default_rng(step), folder / str(step)
    folder.mkdir(parents=True)
    tensors = load_file(base / "model.safetensors")
    new = {n: t + 0.05 * rng.standard_normal(t.shape).astype(t.dtype) for n, t in tensors.items()}
    save_file(new, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "zoo.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_updates", "num_kills"), slow_but((), [(16, 2), (50, 6)]))
def test_updates_under_load_with_trainers_killed_amid_some(num_updates: int, num_kills: int, tmp_path: Path) -> None:
    base = zoo.checkpoint("llama", tmp_path / "rm")
    replies: dict[str, list[np.ndarray]] = {}
    is_over = threading.Event()

    def load(url: str) -> None:
        with RewardClient(url) as client:
            while not is_over.is_set():
                scores = client.score(tokens=ROWS)
                replies.setdefault(scores.weights_version, []).append(scores.rewards)

    versions: dict[str, int] = {}
    torn: set[int] = set()
    rng, first, num_killed = np.random.default_rng(0), 0, 0
    with running(ModelConfig(model=str(base)), weight_transfer=str(tmp_path)) as server:
        with RewardClient(server.http_url) as client:
            origin = client.score(tokens=ROWS).weights_version
        threads = [threading.Thread(target=load, args=(server.http_url,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            while first < num_updates:
                argv = [sys.executable, "-c", TRAINER, server.http_url, str(base / "model.safetensors")]
                trainer = subprocess.Popen([*argv, str(first), str(num_updates)], stdout=subprocess.PIPE, text=True)
                assert trainer.stdout is not None
                kill_at, begun = (first + 5, -1) if num_killed < num_kills else (num_updates, -1)
                for line in trainer.stdout:
                    what, step, *version = line.split()
                    if what == "done":
                        versions[version[0]], first = int(step), int(step) + 1
                    else:
                        begun = int(step)
                    if begun == kill_at:
                        time.sleep(rng.uniform(0, 0.15))
                        os.kill(trainer.pid, signal.SIGKILL)
                        num_killed += 1
                        break
                rest = trainer.stdout.read().split()  # what it wrote before it was killed
                if "done" in rest:
                    versions[rest[-1]] = begun
                elif begun == kill_at:
                    torn.add(begun)
                first = begun + 1
                trainer.wait()
        finally:
            is_over.set()
            for thread in threads:
                thread.join(120)
    assert num_killed == num_kills and len(versions) + len(torn) >= num_updates - 1
    wanted = {
        step: zoo.reference(stepped(base, step, tmp_path / "steps"), ROWS) for step in {*versions.values(), *torn}
    }
    assert len(replies) > num_updates / 5
    for version, rewards in replies.items():
        if version == origin:
            choices = [zoo.reference(base, ROWS)]
        else:  # a trainer that was killed after its last message did not hear the version
            choices = [wanted[versions[version]]] if version in versions else [wanted[step] for step in torn]
        fits = [want for want in choices if np.abs(rewards[0] - want).max() < 1e-5]
        assert len(fits) == 1, version
        np.testing.assert_allclose(rewards, np.tile(fits[0], (len(rewards), 1)), atol=1e-5)


def test_an_average_of_a_teacher_by_files(tmp_path: Path) -> None:
    """The reference is the formula in float64, and transformers' logits by its weights."""
    base = zoo.language_model("llama", tmp_path / "lm")
    want = {name: tensor.astype(np.float64) for name, tensor in load_file(base / "model.safetensors").items()}
    folder = tmp_path / "updates"
    folder.mkdir()
    with (
        running(TeacherConfig(model=str(base)), weight_transfer=str(folder)) as server,
        httpx.Client(base_url=server.http_url, timeout=120) as http,
        TeacherClient(server.http_url) as client,
    ):
        http.post("/init_weight_transfer_engine", json={"init_info": {"ema": 0.9}}).raise_for_status()
        for step in range(3):
            rng = np.random.default_rng(step)
            new = {name: rng.standard_normal(t.shape).astype(np.float32) * 0.2 for name, t in want.items()}
            half = len(new) // 2
            parts = [dict([*new.items()][:half]), dict([*new.items()][half:])]
            for i, part in enumerate(parts):
                save_file(part, folder / f"{i}.safetensors")
            update_id = http.post("/start_weight_update").raise_for_status().json()["update_id"]
            files = [{"file": f"{i}.safetensors"} for i in range(2)]
            done = http.post("/update_weights", params={"update_id": update_id}, json={"update_info": files})
            assert done.raise_for_status().json()["missing"] == 0
            version = http.post("/finish_weight_update").raise_for_status().json()["weights_version"]
            want = {name: 0.9 * t + 0.1 * new[name] for name, t in want.items()}
            answers = client.logprobs(tokens=ROWS)
            assert answers.weights_version == version
        made = tmp_path / "made"
        made.mkdir()
        (made / "config.json").write_bytes((base / "config.json").read_bytes())
        save_file({n: t.astype(np.float32) for n, t in want.items()}, made / "model.safetensors", {"format": "pt"})
        for row, logits, got in zip(ROWS, plain(made, ROWS), answers.logprobs, strict=True):
            table = logits.log_softmax(-1).numpy()
            np.testing.assert_allclose(got, table[np.arange(len(row) - 1), row[1:]], rtol=1e-6, atol=1e-5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    base = zoo.checkpoint("llama", tmp_path_factory.mktemp("rm"))
    with running(ModelConfig(model=str(base)), weight_transfer=str(base)) as server:
        yield server


def tensors(server: RunningServer) -> dict[str, np.ndarray]:
    return load_file(
        next(iter(httpx.get(server.http_url + "/v1/models").json()["data"]))["root"] + "/model.safetensors"
    )


def wrong(kind: str, whole: dict[str, np.ndarray]) -> bytes:
    name = min(whole)
    if kind == "shape":
        return save(whole | {name: np.zeros((3, 5), np.float32)})
    if kind == "unknown":
        return save(whole | {"nobody.weight": np.zeros(3, np.float32)})
    if kind == "torn":
        return save(whole)[:-4]
    if kind == "ids":
        return save(whole | {name: np.zeros(whole[name].shape, np.int64)})
    return save({n: t for n, t in whole.items() if n != name}) if kind == "missing" else b"no safetensors at all"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("shape", "has shape [3, 5], and the model's has"),
        ("unknown", "nobody.weight is none of the model's tensors"),
        ("torn", "no whole file of safetensors"),
        ("ids", "weights are F32, BF16 or F16"),
        ("garbage", "no whole file of safetensors"),
        ("missing", "1 tensors are missing"),
    ],
)
def test_a_wrong_update_leaves_the_old_weights(server: RunningServer, kind: str, says: str) -> None:
    with RewardClient(server.http_url) as client, httpx.Client(base_url=server.http_url, timeout=120) as http:
        before = client.score(tokens=ROWS)
        http.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
        http.post("/start_weight_update").raise_for_status()
        sent = http.post("/update_weights", content=wrong(kind, tensors(server)))
        ended = http.post("/finish_weight_update")
        assert ended.status_code == 400 and (says in sent.text or kind == "missing") and says in ended.json()["error"]
        after = client.score(tokens=ROWS)
        assert after.weights_version == before.weights_version
        np.testing.assert_array_equal(after.rewards, before.rewards)


def test_what_is_asked_wrongly_is_said(server: RunningServer) -> None:
    with httpx.Client(base_url=server.http_url, timeout=120) as http:

        def refused(path: str, status: int, says: str, **sent: Any) -> None:
            answer = http.post(path, **sent)
            assert answer.status_code == status and says in answer.json()["error"], answer.text

        for ema in (1.0, -0.1, 7):
            refused("/init_weight_transfer_engine", 400, "at least 0 and below 1", json={"init_info": {"ema": ema}})
        nccl = {"init_info": {"master_address": "10.0.0.1", "master_port": 1234, "rank_offset": 1, "world_size": 2}}
        refused("/init_weight_transfer_engine", 501, "NCCL and CUDA IPC", json=nccl)
        refused("/start_weight_update?model=nobody", 400, "unknown model")
        http.post("/init_weight_transfer_engine", json={"init_info": {}}).raise_for_status()
        refused("/update_weights", 400, "no update of reward_model is open", content=b"x")
        http.post("/start_weight_update").raise_for_status()
        refused("/update_weights?update_id=other", 400, "another began since", content=b"x")
        for file in ("../secret", "/etc/passwd", "nothing"):
            refused("/update_weights", 400, "no file", json={"update_info": {"file": file}})
        refused("/update_weights", 400, "update_info", json={"update_info": []})


def test_updates_need_the_setting_and_the_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(model=str(zoo.checkpoint("llama", tmp_path)))
    with running(model) as server:
        answer = httpx.post(server.http_url + "/init_weight_transfer_engine", json={"init_info": {}})
        assert answer.status_code == 403 and "--weight-transfer" in answer.text
    monkeypatch.setenv(KEYS_VARIABLE, "score actor an-actors-key-of-length")
    with running(model, weight_transfer=str(tmp_path)) as server:
        for path in (
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
        ):
            headers = {"authorization": "Bearer an-actors-key-of-length"}
            assert httpx.post(server.http_url + path, headers=headers, json={}).status_code == 403
