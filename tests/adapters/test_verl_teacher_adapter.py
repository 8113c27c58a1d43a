"""verl's client of a teacher, as verl calls it; `tests/trainers` has verl itself."""

import asyncio
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import served
import zoo
from guerdon.adapters.verl_teacher import TeacherServerClient
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.settings.config import ServerConfig, TeacherConfig
from teaching import plain

ROW = zoo.rows()[0].tolist()
NEAR: Any = {"rtol": 1e-6, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return zoo.language_model("llama", tmp_path_factory.mktemp("verl") / "teacher")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    models: list[Any] = [TeacherConfig(model=str(folder), name="maths", max_top_k=5)]
    with served.running(ServerConfig(port=0, grpc_port=None, models=models)) as server:
        yield f"{server.http_url}?model=maths"


def ask(url: str, k: int, **media: Any) -> dict[str, np.ndarray]:
    """Returns what verl reads, of a client that Ray has pickled."""
    teacher = pickle.loads(pickle.dumps(TeacherServerClient(url)))  # noqa: S301 - our own
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
    media = {"image_data": None, "video_data": None, "audio_data": None, "mm_processor_kwargs": None} | media
    return asyncio.run(teacher.generate(request_id="r", prompt_ids=ROW, sampling_params=params, **media)).extra_fields


@pytest.mark.parametrize("k", [0, 3])
def test_rows_are_about_the_next_token_and_the_last_is_empty(k: int, url: str, folder: Path) -> None:
    found = ask(url, k)
    ids, logprobs = found["prompt_ids"], found["prompt_logprobs"]
    assert ids.shape == logprobs.shape == (len(ROW), max(k, 1)) and not ids[-1].any() and not logprobs[-1].any()
    (logits,) = plain(folder, [np.array(ROW)])
    table = torch.log_softmax(logits, -1).numpy()[:-1]
    expected = np.argsort(-table, 1, kind="stable")[:, :k] if k else np.array(ROW[1:])[:, None]
    np.testing.assert_array_equal(ids[:-1], expected)
    np.testing.assert_allclose(logprobs[:-1], np.take_along_axis(table, expected, 1), **NEAR)


def test_what_a_served_teacher_cannot_do_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="this sample has images, video or audio"):
        ask(url, 0, image_data=["image"])
    with pytest.raises(InvalidRequest, match="top_k is 6; it must be from 0 to 5"):
        ask(url, 6)


@pytest.mark.parametrize(
    ("path", "message"),
    [("Qwen/Qwen3-8B", "a teacher's model_path is 'Qwen/Qwen3-8B'"), ("http://a:1?modle=b", "unknown key in")],
)
def test_a_wrong_address_is_told_before_the_run(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TeacherServerClient(path)
