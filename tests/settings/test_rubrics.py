"""A rubric's file is read as it is written, and each mistake in it is named."""

from pathlib import Path

import pytest

import judged
from guerdon.errors import ConfigError
from guerdon.judge_core import Comparing, Criterion, Pair, Sample
from guerdon.settings.config import ComponentConfig, JudgeConfig, RewardConfig, ServerConfig
from guerdon.settings.fields import check_settings
from guerdon.settings.rubrics import read_rubric


def test_labels_are_texts_whatever_yaml_would_make_of_them(tmp_path: Path) -> None:
    rubric = read_rubric(
        judged.write(tmp_path, "template: '{response}'\nlabels: {yes: 1, no: 0, 3: 2e-1}\ncriteria: [{name: good}]\n")
    )
    assert (rubric.labels, rubric.values) == (("yes", "no", "3"), (1.0, 0.0, 0.2))
    assert rubric.criteria == (Criterion("good", "", 1.0),)


def test_braces_of_a_sample_are_no_fields(tmp_path: Path) -> None:
    rubric = read_rubric(judged.write(tmp_path, judged.RUBRIC.replace("Q:", "{{Q}}:")))
    assert rubric.render(Sample("{response} {x}", "{criterion}"))[0] == (
        "{Q}: {criterion}\nA: {response} {x}\nIs it right?"
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("labels: {y: 1, n: 0, m: 0.25}\n", "", "labels has no labels"),
        ("{y: 1, n: 0, m: 0.25}", "{y: 1}", "labels has 1 labels"),
        ("{y: 1, n: 0, m: 0.25}", "{y: 1, n: 1}", "all labels have one value"),
        ("y: 1", "y: good", "labels.y is 'good'"),
        ("y: 1", "y: .inf", "labels.y is '.inf'"),
        ("n: 0", "y: 0", "y is given twice"),
        ("{prompt}", "{question}", r"template has the unknown field \{question\}"),
        ("{prompt}", "{prompt!r}", r"template has the unknown field \{prompt!r\}"),
        ("{prompt}", "{prompt", "template has (the unknown field|a stray brace)"),
        ("{response}", "", r"template has no \{response\}"),
        ("{criterion}", "", r"template has no \{criterion\}, and there are 3 criteria"),
        (', text: "Kind?"', "", "the criterion kind has no text"),
        ("weight: 2", "weight: heavy", r"criteria\[0\].weight is 'heavy'"),
        ("weight: 2", "wieght: 2", r"unknown setting criteria\[0\].wieght"),
        ("name: kind", "name: right", "two criteria are named right"),
        ("name: kind", "name: other_mass", r"criteria\[2\].name is 'other_mass'"),
        ("name: kind", "name: a b", r"criteria\[2\].name is 'a b'"),
        ("criteria:", "criterias:", "unknown setting criterias"),
        ("template:", "template: [a]\nsystem:", r"template is \['a'\]"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in judged.RUBRIC
    with pytest.raises(ConfigError, match=message) as refused:
        read_rubric(judged.write(tmp_path, judged.RUBRIC.replace(old, new)))
    assert str(tmp_path) in str(refused.value) and refused.value.help


def test_the_text_of_the_only_criterion_has_its_place(tmp_path: Path) -> None:
    rubric = 'template: "{response}"\nlabels: {y: 1, n: 0}\ncriteria:\n  - {name: right%s}\n'
    assert read_rubric(judged.write(tmp_path, rubric % "")).render(Sample("a")) == ["a"]
    with pytest.raises(ConfigError, match=r"the criterion right has a text, and template has no \{criterion\}"):
        read_rubric(judged.write(tmp_path, rubric % ', text: "Is it right?"'))


def test_a_rubric_compares_by_plain_defaults(tmp_path: Path) -> None:
    text = judged.COMPARING.replace("{schedule: round_robin, scores: wins}", "{}")
    rubric = read_rubric(judged.write(tmp_path, text))
    assert rubric.compare == Comparing("round_robin", "bradley_terry") and not rubric.needs_reference
    pair = Pair(Sample("{response_b}", "p"), Sample("2", "p"))
    assert rubric.render(pair)[1] == "Q: p\nA: {response_b}\nB: 2\nOr brief?"
    against = read_rubric(judged.write(tmp_path, judged.COMPARING.replace("round_robin", "reference")))
    assert against.needs_reference and against.attribute_names == (
        *("right", "brief", "other_mass", "disagreed", "label_entropy"),
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("round_robin", "tournament", "compare.schedule is 'tournament'"),
        ("scores: wins", "score: wins", "unknown setting compare.score"),
        ("{schedule: round_robin, scores: wins}", "", "compare must be a mapping"),
        ("h: 1", "h: 2", "labels.h is 2, and the rubric compares"),
        ("h: 1", "h: 0.5", r"no label prefers \{response_a\}"),
        ("p: 0", "p: 0.5", r"no label prefers \{response_b\}"),
        ("{response_a}", "{response}", r"template has the unknown field \{response\}"),
        ("{response_b}", "", r"template has no \{response_b\}"),
        ("compare: {schedule: round_robin, scores: wins}", "", r"template has the unknown field \{response_a\}"),
        ("name: brief", "name: disagreed", "name is 'disagreed'"),
    ],
)
def test_a_mistake_of_a_rubric_that_compares_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in judged.COMPARING
    with pytest.raises(ConfigError, match=message) as refused:
        read_rubric(judged.write(tmp_path, judged.COMPARING.replace(old, new)))
    assert ("add `compare: {}`" in str(refused.value.help)) == (old.startswith("compare:"))


def test_a_reference_stands_once(tmp_path: Path) -> None:
    text = judged.COMPARING.replace("round_robin", "reference").replace("{prompt}", "{prompt}{reference}")
    with pytest.raises(ConfigError, match="which is one of the responses already"):
        read_rubric(judged.write(tmp_path, text))


def test_weights_that_are_all_0_are_refused(tmp_path: Path) -> None:
    text = "template: '{response}'\nlabels: {a: 1, b: 0}\ncriteria: [{name: good, weight: 0}]\n"
    with pytest.raises(ConfigError, match="the weights of all criteria are 0"):
        read_rubric(judged.write(tmp_path, text))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the rubric nowhere\.yaml"):
        read_rubric("nowhere.yaml")


def test_a_judge_needs_a_rubric_and_may_be_a_component() -> None:
    judge = JudgeConfig(model="m")
    total = RewardConfig(name="total", components=[ComponentConfig(model="judge")])
    with pytest.raises(ConfigError, match=r"models\[0\].rubric is not given"):
        check_settings(ServerConfig(models=[judge]))
    judge.rubric = "rubric.yaml"
    check_settings(ServerConfig(models=[judge], rewards=[total]))
    judge.max_other_mass = 1.5
    with pytest.raises(ConfigError, match=r"max_other_mass is 1\.5"):
        check_settings(ServerConfig(models=[judge]))
