"""Rewards, values and log-probs on CPUs have the same bits alone, in any batch, shared or not, with any threads."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import judged
import zoo
from guerdon.assembly import build_scorer
from guerdon.core import ScoreRequest, Sequence, Truncation
from guerdon.distributed.ranks import ALONE
from guerdon.engine.judging import JudgeEngine, build_judge
from guerdon.engine.logprobs import entropies_of
from guerdon.engine.native.library import find
from guerdon.errors import GuerdonError
from guerdon.judge_core import PlanOfSingles, Sample
from guerdon.kinds import judges as judgements
from guerdon.kinds.compare import PlanOfPairs
from guerdon.server.reading import truncated
from guerdon.settings.config import JudgeConfig, ModelConfig, TeacherConfig
from guerdon.teacher_core import LogprobQuery
from same_bits import assert_same_bits
from tiers import of_each_kind, slow_but

pytestmark = pytest.mark.skipif(find()[0] is None, reason=f"no kernels: {find()[1]}")
DTYPES = ["float32", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16"))]
PACKED = [
    name for name in zoo.ARCHITECTURES if name not in ("deberta-v2", "gptj", "falcon", "mamba", "jamba")
]  # whose attention is in transformers' registry, and without a state


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made_of(config: Any, folder: Path | str, **settings: Any) -> Callable[[int], Any]:
    """Makes the function that scores, of a model's settings, by its budget of tokens."""
    return lambda budget: build_scorer(config(model=str(folder), max_batch_tokens=budget, **settings)).score


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", of_each_kind(PACKED))
def test_rewards(name: str, dtype: str, tmp_path: Path) -> None:
    folder = str(zoo.checkpoint(name, tmp_path))
    scorer = build_scorer(ModelConfig(model=folder, dtype=dtype))
    assert scorer.info.path.startswith("packed"), scorer.info.why
    assert "same bits in any batch" in scorer.info.proofs, scorer.info.proofs
    assert_same_bits(
        made_of(ModelConfig, folder, dtype=dtype), [Sequence(row) for row in [*zoo.rows(1), np.array([7])]]
    )


LARGE = {
    "llama": {"hidden_size": 104, "intermediate_size": 1003, "head_dim": 26},
    "gemma2": {"hidden_size": 104, "intermediate_size": 1003, "head_dim": 26},
    "phi3": {"hidden_size": 104, "intermediate_size": 1003},
    "gpt2": {"n_embd": 104, "n_inner": 1003},
    "gpt-neox": {"hidden_size": 104, "intermediate_size": 1003},
    "opt": {"hidden_size": 104, "ffn_dim": 1003, "word_embed_proj_dim": 104},
    "bert": {"hidden_size": 104, "intermediate_size": 1003},
    "modernbert": {"hidden_size": 104, "intermediate_size": 1003, "classifier_pooling": "mean"},
    "mixtral": {"hidden_size": 104, "intermediate_size": 1000},
    "gpt-oss": {"hidden_size": 104, "intermediate_size": 1000},
    "llama4": {"hidden_size": 104, "intermediate_size": 1000, "intermediate_size_mlp": 1003},
}
"""Odd widths, and so many numbers that PyTorch splits them among threads anywhere."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", slow_but(("llama",), LARGE))
def test_rewards_of_models_of_odd_widths(name: str, dtype: str, tmp_path: Path) -> None:
    make = made_of(ModelConfig, zoo.checkpoint(name, tmp_path, **LARGE[name]), dtype=dtype)
    assert_same_bits(make, [Sequence(row) for row in zoo.rows(2, groups=((40, 6), (200, 5), (101, 1)))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", slow_but(("llama",), ("llama", "gpt2", "gemma2", "mixtral", "gpt-oss", "cohere", "granite"))
)
def test_log_probs_of_a_teacher(name: str, dtype: str, tmp_path: Path) -> None:
    make = made_of(TeacherConfig, zoo.language_model(name, tmp_path), dtype=dtype)
    query = LogprobQuery(start=1, with_entropy=True, top_k=3)
    assert_same_bits(make, [Sequence(row, ask=query) for row in zoo.rows(3, least=2)])


@pytest.mark.parametrize("kind", slow_but(("tokcls",), ["tokcls", "trlx-critic"]))
def test_values_of_every_token(kind: str, tmp_path: Path) -> None:
    make = made_of(ModelConfig, zoo.checkpoint("llama", tmp_path, kind))
    assert_same_bits(make, [Sequence(row) for row in zoo.rows(4)])


def test_only_models_with_products_of_their_own_are_looked_at_for_them(tmp_path: Path) -> None:
    llama = build_scorer(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path / "llama"))))
    mixtral = build_scorer(ModelConfig(model=str(zoo.checkpoint("mixtral", tmp_path / "mixtral"))))
    assert mixtral._by_rows and not llama._by_rows


def test_a_model_that_cannot_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(zoo.checkpoint("llama", tmp_path))
    monkeypatch.setattr("guerdon.engine.independence.find", lambda: (None, "no compiler"))
    scorer = build_scorer(ModelConfig(model=folder))
    assert "bits may change with the batch: no compiler" in scorer.info.proofs
    monkeypatch.undo()
    plain = torch.nn.functional.linear
    monkeypatch.setattr("guerdon.engine.onednn.product", plain)  # of any number of rows, by MKL
    monkeypatch.setattr("guerdon.engine.caught_calls.product", plain)
    monkeypatch.setattr("guerdon.engine.fewer_passes.onednn.REPLACEMENTS", {})
    scorer = build_scorer(ModelConfig(model=folder))
    (said,) = [proof for proof in scorer.info.proofs if "bits" in proof]
    assert "sequences had other bits in another batch" in said


VOCABULARY = 40_001
"""PyTorch splits the sum of a single row among threads if it has more than 32,768 numbers."""


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def scoring(folder: Path, **settings: Any) -> Any:
    def make(budget: int) -> Any:
        return build_scorer(ModelConfig(model=str(folder), max_batch_tokens=budget, **settings)).score

    return make


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [
        ("llama", 19, "float32"),
        *(slow(name, 5, dtype) for name in ("qwen3", "bert", "roberta") for dtype in ("float32", "bfloat16")),
    ],
)
def test_attributes(name: str, count: int, dtype: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path, num_labels=count)
    assert_same_bits(scoring(folder, dtype=dtype), [Sequence(row) for row in zoo.rows(1)])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "float32"), slow("qwen2", "float32"), slow("gpt2", "float32"), slow("llama", "bfloat16")],
)
def test_rewards_of_steps(name: str, dtype: str, tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint(name, tmp_path, "tokcls", num_labels=2))
    make = scoring(folder, dtype=dtype, step_separator="\n", step_reduction="product")
    random = np.random.default_rng(0)

    def ends(length: int) -> np.ndarray:
        return np.unique(random.integers(0, length, 7))

    assert_same_bits(make, [Sequence(row, steps=ends(len(row))) for row in zoo.rows(2)])


@pytest.mark.parametrize("pooling", ["mean", slow("first_eos"), slow("first"), slow("last")])
@pytest.mark.parametrize("kind", slow_but(("seqcls",), ["seqcls", "tokcls"]))
def test_pooled_rows(kind: str, pooling: str, tmp_path: Path) -> None:
    """So long and wide that PyTorch splits a mean over tokens among threads."""
    folder = zoo.checkpoint("llama", tmp_path, kind, hidden_size=248, head_dim=62, num_labels=1)
    rows = zoo.rows(3, groups=((200, 3), (150, 1)))
    rows[1][205:] = zoo.EOS
    assert_same_bits(scoring(folder, pooling=pooling), [Sequence(row) for row in rows])


@pytest.mark.parametrize("name", ["bert", slow("roberta"), slow("electra")])
def test_pairs_of_token_types(name: str, tmp_path: Path) -> None:
    starts = (None, 1, 9, 20)
    samples = [
        Sequence(row, second_start=starts[i % 4]) for i, row in enumerate(zoo.rows(4, groups=((40, 4), (30, 2))))
    ]
    assert_same_bits(scoring(zoo.checkpoint(name, tmp_path)), samples)


@pytest.mark.parametrize("side", slow_but(("left",), ["left", "right"]))
def test_truncated_rows(side: Any, tmp_path: Path) -> None:
    """Cut at the left, samples of one prompt keep different parts of it."""
    samples = [
        truncated(Sequence(row, prompt_length=40), Truncation(48, side)) for row in zoo.rows(5, groups=((40, 7),))
    ]
    assert_same_bits(scoring(zoo.checkpoint("llama", tmp_path)), samples)


# ---------------------------------------------------------------------------------------------------- teachers


QUERIES = [
    LogprobQuery(start=1, with_entropy=True, top_k=5, with_ranks=True, with_next=True),
    LogprobQuery(start=1, with_entropy=True, given=np.array([3, 7, -1]), temperature=0.7),
    LogprobQuery(start=1, with_entropy=True, top_k=5, with_hidden=True),
]


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        ("llama", 300, "float32"),
        *(slow("llama", size, dtype) for size in (300, VOCABULARY) for dtype in ("bfloat16", "float16")),
        *(slow(name, VOCABULARY, "float32") for name in ("llama", "gemma2", "mixtral")),
    ],
)
def test_all_that_teachers_answer(name: str, size: int, dtype: str, tmp_path: Path) -> None:
    folder = str(zoo.language_model(name, tmp_path, vocab_size=size))

    def make(budget: int) -> Any:
        return build_scorer(TeacherConfig(model=folder, dtype=dtype, max_batch_tokens=budget)).score

    rows = zoo.rows(6, groups=((30, 4), (20, 2)), least=2)
    samples = [Sequence(row, ask=QUERIES[i % len(QUERIES)]) for i, row in enumerate(rows)]
    # A single asked token is a single row of logits, and shares its prompt's states with others.
    samples += [Sequence(row[:20], ask=dataclasses.replace(QUERIES[i], start=19)) for i, row in enumerate(rows[:2])]
    assert_same_bits(make, samples)


@pytest.mark.parametrize("size", [300, VOCABULARY])
def test_entropies_of_a_single_row(size: int) -> None:
    table = torch.log_softmax(3 * torch.randn(7, size, generator=torch.Generator().manual_seed(0)), -1)
    torch.set_num_threads(1)
    want = entropies_of(table)
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        assert torch.equal(entropies_of(table), want)
        assert torch.equal(torch.cat([entropies_of(row[None]) for row in table]), want)


# ------------------------------------------------------------------------------------------------------ judges


CRITERIA = "criteria:\n" + "".join(
    f"  - {{name: c{i}, text: 'Is it {i}?', weight: {0.37 * i - 1:.2f}}}\n" for i in range(9)
)
COMPARES = "compare: {{schedule: {}, scores: {}}}\n"
RUBRICS = {
    "alone": 'template: "Q: {prompt}\\nA: {response}\\n{criterion}"\nlabels: {y: 1, n: 0, m: 0.25}\n' + CRITERIA,
    **{
        f"{schedule}, {scores}": judged.COMPARING[: judged.COMPARING.index("criteria")]
        + CRITERIA
        + COMPARES.format(schedule, scores)
        for schedule in ("round_robin", "circular")
        for scores in ("wins", "bradley_terry")
    },
}


@pytest.mark.parametrize(
    ("rubric", "name", "dtype"),
    [
        ("alone", "llama", "float32"),
        slow("round_robin, bradley_terry", "llama", "float32"),
        *(slow(rubric, name, "float32") for rubric in RUBRICS for name in ("gpt2", "mixtral")),
        *(slow(rubric, "llama", "bfloat16") for rubric in RUBRICS),
    ],
)
def test_judges_scores(rubric: str, name: str, dtype: str, tmp_path: Path) -> None:
    """A group is a prompt's responses, which are compared with each other or judged alone."""
    folder = zoo.tokenizer(zoo.language_model(name, tmp_path))
    path = judged.write(tmp_path, RUBRICS[rubric])

    def make(budget: int) -> Any:
        judge = build_judge(JudgeConfig(model=str(folder), rubric=path, dtype=dtype, max_batch_tokens=budget), ALONE)
        return lambda groups: judge_groups(judge, groups)

    random = np.random.default_rng(0)
    words = ["the", "answer", "is", "that", "no", "number", "I", "can", "name", "here"]
    groups = [
        [Sample(" ".join(random.choice(words, random.integers(1, 6))) + str(j), f"question {i}? ") for j in range(size)]
        for i, size in enumerate((3, 2, 4))
    ]
    assert_same_bits(make, groups)


def judge_groups(judge: JudgeEngine, groups: list[list[Sample]]) -> list[list[Any]]:
    """Asks about all groups at once as the service does, and returns the scores of each."""
    samples = [sample for group in groups for sample in group]
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    plan: Any = PlanOfSingles(judge.rubric, [*samples])
    if judge.rubric.compare is not None:
        plan = PlanOfPairs(judge.rubric, [*samples], numbers, "judge")
    texts = [str(text) for text in judgements.render_subjects(judge, plan.subjects)]
    request, rows = ScoreRequest(texts=texts), judge.text.encode(texts)
    said = judge.score([judgements.make_question(judge, row, request, i) for i, row in enumerate(rows)])
    logprobs = [one if isinstance(one, GuerdonError) else judge.labels.read(judgements._said(one)) for one in said]
    answers, _ = judge.rubric.read_answers(plan.subjects, logprobs, judge.config.verdict, 1.0, lambda _: "")
    results = plan.judge(answers).results
    return [[results[i] for i in np.flatnonzero(numbers == number)] for number in range(len(groups))]
