"""Trainers' own code for a teacher's log-probs, each in its environment, against a server and against transformers.

`make trainers` makes the environments; a trainer without one is left out, and the summary says so.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

import served
import zoo
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import TeacherConfig
from processes import environment
from served import Serve
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
    folder = tmp_path_factory.mktemp("teachers")
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher"))
    zoo.tokenizer(zoo.language_model("llama", folder / "student", seed=1))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    """A teacher, and a second one."""
    models: list[Any] = [
        TeacherConfig(model=str(folder / "teacher")),
        TeacherConfig(model=str(folder / "student"), name="other"),
    ]
    return serve(*models)


@pytest.fixture(scope="module")
def student(folder: Path, serve: Serve) -> RunningServer:
    """What stands for a trainer's rollout servers."""
    models: list[Any] = [TeacherConfig(model=str(folder / "student"), name="student")]
    return serve(*models)


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


@pytest.mark.parametrize("name", ["slime", "miles"])
def test_a_step_of_slime_and_miles_is_that_with_the_teacher_in_process(
    name: str, server: RunningServer, folder: Path, tmp_path: Path
) -> None:
    """Under prompts of the teacher's own; miles' rows go to the teacher that they name."""
    names = ["teacher", "other" if name == "miles" else "teacher"]
    rows = [row | {"before": [9, 8, 7 + i], "teacher": names[i % 2]} for i, row in enumerate(ROWS)]
    url = f"{server.http_url}/generate?model="
    settings: dict[str, Any] = {"rm_url": f"{url}teacher"}
    if name == "miles":
        settings["opd_teacher_urls"] = [f"{key}={url}{key}" for key in names]
    folders = json.dumps({"teacher": str(folder / "teacher"), "other": str(folder / "student")})
    arguments = (str(environments.source_of(name)), name, str(folder / "student"), folders, "SAMPLES")
    told = drive(name, "drive_distillation_step.py", *arguments, json.dumps(settings), samples=rows, tmp=tmp_path)
    assert abs(told["in_process"]["loss"]) > 1e-3 and told["in_process"]["moved"] > 1e-3
    assert told["served"] == pytest.approx(told["in_process"], rel=1e-5, abs=1e-5)


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


VERL = "distillation.teacher_models"


def flags_of_page() -> list[str]:
    """Returns the flags of the page's command, without the teacher's address."""
    page = (Path(served.__file__).parents[1] / "docs/trainers/verl.md").read_text()
    (command,) = re.findall(r"(?s)```\n(python -m guerdon.adapters.verl_teacher.*?)```", page)
    return [flag for flag in shlex.split(command.replace("\\\n", "")) if "=" in flag and "model_path" not in flag]


def distil_by_verl(folder: Path, rows: list[dict[str, Any]], tmp: Path, *flags: str) -> Any:
    """Returns what verl's rollout worker has of the rows, with the flags of the page and these."""
    found = [*flags_of_page(), "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=2", *flags]
    arguments = (json.dumps(found), "SAMPLES", str(folder / "teacher"))
    return drive("verl", "drive_verl_teacher.py", *arguments, samples=rows, tmp=tmp)


@pytest.mark.parametrize("loss", ["k1", "forward_kl_topk"])
def test_verl(
    loss: str, server: RunningServer, folder: Path, tables: dict[str, list[np.ndarray]], tmp_path: Path
) -> None:
    flags = (
        f"{VERL}.teacher_model.model_path={server.http_url}",
        f"distillation.distillation_loss.loss_mode={loss}",
        f"distillation.distillation_loss.topk={K}",
    )
    told = distil_by_verl(folder, ROWS, tmp_path, *flags)
    assert told["gpus"] == 2  # the trainer's own
    for ids, values, row, table in zip(told["ids"], told["log_probs"], ROWS, tables["teacher"], strict=True):
        tokens, count = row["tokens"], row["response_length"]
        assert len(ids) == len(values) == len(tokens) and not any(ids[-1]) and not any(values[-1])
        # Row t is about token t + 1.
        got_ids, got = np.array(ids[-1 - count : -1]), np.array(values[-1 - count : -1])
        expected = np.argsort(-table, 1, kind="stable")[:, :K] if loss != "k1" else np.array(tokens[-count:])[:, None]
        np.testing.assert_array_equal(got_ids, expected)
        np.testing.assert_allclose(got, np.take_along_axis(table, expected, 1), **NEAR)


def test_verl_sends_each_sample_to_its_teacher(
    server: RunningServer, folder: Path, tables: dict[str, list[np.ndarray]], tmp_path: Path
) -> None:
    rows = [row | {"teacher": ["maths", "code"][i % 2]} for i, row in enumerate(ROWS)]
    flags = [
        f"+{VERL}.{key}.{flag}"
        for key, name in (("maths", "teacher"), ("code", "other"))
        for flag in (
            "_target_=verl.workers.config.DistillationTeacherModelConfig",
            f"key={key}",
            f'model_path="{server.http_url}?model={name}"',  # quoted, since Hydra reads = and ?
        )
    ]
    told = distil_by_verl(folder, rows, tmp_path, *flags, "distillation.distillation_loss.loss_mode=k1")
    both = list(zip(tables["teacher"], tables["student"], strict=True))
    got = [
        np.array(values[-1 - row["response_length"] : -1])[:, 0].tolist()
        for values, row in zip(told["log_probs"], ROWS, strict=True)
    ]
    check_actual(got, [pair[i % 2] for i, pair in enumerate(both)])


def test_a_step_of_verl_is_that_with_the_teachers_in_process(
    server: RunningServer, folder: Path, tmp_path: Path
) -> None:
    """Each row under a prompt of its teacher's own, as in verl's pull request 6833, which splices ids."""
    rows = [
        row
        | {"teacher": ["teacher", "other"][i % 2], "student_tokens": row["tokens"]}
        | {"tokens": [9, 8, 7 + i, *row["tokens"][-row["response_length"] :]]}
        for i, row in enumerate(ROWS)
    ]
    flags = [
        f"+{VERL}.{name}.{flag}"
        for name in ("teacher", "other")
        for flag in (
            "_target_=verl.workers.config.DistillationTeacherModelConfig",
            f"key={name}",
            f'model_path="{server.http_url}?model={name}"',
        )
    ]
    found = [*flags_of_page(), "actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=2", *flags]
    folders = json.dumps({"teacher": str(folder / "teacher"), "other": str(folder / "student")})
    arguments = (json.dumps(found), "SAMPLES", str(folder / "student"), folders)
    told = drive("verl", "drive_verl_teacher.py", *arguments, samples=rows, tmp=tmp_path)
    assert told["in_process"]["loss"] > 1e-3 and told["in_process"]["grad_norm"] > 1e-3
    assert told["served"] == pytest.approx(told["in_process"], rel=1e-5, abs=1e-5)


def test_verls_own_task_sets_no_gpus_apart_for_served_teachers(folder: Path, tmp_path: Path) -> None:
    """On a machine without GPUs verl ends where it counts them: it misses the trainer's one, and none for teachers."""
    python = environments.python_of("verl")
    if not python.exists():
        pytest.skip("no environment of verl: `make trainers` makes it")
    rows = [
        {"data_source": "any", "prompt": [{"role": "user", "content": "in the"}], "reward_model": {"ground_truth": "1"}}
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows * 4), tmp_path / "rows.parquet")
    small = [f"{key}={value}" for key, value in {
        f"{VERL}.teacher_model.model_path": "http://127.0.0.1:1",
        "actor_rollout_ref.model.path": folder / "teacher",
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "algorithm.adv_estimator": "grpo",
        "data.train_files": tmp_path / "rows.parquet",
        "data.val_files": tmp_path / "rows.parquet",
        "data.train_batch_size": 4,
        "trainer.n_gpus_per_node": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 32,  # of which its idle actors ask for many
    }.items()]  # fmt: skip
    command = [python, "-m", "guerdon.adapters.verl_teacher", *flags_of_page(), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment(), cwd=tmp_path)
    assert done.returncode != 0 and "Total available GPUs 0 is less than total desired GPUs 1\n" in done.stderr


def test_a_token_beyond_the_vocabulary_ends_each_trainers_call(
    server: RunningServer, student: RunningServer, tmp_path: Path
) -> None:
    rows = [{"tokens": [5, 6, zoo.VOCAB_SIZE], "response_length": 1}]
    checkout = str(environments.source_of("slime"))
    arguments = (checkout, "slime", f"{server.http_url}/generate", address(student), "SAMPLES", "{}")
    done = run("slime", "drive_slime_teacher.py", *arguments, samples=rows, tmp=tmp_path)
    assert done.returncode != 0 and "400" in done.stderr.splitlines()[-1]
