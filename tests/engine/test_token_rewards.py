"""Rewards read from a language model's logits are what the models' cards compute with transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import zoo
from guerdon import LocalRewardModel
from guerdon.core import Sequence
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import ModelConfig, TokenRewardConfig, TurnConfig
from teaching import plain
from tiers import slow_but

ASKED = [{"role": "user", "content": "What is 1+1?"}]
CONVERSATIONS = [[*ASKED, {"role": "assistant", "content": text}] for text in ("1+1=2", "1+1=3, I think", "two")]
HEADER = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}<extra_0>\n{% endif %}"
    "{% if m['role'] == 'critic' %}{{ raise_exception('no critics') }}{% endif %}"
    "{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<extra_0>\n{% endif %}"
)
"""As Llama's template marks an assistant's turn: a special token and a line feed."""
PRINCIPLE = "Does the response satisfy this principle: {reference}? Only answer Yes or No."
STEPS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{% for step in m['content'].split('||') %}"
    "{{ step }}</s><extra_0>\n+</s>{% endfor %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
)
"""Writes the steps of an answer as RLHFlow's turns, each followed by a `+`."""
NEAR = {"rtol": 1e-5, "atol": 1e-5}


def rendered(folder: Path, conversations: list[Any], **settings: Any) -> list[np.ndarray]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(one, tokenize=False, **settings) for one in conversations]
    return [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("lm")), chat_template=HEADER)


@torch.no_grad()
def test_the_logit_of_an_id_as_the_next_token(folder: Path) -> None:
    """As the card of nvidia/Llama-3.1-Nemotron-70B-Reward-HF: `generate` one token, of its scores the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    want = []
    for row in rendered(folder, CONVERSATIONS, add_generation_prompt=False):
        ids = torch.from_numpy(row)[None]
        said = model.generate(
            ids, attention_mask=ids > -1, max_new_tokens=1, return_dict_in_generate=True, output_logits=True
        )
        want.append(said["logits"][0][0][0].item())
    with LocalRewardModel(str(folder), reward={"ids": [0]}) as served:
        np.testing.assert_allclose(served.score(messages=CONVERSATIONS).rewards, want, **NEAR)


@pytest.mark.parametrize(
    "name", slow_but(("llama", "gemma2"), ["llama", "gemma2", "cohere", "granite", "gptj", "opt-projected"])
)
def test_every_form_equals_transformers_one_by_one(name: str, tmp_path: Path) -> None:
    """Scales, soft caps, biases and tied weights of the output head included."""
    folder, rows = zoo.language_model(name, tmp_path), zoo.rows()
    last = torch.stack([logits[-1] for logits in plain(folder, rows)]).double()
    wanted = {
        ("logit", "given", (7,)): last[:, 7],
        ("difference", "given", (9, 30)): last[:, 9] - last[:, 30],
        ("probability", "given", (9, 30, 5)): last[:, [9, 30, 5]].softmax(-1)[:, 0],
        ("probability", "all", (9,)): last.softmax(-1)[:, 9],
    }
    for (form, among, ids), want in wanted.items():
        reward = TokenRewardConfig(ids=[*ids], form=form, among=among)  # type: ignore[arg-type]
        engine = Engine(load_reward_model(ModelConfig(model=str(folder), reward=reward, mean=0.5, std=2.0)))
        got = [score.reward for score in engine.score([Sequence(row) for row in rows])]  # type: ignore[union-attr]
        np.testing.assert_allclose(got, (want.numpy() - 0.5) / 2, **NEAR, err_msg=form)
        assert engine.path == ("shared" if name == "gptj" else "packed+shared")


@pytest.mark.parametrize("reduction", ["min", "product", "mean", "last"])
def test_the_probability_at_each_mark(reduction: str, folder: Path) -> None:
    """As the card of peiyi9979/math-shepherd-mistral-7b-prm: softmax of the two candidates, where the mark stands."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = ["1+1\nStep 1: 2 <extra_0>\nStep 2: +4 <extra_0>", "1+1\nStep 1: 2 <extra_0>\nno <extra_0> - <extra_0>"]
    rows = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    candidates = tokenizer.convert_tokens_to_ids(["+", "-"])
    mark = tokenizer.convert_tokens_to_ids("<extra_0>")
    want = [
        logits[:, candidates].softmax(-1)[:, 0].numpy()[row == mark]
        for row, logits in zip(rows, plain(folder, rows), strict=True)
    ]
    reward = {"tokens": ["+", "-"], "form": "probability"}
    settings = {"reward": reward, "step_separator": "<extra_0>", "step_reduction": reduction}
    with LocalRewardModel(str(folder), **settings) as model:
        scores = model.score(texts=texts)
    for got, steps in zip(scores.steps or (), want, strict=True):
        np.testing.assert_allclose(got, steps, **NEAR)
    reduce = {"min": np.min, "product": np.prod, "mean": np.mean, "last": lambda steps: steps[-1]}[reduction]
    np.testing.assert_allclose(scores.rewards, [reduce(steps) for steps in want], **NEAR)


@torch.no_grad()
def test_the_probability_before_each_turn_that_judges_a_step(folder: Path, tmp_path: Path) -> None:
    """As RLHFlow's math-rm/prm_evaluate.py: a `+` turn behind each step, and the logits that predict it, at -3."""
    (tmp_path / "steps.jinja").write_text(STEPS)
    steps, turns, want = ["1+1", "= 2", "So 2"], [], []
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    candidates = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["+", "-"])
    for i, step in enumerate(steps):
        turns += [{"content": step if i else f"1+1? {step}", "role": "user"}, {"content": "+", "role": "assistant"}]
        (row,) = rendered(folder, [turns])
        want.append(model(torch.from_numpy(row)[None]).logits[0, -3, candidates].softmax(-1)[0].item())
    conversation = [{"role": "user", "content": "1+1? "}, {"role": "assistant", "content": "||".join(steps)}]
    reward = {"tokens": ["+", "-"], "form": "probability"}
    settings = {"reward": reward, "step_separator": "<extra_0>\n", "chat_template": str(tmp_path / "steps.jinja")}
    with LocalRewardModel(str(folder), **settings) as served:
        scores = served.score(messages=[conversation])
    np.testing.assert_allclose((scores.steps or [])[0], want, **NEAR)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": {"ids": [300]}}, "reads the token 300, and the model has the ids 0 to 299"),
        ({"reward": {"ids": [-1]}}, "reads the token -1"),
        ({"reward": {"tokens": ["yes"]}}, r"'yes', which is 3 tokens, \[92, 72, 86\]"),
        ({"reward": {"ids": [5]}, "step_separator": "ки"}, r"is 'ки', which is 4 tokens"),
        ({"reward": {"ids": [5], "tokens": ["a"]}}, "ids and tokens are both given"),
        ({"reward": {"ids": [5], "form": "difference"}}, r"ids is \[5\], and form is difference"),
        ({"reward": {}}, r"tokens is \[\], and form is logit"),
        ({"reward": {"ids": [5], "among": "all"}}, "among is all, and form is logit"),
        ({"reward": {"ids": [5]}, "chat_template": "none.jinja"}, "none.jinja cannot be read"),
        ({"reward": {"ids": [5]}, "chat_template": ""}, "chat_template is empty"),
        ({"reward": {"ids": [5]}, "turns": [{"role": "critic", "content": "?"}]}, "cannot be rendered as the settings"),
        ({"reward": {"ids": [5]}, "turns": [{}]}, "turns has a message without content"),
        ({"reward": {"ids": [5]}, "generation_prompt": True, "truncation": "right"}, "cuts off what turns and"),
    ],
)
def test_mistakes_are_told_at_the_start(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalRewardModel(str(folder), **settings)


def test_texts_that_are_the_same_token(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "lower")
    path = tmp_path / "lower/tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ConfigError, match=r"tokens is \['Y', 'y'\], and their ids are \[(\d+), \1\]"):
        LocalRewardModel(str(tmp_path / "lower"), reward={"tokens": ["Y", "y"], "form": "difference"})


@pytest.mark.parametrize(
    "read", ["m.reference", "m['reference']", 'm["reference"]', 'm.get("reference")', "m[ 'reference' ]"]
)
def test_a_template_that_reads_the_label(read: str, folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "reads.jinja"
    template.write_text(
        f"{{% for m in messages %}}{{{{ m.content }}}}{{% if loop.last %}}{{{{ {read} }}}}{{% endif %}}{{% endfor %}}"
    )
    conversation = [{"role": "user", "content": "What is 1+1? "}, {"role": "assistant", "content": "2 "}]
    with LocalRewardModel(str(folder), reward={"ids": [9]}, chat_template=str(template)) as model:
        want = model.score(texts=["What is 1+1? 2 two"]).rewards
        np.testing.assert_allclose(model.score(messages=[conversation], labels=["two"]).rewards, want, **NEAR)
        assert "this sample's label was not sent" in str(model.score(messages=[conversation]).errors[0])


def test_a_model_without_logits_or_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a head for rewards and none for the next token"):
        LocalRewardModel(str(zoo.checkpoint("llama", tmp_path / "rm")), reward={"ids": [0]})
    with pytest.raises(ConfigError, match="unknown: the checkpoint has no tokenizer"):
        LocalRewardModel(str(zoo.language_model("llama", tmp_path / "lm")), reward={"tokens": ["a"]})
    with pytest.raises(ConfigError, match="has no chat template to render conversations by"):
        LocalRewardModel(str(zoo.tokenizer(tmp_path / "lm", chat_template=None)), reward={"ids": [0]}, system="")


def test_a_third_turn_with_each_samples_principle(folder: Path) -> None:
    """As the card of nvidia/Llama-3.3-Nemotron-70B-Reward-Principle: logit(Yes) - logit(No) of the next token."""
    labels = ["be brief", "be right", "name a \\1 number"]
    turns = [{"role": "user", "content": PRINCIPLE.replace("{reference}", label)} for label in labels]
    asked = [[*messages, turn] for messages, turn in zip(CONVERSATIONS, turns, strict=True)]
    rows = rendered(folder, asked, add_generation_prompt=True)
    want = [logits[-1, 61] - logits[-1, 50] for logits in plain(folder, rows)]
    settings = {"reward": {"ids": [61, 50], "form": "difference"}, "generation_prompt": True}
    with LocalRewardModel(str(folder), **settings, turns=[{"content": PRINCIPLE}]) as served:
        np.testing.assert_allclose(served.score(messages=CONVERSATIONS, labels=labels).rewards, want, **NEAR)
        assert "this sample's label was not sent" in str(served.score(messages=CONVERSATIONS).errors[0])


def test_an_empty_system_message(tmp_path: Path) -> None:
    """As the card of Qwen/WorldPM-72B wants it, because the template would write a message of its own."""
    template = "{% if messages[0]['role'] != 'system' %}You help.\n{% endif %}" + zoo.CHAT_TEMPLATE.replace(
        "'user',", "'user', 'system',"
    )
    folder = zoo.tokenizer(zoo.checkpoint("qwen2", tmp_path), chat_template=template)
    system = [{"role": "system", "content": "Own."}]
    want = rendered(folder, [[{"role": "system", "content": ""}, *CONVERSATIONS[0]], [*system, *CONVERSATIONS[1]]])
    with LocalRewardModel(str(folder), system="") as served:
        got = served.score(messages=[CONVERSATIONS[0], [*system, *CONVERSATIONS[1]]]).rewards
    np.testing.assert_allclose(got, zoo.reference(folder, want), **NEAR)


def test_the_version_tells_apart_what_scores_mean(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(HEADER)

    def version(**settings: Any) -> str:
        config = ModelConfig(model=str(folder), **{"reward": TokenRewardConfig(ids=[9]), **settings})
        return load_reward_model(config).info.weights_version

    found = [version(), version(reward=TokenRewardConfig(ids=[8])), version(system=""), version(system="Be brief.")]
    found += [version(turns=[TurnConfig(content="Good?")]), version(mean=0.5), version(pooling="first")]
    found.append(version(chat_template=str(template)))
    template.write_text(HEADER + " ")
    found.append(version(chat_template=str(template)))
    assert len({*found, open_checkpoint(str(folder)).version}) == len(found) + 1
    assert version(max_length=64, name="other", max_batch_tokens=100) == found[0]
    plain_model = zoo.checkpoint("llama", tmp_path / "rm")
    assert load_reward_model(ModelConfig(model=str(plain_model))).info.weights_version == (
        open_checkpoint(str(plain_model)).version
    )
