"""The report about pairs of a chosen and a rejected response: what it counts, and RewardBench's sections."""

import math
from typing import Any

import pytest

from guerdon.client.pair_report import MOST_LINES, REWARDBENCH, UNNAMED, PairReport


def report(*rows: tuple[dict[str, Any], float | None, float | None]) -> PairReport:
    made = PairReport()
    for row, chosen, rejected in rows:
        made.add(row, [chosen, rejected])
    return made


def test_a_tie_is_wrong_and_a_failed_pair_does_not_count() -> None:
    found = report(({}, 2.0, 1.0), ({}, 1.0, 4.0), ({}, 3.0, 3.0), ({}, None, 1.0), ({}, 1.0, None), ({}, 9.0, 2.5))
    total = found.total()
    assert (len(found), len(total), total.num_failed, total.num_ties) == (6, 4, 2, 1)
    assert total.accuracy == 0.5
    assert total.margins.tolist() == [1.0, -3.0, 0.0, 6.5]
    header, line = str(found).splitlines()  # one category: no line of its own
    assert header.split() == ["pairs", "failed", "ties", "accuracy", "mean", "margin", "median"]
    assert line.split() == ["all", "pairs", "6", "2", "1", "50.0%", "1.1250", "0.5000"]


def test_pairs_without_scores_have_no_accuracy() -> None:
    found = report(({}, None, 1.0))
    assert math.isnan(found.total().accuracy)
    assert str(found).splitlines()[1].split() == ["all", "pairs", "1", "1", "0", "-", "-", "-"]


def test_categories_are_named_by_subset_or_category() -> None:
    found = report(
        ({"subset": "b", "category": "x"}, 1.0, 0.0), ({"category": "a"}, 0.0, 1.0), ({"category": None}, 1.0, 0.0),
        ({"subset": 7}, 1.0, 0.0), ({"subset": "b"}, 0.0, 1.0),
    )  # fmt: skip
    assert {name: pairs.accuracy for name, pairs in found.categories.items()} == {"b": 0.5, "a": 0, UNNAMED: 1, "7": 1}
    assert [line.split()[0] for line in str(found).splitlines()[1:]] == ["b", "a", UNNAMED, "7", "all"]
    assert not found.sections()


def test_a_table_shows_the_largest_categories() -> None:
    rows = [({"category": f"c{i}"}, 1.0, 0.0) for i in range(MOST_LINES + 3)]
    found = report(*rows, rows[-1])
    lines = str(found).splitlines()
    assert len(lines) == MOST_LINES + 3
    assert lines[-3].startswith(f"c{MOST_LINES + 2} ")
    assert lines[-2] == "... 3 smaller categories"


@pytest.mark.parametrize("section", REWARDBENCH)
def test_a_section_weights_its_subsets_as_rewardbench_does(section: str) -> None:
    first, *others = REWARDBENCH[section]
    weights = REWARDBENCH[section]
    found = report(*(({"subset": s}, float(s == first), 0.5) for s in (first, *others)))
    (made,) = found.sections()
    assert (made.name, made.is_whole) == (section, True)
    assert made.accuracy == pytest.approx(weights[first] / sum(weights.values()))


def test_sections_of_some_subsets_have_no_mean() -> None:
    rows = [({"subset": "math-prm"}, 1.0, 0.0), ({"subset": "hep-go"}, 0.0, 1.0), ({"subset": "hep-js"}, None, 1.0)]
    found = report(*rows)
    (made,) = found.sections()
    assert (made.subsets, made.is_whole) == (("math-prm", "hep-go"), False)
    assert made.accuracy == pytest.approx(984 / (984 + 164))
    assert str(found).splitlines()[-2:] == ["RewardBench  subsets  accuracy", "Reasoning        2/7     85.7%"]
    assert not report(*rows, ({"subset": "mine"}, 1.0, 0.0)).sections()


def test_all_subsets_have_a_mean_of_the_sections() -> None:
    right = {"Chat": 1.0, "Chat Hard": 0.0, "Safety": 1.0, "Reasoning": 1.0}
    rows = [({"subset": subset}, right[name], 0.5) for name, subsets in REWARDBENCH.items() for subset in subsets]
    assert len(rows) == 23
    lines = str(report(*rows)).splitlines()
    assert [line.split() for line in lines[-5:]] == [
        ["Chat", "5/5", "100.0%"], ["Chat", "Hard", "6/6", "0.0%"], ["Safety", "5/5", "100.0%"],
        ["Reasoning", "7/7", "100.0%"], ["mean", "75.0%"],
    ]  # fmt: skip
