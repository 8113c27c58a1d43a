"""What reaches a reward model with a chat template, by every adapter and form that sends texts or token ids.

The reference is plain transformers on the conversation's text, as the template writes it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

import chats
import served
import zoo
from guerdon import RewardClient
from guerdon.adapters import areal, openrlhf, trl, verl
from guerdon.adapters.judge import judge
from guerdon.adapters.nemo_rl import RewardEnvironment
from guerdon.adapters.rewardbench import ServerPipeline
from guerdon.adapters.trlx import create_reward_fn
from guerdon.cli import console
from guerdon.cli.doctor import examine_server
from guerdon.endings import Ending, ended
from guerdon.errors import ConfigError
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig
from served import Serve
from server.keys import ADMIN, bearer, keyed
from tiers import slow_but

TURNS = [
    {"role": "user", "content": "an inn in the north"},
    {"role": "assistant", "content": "there"},
    {"role": "user", "content": "in then"},
]
ANSWER = "the thin man"


@dataclass(frozen=True)
class Sample:
    """An answer as trainers have it: `asked` by the template, drawn as ids that end with `eos` or were truncated."""

    tokenizer: Any
    asked: str
    prompt_ids: list[int]
    ids: list[int]
    whole: str
    """Prompt and response as OpenRLHF has them."""
    url: str
    grpc_host: str

    @property
    def bare(self) -> str:
        """Returns the response as TRL and verl have it."""
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)

    @property
    def drawn(self) -> str:
        """Returns the response with its special tokens, as AReaL and slime have it."""
        return self.tokenizer.decode(self.ids, skip_special_tokens=False)


def by_trlx(s: Sample) -> float:
    reward_fn: Any = create_reward_fn(triton_host=f"{s.grpc_host}/reward_model", tokenizer=s.tokenizer)
    return reward_fn([s.asked + s.bare])[0]


def by_nemo_rl(s: Sample) -> float:
    log = [{"role": "user", "content": s.asked}, {"role": "assistant", "content": s.bare}]
    return float(RewardEnvironment({"url": s.url, "send": "texts"}).step([log], [{}]).rewards[0])


def by_rewardbench(s: Sample, send: str) -> float:
    text = s.tokenizer.apply_chat_template([*TURNS, {"role": "assistant", "content": ANSWER}], tokenize=False)
    return ServerPipeline(judge(s.url, "reward_model", 30.0), s.tokenizer, send)([text])[0]["score"]


def post(s: Sample, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(s.url + path, json=body).raise_for_status().json()


def of_columns(s: Sample) -> dict[str, Any]:
    return {"prompts": [s.asked], "completions": [s.bare], "completion_ids": [s.ids]}


CHAT = [{"role": "assistant", "content": ANSWER}]
BY: dict[str, Callable[[Sample], float]] = {
    "trl": lambda s: trl.reward_function(s.url)(**of_columns(s)),
    "trl, async": lambda s: asyncio.run(trl.async_reward_function(s.url)(**of_columns(s))),
    "trl, conversations": lambda s: trl.reward_function(s.url)([TURNS], [CHAT]),
    "trl, the ending in the completion": lambda s: trl.reward_function(s.url)(
        [s.asked], [s.drawn.rstrip() + s.tokenizer.apply_chat_template(CHAT, tokenize=False).partition(ANSWER)[2]]
    ),
    "trl, without the BOS": lambda s: trl.reward_function(s.url)([s.asked.removeprefix("<s>")], [s.bare]),
    "verl": lambda s: verl.compute_score("", s.bare, "", {"prompt": s.asked}, url=s.url)["score"],
    "verl, async": lambda s: asyncio.run(verl.compute_score_async("", s.bare, "", {"prompt": s.asked}, url=s.url))[
        "score"
    ],
    "verl, messages": lambda s: verl.compute_score("", ANSWER, "", {"prompt": TURNS}, url=s.url)["score"],
    "openrlhf": lambda s: openrlhf.reward_function(s.url, ending=None)([s.whole], [s.asked], [])["rewards"],
    "openrlhf, only queries": lambda s: openrlhf.reward_function(s.url, ending=None)([s.whole], [], [])["rewards"],
    "openrlhf's form": lambda s: post(s, "/get_reward?ending=true", {"query": [s.whole]})["rewards"],
    "openrlhf's form, prompts": lambda s: post(
        s, "/get_reward?ending=true", {"query": [s.whole], "prompts": [s.asked]}
    )["rewards"],
    "areal": lambda s: areal.reward_function(s.url)(s.asked, s.drawn, s.prompt_ids, s.ids),
    "areal, async": lambda s: asyncio.run(areal.async_reward_function(s.url)(s.asked, s.drawn, s.prompt_ids, s.ids)),
    "areal, tokens": lambda s: areal.reward_function(s.url, send="tokens")(s.asked, s.drawn, s.prompt_ids, s.ids),
    "nemo-rl": by_nemo_rl,
    "trlx": by_trlx,
    "slime's form": lambda s: post(s, "/reward", {"prompt": s.asked, "response": s.drawn}),
    "slime's form, messages": lambda s: post(s, "/reward", {"prompt": TURNS, "response": ANSWER}),
    "rewardbench": lambda s: by_rewardbench(s, "tokens"),
    "rewardbench, texts": lambda s: by_rewardbench(s, "texts"),
}
TOKENS_DIFFER = {"qwen3"}
"""Families whose template writes something between the policy's prompt and an answer, which no sampled ids have."""


QUICK = ("chatml", "llama3", "gemma", "mistral", "zephyr", "qwen", "deepseek")


@pytest.fixture(scope="module", params=slow_but(QUICK, chats.FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    zoo.checkpoint("llama", folder, vocab_size=chats.VOCAB_SIZE, pad_token_id=None)
    return request.param, chats.save(request.param, folder)


@pytest.fixture(scope="module")
def server(family: tuple[str, Path], serve: Serve) -> RunningServer:
    return serve(ModelConfig(model=str(family[1])), grpc_port=0)


@pytest.fixture(scope="module")
def wanted(family: tuple[str, Path]) -> float:
    """What transformers makes of the whole conversation."""
    tokenizer = AutoTokenizer.from_pretrained(family[1])
    whole = tokenizer.apply_chat_template([*TURNS, *CHAT])["input_ids"]
    return float(zoo.reference(family[1], [np.array(whole)])[0])


@pytest.fixture(scope="module", params=slow_but(("ended",), ("ended", "truncated")))
def sample(request: pytest.FixtureRequest, family: tuple[str, Path], server: RunningServer) -> Sample:
    tokenizer = AutoTokenizer.from_pretrained(family[1])
    asked = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    # A policy draws what the template has behind the prompt, as far as its EOS.
    text = tokenizer.apply_chat_template([*TURNS, *CHAT], tokenize=False)
    blank = text[text.rfind(ANSWER) - 1] if not text[: text.rfind(ANSWER)].endswith("\n") else ""
    lead = blank if text[: text.rfind(ANSWER)] == asked + blank else ""
    drawn = tokenizer(asked + lead + ANSWER, add_special_tokens=False)["input_ids"][len(prompt_ids) :]
    eos = [tokenizer.eos_token_id] if request.param == "ended" and tokenizer.eos_token in text[len(asked) :] else []
    whole = asked + lead + ANSWER + (tokenizer.eos_token if eos else "")
    host = str(server.grpc_url).removeprefix("grpc://")
    return Sample(tokenizer, asked, prompt_ids, [*drawn, *eos], whole, server.http_url, host)


@pytest.mark.parametrize("by", BY)
def test_every_way_scores_as_the_conversation_does(
    by: str, family: tuple[str, Path], sample: Sample, wanted: float
) -> None:
    if by.endswith("tokens") and family[0] in TOKENS_DIFFER:
        pytest.skip("the policy's ids lack what the template writes before an answer")
    assert float(np.ravel(BY[by](sample))[0]) == pytest.approx(wanted, abs=1e-5)


def test_start_configuration_and_doctor_tell_the_ending(family: tuple[str, Path], server: RunningServer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family[1])
    cut, whole = (
        tokenizer.apply_chat_template([*TURNS, *CHAT], tokenize=False).rpartition(ANSWER)[0] + ANSWER + behind
        for behind in ("", chats.FAMILIES[family[0]].ending)
    )
    cut_ids, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (cut, whole))
    tokens = ids[len(cut_ids) :]
    said = f"the chat template ends an answer with {chats.FAMILIES[family[0]].ending!r} (ids {tokens})"
    with RewardClient(server.http_url) as client:
        ending = Ending.reported(client.config())
    assert ending is not None and (ending.text, [*ending.tokens]) == (chats.FAMILIES[family[0]].ending, tokens)
    texts = [finding.text for url in (server.http_url, server.grpc_url) for finding in examine_server(str(url))]
    assert sum(text.startswith(f"model reward_model: {said}; conversations get it") for text in texts) == 2
    assert console.describe_ending("a", ending, ("rewards",)).startswith(f"a: {said}; conversations get it")
    assert "asked as a part of a conversation's answer" in console.describe_ending("a", ending, ("logprobs",))
    assert console.describe_ending("a", ending, ("values",)) == console.describe_ending("a", None, ("rewards",)) == ""


# ------------------------------------------------------------------------------------- what is said, and what is not


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    """A reward model with ChatML, one without a template, and a sum of each with a function."""
    folder = tmp_path_factory.mktemp("chatml")
    chats.save("chatml", zoo.checkpoint("llama", folder / "chat", vocab_size=chats.VOCAB_SIZE))
    zoo.tokenizer(zoo.checkpoint("llama", folder / "plain"), chat_template=None)
    models = [ModelConfig(model=str(folder / name), name=name) for name in ("chat", "plain")]
    models.append(ModelConfig(model="scorers:length", name="length"))
    sums = [
        RewardConfig(name=f"{name}_sum", components=[ComponentConfig(model=name), ComponentConfig(model="length")])
        for name in ("chat", "plain")
    ]
    return serve(*models, rewards=sums)


CHATML = "<|im_start|>user\nan inn<|im_end|>\n<|im_start|>assistant\n"
BARE = "an inn in the north: "
LLAMA3 = "<|start_header_id|>user<|end_header_id|>\n\nan inn<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("model", "prompt", "settings", "ending", "says"),
    [
        ("chat", CHATML, {}, "<|im_end|>\n", ""),
        ("chat", CHATML, {"ending": "<|im_end|>\n"}, "<|im_end|>\n", ""),
        ("chat", CHATML, {"ending": "<|im_end|>"}, "<|im_end|>", "do not end with '<|im_end|>\\n'"),
        ("chat", CHATML, {"ending": ""}, "", "do not end with '<|im_end|>\\n'"),
        ("chat", BARE, {}, "", "has a chat template, but this text was not made by it"),
        ("chat", LLAMA3, {}, "", "has a chat template, but this text was not made by it"),
        ("chat", BARE, {"ending": "<|im_end|>"}, "<|im_end|>", ""),
        ("plain", BARE, {}, "", ""),
        ("plain", BARE, {"ending": "</s>"}, "</s>", ""),
        ("length", BARE, {}, "", ""),
        ("chat_sum", CHATML, {}, "<|im_end|>\n", ""),
        ("plain_sum", BARE, {}, "", ""),
    ],
)
def test_a_text_that_reaches_a_chat_model_without_its_ending_is_said_once(
    model: str,
    prompt: str,
    settings: dict[str, Any],
    ending: str,
    says: str,
    chatml: RunningServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("guerdon.adapters.judge._judges", {})  # which would know what it has said
    with RewardClient(chatml.http_url, model) as client:
        wanted = client.score(texts=[prompt + ANSWER + ending]).rewards.tolist()
    function = trl.reward_function(chatml.http_url, model, **settings)
    caplog.clear()
    for _ in range(2):
        assert function([prompt], [ANSWER]) == wanted
    told = [record.getMessage() for record in caplog.records if record.name == "guerdon.adapters.judge"]
    assert len(told) == bool(says) and says in "".join(told)


def test_a_server_that_gets_a_text_without_its_ending_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chats.save("chatml", zoo.checkpoint("llama", tmp_path, vocab_size=chats.VOCAB_SIZE))
    said = []
    with (
        served.running(ModelConfig(model=str(tmp_path))) as server,
        RewardClient(server.http_url) as client,
    ):
        for text in (BARE + ANSWER, CHATML + ANSWER + "<|im_end|>\n", CHATML + ANSWER, CHATML + ANSWER):
            caplog.clear()
            client.score(texts=[text])
            said.append("does not end with '<|im_end|>\\n'" in caplog.text)
    assert said == [False, False, True, False]


def test_new_weights_may_have_another_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guerdon.adapters.judge._judges", {})
    monkeypatch.setenv("GUERDON_API_KEY", ADMIN)
    for seed, name in enumerate(("old", "new")):
        folder = zoo.checkpoint("llama", tmp_path / name, seed=seed, vocab_size=chats.VOCAB_SIZE)
        tokenizer: Any = AutoTokenizer.from_pretrained(chats.save("chatml", folder))
        if name == "new":  # without the line's end after an answer
            bare = r"'<|im_end|>' + ('' if m.role == 'assistant' else '\n')"
            tokenizer.chat_template = tokenizer.chat_template.replace(r"'<|im_end|>' + '\n'", bare)
            tokenizer.save_pretrained(folder)
    config = keyed(
        tmp_path, grpc_port=None, models=[ModelConfig(model=str(tmp_path / "old"))], model_repository=str(tmp_path)
    )
    with served.running(config=config) as server, RewardClient(server.http_url) as client:
        function = trl.reward_function(server.http_url)
        wanted = client.score(texts=[CHATML + ANSWER + "<|im_end|>\n"]).rewards.tolist()
        assert function([CHATML], [ANSWER]) == pytest.approx(wanted, abs=1e-6)
        load = server.http_url + "/v2/repository/models/reward_model/load"
        for name in ("new", "old", "new"):
            body = {"parameters": {"model": name}}
            loaded = httpx.post(load, json=body, headers=bearer(ADMIN), timeout=120)
            assert loaded.status_code == 200, loaded.text
            old, new = client.score(texts=[CHATML + ANSWER + "<|im_end|>" + line for line in ("\n", "")]).rewards
            right, wrong = (new, old) if name == "new" else (old, new)
            assert function([CHATML], [ANSWER]) == pytest.approx([right], abs=1e-6) != pytest.approx([wrong], abs=1e-6)


def test_forms_can_leave_the_ending_out_or_in(chatml: RunningServer) -> None:
    with RewardClient(chatml.http_url, "chat") as client:
        bare, ended_so = client.score(texts=[CHATML + ANSWER, CHATML + ANSWER + "<|im_end|>\n"])
    url = chatml.http_url
    body = {"prompt": CHATML, "response": ANSWER, "model": "chat"}
    query = {"query": [CHATML + ANSWER], "model": "chat"}
    found = [httpx.post(f"{url}/reward?ending={ending}", json=body).json() for ending in ("true", "false")]
    found += [httpx.post(f"{url}/get_reward?ending={e}", json=query).json()["rewards"][0] for e in ("true", "false")]
    assert found == pytest.approx([ended_so, bare] * 2, abs=1e-6) and abs(bare - ended_so) > 1e-3


@pytest.mark.parametrize(
    ("text", "ending", "wanted"),
    [
        ("a", "<|im_end|>\n", "a<|im_end|>\n"),
        ("a<|im_end|>", "<|im_end|>\n", "a<|im_end|>\n"),
        ("a<|im_end|>\n", "<|im_end|>\n", "a<|im_end|>\n"),
        ("a<|im_end|>\n\n", "<|im_end|>\n", "a<|im_end|>\n"),
        ("if a <", "<|im_end|>\n", "if a <<|im_end|>\n"),  # a part of a token is no part of the ending
        ("a\n", "<|im_end|>\n", "a\n<|im_end|>\n"),
        ("a</s>", " </s>", "a </s>"),
        ("a ", " </s>", "a </s>"),
        ("a\n\n", "\n\n--\n", "a\n\n--\n"),
        ("a", "", "a"),
        ("", "</s>", "</s>"),
    ],
)
def test_an_ending_stands_once(text: str, ending: str, wanted: str) -> None:
    assert ended(text, ending) == wanted


def test_an_ending_is_read_back_from_a_configuration() -> None:
    made = Ending("<｜end▁of▁sentence｜>\n", (5, 6), " ", "<a>", "<s>", "why")
    assert Ending.reported({"parameters": {"ending": {"string_value": made.to_json()}}}) == made
    for other in ({}, {"parameters": {}}, {"parameters": {"ending": {"string_value": "x"}}}, {"parameters": None}):
        assert Ending.reported(other) is None


def test_an_eos_to_wait_for_needs_an_ending() -> None:
    with pytest.raises(ConfigError, match="eos_token_id is set without an ending"):
        trl.reward_function("http://127.0.0.1:1", eos_token_id=2)
