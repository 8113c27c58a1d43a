"""One conversation has one score: of the policy's tokens, as text, as messages, and by the adapters."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import chats
import zoo
from actor.rollouts import serving
from guerdon import CriticClient
from guerdon.actor.prompts import Prompts, check_sendable
from guerdon.actor.remote_critic import RemoteCritic
from guerdon.actor.remote_rewards import RemoteRewards, samples_of
from guerdon.actor.rollouts import Rollout, response_text
from guerdon.adapters import areal, openrlhf, trl, verl
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import CriticServer, DataConfig, RemoteCriticConfig, RemoteRewardConfig, RewardServer
from guerdon.settings.config import CriticConfig, ModelConfig

ASKED = {"role": "user", "content": "an inn in the north"}
ANSWER = "the thin man"


def model_of(name: str, folder: Path, template: str | None = None) -> Path:
    """A reward model with the family's tokenizer; `template` in place of the family's."""
    chats.save(name, zoo.checkpoint("llama", folder / "model", vocab_size=chats.VOCAB_SIZE, pad_token_id=None))
    if template is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / "model")
    return folder / "model"


def prompts_of(folder: Path, tokenizer: Any, rows: list[Any], **settings: Any) -> Prompts:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    config = DataConfig(prompts=str(path), num_validation=0, template=True)
    made = {"prompts_per_step": 1, "max_prompt_length": None, "seed": 0, "output_dir": folder, **settings}
    return Prompts(config, tokenizer, **made)


def rollouts_of(prompts: Prompts, tokenizer: Any, answer: str = ANSWER) -> list[Rollout]:
    """A response that its EOS ended and one that was cut, drawn as the template's own tokens have them."""
    (prompt,) = prompts.training
    whole = tokenizer.apply_chat_template([ASKED, {"role": "assistant", "content": answer}])["input_ids"]
    drawn = whole[len(prompt.tokens) : whole.index(tokenizer.eos_token_id, len(prompt.tokens)) + 1]
    made = []
    for index, tokens in enumerate((drawn, drawn[:-1])):
        has_eos = index == 0
        made.append(
            Rollout(
                prompt,
                0,
                index,
                np.array([*prompt.tokens, *tokens], np.int64),
                has_eos,
                np.zeros(len(tokens), np.float32),
                response_text(tokenizer, tokens, has_eos),
                has_eos=has_eos,
            )
        )
    return made


@pytest.fixture(scope="module", params=[name for name in chats.FAMILIES if name not in chats.ODD])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, model_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def server(family: tuple[str, Path]) -> Iterator[RunningServer]:
    with serving(ModelConfig(model=str(family[1]))) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(family: tuple[str, Path]) -> float:
    """What transformers makes of the whole conversation."""
    tokenizer = AutoTokenizer.from_pretrained(family[1])
    whole = tokenizer.apply_chat_template([ASKED, {"role": "assistant", "content": ANSWER}])["input_ids"]
    return float(zoo.reference(family[1], [np.array(whole)])[0])


@pytest.mark.parametrize("send", ["tokens", "text", "messages"])
def test_the_actors_answer_ends_as_the_template_ends_it(
    send: Any, family: tuple[str, Path], server: RunningServer, wanted: float, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family[1])
    prompts = prompts_of(tmp_path, tokenizer, [ASKED["content"]])
    assert prompts.ending is not None and prompts.ending.text == chats.FAMILIES[family[0]].ending
    rollouts = rollouts_of(prompts, tokenizer)
    assert [r.text for r in rollouts] == [ANSWER, ANSWER]
    config = RemoteRewardConfig(RewardServer(urls=[server.http_url]), send=send, timeout_s=30.0)
    with RemoteRewards(config) as rewards:
        rewards.wait_ready()
        rewards.score(rollouts)
    assert [r.reward for r in rollouts] == pytest.approx([wanted, wanted], abs=1e-5)


def test_adapters_give_it_the_same_score(family: tuple[str, Path], server: RunningServer, wanted: float) -> None:
    name, folder = family
    tokenizer = AutoTokenizer.from_pretrained(folder)
    url, ending = server.http_url, chats.FAMILIES[name].ending
    answer = {"role": "assistant", "content": ANSWER}
    query = tokenizer.apply_chat_template([ASKED, answer], tokenize=False).removesuffix("\n")
    asked = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    drawn = query[len(asked) :]
    rewards = {
        "trl": trl.reward_function(url)([[ASKED]], [[answer]])[0],
        "verl": verl.compute_score("", ANSWER, "", {"prompt": [ASKED]}, url=url)["score"],
        "openrlhf": openrlhf.reward_function(url, ending=ending)([query], [asked], [])["rewards"][0],
        "areal": areal.reward_function(url, ending=ending)(asked, drawn, [], []),
        "areal, cut": areal.reward_function(url, ending=ending)(asked, drawn.removesuffix(ending.strip()), [], []),
    }
    assert rewards == pytest.approx(dict.fromkeys(rewards, wanted), abs=1e-5)


def test_a_critic_gives_it_the_same_reward_and_values_the_policys_own_tokens(tmp_path: Path) -> None:
    folder = model_of("chatml", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rollouts = rollouts_of(prompts_of(tmp_path, tokenizer, [[ASKED]]), tokenizer)
    critic = CriticConfig(model=str(folder), reward_model=str(folder))
    with (
        serving(critic=critic) as server,
        RemoteCritic(RemoteCriticConfig(critic=CriticServer(url=server.http_url), timeout_s=30.0)) as remote,
        CriticClient(server.http_url) as plain,
    ):
        remote.wait_ready()
        remote.score(rollouts)
        values = plain.infer(tokens=[r.tokens for r in rollouts]).values
    whole = tokenizer.apply_chat_template([ASKED, {"role": "assistant", "content": ANSWER}])["input_ids"]
    want = zoo.reference(folder, [np.array(whole)])[0]
    assert [r.reward for r in rollouts] == pytest.approx([want, want], abs=1e-5)
    for rollout, own in zip(rollouts, values, strict=True):
        assert rollout.values is not None and rollout.values == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize(
    ("template", "ending", "says"),
    [
        (chats.FAMILIES["chatml"].template, "<|im_end|>\n", ""),
        (
            chats.FAMILIES["chatml"].template.replace("m.content", "m.content.split('</think>')[-1]"),
            "<|im_end|>\n",
            "strips blanks or reasoning",
        ),
        (
            chats.FAMILIES["chatml"].template.replace("assistant\\n", "assistant\\n<think>\\n"),
            "<|im_end|>\n",
            "to ask for one",
        ),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "", "to ask for one"),
        ("{{ messages[0].content }}", None, "does not write the assistant's answer"),
    ],
)
def test_what_is_sent_is_said_at_the_start(
    template: str, ending: str | None, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chats.save("chatml", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = template
    with caplog.at_level(logging.INFO):
        prompts = prompts_of(tmp_path, tokenizer, [[ASKED]])
        check_sendable(prompts, "remote_rm", RemoteRewardConfig(), 8)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    warned = " ".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert (prompts.ending.text if prompts.ending else None) == ending
    assert told == [
        "the reward model gets the policy's token ids"
        + (
            ", with nothing added"
            if ending is None
            else f"; each answer, even a truncated one, ends as its template has it: {ending!r}"
        )
    ]
    assert says in warned and bool(says) == bool(warned)


def test_plain_prompts_are_sent_as_they_are(tmp_path: Path) -> None:
    chats.save("chatml", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "the"}\n')
    config = DataConfig(prompts=str(tmp_path / "p.jsonl"), num_validation=0)
    prompts = Prompts(config, tokenizer, prompts_per_step=1, max_prompt_length=None, seed=0, output_dir=tmp_path)
    (prompt,) = prompts.training
    tokens = np.array([*prompt.tokens, tokenizer.eos_token_id], np.int64)
    assert prompts.ending is None
    assert Rollout(prompt, 0, 0, tokens, True, np.zeros(1), has_eos=True).completed.tolist() == tokens.tolist()


def test_a_stop_text_that_begins_the_ending_does_not_stand_twice(tmp_path: Path) -> None:
    chats.save("chatml", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompts = prompts_of(tmp_path, tokenizer, [[ASKED]])
    ended, cut = rollouts_of(prompts, tokenizer)
    stopped = Rollout(ended.prompt, 0, 0, ended.tokens, True, ended.logprobs, ANSWER, has_eos=False)
    assert stopped.completed.tolist() == ended.completed.tolist() == cut.completed.tolist()


def test_a_stop_text_in_a_sent_text_does_not_stand_twice(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n--\n{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    folder = model_of("chatml", tmp_path, template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = prompts_of(tmp_path, tokenizer, [[ASKED]])
    (prompt,) = prompts.training
    whole = tokenizer.apply_chat_template([ASKED, {"role": "assistant", "content": ANSWER}], tokenize=False)
    made = []
    for answer, is_end in ((ANSWER + "\n\n", True), (ANSWER, False)):
        tokens = tokenizer(prompt.text + answer)["input_ids"]
        num = len(tokens) - len(prompt.tokens)
        made.append(Rollout(prompt, 0, 0, np.array(tokens), is_end, np.zeros(num, np.float32), answer))
    for send in ("tokens", "text"):
        sent = samples_of(made, RemoteRewardConfig(send=send))
        texts = sent["texts"] if send == "text" else [tokenizer.decode(tokens) for tokens in sent["tokens"]]
        assert texts == [whole, whole]


def test_the_longest_prompt_leaves_room_for_the_ending(tmp_path: Path) -> None:
    chats.save("chatml", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    length = len(prompts_of(tmp_path, tokenizer, [[ASKED]]).training[0].tokens)
    rows = [[{"role": "user", "content": "the"}], [ASKED]]
    assert len(prompts_of(tmp_path, tokenizer, rows, max_prompt_length=length + 2).training) == 2
    assert len(prompts_of(tmp_path, tokenizer, rows, max_prompt_length=length + 1).training) == 1
