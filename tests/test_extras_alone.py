"""Each extra alone: the command that its page names, in an environment that has what the extra brings and nothing else.

The environments are made of links to what is installed here. With GUERDON_EXTRAS=install (`make extras`) pip installs
each of them instead, one after the other, with the CPU build of torch where pip finds one first.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml

import zoo
from guerdon.client import CriticClient, RewardClient, TeacherClient
from guerdon.server.runtime import RunningServer
from linked_environment import EXTRAS, ROOT, Environment, linked
from ports import free_port
from served import plain
from server.helpers import wait_until
from training.plain import request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
INSTALLS = os.environ.get("GUERDON_EXTRAS") == "install"
LARGE = ("ray", "vllm")
"""Gigabytes, or a GPU: `make ray` and the pages of vLLM try them."""
ROWS = zoo.rows(3, ((12, 2),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model `rm`, a language model `lm`, an adapter `adapter` of it, prompts and rows to score."""
    folder = tmp_path_factory.mktemp("extras")
    zoo.tokenizer(zoo.checkpoint("llama", folder / "rm"))
    zoo.tokenizer(zoo.language_model("llama", folder / "lm"))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "chosen": "the one", "rejected": "another"}\n' * 3)
    (folder / "prompts.jsonl").write_text('{"prompt": "say the thing"}\n' * 4)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server beside the extras that are clients."""
    with plain(tmp_path_factory.mktemp("server")) as running:
        yield running


def environment(extra: str, folder: Path) -> Environment:
    made = Environment(folder / f"env-{extra or 'client'}")
    if not INSTALLS:
        try:
            return linked(extra, made.folder)
        except PackageNotFoundError as e:
            pytest.skip(f"{e.name} is not installed here; `make extras` installs it")
    subprocess.run([sys.executable, "-m", "venv", made.folder], check=True)
    what = f"{ROOT}[{extra}]" if extra else str(ROOT)
    done = made.run("-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", what, timeout_s=1500)
    assert done.returncode == 0, done.stdout
    return made


def guerdon(made: Environment, *args: object, **env: str) -> str:
    done = made.run("-m", "guerdon", *args, timeout_s=300, **env)
    assert done.returncode == 0, done.stdout
    return done.stdout


@contextlib.contextmanager
def serving(made: Environment, command: str, *args: object, **env: str) -> Iterator[str]:
    """The URL of a server of the environment, when it is ready."""
    port = free_port()
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    words = [
        made.python,
        "-m",
        "guerdon",
        command,
        *map(str, args),
        "--port",
        str(port),
        "--grpc-port",
        str(free_port()),
    ]
    log = made.folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(words, env=plain | env, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/v2/health/ready").status_code == 200
        return False

    try:
        wait_until(is_ready)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()


def check_rewards(url: str, model: Path) -> None:
    with RewardClient(url) as client:
        np.testing.assert_allclose(client.score(tokens=ROWS).rewards, zoo.reference(model, ROWS), atol=1e-5)


def check_training(url: str) -> None:
    batch = request(ROWS)
    with CriticClient(url) as client:
        before = client.infer(tokens=ROWS).values
        client.train(batch.tokens, batch.returns, batch.prev_values, batch.mask)
        assert not np.array_equal(np.concatenate(client.infer(tokens=ROWS).values), np.concatenate(before))


# ------------------------------------------------------------------------------------------------ what each is for


def client(made: Environment, folder: Path, server: RunningServer) -> None:
    url = server.http_url
    assert "is ready" in made.run("-m", "guerdon", "doctor", url).stdout
    guerdon(made, "score", folder / "rows.jsonl", "-o", made.folder / "out.jsonl", "--server", url)
    assert len((made.folder / "out.jsonl").read_text().splitlines()) == 3
    load_test = made.run(ROOT / "benchmarks/server_load.py", url, "--requests", "4")
    assert load_test.returncode == 0, load_test.stderr
    script = f"from guerdon import *; print(RewardClient({url!r}).score(texts=['a']).rewards)"
    assert "[" in made.run("-c", script).stdout


def grpc(made: Environment, folder: Path, server: RunningServer) -> None:
    script = f"import guerdon; print('got', guerdon.RewardClient({server.grpc_url!r}).score(texts=['a']).rewards)"
    assert "got [" in made.run("-c", script).stdout
    assert "is ready" in made.run("-m", "guerdon", "doctor", server.grpc_url).stdout


def plot(made: Environment, folder: Path, server: RunningServer) -> None:
    out, url = made.folder, server.http_url
    guerdon(made, "score", folder / "rows.jsonl", "-o", out / "o.jsonl", "--server", url, "--plot", out / "score.png")
    assert (out / "score.png").stat().st_size > 1000


def serve(made: Environment, folder: Path, server: RunningServer) -> None:
    for parallel in ([], ["--tensor-parallel", "2"]):
        with serving(made, "serve", folder / "rm", *parallel) as url:
            check_rewards(url, folder / "rm")
            assert httpx.get(f"{url}/docs").status_code == 200
    with serving(made, "serve-critic", folder / "rm", "--fsdp", "--data-parallel", "2") as url:
        check_training(url)
    with serving(made, "serve-teacher", folder / "lm", "--tensor-parallel", "2") as url, TeacherClient(url) as teacher:
        assert len(teacher.logprobs(tokens=ROWS).logprobs) == len(ROWS)
    guerdon(made, "score", folder / "rows.jsonl", "-o", made.folder / "o.jsonl", "--model", folder / "rm")
    assert "peft is not installed" in made.run("-m", "guerdon", "serve-teacher", folder / "adapter").stdout


def lora(made: Environment, folder: Path, server: RunningServer) -> None:
    with serving(made, "serve-critic", folder / "rm", "--lora", 2, "--checkpoint-dir", made.folder / "kept") as url:
        check_training(url)
        with CriticClient(url) as critic:
            critic.save()
    (kept,) = (made.folder / "kept").glob("checkpoint-*")
    for parallel in ([], ["--tensor-parallel", "2"]):
        with serving(made, "serve", kept, *parallel) as url, RewardClient(url) as reward:
            assert np.isfinite(reward.score(tokens=ROWS).rewards).all()
    with serving(made, "serve-teacher", folder / "adapter") as url, TeacherClient(url) as teacher:
        assert len(teacher.logprobs(tokens=ROWS).logprobs) == len(ROWS)
    guerdon(made, "convert", folder / "adapter", made.folder / "whole")


def eight_bit(made: Environment, folder: Path, server: RunningServer) -> None:
    with serving(made, "serve-critic", folder / "rm", "--optimizer", "adamw_8bit") as url:
        check_training(url)


def gguf(made: Environment, folder: Path, server: RunningServer) -> None:
    from engine.checkpoint.test_converting import write_gguf

    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    zoo.tokenizer(zoo.language_model("llama", folder / "source", **shape))
    write_gguf(folder / "source", folder / "model.gguf", quantised=True)
    assert "dequantised" in guerdon(made, "convert", folder / "model.gguf", made.folder / "converted")


def act(
    made: Environment, folder: Path, server: RunningServer, *, prompts: str = "", trackers: Any = (), **env: str
) -> Path:
    """One step of REINFORCE; returns the run's folder."""
    settings = {
        "policy": {"model": str(folder / "lm")},
        "data": {"prompts": prompts or str(folder / "prompts.jsonl"), "num_validation": 1},
        "rollouts": {"rollouts_per_prompt": 2, "max_new_tokens": 4, "prompts_per_step": 2},
        "remote_rm": {"reward_model": {"urls": [server.http_url]}},
        "run": {"steps": 1, "output_dir": str(made.folder / "run"), "trackers": list(trackers)},
    }
    path = made.folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    guerdon(made, "reinforce", path, **env)
    assert (made.folder / "run" / "curves.png").exists()
    return made.folder / "run"


def data(made: Environment, folder: Path, server: RunningServer) -> None:
    import datasets

    datasets.Dataset.from_list([{"prompt": "say the thing"}] * 4).to_parquet(folder / "prompts.parquet")
    act(made, folder, server, prompts=str(folder / "prompts.parquet"))


def otel(made: Environment, folder: Path, server: RunningServer) -> None:
    from collector import collecting

    with collecting() as collector:
        with serving(made, "serve", folder / "rm", "--traces", collector.url) as url:
            check_rewards(url, folder / "rm")
        collector.wait("POST")


def mathematics(made: Environment, folder: Path, server: RunningServer) -> None:
    words = ("guerdon.verifiers.mathematics:verify", "--isolate")
    with serving(made, "serve", *words) as url, RewardClient(url) as reward:
        chats = [[{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": x}] for x in ("$2$", "$3$")]
        assert reward.score(messages=chats, labels=["2", "2"]).rewards.tolist() == [1, 0]


def wandb(made: Environment, folder: Path, server: RunningServer) -> None:
    run = act(made, folder, server, trackers=["wandb"], WANDB_MODE="offline", WANDB_DIR=str(made.folder))
    assert list(made.folder.glob("**/offline-run-*")) and run.is_dir()


def mlflow(made: Environment, folder: Path, server: RunningServer) -> None:
    act(made, folder, server, trackers=["mlflow"], MLFLOW_TRACKING_URI=f"file:{made.folder}/mlruns")
    assert list((made.folder / "mlruns").glob("*/*/metrics/*"))


TRIALS: dict[str, Callable[[Environment, Path, RunningServer], Any]] = {
    "": client, "grpc": grpc, "plot": plot, "server": serve, "lora": lora, "8bit": eight_bit, "actor": act,
    "gguf": gguf, "otel": otel, "data": data, "math": mathematics, "wandb": wandb, "mlflow": mlflow,
}  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_alone_does_what_its_page_says(
    extra: str, folder: Path, server: RunningServer, tmp_path: Path
) -> None:
    if extra in LARGE:
        pytest.skip("it has a target or a page of its own")
    if not (folder / "adapter").exists():
        peft = pytest.importorskip("peft")
        from transformers import AutoModelForCausalLM

        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "lm"), config).save_pretrained(
            folder / "adapter"
        )
    made = environment(extra, tmp_path)
    try:
        TRIALS[extra](made, folder, server)
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)


def test_every_extra_has_a_trial() -> None:
    assert {*EXTRAS} - {*LARGE} == TRIALS.keys()
