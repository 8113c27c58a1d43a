"""TRL's own distillation trainers with a served teacher: they learn from the log-probs that transformers computes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import torch
import trl.generation.vllm_client as trl_client
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_distillation import (
    AsyncDistillationConfig,
    AsyncDistillationTrainer,
    async_distillation_trainer,
    async_rollout_worker,
)
from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
from trl.experimental.sdft import SDFTConfig, SDFTTrainer
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

import served
import zoo
from adapters.test_trl_models import train
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig, TeacherConfig
from ports import free_port
from served import Serve
from server.keys import SCORE, keyed
from teaching import plain

PROMPTS = ["What is 2+2?", "Name a colour.", "Who wrote Faust?", "Say something kind."]
TALKS = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": len(PROMPTS),
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher", seed=1))
    zoo.tokenizer(zoo.language_model("llama", folder / "student", seed=2))
    zoo.tokenizer(zoo.language_model("llama", folder / "other", seed=3))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    """Teachers behind a reward model, as a user may write them into one file; the second is the student itself."""
    models: list[Any] = [
        ModelConfig(model=str(served.reward_model(folder / "rm"))),
        TeacherConfig(model=str(folder / "teacher")),
        TeacherConfig(model=str(folder / "other"), name="other"),
        TeacherConfig(model=str(folder / "student"), name="self"),
    ]
    return serve(*models)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL insists that vLLM is installed, and its asynchronous trainer on a GPU, though it uses neither here."""
    for module in (trl_client, async_rollout_worker):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)
    # It asks CUDA for the name of a device, though only to log how much of it is used.
    monkeypatch.setattr(async_distillation_trainer, "get_peak_flops_per_device", lambda *_: None)


class PlainTeacher:
    """What TRL's client says of a teacher, computed by transformers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_sequence_logprobs(
        self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int, temperature: float
    ) -> dict[str, list[Any]]:
        assert temperature == 1.0
        answers: dict[str, list[Any]] = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for row, length, logits in zip(
            sequences, prompt_lengths, plain(self._folder, [np.array(row) for row in sequences]), strict=True
        ):
            table = torch.log_softmax(logits[length - 1 : -1], -1)
            top = table.topk(top_logprobs)
            answers["logprobs"].append(top.values.tolist())
            answers["logprob_token_ids"].append(top.indices.tolist())
            answers["actual_logprobs"].append(table.gather(1, torch.tensor(row[length:])[:, None]).tolist())
        return answers


def server_trainer(url: str, folder: Path, out: Path, form: str = "ServerDistillation", **settings: Any) -> Any:
    """ServerDistillationTrainer, or IWOPDTrainer, which asks a server in the same way."""
    if form == "IWOPD":
        config, trainer, settings = IWOPDConfig, IWOPDTrainer, {**settings, "use_teacher_server": True}
        answer = {"role": "assistant", "content": "4"}
        rows = [{"messages": [*talk["prompt"], answer]} for talk in TALKS]
    else:
        config, trainer, rows = ServerDistillationConfig, ServerDistillationTrainer, TALKS
    return trainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32),
        args=config(output_dir=str(out), teacher_model_server_url=url, max_completion_length=12, **COMMON, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "student", padding_side="left"),
    )


@pytest.mark.parametrize(
    ("form", "beta", "top_k"),
    [
        ("ServerDistillation", 0.0, 100),
        ("ServerDistillation", 0.5, 1),
        ("ServerDistillation", 1.0, 1),
        ("IWOPD", 1.0, 1),
    ],
)
def test_a_trainer_computes_the_loss_of_plain_transformers(
    form: str, beta: float, top_k: int, server: RunningServer, folder: Path, tmp_path: Path
) -> None:
    """The teacher's log-probs are within 1e-5, and a token's loss weighs them with probabilities: 1e-4 is ample.

    Plain gradient descent keeps rounding small over the steps; Adam's first step is the gradient's sign.
    """
    settings: dict[str, Any] = {"beta": beta, "loss_top_k": top_k, "max_steps": 2, "learning_rate": 0.1}
    settings |= {"form": form, "optim": "sgd"}
    trainer = server_trainer(server.http_url, folder, tmp_path, **settings)
    reference = server_trainer(server.http_url, folder, tmp_path, **settings)
    reference.teacher_client = PlainTeacher(folder / "teacher")
    logs, expected = train(trainer), train(reference)
    assert len(logs) == 2 and abs(logs[0]["loss"]) > 1e-3
    for line, other in zip(logs, expected, strict=True):
        assert line.get("completions/mean_length") == other.get("completions/mean_length")
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    for weight, other_weight in zip(trainer.model.parameters(), reference.model.parameters(), strict=True):
        np.testing.assert_allclose(weight.detach(), other_weight.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["teacher", "other"])
def test_a_step_by_each_teacher_of_one_server_is_that_in_process(
    name: str, server: RunningServer, folder: Path, tmp_path: Path
) -> None:
    """The URL names the teacher; the loss is that of transformers."""
    settings: dict[str, Any] = {"beta": 0.5, "loss_top_k": 1, "max_steps": 1, "learning_rate": 0.1, "optim": "sgd"}
    trainer = server_trainer(f"{server.http_url}/models/{name}", folder, tmp_path, **settings)
    reference = server_trainer(server.http_url, folder, tmp_path, **settings)
    reference.teacher_client = PlainTeacher(folder / name)
    (log,), (expected,) = train(trainer), train(reference)
    assert abs(expected["loss"]) > 1e-3
    for key in ("loss", "grad_norm"):
        assert log[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5)


def test_a_step_of_self_distillation_is_that_in_process(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    """TRL's SDFT has the teacher read the privileged context before the student's response.

    It asks only the vLLM that generates, so that the trainer gets its client after it is made.
    """
    context = {"privileged_context": "The reference solution: 4."}
    losses = []
    for is_served in (True, False):
        args = SDFTConfig(
            output_dir=str(tmp_path), max_completion_length=12, distillation_mode="sampled_token",
            distillation_alpha=1.0, teacher_model_kind="live", num_generations=2, max_steps=1, learning_rate=0.1,
            optim="sgd", **COMMON,
        )  # fmt: skip
        trainer = SDFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32),
            args=args,
            train_dataset=Dataset.from_list([row | context for row in TALKS]),
            processing_class=AutoTokenizer.from_pretrained(folder / "student", padding_side="left"),
        )
        if is_served:
            trainer.use_teacher_server = True
            trainer.teacher_client = trl_client.VLLMClient(base_url=f"{server.http_url}/models/self")
        losses.append(train(trainer)[0])
    served_log, expected = losses
    assert abs(expected["loss"]) > 1e-3
    for key in ("loss", "grad_norm"):
        assert served_log[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_server_distillation_brings_the_student_closer(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    settings = {"beta": 0.0, "loss_top_k": 100, "max_steps": 12, "learning_rate": 0.01, "lr_scheduler_type": "constant"}
    losses = [line["loss"] for line in train(server_trainer(server.http_url, folder, tmp_path, **settings))]
    assert np.mean(losses[-3:]) < 0.8 * losses[0], losses


def rollout_loop(url: str, folder: Path) -> Any:
    """What TRL's asynchronous trainer asks its servers with, otherwise in a process of its own."""
    loop = async_rollout_worker._AsyncRolloutLoop(
        model_name="student", dataset=Dataset.from_list(TALKS), eos_token_ids=[zoo.EOS],
        processing_class=AutoTokenizer.from_pretrained(folder / "student"), teacher_server_urls={"only": url},
        rollout_buffer=queue.Queue(), model_version_value=None, heartbeat_value=None, failed_event=None,
        exception_info_queue=None, metrics_queue=queue.Queue(),
    )  # fmt: skip
    loop._loop.close()
    return loop


async def ask_as_worker(url: str, folder: Path, prompt: list[int], completion: list[int]) -> tuple[str, Any, Any]:
    """Returns the teacher's name, and the ids and log-probs of each token of the completion."""
    loop = rollout_loop(url, folder)
    async with aiohttp.ClientSession() as loop.session:
        await loop._resolve_teacher_model_names()
        name = loop.teacher_model_names["only"]
        return name, *(await loop._score_with_teacher(prompt, completion, url, name))


def check_as_worker(url: str, folder: Path) -> None:
    """Asserts that the asynchronous trainer's worker gets the teacher's log-probs, the actual token's among them."""
    row = zoo.rows()[0].tolist()
    name, ids, logprobs = asyncio.run(ask_as_worker(url, folder, row[:40], row[40:]))
    assert name == "teacher" and len(ids) == len(row) - 40
    table = torch.log_softmax(plain(folder / "teacher", [np.array(row)])[0], -1).numpy()
    for token, asked, some, values in zip(row[40:], table[39:-1], ids, logprobs, strict=True):
        assert some[:8] == np.argsort(-asked, kind="stable")[:8].tolist() and token in some
        np.testing.assert_allclose(values, asked[some], rtol=1e-6, atol=1e-5)


def test_the_asynchronous_trainers_worker_reads_it(server: RunningServer, folder: Path) -> None:
    check_as_worker(server.http_url, folder)


def test_a_key_goes_into_the_url(folder: Path, tmp_path: Path) -> None:
    config = keyed(tmp_path, grpc_port=None, models=[TeacherConfig(model=str(folder / "teacher"))])
    with served.running(config=config) as running:
        url = running.http_url.replace("http://", f"http://x:{SCORE}@")
        got = trl_client.VLLMClient(base_url=url).get_sequence_logprobs([[5, 6, 7, 8]], [2], top_logprobs=1)
        assert np.isfinite(got["actual_logprobs"]).all() and len(got["actual_logprobs"][0]) == 2
        check_as_worker(url, folder)


def test_a_wrong_request_ends_the_run_with_the_servers_message(server: RunningServer) -> None:
    client = trl_client.VLLMClient(base_url=server.http_url)
    with pytest.raises(Exception, match=r"400.*prompt_logprobs is 129; teacher gives at most 128 ids"):
        client.get_sequence_logprobs([[5, 6, 7]], [1], top_logprobs=129)


@pytest.mark.slow  # TRL waits 4 s before its second retry
def test_trls_client_waits_for_a_server_that_restarts(folder: Path) -> None:
    models: list[Any] = [TeacherConfig(model=str(folder / "teacher"))]
    config = ServerConfig(port=free_port(), grpc_port=None, models=models)
    with served.running(config=config) as running:
        client = trl_client.VLLMClient(base_url=running.http_url)
        before = client.get_sequence_logprobs([[5, 6, 7]], [1], top_logprobs=2)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.get_sequence_logprobs, [[5, 6, 7]], [1], top_logprobs=2)
        assert not wait([asked], timeout=1).done
        with served.running(config=config):
            assert asked.result(120) == before


class NoTransfer:
    """Leaves the student's server with the weights that it has."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class StudentServer(NoTransfer):
    """Generates as vLLM does for the student of TRL's asynchronous trainer, and takes its new weights.

    It is all that TRL calls a weight transfer, so that no NCCL is needed.
    """

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.updates = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({"data": [{"id": "student", "max_model_len": zoo.MAX_LENGTH}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer({"choices": [{"token_ids": outer.generate(body)}]})

            def _answer(self, told: dict[str, Any]) -> None:
                data = json.dumps(told).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> StudentServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

    def generate(self, body: dict[str, Any]) -> list[int]:
        prompt = torch.tensor([body["prompt"]])
        with self._lock, torch.random.fork_rng():
            torch.manual_seed(body["seed"])
            whole = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=body["max_tokens"]
            )
        return whole[0, prompt.shape[1] :].tolist()

    def pause(self) -> None:
        self._lock.acquire()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model.load_state_dict(dict(iterator), strict=False)
        self.updates += 1

    def resume(self) -> None:
        self._lock.release()


def async_trainer(
    student: Path, url: str, transfer: NoTransfer, teacher: str, out: Path, **settings: Any
) -> AsyncDistillationTrainer:
    """A trainer of `student`, which the server at `url` generates with."""
    args = AsyncDistillationConfig(
        output_dir=str(out), vllm_server_base_url=url, teacher_server_urls={"only": teacher}, max_completion_length=12,
        token_budget=0, model_init_kwargs={"attn_implementation": "sdpa"}, learning_rate=0.01,
        lr_scheduler_type="constant", **COMMON, **settings,
    )  # fmt: skip
    return AsyncDistillationTrainer(
        model=str(student), args=args, train_dataset=Dataset.from_list(TALKS), weight_transfer=transfer
    )


@contextlib.contextmanager
def recorded(trainer: AsyncDistillationTrainer) -> Iterator[list[dict[str, torch.Tensor]]]:
    """Yields a list that gets the inputs of every step."""
    seen: list[dict[str, torch.Tensor]] = []
    compute = trainer._compute_loss

    def compute_and_record(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append({name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return compute(model, inputs)

    trainer._compute_loss = compute_and_record
    yield seen


def check_rollouts(inputs: dict[str, torch.Tensor], folder: Path) -> None:
    """Asserts that each completion's token has the teacher's likeliest ids and its own, as transformers computes."""
    kept = inputs["attention_mask"].bool()
    tokens, positions, answered = (
        inputs[name][kept].numpy() for name in ("input_ids", "position_ids", "completion_mask")
    )
    ids, logprobs = (inputs[name][kept].numpy() for name in ("teacher_topk_ids", "teacher_topk_logprobs"))
    starts = np.flatnonzero(positions == 0)
    bounds = [*starts.tolist(), len(tokens)]
    rows = [tokens[a:b] for a, b in itertools.pairwise(bounds)]
    assert len(rows) == len(PROMPTS)
    for start, row, logits in zip(starts, rows, plain(folder / "teacher", rows), strict=True):
        table = torch.log_softmax(logits, -1).numpy()
        for i in range(1, len(row)):
            known = ids[start + i] >= 0
            if not answered[start + i]:
                assert not known.any()
                continue
            named = ids[start + i][known]
            assert row[i] in named and 8 <= len(named) <= 9
            np.testing.assert_allclose(logprobs[start + i][known], table[i - 1, named], rtol=1e-6, atol=1e-5)
            np.testing.assert_allclose(logprobs[start + i][:8], -np.sort(-table[i - 1])[:8], rtol=1e-6, atol=1e-5)


@pytest.mark.slow  # TRL's worker imports torch and itself again, in a process of its own
def test_async_distillation_learns_from_the_teachers_logprobs(
    server: RunningServer, folder: Path, tmp_path: Path
) -> None:
    with StudentServer(folder / "student") as student:
        trainer = async_trainer(folder / "student", student.url, student, server.http_url, tmp_path, max_steps=12)
        with recorded(trainer) as seen:
            losses = [line["loss"] for line in train(trainer)]
    assert student.updates >= 12 and len(seen) == 12
    for inputs in seen:
        check_rollouts(inputs, folder)
    assert np.mean(losses[-3:]) < 0.8 * losses[0], losses


VLLM = Path(os.environ.get("GUERDON_VLLM", Path(__file__).parents[2] / ".bench/vllm/bin/vllm"))


@contextlib.contextmanager
def vllm(model: Path, log: Path) -> Iterator[str]:
    """Yields the URL of vLLM with that model."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [VLLM, "serve", model, "--port", str(port), "--dtype", "float32", "--max-model-len", "128"]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [*command, "--enforce-eager"], env=env, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        try:
            end = time.monotonic() + 300
            while not is_healthy(url):
                assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
                time.sleep(1)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VLLM.exists(), reason="no vLLM: `make bench` installs it, or GUERDON_VLLM names its command")
def test_async_distillation_with_a_student_in_vllm(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    """Without NCCL, which needs GPUs, vLLM keeps the first weights."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    student = zoo.tokenizer(zoo.language_model("llama", tmp_path / "student", **sizes))
    with vllm(student, tmp_path / "vllm.log") as url:
        trainer = async_trainer(student, url, NoTransfer(), server.http_url, tmp_path, max_steps=3)
        with recorded(trainer) as seen:
            assert len(train(trainer)) == 3
    for inputs in seen:
        check_rollouts(inputs, folder)
