import pytest

from guerdon.errors import InvalidRequest
from guerdon.server.page.query import parse_query

KNOWN = ("window", "reference", "model", "beside", "until")


def test_what_is_left_out_is_ten_minutes_beside_those_before():
    what = parse_query({}, *KNOWN)
    assert what.window_s == 600
    assert what.compared(5000, 100) == (4400, 5000)


def test_a_reference_may_be_the_start_or_any_time():
    what = parse_query({"window": "60", "reference": "start"}, *KNOWN)
    assert what.compared(5000, 100) == (40, 160)
    assert what.compared(130, 100) == (40, 130)  # never the window itself
    what = parse_query({"reference": "1767225600.5-1767229200"}, *KNOWN)
    assert what.compared(5000, 100) == (1767225610, 1767229200)


def test_there_are_not_many_different_questions():
    assert {parse_query({"window": f"{3000 + i / 1000}"}, *KNOWN).window_s for i in range(1, 1000)} == {3010}
    assert {parse_query({"window": f"{86_000 + i / 1000}"}, *KNOWN).window_s for i in range(1, 1000)} == {86_040}
    assert parse_query({"model": "rm"}, *KNOWN).model == "rm"
    assert parse_query({"until": "1767225600.5"}, *KNOWN).until == 1767225610


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"window": "59"}, "window=59; give seconds from 60 to 86400"),
        ({"window": "86401"}, "window=86401"),
        ({"window": "nan"}, "window=nan"),
        ({"window": "an hour"}, "window=an hour"),
        ({"reference": "yesterday"}, "reference=yesterday; give previous, start, or FROM-TO"),
        ({"reference": "9-8"}, "reference=9-8"),
        ({"reference": "5-inf"}, "reference=5-inf"),
        ({"reference": "-5"}, "reference=-5"),
        ({"until": "-1"}, "until=-1; give seconds since 1970"),
        ({"until": "now"}, "until=now"),
        ({"widnow": "60"}, "unknown key 'widnow'; this path takes window, reference, model"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_wrong_is_named(query, told):
    with pytest.raises(InvalidRequest) as raised:
        parse_query(query, *KNOWN)
    assert told in str(raised.value)
