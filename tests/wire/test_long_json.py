"""JSON that is read in pieces has the values and the faults that a decoder finds in it at once."""

import json
from random import Random
from typing import Any

import msgspec
import pytest

from guerdon.errors import InvalidRequest
from guerdon.wire import bodies, kserve, long_json
from guerdon.wire.forms import ALL_FORMS

KINDS = sorted({kind for form in ALL_FORMS.values() for kind in form.bodies}, key=lambda kind: kind.__name__)
KINDS += [kserve.RequestBody, kserve.ReplyBody]
SCALARS = [None, True, 0, -5, 2**63, 1.5, "", "a,b]", "\\", '"', "é\u2028", "x" * 40, "[{"]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Random:
    """Pieces of a few bytes, as drawn by the random numbers that it gives."""
    monkeypatch.setattr(long_json, "_MAX_PAIRS_BYTES", 1 << 20)
    monkeypatch.setattr(long_json, "PIECE", 3)
    return Random(0)


def some_value(random: Random, depth: int = 0) -> Any:
    draw = random.random()
    if depth > 3 or draw < 0.45:
        return random.choice([*SCALARS, {}, []])
    count = random.randrange(1, 9)
    if draw < 0.8:
        return [some_value(random, depth + 1) for _ in range(count)]
    return {
        random.choice(["a", "role", "content", "input", 'q"', "é", ""]): some_value(random, 3) for _ in range(count)
    }


def like(random: Random, value: Any) -> Any:
    """A value of about the same form."""
    if random.random() < 0.03:
        return some_value(random, 2)
    if isinstance(value, list):
        return [like(random, random.choice(value)) for _ in range(random.randrange(1, 9))] if value else []
    if isinstance(value, dict):
        return {key: like(random, inner) for key, inner in value.items()}
    return value * 3 if isinstance(value, str) and random.random() < 0.2 else value


def damaged(random: Random, text: bytes) -> bytes:
    made = bytearray(text.decode().encode("ascii", "backslashreplace"))  # of an unknown key's UTF-8 nothing is asked
    at, mark = random.randrange(len(made)), random.choice(b'[]{},:"\\1a ')
    match random.randrange(4):
        case 0:
            del made[at]
        case 1:
            made.insert(at, mark)
        case 2:
            made[at] = mark
        case 3:
            del made[at:]
    return bytes(made)


def test_pieces_give_what_a_decoder_gives_and_refuse_what_it_refuses(
    tiny: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {True: 0, False: 0}
    for _ in range(400):
        monkeypatch.setattr(long_json, "PIECE", tiny.choice([3, 9, 20, 60]))
        kind = tiny.choice([*KINDS, Any, dict[str, Any]])
        example = getattr(kind, "example", "...")
        value = some_value(tiny) if "..." in example else like(tiny, json.loads(example))
        text = json.dumps(value, ensure_ascii=tiny.random() < 0.5, indent=tiny.choice([None, 1])).encode()
        text = damaged(tiny, text) if tiny.random() < 0.5 else text
        try:
            wanted = msgspec.json.encode(msgspec.json.decode(text, type=kind))
        except (msgspec.MsgspecError, InvalidRequest):
            wanted = None
        try:
            made = msgspec.json.encode(bodies.read(text, kind))
        except InvalidRequest:
            made = None
        assert made == wanted, (kind, long_json.PIECE, text)
        counts[made is None] += 1
    assert min(counts.values()) > 100


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("/v1/completions", '{"prompt": [[1, 2], [3, "a", 4]]}', r"prompt\[1\]\[1\] is a string; send a token id"),
        ("/v1/completions", '{"prompt": [1, 2, 3, 4, 5, -6]}', r"prompt\[5\] is -6; send"),
        ("/v1/completions", '{"prompt": {"a": [1, 2, 3]}}', "prompt is an object; send a string"),
        ("/v1/completions", '{"prompt": [   ]}', "prompt is an empty list; send"),
        ("/v1/completions", '{"prompt": "abcdefg", "prompt": "abcdefg"}', "the key 'prompt' twice"),
        ("/score", '{"text_1": "abcdef", "text_2": ["abcdef", "abcdef", 7]}', r"text_2\[2\] is 7; send a string"),
        ("/get_reward", '{"query": ["abcdef"], "labels": [1, 2,, 3]}', "the body is not valid JSON"),
        ("/get_reward", '{"query": ["abcdef"]} {}', "more follows its end"),
        ("/get_reward", '{"query": ["abcdef", ]}', "a value is missing"),
        ("/get_reward", '{"query" ["abcdef"]}', "a colon is missing"),
        ("/get_reward", '{"query": ["abcdef"}', r"a comma or \] is missing"),
        ("/get_reward", "[" * 90 + "]" * 90, "nested too deep"),
    ],
)
def test_faults_are_told_with_their_place(kind: str, text: str, message: str, tiny: Random) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ALL_FORMS[kind].read(text.encode(), {})


def test_a_long_string_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "_PART", 50)
    monkeypatch.setattr(long_json, "PIECE", 20)
    random = Random(1)
    for _ in range(300):
        words = ["plain words of text", "é", "日本", "\U0001f600", '"', "\\", "\n", "\\u0041", "\ud83d"]
        value = "".join(random.choice(words) for _ in range(random.randrange(30)))
        value = value.encode("utf-8", "ignore").decode()
        for is_ascii in (True, False):
            text = json.dumps([value], ensure_ascii=is_ascii).encode()
            assert bodies.parse(text) == [value]
    with pytest.raises(InvalidRequest, match=r"prompt\[0\]\[0\] is a string; send a token id"):
        ALL_FORMS["/v1/completions"].read(json.dumps({"prompt": [["plain words of text" * 9]]}).encode(), {})


@pytest.mark.parametrize("value", ["x" * 200, [1] * 200, {"a": [1] * 200}, 7, None])
def test_what_is_only_looked_at_has_its_kind(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "_PART", 50)
    monkeypatch.setattr(long_json, "PIECE", 20)

    class Keys(msgspec.Struct):
        query: msgspec.Raw = msgspec.Raw(b"null")
        other: Any = None

    made = bodies.read(json.dumps({"query": value, "other": value, "more": [value]}).encode(), Keys)
    assert made.other == value
    assert type(json.loads(bytes(made.query))) is type(value)


def test_what_can_only_be_read_at_once_is_bounded() -> None:
    keys = b"{%s}" % b",".join(b'"key %d":1' % i for i in range(100_000))
    with pytest.raises(InvalidRequest, match="an object has more than 524,288 bytes of short values"):
        bodies.parse(keys)
    with pytest.raises(InvalidRequest, match="a string has more than 64 MiB"):
        bodies.parse(b'["%s"]' % (b"a" * (long_json.MAX_STRING_BYTES + long_json.PIECE)))
    with pytest.raises(InvalidRequest, match="invalid escape"):
        bodies.parse(b'["%s"]' % (b"\\u12" * 1_000_000))
    for twice in (b'"a":1,"a":[%s1]', b'"a":[%s1],"a":1'):
        with pytest.raises(InvalidRequest, match="the key 'a' twice"):
            bodies.parse(b"{%s}" % (twice % (b"1," * 100_000)))
    nested = b'{"a":%s,"b":%s}' % (
        b"[%s1]" % (b"1," * 100_000),
        b'{"c":%s}' % keys[:100_000].rpartition(b",")[0] + b"}",
    )
    assert len(bodies.parse(nested)["a"]) == 100_001
