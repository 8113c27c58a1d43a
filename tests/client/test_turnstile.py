"""The order of calls, by hand and by all that can happen."""

from hypothesis import given
from hypothesis import strategies as st

from guerdon.client.ordering import Turnstile


def test_those_that_go_together_go_at_once_and_one_alone_waits_for_them() -> None:
    line: Turnstile[str] = Turnstile()
    assert line.arrive("infer 1", alone=False) == ["infer 1"]
    assert line.arrive("infer 2", alone=False) == ["infer 2"]
    assert line.arrive("train 1", alone=True) == []
    assert line.arrive("train 2", alone=True) == []
    assert line.arrive("infer 3", alone=False) == []
    assert line.arrive("infer 4", alone=False) == []
    assert line.leave("infer 2") == []
    assert line.leave("infer 1") == ["train 1"]
    assert line.leave("train 1") == ["train 2"]
    assert line.leave("train 2") == ["infer 3", "infer 4"]


def test_one_that_gives_up_delays_nobody() -> None:
    line: Turnstile[str] = Turnstile()
    line.arrive("infer 1", alone=False)
    line.arrive("train 1", alone=True)
    assert line.arrive("infer 2", alone=False) == []
    assert line.leave("train 1") == ["infer 2"]
    assert line.leave("infer 1") == []
    assert line.arrive("train 2", alone=True) == []
    assert line.leave("train 2") == []
    assert line.leave("infer 2") == []
    assert line.arrive("train 3", alone=True) == ["train 3"]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_nobody_goes_before_those_it_must_wait_for_and_all_go_in_the_end(events: list[tuple[bool, int]]) -> None:
    line: Turnstile[int] = Turnstile()
    alone: list[bool] = []
    gone: list[int] = []
    inside: list[int] = []

    def let_in(numbers: list[int]) -> None:
        for n in numbers:
            assert not any(alone[m] or alone[n] for m in inside)
            inside.append(n)
            gone.append(n)

    def out(which: int) -> None:
        n = inside.pop(which % len(inside))
        let_in(line.leave(n))

    for is_alone, which in events:
        if which < 6 or not inside:
            alone.append(is_alone)
            let_in(line.arrive(len(alone) - 1, alone=is_alone))
        else:
            out(which)
    while inside:
        out(0)
    assert gone == list(range(len(alone)))
