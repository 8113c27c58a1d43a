"""Criteria that come with each sample: their forms are read, and scores equal separate forwards at the cost counted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from transformers import AutoTokenizer

import judged
import zoo
from guerdon.client import RewardClient, Scores
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.judge_core import Criterion
from guerdon.kinds.judges import read_criteria
from guerdon.server.runtime import RunningServer
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ComponentConfig, JudgeConfig, RewardConfig
from guerdon.settings.rubrics import read_rubric
from served import Serve
from stand_in_judge import KEY, MODEL, StandIn, stand_in

RUBRIC = """\
template: "Q: {prompt}\\nA: {response}\\n{criterion}"
labels: {y: 1, n: 0, m: 0.25}
criteria: [{name: right, text: "Is it right?", weight: 2}]
sample_criteria: add
"""
REPLACING = RUBRIC.replace("sample_criteria: add", "sample_criteria: replace\nreduce: mean")
NAMED = [{"name": "brief", "text": "Is it brief and to the point?", "weight": 3}, {"criterion": "Is it a red one?"}]
OTHERS = [{"name": "brief", "text": "Or rather long?", "weight": -0.5}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("criteria") / "llama"))


@pytest.fixture(scope="module")
def remote() -> Iterator[StandIn]:
    with stand_in() as running:
        yield running


@pytest.fixture(scope="module")
def server(model: Path, remote: StandIn, serve: Serve) -> RunningServer:
    folder = model.parent
    (folder / "key").write_text(KEY)
    rubrics = {
        "own": RUBRIC,
        "replacing": REPLACING,
        "only": REPLACING.replace('criteria: [{name: right, text: "Is it right?", weight: 2}]\n', ""),
    }
    models: list[Any] = [
        JudgeConfig(model=str(model), name=name, rubric=judged.write(folder, text, f"{name}.yaml"), max_other_mass=1.0)
        for name, text in rubrics.items()
    ]
    models.append(ChatJudgeConfig(
        name="words", url=remote.url, model=MODEL, template="{response} {criterion}", sample_criteria="replace",
        parse=ParseConfig(regex=r"Score: (\S+)"), cache=str(folder / "answers"), api_key_file=str(folder / "key"),
    ))  # fmt: skip
    total = RewardConfig(name="total", components=[ComponentConfig("own", 2.0), ComponentConfig("only", -1.0)])
    return serve(*models, grpc_port=0, rewards=[total])


def ask(server: RunningServer, name: str, labels: list[Any], url: str | None = None) -> Scores:
    with RewardClient(url or server.http_url, name) as client:
        return client.score(texts=judged.TEXTS[: len(labels)], prompts=judged.PROMPTS[: len(labels)], labels=labels)


def wanted(folder: Path, i: int, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Values and other masses of the criteria of sample `i`, each asked by a forward of its own."""
    said = {"{prompt}": judged.PROMPTS[i], "{response}": judged.RESPONSES[i]}
    questions = [judged.TEMPLATE.replace("{criterion}", text) for text in texts]
    for name, text in said.items():
        questions = [question.replace(name, text) for question in questions]
    chosen = judged.probabilities(folder, questions, judged.LABELS)
    return chosen @ [*judged.LABELS.values()] / chosen.sum(-1), 1 - chosen.sum(-1)


def computed(server: RunningServer, model: str) -> float:
    text = httpx.get(f"{server.http_url}/metrics").text
    return float(text.split(f'guerdon_computed_tokens_total{{model="{model}"}} ')[1].split("\n")[0])


def test_scores_are_those_of_separate_forwards(server: RunningServer, model: Path) -> None:
    labels = [NAMED, OTHERS, None]
    asked = [["Is it right?", *(one.get("text") or one["criterion"] for one in own or [])] for own in labels]
    weights: list[list[float]] = [[2, 3, 1], [2, -0.5], [2]]
    told = [wanted(model, i, texts) for i, texts in enumerate(asked)]
    for url in (server.http_url, server.grpc_url):
        scores = ask(server, "own", labels, url)
        rewards = [values @ weight for (values, _), weight in zip(told, weights, strict=True)]
        np.testing.assert_allclose(scores.rewards, rewards, rtol=0, atol=1e-5)
        assert scores.attribute_names == ("right", "sample_criteria", "other_mass", "label_entropy")
        assert scores.attributes is not None
        own = [reward - 2 * values[0] for reward, (values, _) in zip(rewards, told, strict=True)]
        np.testing.assert_allclose(scores.attributes[:, 0], [values[0] for values, _ in told], rtol=0, atol=1e-5)
        np.testing.assert_allclose(scores.attributes[:, 1], own, rtol=0, atol=1e-5)
        np.testing.assert_allclose(scores.attributes[:, 2], [other.max() for _, other in told], rtol=0, atol=1e-5)
    means = [
        values[k:] @ weight[k:] / np.abs(weight[k:]).sum()
        for (values, _), weight, k in zip(told, weights, (1, 1, 0), strict=True)
    ]
    np.testing.assert_allclose(ask(server, "replacing", labels).rewards, means, rtol=0, atol=1e-5)
    only = ask(server, "only", labels)
    np.testing.assert_allclose(only.rewards[:2], means[:2], rtol=0, atol=1e-5)
    assert "has no criteria, and this sample's label has none" in (only.errors[2] or "")
    total = ask(server, "total", labels[:2])
    np.testing.assert_allclose(total.rewards, 2 * np.array(rewards[:2]) - means[:2], rtol=0, atol=3e-5)


def test_a_name_that_all_samples_have_is_a_component(server: RunningServer, model: Path) -> None:
    scores = ask(server, "own", [NAMED, OTHERS])
    assert scores.attribute_names == ("right", "sample_criteria", "other_mass", "label_entropy", "brief")
    assert scores.attributes is not None
    want = [wanted(model, i, [own[0]["text"]])[0][0] for i, own in enumerate((NAMED, OTHERS))]
    np.testing.assert_allclose(scores.attributes[:, 4], want, rtol=0, atol=1e-5)
    body = {"model": "own", "prompt": judged.PROMPTS[0], "response": judged.RESPONSES[0], "label": NAMED}
    reply = httpx.post(f"{server.http_url}/reward?key=score", json=body).raise_for_status().json()
    assert [*reply["components"]] == [*scores.attribute_names]
    np.testing.assert_allclose(reply["components"]["brief"], want[0], rtol=0, atol=1e-5)


def test_gyms_components_sum_to_the_reward(server: RunningServer) -> None:
    (want,) = ask(server, "own", [NAMED]).rewards
    message = {"type": "message", "role": "assistant", "content": judged.RESPONSES[0]}
    row = {"responses_create_params": {"input": judged.PROMPTS[0]}, "response": {"output": [message]}}
    told = httpx.post(f"{server.http_url}/verify?model=own", json=row | {"label": {"criteria": NAMED}}).json()
    assert told["reward"] == pytest.approx(float(want), abs=1e-5)
    assert {*told["reward_components"]} == {"right", "sample_criteria"} and "brief" in told["components"]
    assert sum(told["reward_components"].values()) == pytest.approx(told["reward"], rel=1e-5)


def test_criteria_of_all_samples_are_one_forest(server: RunningServer, model: Path) -> None:
    """P + N·R + the criteria: shared prefixes of at least 16 tokens are computed once, and no label is."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    prompt, responses = (
        "what is it that you can name here, and why? ",
        ["the answer is this one here", "no number that I know of it"],
    )
    labels = [
        [{"text": f"{text} {i}?"} for text in ("Is it right to say so", "Does it name the answer")] for i in range(2)
    ]

    def rows(text: str, own: list[dict[str, str]]) -> list[list[int]]:
        questions = [f"Q: {prompt}\nA: {text}\n{one}" for one in ("Is it right?", *(o["text"] for o in own))]
        messages = [[{"role": "user", "content": question}] for question in questions]
        return [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in messages]

    every = [rows(text, own) for text, own in zip(responses, labels, strict=True)]
    ends = {tuple(row[:n]) for asked in every for row in asked for n in range(1, len(row) + 1)}
    before = computed(server, "own")
    with RewardClient(server.http_url, "own") as client:
        client.score(
            texts=[prompt + text for text in responses], prompts=[prompt] * 2, labels=labels
        ).raise_for_failed()
    # The nodes of the questions' trie; a branch of fewer than 16 tokens may be computed again for each of its leaves.
    cost = computed(server, "own") - before
    assert len(ends) <= cost < len(ends) + 6 * 16
    assert cost < 0.6 * sum(len(row) for asked in every for row in asked)


def test_a_judge_in_words_takes_them_too(server: RunningServer, remote: StandIn) -> None:
    labels = [[{"name": "one", "text": "worth 3"}, {"text": "worth 4", "weight": 2}], [{"text": "worth <refuse> 1"}]]
    with RewardClient(server.http_url, "words") as client:
        scores = client.score(texts=["a", "b"], labels=labels)
    assert scores.rewards[0] == 3 + 2 * 4 and "the judge refused" in (scores.errors[1] or "")
    assert scores.attribute_names == ("sample_criteria", "one")


CRITERIA = (Criterion("", "Is it brief?", 2.0), Criterion("Cites_sources", "Does it cite?", -1.0))


def pair(text: str, weight: str, name: str, **more: Any) -> list[dict[str, Any]]:
    """The criteria in the keys of a project."""
    return [{text: "Is it brief?", weight: 2, **more}, {text: "Does it cite?", name: "Cites sources", weight: -1}]


FORMS: dict[str, Any] = {
    "ours": pair("criterion", "weight", "name"),
    "open-instruct": json.dumps({"query": "q", "rubrics": pair("description", "weight", "title")}),
    "verifiers": {"criteria": pair("text", "weight", "name", choices=["no", "yes"])},
    "tinker-cookbook": {"convo": [], "rubric_items": pair("rubric_str", "weight", "title", extraction_regex="x")},
    "HealthBench": {"rubrics": pair("criterion", "points", "title", tags=[])},
}


@pytest.mark.parametrize("form", [*FORMS])
def test_each_projects_form_is_read(form: str) -> None:
    for choices in (("no", "yes"), ("no", "no", "yes", "yes")):  # with two spellings of each
        assert read_criteria(FORMS[form], choices) == (CRITERIA, None)
    assert read_criteria([json.dumps(FORMS["verifiers"])], ("no", "yes"))[0] == CRITERIA
    for text in ("criterion", "text", "description"):
        assert read_criteria({text: "Is it brief?", "points": 2}, ()) == (CRITERIA[:1], None)


def test_json_in_lists_and_json_of_json_are_read() -> None:
    """As tables have them, whose columns are texts."""
    ours = FORMS["ours"]
    each = [json.dumps(one) for one in ours]
    for label in (
        each,
        json.dumps(each),
        {"criteria": each},
        [ours],
        [{"criteria": ours}],
        json.dumps(json.dumps(ours)),
    ):
        assert read_criteria(label, ()) == (CRITERIA, None), label


def test_a_reference_stands_beside_the_criteria() -> None:
    assert read_criteria({"criteria": ["Right?"], "reference": "4"}, ()) == ((Criterion("", "Right?"),), "4")
    for label in ("4", "[not json", 7, None, [1, 2], ["a", "b"], {"a": 1}, "{}", {"text": "a"}, '"a"', ["[1]"]):
        assert read_criteria(label, ()) == ((), label)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"criteria": "Is it brief"}, "are the str 'Is it brief'; send a list"),
        ([{"weight": 1}], "criterion 0 of this sample's label has no text"),
        ([{"text": " "}], "criterion 0 of this sample's label has no text"),
        ([{"text": "a"}, 3], "criterion 1 of this sample's label has no text"),
        ([{"text": "a", "weight": "2"}], "the weight of criterion 0 of this sample's label is the str '2'"),
        ([{"text": "a", "weight": True}], "the weight of criterion 0"),
        ([{"text": "a", "weight": float("nan")}], "the weight of criterion 0"),
        ([{"text": "a", "weight": 10**400}], "the weight of criterion 0 of this sample's label is the int 1000"),
        ('[{"text": "a", "weight": 1e39}]', "the weight of criterion 0 of this sample's label is the float 1e"),
        ([{"text": "a", "weight": 0}], "the weights of all criteria in this sample's label are 0"),
        ([{"text": "a", "choices": ["bad", "good"]}], "the rubric's labels are, from worst to best, no, yes"),
        ([{"text": "a", "choices": 5}], "has the choices 5, and the rubric's labels"),
        ("[{'text': 'a'}]", "begins as JSON, and is none; send a list"),
        ('{"criteria": [{"text": "a"', "begins as JSON, and is none; send a list"),
        (['{"text": "a"}', '{"text": "b"'], "begins as JSON, and is none; send a list"),
        ({"criteria": ['{"text": "a"']}, "criterion 0 of this sample's label has no text"),
    ],
)
def test_a_mistake_in_a_label_is_named(label: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_criteria(label, ("no", "yes"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{criterion}", "", r"template has no \{criterion\}, and there are sample_criteria"),
        ("sample_criteria: add", "sample_criteria: more", "sample_criteria is 'more'"),
        ("name: right", "name: sample_criteria", r"criteria\[0\].name is 'sample_criteria'"),
        ("A: {response}", "{response_a} {response_b}", "add `compare"),
    ],
)
def test_a_mistake_in_the_rubric_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        read_rubric(judged.write(tmp_path, RUBRIC.replace(old, new)))
    assert message.replace("\\", "") in f"{refused.value} {refused.value.help}"


def test_a_judge_that_compares_has_its_own_criteria_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sample_criteria is set, and the judge compares"):
        read_rubric(judged.write(tmp_path, judged.COMPARING + "sample_criteria: add\n"))


def test_too_many_criteria_are_refused(server: RunningServer) -> None:
    message = "make 65,537 questions to words, and at most 65,536"
    with RewardClient(server.http_url, "words") as client, pytest.raises(InvalidRequest, match=message):
        client.score(texts=["a"], labels=[[{"text": "?"}] * 65_537])


def test_a_label_that_cannot_be_scored_harms_no_other(server: RunningServer) -> None:
    """Weights whose sum no float32 has, at any place of a request, and names that replies keep for themselves."""
    most = {"text": "Is it a red one?", "weight": 3e38}
    (want,) = ask(server, "own", [OTHERS]).rewards
    for label in ([most] * 99, [{**most, "weight": 10**400}]):
        scores = ask(server, "own", [OTHERS, json.dumps(label)], server.grpc_url)
        assert scores.rewards[0] == pytest.approx(float(want), abs=1e-5) and np.isnan(scores.rewards[1])
        assert "weight" in (scores.errors[1] or "")
    tiny, plain = (ask(server, "replacing", [[{"text": "Is it red?", "weight": x}]]).rewards[0] for x in (5e-324, 1))
    assert tiny == pytest.approx(plain, abs=1e-6)
    assert "score" not in ask(server, "own", [[{"name": "score", "text": "Is it red?"}]]).attribute_names
