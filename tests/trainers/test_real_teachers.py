"""Trainers' own code for a teacher's log-probs, each in its environment, against a server and against transformers.

`make trainers` makes the environments; a trainer without one is left out, and the summary says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import served
import zoo
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig, TeacherConfig
from teaching import plain
from trainers import environments
from trainers.driving import drive, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NEAR: Any = {"rtol": 1e-6, "atol": 1e-5}
K = 4
LENGTHS = [7, 1, 12, 9]
ROWS: list[dict[str, Any]] = [
    {"tokens": row.tolist(), "response_length": length} for row, length in zip(zoo.rows()[:4], LENGTHS, strict=True)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("teachers")
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher"))
    zoo.tokenizer(zoo.language_model("llama", folder / "student", seed=1))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """A teacher, and a second one."""
    models: list[Any] = [
        TeacherConfig(model=str(folder / "teacher")),
        TeacherConfig(model=str(folder / "student"), name="other"),
    ]
    with served.running(ServerConfig(port=0, grpc_port=None, models=models)) as running:
        yield running


@pytest.fixture(scope="module")
def student(folder: Path) -> Iterator[RunningServer]:
    """What stands for a trainer's rollout servers."""
    models: list[Any] = [TeacherConfig(model=str(folder / "student"), name="student")]
    with served.running(ServerConfig(port=0, grpc_port=None, models=models)) as running:
        yield running


@pytest.fixture(scope="module")
def tables(folder: Path) -> dict[str, list[np.ndarray]]:
    """The log-probs `[response_length, V]` of each row's response by each model, as transformers computes them."""
    rows = [np.array(row["tokens"]) for row in ROWS]
    return {
        name: [
            torch.log_softmax(logits, -1).numpy()[-1 - row["response_length"] : -1]
            for logits, row in zip(plain(folder / name, rows), ROWS, strict=True)
        ]
        for name in ("teacher", "student")
    }


def check_actual(got: list[list[float]], tables: list[np.ndarray]) -> None:
    """Asserts that these are the log-probs of the rows' own tokens."""
    for told, row, table in zip(got, ROWS, tables, strict=True):
        targets = row["tokens"][-row["response_length"] :]
        assert len(told) == len(targets)
        np.testing.assert_allclose(told, table[np.arange(len(targets)), targets], **NEAR)


def address(running: RunningServer) -> str:
    return running.http_url.removeprefix("http://")


def distil(
    name: str, teacher: str, student: RunningServer, tmp: Path, rows: list[dict[str, Any]] = ROWS, **settings: Any
) -> Any:
    """Returns what slime's or miles' hooks make of the rows."""
    checkout = str(environments.source_of(name))
    arguments = (checkout, name, teacher, address(student), "SAMPLES", json.dumps(settings))
    return drive(name, "drive_slime_teacher.py", *arguments, samples=rows, tmp=tmp)


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_slime_and_miles_read_the_sampled_tokens(
    name: str, server: RunningServer, student: RunningServer, tables: dict[str, list[np.ndarray]], tmp_path: Path
) -> None:
    told = distil(name, f"{server.http_url}/generate", student, tmp_path)
    check_actual(told["log_probs"], tables["teacher"])
    assert told["rewards"] == [0.0] * len(ROWS)
    told = distil(name, f"{server.http_url}/generate?model=other", student, tmp_path)
    check_actual(told["log_probs"], tables["student"])


def test_miles_sends_each_sample_to_its_teacher(
    server: RunningServer, student: RunningServer, tables: dict[str, list[np.ndarray]], tmp_path: Path
) -> None:
    url = f"{server.http_url}/generate?model="
    rows = [row | {"teacher": ["code", None][i % 2]} for i, row in enumerate(ROWS)]
    urls = {"opd_teacher_urls": [f"code={url}other", f"default={url}teacher"]}
    told = distil("miles", "http://127.0.0.1:1/unused", student, tmp_path, rows, **urls)
    both = zip(tables["student"], tables["teacher"], strict=True)
    check_actual(told["log_probs"], [pair[i % 2] for i, pair in enumerate(both)])


@pytest.mark.parametrize("is_by_position", [False, True])
@pytest.mark.parametrize("strategy", ["only-student", "only-teacher", "intersection", "union", "xor"])
def test_miles_reverse_kl_of_the_likeliest_tokens(
    strategy: str,
    is_by_position: bool,
    server: RunningServer,
    student: RunningServer,
    tables: dict[str, list[np.ndarray]],
    tmp_path: Path,
) -> None:
    rows = []
    for row, table in zip(ROWS, tables["student"], strict=True):
        best = np.argsort(-table, 1, kind="stable")[:, :K]
        top = [[[float(values[i]), int(i), None] for i in ids] for values, ids in zip(table, best, strict=True)]
        rows.append(row | {"top": top})
    told = distil(
        "miles", f"{server.http_url}/generate", student, tmp_path, rows,
        opd_log_prob_top_k=K, opd_top_k_strategy=strategy, opd_topk_per_position=is_by_position,
    )  # fmt: skip
    for got, teacher, policy in zip(told["reverse_kl"], tables["teacher"], tables["student"], strict=True):
        expected = [reverse_kl(p, q, strategy) for p, q in zip(policy, teacher, strict=True)]
        np.testing.assert_allclose(got, expected, **NEAR)


def reverse_kl(policy: np.ndarray, teacher: np.ndarray, strategy: str) -> float:
    """The difference of two distributions `[V]` over the chosen ids, weighted by the policy's probability."""
    own, theirs = (set(np.argsort(-row, kind="stable")[:K].tolist()) for row in (policy, teacher))
    chosen = {"only-student": own, "only-teacher": theirs, "intersection": own & theirs, "union": own | theirs,
              "xor": own ^ theirs}[strategy]  # fmt: skip
    ids = sorted(chosen)
    weights = np.exp(policy[ids])
    if strategy != "xor" and ids:
        weights = weights / weights.sum()
    return float((weights * (policy[ids] - teacher[ids])).sum())


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_areals_engines(kind: str, server: RunningServer, tables: dict[str, list[np.ndarray]], tmp_path: Path) -> None:
    told = drive("areal", "drive_areal_teacher.py", kind, address(server), "SAMPLES", samples=ROWS, tmp=tmp_path)
    found = []
    for values, row in zip(told["log_probs"], ROWS, strict=True):
        stop = len(row["tokens"])
        start = stop - row["response_length"]
        assert not any(values[:start]) and not any(values[stop:])
        found.append(values[start:stop])
    check_actual(found, tables["teacher"])


def test_prime_rl(server: RunningServer, tables: dict[str, list[np.ndarray]], tmp_path: Path) -> None:
    checkout, url = str(environments.source_of("prime_rl")), f"{server.http_url}/v1"
    told = drive("prime_rl", "drive_prime_rl_teacher.py", checkout, url, "SAMPLES", samples=ROWS, tmp=tmp_path)
    check_actual(told["log_probs"], tables["teacher"])


def test_a_token_beyond_the_vocabulary_ends_each_trainers_call(
    server: RunningServer, student: RunningServer, tmp_path: Path
) -> None:
    rows = [{"tokens": [5, 6, zoo.VOCAB_SIZE], "response_length": 1}]
    checkout = str(environments.source_of("slime"))
    arguments = (checkout, "slime", f"{server.http_url}/generate", address(student), "SAMPLES", "{}")
    done = run("slime", "drive_slime_teacher.py", *arguments, samples=rows, tmp=tmp_path)
    assert done.returncode != 0 and "400" in done.stderr.splitlines()[-1]
