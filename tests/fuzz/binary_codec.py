"""atheris, which follows the branches that an input takes, over the binary codec and what it asks.

    PYTHONPATH=src:tests python tests/fuzz/binary_codec.py --runs 100000

An input is two bytes that tell the JSON's length, one for whom it asks, and the body. Ends with an error at the first
input that raises what it must not, takes ten seconds, or makes the process larger than a gigabyte.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

import atheris
import orjson

with atheris.instrument_imports(include=["guerdon.wire"]):
    from fuzz import cases
    from guerdon.wire import kserve

_LEGEND = 3


def read(data: bytes) -> None:
    """Judges one input."""
    if len(data) < _LEGEND:
        return
    length = int.from_bytes(data[:2], "little")
    body = data[_LEGEND:]
    # One of the lengths is none at all, as a body of JSON alone has it.
    cases.binary(body, None if length == 0xFFFF else length, cases.INFOS[data[2] % len(cases.INFOS)])


def changed(data: bytes, max_size: int, seed: int) -> bytes:
    """Another input: every second time with another value in its JSON, whose length stays right."""
    rng, length = Random(seed), int.from_bytes(data[:2], "little")
    body = data[_LEGEND:]
    end = len(body) if length == 0xFFFF else length
    if rng.random() < 0.5:
        return atheris.Mutate(data, max_size)
    try:
        text = cases.text(rng, cases.changed(rng, orjson.loads(body[:end])))
    except (orjson.JSONDecodeError, TypeError):  # it is none, or deeper than orjson writes
        return atheris.Mutate(data, max_size)
    legend = data[:2] if length == 0xFFFF else min(len(text), 0xFFFE).to_bytes(2, "little")
    return (legend + data[2:_LEGEND] + text + body[end:])[:max_size]


def seeds() -> list[bytes]:
    """Valid inputs to begin with."""
    made = []
    for request, info in cases.requests():
        body, length = kserve.encode_request(request)
        made.append(length.to_bytes(2, "little") + bytes([cases.INFOS.index(info)]) + body)
        made.append(b"\xff\xff" + made[-1][2:_LEGEND] + cases.text_of(request))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for i, seed in enumerate(seeds()):
            (corpus / f"seed-{i}").write_bytes(seed)
        words = Path(folder) / "words"
        written = ("".join(f"\\x{byte:02x}" for byte in piece) for piece in cases.WORDS)
        words.write_text("".join(f'"{word}"\n' for word in written if word))
        options = [f"-runs={runs}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1"]
        atheris.Setup(
            [sys.argv[0], str(corpus), f"-dict={words}", f"-artifact_prefix={folder}/", *options],
            read,
            custom_mutator=changed,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
