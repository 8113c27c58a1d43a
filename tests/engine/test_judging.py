"""A judge's labels are one token each where they stand, its questions share what they can, and its values are means."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
import judged
import zoo
from guerdon.core import Score, ScoreRequest, common_prefix
from guerdon.distributed.ranks import ALONE
from guerdon.engine.judging import JudgeEngine, build_judge
from guerdon.errors import CheckpointError, ConfigError, InvalidRequest, SampleFailed
from guerdon.judge_core import Criterion, Pair, PlanOfSingles, Rubric, Sample
from guerdon.kinds import judges as judgements
from guerdon.settings.config import JudgeConfig


def build(folder: Path, rubric: str = judged.RUBRIC, **settings: Any) -> JudgeEngine:
    return build_judge(JudgeConfig(model=str(folder), rubric=judged.write(folder, rubric), **settings), ALONE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("judge")))


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("raw")), chat_template=None)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("{yes: 1, n: 0}", "after the criterion right the label 'yes' is 3 tokens, and must be one"),
        ("{y: 1, '': 0}", "the label '' is 0 tokens, and must be one"),
    ],
)
def test_a_label_is_one_token(labels: str, message: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        build(model, judged.RUBRIC.replace("{y: 1, n: 0, m: 0.25}", labels))


def test_a_label_that_changes_the_token_before_it_is_refused(raw: Path) -> None:
    """The vocabulary has a token `th`, so that `h` behind a `t` is no token of its own."""
    rubric = judged.RUBRIC.replace("Kind?", "Is it kind? But").replace("{y: 1", "{h: 1")
    with pytest.raises(ConfigError, match="after the criterion kind the label 'h' is no token of its own"):
        build(raw, rubric)


def test_labels_of_one_token_are_refused(tmp_path: Path) -> None:
    """This tokenizer writes a blank as the other character."""
    folder = zoo.language_model("llama", tmp_path, vocab_size=chats.VOCAB_SIZE)
    chats.save("gemma", folder)
    with pytest.raises(ConfigError, match="and another are the same token"):
        build(folder, judged.RUBRIC.replace("{y: 1, n: 0, m: 0.25}", "{' ': 1, y: 0, '▁': 2}"))


def test_a_sample_whose_text_swallows_the_label_fails(raw: Path) -> None:
    rubric = judged.RUBRIC.replace('\\n{criterion}"', '"').replace("{y: 1", "{h: 1")
    rubric = rubric[: rubric.index("  - {name: brief")].replace(', text: "Is it right?"', "")
    judge = build(raw, rubric)
    request = ScoreRequest(texts=["a cat", "a dog"], prompts=["", ""])
    (swallowed, fine) = (row for row in rows_of(judge, request))
    error = judgements.find_fault(judge, swallowed)
    assert isinstance(error, InvalidRequest) and "the label 'h' is no token of its own" in str(error)
    assert judgements.find_fault(judge, fine) is None


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer, and a judge reads text"):
        build(zoo.language_model("llama", tmp_path))


def rows_of(judge: JudgeEngine, request: ScoreRequest) -> list[np.ndarray]:
    plan = judgements.make_plan(judge, request, judgements.read_samples(judge, request, range(len(request))))
    texts = [str(text) for text in judgements.render_subjects(judge, plan.subjects)]
    steps = judge.encode_in_steps(texts)
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return e.value


def test_criteria_and_responses_cost_what_they_do_not_share(model: Path) -> None:
    """P + N·R + N·K·c tokens: the prompt once, each response once, each criterion once for each response."""
    judge = build(model)
    assert judge.info.path == "packed+shared"
    responses = ["A long answer of bytes.", "Both are better yet....", "Could be, I would say.."]
    request = ScoreRequest(texts=["What is it? " + text for text in responses], prompts=["What is it? "] * 3)
    rows = [row[:-1] for row in rows_of(judge, request)]  # the label behind a question is not computed
    num_criteria = 3
    prompt = common_prefix(rows[0], rows[num_criteria])
    each = [common_prefix(rows[i], rows[i + 1]) - prompt for i in range(0, len(rows), num_criteria)]
    ends = [len(row) - prompt - each[i // num_criteria] for i, row in enumerate(rows)]
    batches = [*judge.plan(rows)]
    computed = sum(batch.packed.num_tokens for batch in batches if batch.packed is not None)
    assert len(batches) == 1 and computed == prompt + sum(each) + sum(ends)
    assert computed < 0.4 * sum(map(len, rows))
    assert each == [len(ids) for ids in judge.text.encode([text + "\n" for text in responses])]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "num_firsts", "num_ordered"), [("round_robin", 4, 12), ("circular", 4, 8), ("reference", 5, 8)]
)
def test_comparisons_cost_what_they_do_not_share(schedule: str, num_firsts: int, num_ordered: int, model: Path) -> None:
    """The prompt once, each response behind it once, and for each ordered pair the second response and K criteria."""
    judge = build(model, judged.COMPARING.replace("round_robin", schedule))
    prompt, reference = "What would you say that it is? ", "Every word is right here"
    responses = [
        "A long answer of bytes.",
        "Both are better yet....",
        "Could be, I would say..",
        "Do not ask me again....",
    ]
    texts = [prompt + text for text in responses]
    request = ScoreRequest(texts=texts, prompts=[prompt] * 4, references=[reference] * 4)
    rows = [row[:-1] for row in rows_of(judge, request)]  # the label behind a question is not computed
    batches = [*judge.plan(rows)]
    computed = sum(batch.packed.num_tokens for batch in batches if batch.packed is not None)

    def count(text: str) -> int:
        (ids,) = judge.text.encode([text])
        return len(ids)

    first = min(common_prefix(rows[0], row) for row in rows)
    subjects = judgements.make_plan(judge, request, judgements.read_samples(judge, request, range(4))).subjects
    pairs = [(one.a.response, one.b.response) for one in subjects if isinstance(one, Pair)]
    firsts = sum(count(text + "\nB: ") for text in {a for a, _ in pairs})
    seconds = sum(count(b + "\n") for _, b in pairs)
    ends = sum(
        len(rows[2 * i + k]) - first - count(a + "\nB: " + b + "\n") for i, (a, b) in enumerate(pairs) for k in (0, 1)
    )
    assert (len({a for a, _ in pairs}), len(pairs)) == (num_firsts, num_ordered)
    assert len(batches) == 1 and computed == first + firsts + seconds + ends
    assert computed < 0.6 * sum(map(len, rows))


def explain(number: int) -> str:
    return f"question {number}"


RUBRIC = Rubric("{response}", ("y", "n"), (1.0, 0.0), (Criterion("one", ""), Criterion("two", "", 3.0)))


def test_values_are_means_over_the_labels_alone() -> None:
    logprobs = np.log(np.array([[0.6, 0.2], [0.1, 0.3]], np.float32))
    plan = PlanOfSingles(RUBRIC, [Sample("a")])
    answers, _ = RUBRIC.read_answers(plan.subjects, [*logprobs], "expected", 0.61, explain)
    (score,) = plan.judge(answers).results
    assert isinstance(score, Score) and score.attributes is not None
    unsure = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
    np.testing.assert_allclose(score.attributes, [0.75, 0.25, 0.6, unsure], rtol=1e-6)
    np.testing.assert_allclose([score.reward], [1.5], rtol=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_labels_of_one_value_are_one_answer(seed: int) -> None:
    """All that is read of labels stays the same if they are split into labels of the same value."""
    drawn = np.random.default_rng(seed)
    values, parts = drawn.permutation([1.0, 0.5, 0.0]), drawn.integers(1, 5, 3)
    whole = drawn.dirichlet([1, 1, 1, 1], 6)[:, :3]
    shares = np.concatenate(
        [one * drawn.dirichlet(np.ones(n), 6) for one, n in zip(whole.T[..., None], parts, strict=True)], -1
    )
    order = drawn.permutation(shares.shape[1])
    labels, split = tuple("abcdefghijkl"[: len(order)]), np.repeat(values, parts)[order]
    for verdict in ("expected", "likeliest"):
        want = replace(RUBRIC, labels=("a", "b", "c"), values=tuple(values)).read(np.log(whole), verdict)
        got = replace(RUBRIC, labels=labels, values=tuple(split)).read(np.log(shares[:, order]), verdict)
        np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_array_equal(got[0], values[whole.argmax(-1)])


def test_many_labels_of_one_value_have_the_same_bits_in_any_batch() -> None:
    logprobs = np.log(np.random.default_rng(0).dirichlet(np.ones(40), 64))
    many = replace(RUBRIC, labels=tuple(map(str, range(40))), values=(1.0,) * 25 + (0.0,) * 15)
    alone = np.concatenate([many.read(row[None], "expected") for row in logprobs], 1)
    np.testing.assert_array_equal(many.read(logprobs, "expected"), alone)


def test_labels_that_are_impossible_fail_the_sample_under_any_bound() -> None:
    for verdict in ("expected", "likeliest"):
        plan, impossible = PlanOfSingles(RUBRIC, [Sample("a")]), np.full((2, 2), -np.inf, np.float32)
        answers, _ = RUBRIC.read_answers(plan.subjects, [*impossible], verdict, 1.0, explain)  # type: ignore[arg-type]
        (result,) = plan.judge(answers).results
        assert isinstance(result, SampleFailed) and "no label" in str(result)


def test_the_version_covers_all_that_scores_are_made_of(model: Path, tmp_path: Path) -> None:
    def version(text: str = judged.RUBRIC, folder: str = "rubrics", **settings: Any) -> str:
        rubric = judged.write(tmp_path / folder, text)
        return build_judge(JudgeConfig(model=str(model), rubric=rubric, **settings), ALONE).info.weights_version

    first = version()
    assert version(folder="elsewhere") == first
    changed = [
        version(judged.RUBRIC.replace("weight: 2", "weight: 3")),
        version(judged.RUBRIC.replace("n: 0", "n: -1")),
        version(judged.RUBRIC.replace("Kind?", "Kind!")),
        version(verdict="likeliest"),
        version(max_other_mass=0.9),
    ]
    assert len({first, *changed}) == 6 and all(len(one) == len(first) for one in changed)
