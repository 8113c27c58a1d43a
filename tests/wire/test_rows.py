from __future__ import annotations

import pytest

from guerdon.core import Score, ScoreReply
from guerdon.errors import Overloaded, ServerFault
from guerdon.wire.rows import groups_of, scores_of


def test_groups_are_the_same_in_every_process():
    assert groups_of(["a", "ü", "", "a"]).tolist() == [3904355907, 1675192789, 0, 3904355907]
    assert groups_of([]).tolist() == []


def test_what_is_no_proper_text_has_a_group_too():
    assert len({*groups_of(["\ud800", "\ud801", "?"]).tolist()}) == 3


def test_an_error_that_befell_many_requests_is_told_to_each_as_its_own():
    shared = ServerFault("the server cannot compute any more")
    for _ in range(3):
        with pytest.raises(ServerFault, match=r"^row 1: the server cannot compute any more$"):
            scores_of(ScoreReply([Score(1.0), shared], [1, 1], "v"))
    assert str(shared) == "the server cannot compute any more"
    with pytest.raises(Overloaded) as told:
        scores_of(ScoreReply([Overloaded("full", 2.5)], [1], "v"))
    assert told.value.retry_after_s == 2.5
