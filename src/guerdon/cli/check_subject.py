"""The server that `guerdon check` tries: asks it in one form, and keeps what the trials share."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import orjson

from guerdon.cli.check_forms import LENGTH_HEADER, AskedForm, Numbers, Sample, TextPair
from guerdon.client.addresses import Address
from guerdon.errors import Exit, GuerdonError

PROMPT = "What do you see?"
LENGTHS = (6, 11, 11, 17, 24, 31, 40, 52)
_ROOM, LEAST_LENGTH = 64, 32
"""A model that takes fewer tokens than the first gets shorter samples; with fewer than the second it is not tried."""
IDS = range(150, 250)
"""Ids that nearly every vocabulary has, and for no special tokens."""
AT_ONCE = 32
_WORDS = ("red", "tan", "sky", "sea", "oak", "elm", "fir", "ash", "ivy", "bay", "dew", "fog", "ice", "jam", "key")
"""Words of one length: a scorer of lengths tells none of them from another."""
_NUM_WORDS = 4
_VERSIONS = ("weights_version", "weight_version", "model_version", "weight_versions")


class FellShort(Exception):
    """The server does not hold what a trial asks; the text says what it did."""


class NoReply(FellShort):
    """No reply came in time."""


class NotApplicable(Exception):
    """The trial cannot be asked of this server; the text says why."""


@dataclass
class Reply:
    """A server's reply; `numbers` is None, and `why` not empty, if it has none where they should be."""

    status: int
    text: str
    numbers: Numbers | None = None
    why: str = ""


@dataclass
class Subject:
    """A server under trial: asks it in one form, and keeps what the trials share.

    `kinds` are the samples that it takes, the first of which most trials send. A request that gets 429 or 503 is sent
    again after each of `waits_s`.
    """

    address: Address
    form: AskedForm
    model: str
    timeout_s: float
    tolerance: float
    kinds: list[str] = field(default_factory=list)
    max_length: int | None = None
    reference: Any = None
    scale: float = 1.0
    noise: float = 0.0
    waits_s: tuple[float, ...] = ()
    num_busy: int = 0
    not_finite: int = 0
    num_replies: int = 0
    versions: set[str] = field(default_factory=set)

    @cached_property
    def http(self) -> httpx.Client:
        """The connections, which are closed when the process ends."""
        trusted, limits = verify(self.address), httpx.Limits(max_connections=2 * AT_ONCE)
        return httpx.Client(headers=self.address.headers, verify=trusted, timeout=self.timeout_s, limits=limits)

    @cached_property
    def base(self) -> list[Sample]:
        return [self.sample(length, seed) for seed, length in enumerate(self.lengths)]

    @cached_property
    def lengths(self) -> list[int]:
        """The numbers of ids of `base`."""
        return [length * min(self.max_length or _ROOM, _ROOM) // _ROOM for length in LENGTHS]

    @cached_property
    def alone(self) -> list[np.ndarray]:
        """The numbers of each sample of `base`, asked by itself."""
        return [self.numbers([sample])[0] for sample in self.base]

    def sample(self, length: int, seed: int, kind: str | None = None) -> Sample:
        """Returns a sample of so many ids; a text has a quarter as many short words."""
        rng = random.Random(seed)
        if (kind or self.kinds[0]) == "ids":
            return rng.choices(IDS, k=length)
        return TextPair(PROMPT, " ".join(rng.choices(_WORDS, k=max(1, length // 4))))

    def send(
        self, samples: Sequence[Sample], kind: str | None = None, body: bytes | None = None, model: str | None = None,
        **options: Any,
    ) -> Reply:  # fmt: skip
        """Returns the reply to one request; `body` replaces the form's own. Raises FellShort if none comes."""
        url, headers, own = self.request(samples, kind, model)
        if body is not None:
            headers.pop(LENGTH_HEADER, None)
        ask = partial(self.http.post, url, content=own if body is None else body, headers=headers, **options)
        try:
            try:
                got = ask()
            except (httpx.NetworkError, httpx.RemoteProtocolError):  # the server had closed a kept connection
                got = ask()
            for wait_s in self.waits_s:
                if got.status_code not in (429, 503):
                    break
                self.num_busy += 1
                time.sleep(wait_s)
                got = ask()
        except httpx.TimeoutException:
            raise NoReply(f"no reply within {self.timeout_s:.3g} s") from None
        except httpx.HTTPError as e:
            raise FellShort(f"the connection broke: {e or type(e).__name__}") from None
        reply = Reply(got.status_code, clip(got.text))
        if got.status_code == 200:
            try:
                reply.numbers = self.form.numbers(got.content, got.headers)
                self._note(got, reply.numbers)
            except (GuerdonError, ValueError) as e:
                reply.why = str(e)
                self.not_finite += "NaN" in got.text or "Infinity" in got.text
        return reply

    def request(self, samples: Sequence[Sample], kind: str | None, model: str | None) -> tuple[str, Any, bytes]:
        """Returns the URL, the headers and the body of a request."""
        model = self.model if model is None else model
        headers, body = self.form.request(samples, kind or self.kinds[0], model)
        return self.address.url + self.form.path.replace("$model", quote(model, safe="")), headers, body

    def _note(self, got: httpx.Response, numbers: Numbers) -> None:
        self.num_replies += 1
        self.not_finite += not all(np.isfinite(row).all() for row in numbers if row is not None)
        head = orjson.loads(got.content[: int(got.headers.get(LENGTH_HEADER, len(got.content)))])
        first = head[0] if isinstance(head, list) and head else head
        about = [first, *(first.get(name) for name in ("parameters", "meta_info"))] if isinstance(first, dict) else []
        found = [some[name] for some in about if isinstance(some, dict) for name in _VERSIONS if some.get(name)]
        found += [value for name, value in got.headers.items() if name.endswith(("weights-version", "model-version"))]
        self.versions.add(str(found[-1]) if found else "")

    def numbers(self, samples: Sequence[Sample], kind: str | None = None) -> list[np.ndarray]:
        """Returns the numbers of each sample by one request; raises FellShort if one has none, or no finite ones."""
        reply = self.send(samples, kind)
        if reply.status != 200:
            raise FellShort(f"{reply.status}: {reply.text}")
        if reply.numbers is None:
            raise FellShort(reply.why)
        if len(reply.numbers) != len(samples):
            raise FellShort(f"{len(reply.numbers)} answers to {len(samples)} samples")
        made = []
        for sample, row in zip(samples, reply.numbers, strict=True):
            if row is None or not len(row) or not np.isfinite(row).all():
                raise FellShort(
                    f"a sample got {'no number' if row is None or not len(row) else row[~np.isfinite(row)][0]}"
                )
            if self.form.gives == "logprobs" and isinstance(sample, list) and len(row) != len(sample) - 1:
                raise FellShort(f"{len(row)} log-probs for {len(sample)} tokens, of which the first has none")
            made.append(row)
        return made

    def together(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Returns the samples' numbers by one request, or by requests at the same time if each takes one sample."""
        if not self.form.takes_one(self.kinds[0]):
            return self.numbers(samples)
        with threads(len(samples)) as pool:
            return [row for (row,) in pool.map(lambda sample: self.numbers([sample]), samples)]

    def difference(self, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
        """Returns the largest difference, as a share of the spread of the samples' numbers."""
        for one, other in zip(got, want, strict=True):
            if len(one) != len(other):
                raise FellShort(f"{len(one)} numbers in place of {len(other)}")
        return max(float(np.abs(one - other).max()) for one, other in zip(got, want, strict=True)) / self.scale

    def expect(self, got: Sequence[np.ndarray], want: Sequence[np.ndarray], what: str) -> str:
        """Returns by how much `got` differs; raises FellShort beyond the tolerance."""
        found = self.difference(got, want)
        if found > self.tolerance:
            raise FellShort(f"{what} changes scores by {found:.2g} of their spread")
        return "the same bits" if not found else f"within {found:.1g} of the scores' spread"

    def expect_refusal(self, reply: Reply, what: str) -> None:
        """Raises FellShort unless the reply is a 4xx that shows no traceback."""
        if reply.status == 200:
            given = reply.numbers if reply.numbers is not None else reply.text
            raise FellShort(f"{what} got 200: {shown(given)}")
        if not 400 <= reply.status < 500:
            raise FellShort(f"{what} got {reply.status}: {reply.text}")
        if "Traceback" in reply.text:
            raise FellShort(f"{what} shows a traceback")

    def expect_alive(self) -> None:
        """Raises FellShort unless the first sample still has its number."""
        self.expect(self.numbers(self.base[:1]), self.alone[:1], "what came before")

    def wanted(self, sample: Sample) -> dict[str, np.ndarray]:
        """Returns the reference's numbers for each way to read the sample."""
        assert self.reference is not None
        ways = self.reference.readings(sample) if isinstance(sample, TextPair) else {"ids": sample}
        return {way: self.reference.numbers(ids) for way, ids in ways.items() if ids}

    def nearest(self, got: np.ndarray, wanted: dict[str, np.ndarray]) -> tuple[str, float]:
        """Returns which of the numbers is nearest, and how far it is."""
        rows = {name: row.mean(keepdims=True) if len(got) == 1 < len(row) else row for name, row in wanted.items()}
        far = {name: self.difference([got], [row]) if len(got) == len(row) else np.inf for name, row in rows.items()}
        return min(far.items(), key=lambda entry: entry[1])

    def needs_reference(self, *, with_tokenizer: bool = False) -> None:
        """Raises NotApplicable without a reference for this form."""
        if self.reference is None:
            raise NotApplicable("needs --reference, for rewards or log-probs")
        if with_tokenizer and self.reference.tokenizer is None:
            raise NotApplicable("the reference has no tokenizer")

    def needs_texts(self) -> None:
        if "texts" not in self.kinds:
            raise NotApplicable("the server takes no text in this form")

    def needs_content(self) -> None:
        """Raises NotApplicable if a change of content of equal length may leave a text's score as it is."""
        if self.kinds[0] == "texts" and self._num_told_apart < _NUM_WORDS:
            who = "texts of equal length score alike, whatever they say"
            raise NotApplicable(who if self._num_told_apart == 1 else "scores are coarse: some words score alike")

    @cached_property
    def _num_told_apart(self) -> int:
        return len({self.numbers([TextPair(PROMPT, word)])[0].tobytes() for word in _WORDS[:_NUM_WORDS]})


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool that does not outlive Ctrl-C: Python would wait for each open request, and nothing needs clearing up."""
    with ThreadPoolExecutor(count) as pool:
        try:
            yield pool
        except KeyboardInterrupt:
            os._exit(Exit.INTERRUPTED)


def clip(text: str, most: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def shown(given: Any) -> str:
    rows = (
        given if isinstance(given, str) else [None if row is None else np.round(row[:3], 4).tolist() for row in given]
    )
    return clip(str(rows), 50)


def verify(address: Address) -> Any:
    return address.credentials.tls() if address.has_tls else False
