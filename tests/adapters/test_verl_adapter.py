"""verl's reward functions and its client of a teacher, with the arguments that verl calls them with."""

import asyncio
import inspect
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from guerdon import RewardClient
from guerdon.adapters.verl import RewardManager, compute_score, compute_score_async
from guerdon.adapters.verl_teacher import TeacherServerClient
from guerdon.errors import ConfigError, InvalidRequest, SampleFailed
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import TeacherConfig
from served import Serve
from teaching import plain

QUESTION = [
    {"role": "user", "content": "Be brief."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "What is 2+2?"},
]


@pytest.fixture(scope="module")
def url(sums: RunningServer) -> str:
    return sums.http_url


def ask(function: Any, response: str, extra_info: dict[str, Any], label: Any = None) -> dict[str, float]:
    """Calls the function as verl does, with the config's `reward_kwargs`."""
    extra_info |= {"num_turns": None, "rollout_reward_scores": {}, "index": 3}
    more = {"reward_router_address": "host:1", "reward_model_tokenizer": None}
    told = function(data_source="d", solution_str=response, ground_truth=label, extra_info=extra_info, **more)
    return asyncio.run(told) if inspect.iscoroutine(told) else told


@pytest.mark.parametrize("function", [compute_score, compute_score_async])
def test_score_is_the_servers_own_of_text_and_of_conversations(function: Any, url: str) -> None:
    talk = [*QUESTION, {"role": "assistant", "content": "4."}]
    with RewardClient(url, "helpful") as client:
        texts = client.score(texts=["What is 2+2? 4.", "What is 2+2? 4.</s>"]).rewards.tolist()
        (talks,) = client.score(messages=[talk])
    bound = partial(function, url=[url], model="helpful")
    assert ask(bound, " 4.", {"prompt": "What is 2+2?"}) == {"score": texts[0]}
    assert ask(partial(bound, ending="</s>", prompt_key="q"), " 4.", {"q": "What is 2+2?"}) == {"score": texts[1]}
    assert ask(bound, "4.", {"prompt": QUESTION}) == {"score": talks}
    # So Parquet gives them.
    assert ask(bound, "4.", {"prompt": np.array(QUESTION, dtype=object)}) == {"score": talks}


@pytest.mark.parametrize("function", [compute_score, compute_score_async])
def test_components_of_a_sum_stand_beside_the_score(function: Any, url: str) -> None:
    bound = partial(function, url=url, model="total")
    told = [ask(bound, " 4.", {"prompt": "What is 2+2?"}, label) for label in ("4", np.int64(2), None)]
    assert [answer["agreement"] for answer in told] == [1.0, 2.0, 0.0]
    assert [[*answer] for answer in told] == [["helpful", "agreement", "score"]] * 3
    np.testing.assert_allclose(told[0]["score"], told[0]["helpful"] + 0.5, rtol=1e-6)


@pytest.mark.parametrize("function", [compute_score, compute_score_async])
def test_missing_prompt_says_where_to_write_it(function: Any, url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"extra_info has no 'prompt', only num_turns, .*prompt_key"):
        ask(partial(function, url=url), "4.", {})


@pytest.mark.parametrize("function", [compute_score, compute_score_async])
@pytest.mark.parametrize("unknown", ["modle", "sufix", "promt_key"])
def test_misspelt_settings_are_refused(function: Any, unknown: str, url: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting reward_kwargs\.{unknown}.*known here: url, model"):
        ask(partial(function, url=url, model="flaky", **{unknown: "x"}), "4.", {"prompt": "a"})


@pytest.mark.parametrize("prompt", [None, [], ["a"], 7])
def test_a_malformed_prompt_is_refused(prompt: Any, url: str) -> None:
    with pytest.raises(InvalidRequest, match="sample 0: the prompt is a"):
        ask(partial(compute_score, url=url, model="flaky"), "4.", {"prompt": prompt})


def test_a_malformed_response_gets_no_score(url: str) -> None:
    with pytest.raises(InvalidRequest, match="sample 0: the completion is a NoneType"):
        ask(partial(compute_score, url=url, model="flaky"), None, {"prompt": "a"})  # type: ignore[arg-type]
    with pytest.raises(SampleFailed, match="row 0: message 3 needs a content"):
        ask(partial(compute_score, url=url, model="helpful"), None, {"prompt": QUESTION})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- the manager


class Rollouts:
    """Rollouts as verl's DataProto has them: padded tensors, and columns of objects."""

    def __init__(self, responses: list[str], width: int = 24, **columns: list[Any]) -> None:
        self.columns = columns
        ids = [[ord(c) for c in text] for text in responses]
        self.responses = torch.tensor([row + [ord("x")] * (width - len(row)) for row in ids])
        self.mask = torch.tensor([[0, 1, 1] + [1] * len(row) + [0] * (width - len(row)) for row in ids])

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, slice):
            part = object.__new__(Rollouts)
            part.responses, part.mask = self.responses[rows], self.mask[rows]
            part.columns = {name: values[rows] for name, values in self.columns.items()}
            return part
        batch = {"responses": self.responses[rows], "attention_mask": self.mask[rows]}
        return SimpleNamespace(
            batch=batch, non_tensor_batch={name: values[rows] for name, values in self.columns.items()}
        )


class Characters:
    def decode(self, ids: torch.Tensor, *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, ids.tolist()))


def manager(**settings: Any) -> RewardManager:
    """The manager as verl makes it."""
    config = SimpleNamespace(reward={"reward_kwargs": settings} if settings else {})
    return RewardManager(
        config=config,
        tokenizer=Characters(),
        compute_score=len,
        reward_router_address=None,
        reward_model_tokenizer=None,
    )


GSM8K = {
    "data_source": ["openai/gsm8k"],
    "reward_model": [{"style": "rule", "ground_truth": "4"}],
    "extra_info": [{"index": 3, "question": "What is 2+2?"}],
}


def test_the_manager_scores_the_answer_to_the_prompt_that_verl_passes(url: str) -> None:
    expected = {}
    with RewardClient(url, "graded") as client:
        for answer in ("4.", "44.", ""):
            scores = client.score(messages=[[*QUESTION, {"role": "assistant", "content": answer}]], labels=["4"])
            (components,) = scores.raise_for_failed().attributes.tolist()
            expected[answer] = {
                **dict(zip(scores.attribute_names, components, strict=True)),
                "score": scores.rewards[0],
            }
    assert [expected[answer]["graded_answer"] for answer in expected] == [1.0, 2.0, 0.0]
    made = manager(url=[url], model="graded", timeout_s=60)
    for prompt in (QUESTION, np.array(QUESTION, dtype=object)):  # as the agent loop gives them
        for answer, components in expected.items():
            told = asyncio.run(made.run_single(Rollouts([answer], raw_prompt=[prompt], **GSM8K)))
            assert told == {"reward_score": components["score"], "reward_extra_info": components}


def test_the_manager_scores_the_last_of_several_sequences_and_needs_no_label(url: str) -> None:
    with RewardClient(url, "helpful") as client:
        (expected,) = client.score(messages=[[*QUESTION, {"role": "assistant", "content": "4."}]])
    several = Rollouts(["nonsense", "4."], raw_prompt=[QUESTION, QUESTION], reward_model=[{}, {}])
    told = asyncio.run(manager(url=url, model="helpful").run_single(several))
    assert told == {"reward_score": expected, "reward_extra_info": {"score": expected}}


def test_the_manager_raises_for_what_has_no_score(url: str) -> None:
    made = manager(url=url, model="helpful")
    with pytest.raises(InvalidRequest, match="has no raw_prompt"):
        asyncio.run(made.run_single(Rollouts(["4."], **GSM8K)))
    picture = [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
    with pytest.raises(SampleFailed, match="is no text"):
        asyncio.run(made.run_single(Rollouts(["4."], raw_prompt=[picture], **GSM8K)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"reward\.reward_kwargs\.url is not given"),
        ({"model": "m"}, r"reward\.reward_kwargs\.url is not given"),
        (
            {"url": "h:1", "max_resp_len": 8},
            r"unknown setting reward\.reward_kwargs\.max_resp_len; known here: url, model",
        ),
    ],
)
def test_wrong_settings_of_the_manager_are_refused_when_it_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        manager(**settings)


ROW = zoo.rows()[0].tolist()
NEAR: Any = {"rtol": 1e-6, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.language_model("llama", tmp_path_factory.mktemp("verl") / "teacher")


@pytest.fixture(scope="module")
def teacher_url(folder: Path, serve: Serve) -> str:
    reader = str(zoo.tokenizer(zoo.language_model("llama", folder.parent / "reader")))
    models: list[Any] = [
        TeacherConfig(model=str(folder), name="maths", max_top_k=5),
        TeacherConfig(model=reader, name="reader", student_tokenizer=reader),
    ]
    return f"{serve(*models).http_url}?model=maths"


def teacher_ask(url: str, k: int, **media: Any) -> dict[str, np.ndarray]:
    """Returns what verl reads, of a client that Ray has pickled."""
    teacher = pickle.loads(pickle.dumps(TeacherServerClient(url)))  # noqa: S301 - our own
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": k}
    media = {"image_data": None, "video_data": None, "audio_data": None, "mm_processor_kwargs": None} | media
    return asyncio.run(teacher.generate(request_id="r", prompt_ids=ROW, sampling_params=params, **media)).extra_fields


@pytest.mark.parametrize("k", [0, 3])
def test_rows_are_about_the_next_token_and_the_last_is_empty(k: int, teacher_url: str, folder: Path) -> None:
    found = teacher_ask(teacher_url, k)
    ids, logprobs = found["prompt_ids"], found["prompt_logprobs"]
    assert ids.shape == logprobs.shape == (len(ROW), max(k, 1)) and not ids[-1].any() and not logprobs[-1].any()
    (logits,) = plain(folder, [np.array(ROW)])
    table = torch.log_softmax(logits, -1).numpy()[:-1]
    expected = np.argsort(-table, 1, kind="stable")[:, :k] if k else np.array(ROW[1:])[:, None]
    np.testing.assert_array_equal(ids[:-1], expected)
    np.testing.assert_allclose(logprobs[:-1], np.take_along_axis(table, expected, 1), **NEAR)


def test_what_a_served_teacher_cannot_do_is_refused(teacher_url: str) -> None:
    with pytest.raises(InvalidRequest, match="this sample has images, video or audio"):
        teacher_ask(teacher_url, 0, image_data=["image"])
    with pytest.raises(InvalidRequest, match="top_k is 6; it must be from 0 to 5"):
        teacher_ask(teacher_url, 6)
    with pytest.raises(InvalidRequest, match="gives some tokens no log-prob, and verl needs one for each"):
        teacher_ask(teacher_url.replace("maths", "reader"), 0)


@pytest.mark.parametrize(
    ("path", "message"),
    [("Qwen/Qwen3-8B", "a teacher's model_path is 'Qwen/Qwen3-8B'"), ("http://a:1?modle=b", "unknown key in")],
)
def test_a_wrong_address_is_told_before_the_run(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TeacherServerClient(path)
