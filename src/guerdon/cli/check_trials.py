"""The trials of `guerdon check`: each trap of such servers as a question to one, from outside."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import httpx
import numpy as np

from guerdon.cli.check_forms import KServe, Sample, TextPair
from guerdon.cli.check_subject import AT_ONCE, IDS, PROMPT, FellShort, NotApplicable, Subject, clip, shown, threads

_NO_ID = 10_000_000
_BEYOND = 16
"""Tokens by which a sequence exceeds the limit."""
_UNICODE = ("naïve café", "日本語のテキスト", "שלום", "👩‍👩‍👧 🇫🇷", "e\u0301 a\u200db", "\U0001d11e ﬁ")
_UNFINISHED = 8
_OF_BFLOAT16 = 0.05
"""The tolerance for a server in bfloat16."""


@dataclass(frozen=True)
class ServerTrial:
    """A trap as a question to a server: `run` returns why it held, or raises FellShort or NotApplicable."""

    name: str
    asks: str
    run: Callable[[Subject], str]


TRIALS: list[ServerTrial] = []
"""All trials, in the order in which they run: the first makes what the others compare with."""


def trial(name: str, asks: str) -> Callable[[Callable[[Subject], str]], Callable[[Subject], str]]:
    """Adds a function to the trials."""

    def add(run: Callable[[Subject], str]) -> Callable[[Subject], str]:
        TRIALS.append(ServerTrial(name, asks, run))
        return run

    return add


@trial("answers", "Different samples get finite scores, which are not all the same.")
def _answers(p: Subject) -> str:
    rows = p.alone
    p.scale = float(np.std(np.concatenate(rows)))
    different = len({row.tobytes() for row in rows})
    if not p.scale or different == 1:
        raise FellShort(f"{len(rows)} different samples get the scores {shown(rows)}")
    some = f", of {different} different scores" if different < len(rows) else ""
    return f"{len(rows)} samples of {min(p.lengths)} to {max(p.lengths)} tokens{some}; their spread is {p.scale:.3g}"


@trial("repeat", "The same request again gets the same scores.")
def _repeat(p: Subject) -> str:
    again = [p.numbers([sample])[0] for sample in p.base for _ in range(2)]
    want = [row for row in p.alone for _ in range(2)]
    p.noise = p.difference(again, want)
    return p.expect(again, want, "asking again")


@trial("reference", "Scores are those of the checkpoint: alone, without padding, in float32, raw.")
def _reference(p: Subject) -> str:
    p.needs_reference(with_tokenizer=p.kinds[0] == "texts")
    ways, far = [], 0.0
    for sample, got in zip(p.base, p.alone, strict=True):
        way, distance = p.nearest(got, p.wanted(sample))
        if distance > p.tolerance:
            raise FellShort(f"off by {distance:.2g} of the spread{_explained(p, sample, got, distance)}")
        ways.append(way)
        far = max(far, distance)
    read = "" if p.kinds[0] == "ids" else f"; texts are read {max(ways, key=ways.count)}"
    return f"within {far:.1g} of the scores' spread{read}"


def _explained(p: Subject, sample: Sample, got: np.ndarray, distance: float) -> str:
    """Returns which known mistake makes these numbers of the reference's."""
    if distance <= _OF_BFLOAT16:  # so near, a mistake would explain it by chance
        return f"; if the server has bfloat16, give --tolerance {_OF_BFLOAT16}"
    ways = p.reference.readings(sample) if isinstance(sample, TextPair) else {"ids": sample}
    made = {
        f"{name}, {way}": row for way, ids in ways.items() if ids for name, row in p.reference.mistakes(ids).items()
    }
    if isinstance(sample, TextPair):
        stripped = p.wanted(TextPair(*(part.strip() for part in sample)))
        made |= {f"the score of the text without white space at its end, {way}": row for way, row in stripped.items()}
    name, far = p.nearest(got, made)
    return f": it is {name.removesuffix(', ids')}" if far <= p.tolerance else ""


@trial("batch", "A sample scores in a batch as alone.")
def _batch(p: Subject) -> str:
    return p.expect(p.together(p.base), p.alone, "company")


@trial("padding", "A short sample beside a long one scores as alone, whatever pads it.")
def _padding(p: Subject) -> str:
    pair, want = [p.base[0], p.base[-1]], [p.alone[0], p.alone[-1]]
    got = [*p.together(pair), *p.together(pair[::-1])[::-1]]
    why = p.expect(got, want * 2, "a longer neighbour")
    if isinstance(p.form, KServe) and p.kinds[0] == "ids" and not p.form.takes_one("ids"):
        other = replace(p, form=replace(p.form, pad=IDS[7])).together(pair)
        p.expect(other, want, f"id {IDS[7]} behind a row's length, in place of 0,")
    return why


@trial("neighbours", "Other samples of equal lengths in its place change nothing.")
def _neighbours(p: Subject) -> str:
    own, length = p.base[3], p.lengths[3]
    company = [[p.sample(length, 100 + 10 * i + j) for j in range(3)] for i in range(3)]
    rows = [p.together([own, *some])[0] for some in (*company, company[0], company[0])]
    noise = max(p.noise, p.difference(rows[3:], [rows[0]] * 2))
    found, bound = p.difference(rows[1:3], [rows[0]] * 2), min(p.tolerance, max(1e-5, 4 * noise))
    if found > bound:
        raise FellShort(f"other samples of equal length change a score by {found:.2g} of the spread")
    return "the same bits beside others of equal length" if not found else f"within {found:.1g} of the scores' spread"


@trial("order", "Scores come in the order of the samples, also if one comes twice.")
def _order(p: Subject) -> str:
    twice = [*p.base[::-1], p.base[2]]
    return p.expect(p.together(twice), [*p.alone[::-1], p.alone[2]], "another order")


@trial("concurrency", f"{AT_ONCE} requests at once get their own scores, or a 429 or 503.")
def _concurrency(p: Subject) -> str:
    places, before = [i % len(p.base) for i in range(AT_ONCE)], p.num_busy
    with threads(AT_ONCE) as pool:
        replies = list(pool.map(lambda i: p.send([p.base[i]]), places))
    for i, reply in zip(places, replies, strict=True):
        if reply.status in (429, 503):
            continue
        if reply.status != 200 or not reply.numbers or reply.numbers[0] is None:
            raise FellShort(f"one of {AT_ONCE} requests at once got {reply.status}: {reply.why or reply.text}")
        p.expect([reply.numbers[0]], [p.alone[i]], f"being one of {AT_ONCE} requests at once")
    busy = p.num_busy - before
    return f"{AT_ONCE} requests at once" + (f"; {busy} times one was told to come back" if busy else "")


@trial("endings", "An EOS at the end, or inside, is read as by the checkpoint.")
def _endings(p: Subject) -> str:
    p.needs_reference(with_tokenizer=True)
    tokenizer = p.reference.tokenizer
    if tokenizer.eos_token is None:
        raise NotApplicable("the reference's tokenizer has no EOS")
    eos, text = tokenizer.eos_token_id, tokenizer.eos_token
    found: dict[str, Sample] = {
        "EOS": TextPair(PROMPT, f"red{text}"),
        "EOS and a line break": TextPair(PROMPT, f"red{text}\n"),
        "a line break": TextPair(PROMPT, "red\n"),
    }
    if p.kinds[0] == "ids":
        row = list(IDS[:20])
        found = {"EOS": [*row, eos], "two EOS": [*row, eos, eos], "an EOS inside": [*row, eos, *row[:4]]}
    for what, sample in found.items():
        (got,) = p.numbers([sample])
        _, far = p.nearest(got, p.wanted(sample))
        if far > p.tolerance:
            raise FellShort(f"with {what} a score is off by {far:.2g}{_explained(p, sample, got, far)}")
    return f"as the reference with {', '.join(found)}"


@trial("BOS", "A text that begins with the BOS gets no second one.")
def _bos(p: Subject) -> str:
    p.needs_texts()
    p.needs_reference(with_tokenizer=True)
    tokenizer = p.reference.tokenizer
    if tokenizer.bos_token is None or tokenizer.cls_token is not None:
        raise NotApplicable("the reference's tokenizer has no BOS")
    pair, bos = TextPair(tokenizer.bos_token + PROMPT, "red sea"), tokenizer.bos_token_id
    wanted: dict[str, np.ndarray] = {}
    for ids in p.reference.readings(pair).values():
        bare = ids[next((i for i, token in enumerate(ids) if token != bos), 0) :]
        wanted |= {
            f"once {bare}": p.reference.numbers([bos, *bare]),
            f"twice {bare}": p.reference.numbers([bos, bos, *bare]),
        }
    name, far = p.nearest(p.numbers([pair], "texts")[0], wanted)
    if far > p.tolerance:
        raise FellShort(f"off by {far:.2g} of the spread from one BOS and from two")
    if name.startswith("twice"):
        raise FellShort("a text that begins with the BOS gets a second one")
    return "a text that begins with the BOS has one"


@trial("unicode", "No letter is replaced; a lone surrogate is no 5xx.")
def _unicode(p: Subject) -> str:
    p.needs_texts()
    p.needs_content()
    for text in _UNICODE:
        asked = "".join("?" if ord(letter) > 127 else letter for letter in text)
        (got,), (other,) = (p.numbers([TextPair(PROMPT, some)], "texts") for some in (text, asked))
        if len(got) == len(other) and p.difference([got], [other]) <= p.noise:
            raise FellShort(f"{text!r} scores as {asked!r}")
        if p.reference is not None and p.reference.tokenizer is not None:
            _, far = p.nearest(got, p.wanted(TextPair(PROMPT, text)))
            if far > p.tolerance:
                raise FellShort(f"{text!r} is off by {far:.2g} of the spread")
    if not isinstance(p.form, KServe):
        _, _, body = p.request([TextPair(PROMPT, "a SURROGATE")], "texts", None)
        reply = p.send([], "texts", body.replace(b"SURROGATE", b"\\ud800"))
        if reply.status >= 500:
            raise FellShort(f"a lone surrogate got {reply.status}: {reply.text}")
    return f"{len(_UNICODE)} scripts are told from question marks"


def _reads(p: Subject, sample: Sample, *, last: bool) -> bool:
    """Whether the first or last tokens of a sample change its numbers."""
    other = p.sample(_BEYOND if isinstance(sample, list) else 4 * _BEYOND, 999)
    if isinstance(sample, list) and isinstance(other, list):
        changed: Sample = [*sample[:-_BEYOND], *other] if last else [*other, *sample[_BEYOND:]]
    else:
        assert isinstance(sample, TextPair) and isinstance(other, TextPair)
        size = len(other.response)
        kept = sample.response[:-size] + other.response if last else other.response + sample.response[size:]
        changed = TextPair(sample.prompt, kept)
    return p.difference(p.numbers([changed]), p.numbers([sample])) > 2 * p.noise


@trial("long inputs", "A sample near the limit is scored to its end, as by the checkpoint, and beside a short one.")
def _long(p: Subject) -> str:
    p.needs_content()
    size = min(p.max_length or 512, 2048) - 4
    sample = p.sample(size if p.kinds[0] == "ids" else size // 3, 50)
    while p.max_length is None and size > 64 and 400 <= p.send([sample]).status < 500:  # a limit that nobody stated
        size //= 2
        sample = p.sample(size if p.kinds[0] == "ids" else size // 3, 50)
    want = [p.alone[0], p.numbers([sample])[0]]
    if not _reads(p, sample, last=True):
        raise FellShort(f"the last of about {size} tokens change nothing")
    if p.reference is not None and (p.kinds[0] == "ids" or p.reference.tokenizer is not None):
        _, far = p.nearest(want[1], p.wanted(sample))
        if far > p.tolerance:
            raise FellShort(f"of about {size} tokens a score is off by {far:.2g}{_explained(p, sample, want[1], far)}")
    return f"about {size} tokens; beside a short sample " + p.expect(p.together([p.base[0], sample]), want, "company")


@trial("truncation", "A sample beyond the limit is refused, never cut without being asked to.")
def _truncation(p: Subject) -> str:
    p.needs_content()
    lengths = [p.max_length + _BEYOND] if p.max_length else [512 << i for i in range(5)]
    for length in lengths:
        sample = p.sample(length if p.kinds[0] == "ids" else 4 * length, 60)
        reply = p.send([sample])
        if 400 <= reply.status < 500 and "Traceback" not in reply.text:
            p.expect_alive()
            return f"{length:,} tokens are refused: {reply.text}"
        p.numbers([sample])
        if not _reads(p, sample, last=True):
            raise FellShort(f"of {length:,} tokens the last are cut off without a word")
        if not _reads(p, sample, last=False) and _reads(p, p.sample(p.lengths[-1], 61), last=False):
            raise FellShort(f"of {length:,} tokens the first are cut off without a word")
    if p.max_length:
        raise FellShort(f"{lengths[-1]:,} tokens are scored, and the model takes {p.max_length:,}")
    return f"{lengths[-1]:,} tokens are read from first to last"


@trial("empty", "No samples, or none of their tokens, is a 4xx and no score.")
def _empty(p: Subject) -> str:
    kind = p.kinds[0]
    if not p.form.takes_one(kind):
        reply = p.send([])
        if reply.numbers != []:
            p.expect_refusal(reply, "an empty list")
    if kind == "ids" and p.form.gives != "labels":  # an empty item leaves the query
        p.expect_refusal(p.send([[]]), "a sample without tokens")
    if kind == "texts":  # a model may read special tokens there
        reply = p.send([TextPair("", "")])
        if reply.status != 200 or not reply.numbers or reply.numbers[0] is None:
            p.expect_refusal(reply, "an empty text")
    p.expect_alive()
    return "nothing gets a number"


@trial("unknown ids", "Ids outside the vocabulary are a 4xx.")
def _unknown(p: Subject) -> str:
    if "ids" not in p.kinds:
        raise NotApplicable("the server takes no token ids in this form")
    for token in (_NO_ID, -1):
        p.expect_refusal(p.send([[160, token, 161]], "ids"), f"id {token}")
    p.expect_alive()
    return f"ids {_NO_ID:,} and -1 are refused"


@trial("malformed", "A malformed body is a 4xx without a traceback.")
def _malformed(p: Subject) -> str:
    for what, body in {"half a JSON": b'{"a": [', "a body without samples": b"{}"}.items():
        p.expect_refusal(p.send(p.base[:1], body=body), what)
    if not isinstance(p.form, KServe):
        p.expect_refusal(p.send([{"a": 1}]), "an object as a sample")  # type: ignore[list-item]
    p.expect_alive()
    return "each is refused"


@trial("names", "A request for a model that is not served is refused.")
def _names(p: Subject) -> str:
    if not p.form.names_model:
        raise NotApplicable("requests name no model in this form")
    p.expect_refusal(p.send(p.base[:1], model="no-such-model"), "a model that is not served")
    return "another model's name is refused"


@trial("one bad", "A bad sample gets no score, and neighbours keep theirs.")
def _one_bad(p: Subject) -> str:
    kind = p.kinds[0]
    bad: Sample = [160, _NO_ID, 161] if kind == "ids" else None
    with threads(16) as pool:
        replies = list(pool.map(lambda i: p.send([bad if i % 4 == 1 else p.base[i % 8]]), range(16)))
    for i, reply in enumerate(replies):
        if i % 4 != 1 and reply.status not in (429, 503):
            if reply.status != 200 or not reply.numbers or reply.numbers[0] is None:
                raise FellShort(f"beside a bad request a good one got {reply.status}: {reply.why or reply.text}")
            p.expect([reply.numbers[0]], [p.alone[i % 8]], "a bad request at the same time")
    if not p.form.takes_one(kind):
        reply = p.send([p.base[0], bad, p.base[1]])
        rows = reply.numbers or []
        if reply.status == 200 and len(rows) == 3 and rows[0] is not None and rows[2] is not None and rows[1] is None:
            p.expect([rows[0], rows[2]], p.alone[:2], "a bad sample")
        else:
            p.expect_refusal(reply, "a batch with a bad sample")
    return "neighbours of bad samples and bad requests get their scores"


@trial("time-outs", "Clients that stall or leave delay nobody.")
def _timeouts(p: Subject) -> str:
    url, headers, body = p.request(p.base[:1], None, None)
    gate, sent = threading.Event(), threading.Semaphore(0)

    def half() -> Iterator[bytes]:
        yield body[: len(body) // 2]
        sent.release()
        gate.wait(4 * p.timeout_s)
        raise ConnectionAbortedError

    def leave() -> None:
        with contextlib.suppress(httpx.HTTPError, ConnectionAbortedError):
            p.http.post(url, content=half(), headers=headers | {"Content-Length": str(len(body))})

    with threads(_UNFINISHED) as pool:
        try:
            for _ in range(_UNFINISHED):
                pool.submit(leave)
            for _ in range(_UNFINISHED):
                sent.acquire(timeout=p.timeout_s)
            p.expect_alive()
        except FellShort as e:
            raise FellShort(f"beside {_UNFINISHED} unfinished requests: {e}") from None
        finally:
            gate.set()
    for _ in range(_UNFINISHED):
        with contextlib.suppress(FellShort):
            p.send(p.base[-1:], timeout=httpx.Timeout(p.timeout_s, read=1e-3))
    p.expect_alive()
    return f"{_UNFINISHED} unfinished and {_UNFINISHED} abandoned requests delay nobody"


@trial("NaN", "No reply has a number that is not finite.")
def _nan(p: Subject) -> str:
    if p.not_finite:
        raise FellShort(f"{p.not_finite} replies with status 200 have a number that is not finite")
    return f"all numbers of {p.num_replies} replies are finite"


@trial("versions", "Every reply names the version of its weights, always the same.")
def _versions(p: Subject) -> str:
    if p.versions == {""}:
        raise FellShort("no reply names the version of its weights")
    if len(p.versions) > 1:
        raise FellShort(f"replies name {len(p.versions)} versions: {clip(str(sorted(p.versions)))}")
    return f"each reply names its weights: {clip(next(iter(p.versions), ''), 24)}"
