"""Teachers asked about responses in conversations: by the chat template, and against transformers' own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import served
import zoo
from guerdon import TeacherClient
from guerdon.core import Sequence
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.server import reading
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig, TeacherConfig
from guerdon.teacher_core import TokenLogprobs
from teaching import check, plain

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% if 'think' in messages[-1]['content'] %}hmm{% endif %}{% endif %}"
)
"""Its generation prompt may have more than the turn that follows, as those of models that think have."""


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKING = [
    [turn("user", "in the thing")],
    [turn("system", "be on"), turn("user", "a"), turn("assistant", "the"), turn("user", "on a thing")],
    [turn("user", [{"type": "text", "text": "in parts"}])],
]
ANSWERS = ["the other", "a", "on the thing"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("messages")
    return zoo.tokenizer(zoo.language_model("llama", folder / "teacher"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    reward_model = served.reward_model(tmp_path_factory.mktemp("rm"))
    models: list[Any] = [TeacherConfig(model=str(folder)), ModelConfig(model=str(reward_model))]
    with served.running(ServerConfig(port=0, grpc_port=0, models=models)) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[TeacherClient]:
    url = server.http_url if request.param == "http" else server.grpc_url
    with TeacherClient(str(url)) as client:
        yield client


def rendered(folder: Path, conversations: list[Any], *, is_prompt: bool) -> list[np.ndarray]:
    """The ids of each conversation by transformers' template; its contents are texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [[{**m, "content": m["content"] if isinstance(m["content"], str) else "in parts"} for m in one]
             for one in conversations]  # fmt: skip
    return [
        np.array(tokenizer.apply_chat_template(one, add_generation_prompt=is_prompt, return_dict=False))
        for one in texts
    ]


def check_all(folder: Path, logprobs: Any, rows: list[np.ndarray], prompts: list[np.ndarray]) -> None:
    for own, row, prompt, logits in zip(logprobs, rows, prompts, plain(folder, rows), strict=True):
        assert len(own) == len(row) - len(prompt) > 0
        check(TokenLogprobs(logprobs=own), logits, Sequence(row, prompt_length=len(prompt)))


@pytest.mark.parametrize("at_once", [2, 64])
def test_the_assistants_last_message_is_the_response(
    at_once: int, client: TeacherClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RENDERED_AT_ONCE", at_once)
    whole = [[*before, turn("assistant", text)] for before, text in zip(ASKING, ANSWERS, strict=True)]
    answers = client.logprobs(messages=whole)
    prompts = rendered(folder, ASKING, is_prompt=True)
    check_all(folder, answers.logprobs, rendered(folder, whole, is_prompt=False), prompts)


def test_a_text_may_be_the_response_to_messages(client: TeacherClient, folder: Path) -> None:
    """Nothing but the text is asked: not what ends the turn."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = rendered(folder, ASKING, is_prompt=True)
    texts = [np.array(tokenizer.encode(text, add_special_tokens=False)) for text in ANSWERS]
    rows = [np.concatenate(both) for both in zip(prompts, texts, strict=True)]
    check_all(folder, client.logprobs(messages=ASKING, responses=ANSWERS).logprobs, rows, prompts)
    top = client.top(3, messages=ASKING, responses=ANSWERS)
    assert top.top_ids is not None and [len(ids) for ids in top.top_ids] == [len(text) for text in texts]


def test_a_conversation_without_a_response_is_asked_from_its_start(client: TeacherClient, folder: Path) -> None:
    only = [[turn("assistant", "the other")]]
    for conversations in (ASKING, only):
        rows = rendered(folder, conversations, is_prompt=False)
        check_all(folder, client.logprobs(messages=conversations).logprobs, rows, [row[:1] for row in rows])


def test_a_prompt_that_the_turn_does_not_begin_with_is_an_error_of_its_sample(
    client: TeacherClient, server: RunningServer, folder: Path
) -> None:
    thinks = [turn("user", "think"), turn("assistant", "the thing")]
    answers = client.logprobs(messages=[thinks, [*ASKING[0], turn("assistant", "a")], [turn("user", 7), thinks[1]]])
    assert answers.logprobs is not None and [len(row) > 0 for row in answers.logprobs] == [False, True, False]
    (alone,), (whole,) = (rendered(folder, [one], is_prompt=len(one) == 1) for one in (thinks[:1], thinks))
    same = next(i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b)
    told = f"alone has {alone[same : same + 8].tolist()}, and with the response {whole[same : same + 8].tolist()}"
    assert told in str(answers.errors[0]) and "message 0 needs a content" in str(answers.errors[2])
    with pytest.raises(SampleFailed, match="the tokens change where the prompt ends"):
        answers.raise_for_failed()
    continued = [[turn("user", "a"), turn("assistant", "a t")]]
    with pytest.raises(SampleFailed, match="the tokens change where the prompt ends"):
        client.logprobs(messages=continued, responses=["he"]).raise_for_failed()
    # All tokens may be asked, whatever the template does.
    message = {"name": "messages", "datatype": "BYTES", "shape": [1], "data": [json.dumps(thinks)]}
    body = {"inputs": [message], "parameters": {"start": 1}}
    reply = httpx.post(f"{server.http_url}/v2/models/teacher/infer", json=body).json()
    check_all(folder, [np.array(reply["outputs"][0]["data"], np.float32)], [whole], [whole[:1]])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "prompts and messages": ({"prompts": ["a"]}, "with prompts or with messages, one before each"),
    "lengths": ({"prompt_lengths": [1]}, "with prompts or with messages, one before each, and with nothing else"),
    "too few": ({"messages": []}, "messages must be a list of at least one sample, not empty"),
    "one too many": ({"messages": [[turn("user", "a")]] * 2}, "messages has 2 entries for 1 responses"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_mixture_is_one_clear_error(wrong: str, client: TeacherClient) -> None:
    changes, message = WRONG[wrong]
    with pytest.raises(InvalidRequest, match=message):
        client.logprobs(**{"messages": [[turn("user", "a")]], "responses": ["a"]} | changes)


def test_a_reward_model_takes_one_of_both(server: RunningServer) -> None:
    inputs = [
        {"name": "sentences", "datatype": "BYTES", "shape": [1], "data": ["a"]},
        {"name": "messages", "datatype": "BYTES", "shape": [1], "data": [json.dumps(ASKING[0])]},
    ]
    reply = httpx.post(f"{server.http_url}/v2/models/reward_model/infer", json={"inputs": inputs})
    assert reply.status_code == 400 and "the request has messages and sentences" in reply.text
