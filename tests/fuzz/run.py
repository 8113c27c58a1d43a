"""A million inputs and more: damaged requests of every kind, hypothesis, atheris and schemathesis, counted by kind.

    PYTHONPATH=src:tests python tests/fuzz/run.py --inputs 1000000

Ends with 1 where an input was answered by what it must not be, computed for more than a second, or made a process grow.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import psutil

from fuzz import cases

_HERE = Path(__file__).parent
_GROWTH = 1.05
_SLOW_S = 1.0
_FIRST_SEED = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all kinds together, at least")
    asked = parser.parse_args().inputs
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    counted: Counter[str] = Counter()
    failed = [kind for kind in ("damaged", "atheris", "schemathesis", "hypothesis") if not _KINDS[kind](asked, counted)]
    total = sum(counted.values())
    print("\n".join(f"{kind:32} {count:>12,}" for kind, count in (*sorted(counted.items()), ("all", total))))
    if failed or total < asked:
        sys.exit(f"failed: {', '.join(failed) or 'too few inputs'}")


def _damaged(asked: int, counted: Counter[str]) -> bool:
    """Half of all inputs, in this process; those of the first tenth warm it up."""
    count, passed, slowest = asked // 2 // len(cases.KINDS), True, 0.0
    before: tuple[int, int] | None = None
    for i in range(count):
        if i == count // 10:
            before = _size()
        for kind in cases.KINDS:
            made = cases.inputs(kind, Random(f"{_FIRST_SEED} {kind} {i}"))
            started = time.thread_time()
            try:
                made.try_it()
            except Exception as e:
                print(f"{kind}, seed '{_FIRST_SEED} {kind} {i}': {type(e).__name__}: {str(e)[:300]}", flush=True)
                passed = False
            took_s = time.thread_time() - started
            slowest = max(slowest, took_s)
            counted[f"damaged {kind}"] += 1
    assert before is not None, "too few inputs to tell growth"
    after = _size()
    grown = [
        f"{what} {then:,}, then {now:,}" for what, then, now in zip(("RSS", "objects"), before, after, strict=True)
    ]
    print(f"damaged: slowest {slowest:.3f} s; {'; '.join(grown)}", flush=True)
    return passed and slowest < _SLOW_S and after[0] <= before[0] * _GROWTH and after[1] <= before[1] * _GROWTH


def _size() -> tuple[int, int]:
    """The bytes of memory that this process has, and its objects."""
    gc.collect()
    return psutil.Process().memory_info().rss, len(gc.get_objects())


def _atheris(asked: int, counted: Counter[str]) -> bool:
    """Four tenths of all inputs."""
    output, passed = _told([str(_HERE / "binary_codec.py"), "--runs", str(asked * 4 // 10)])
    found = re.findall(r"number_of_executed_units: (\d+)", output)
    counted["atheris, binary codec"] += int(found[0]) if found else 0
    return passed


def _schemathesis(asked: int, counted: Counter[str]) -> bool:
    """As many as the document has operations, times a number that grows slowly: each takes a real request."""
    output, passed = _told([str(_HERE / "served_openapi.py"), "--examples", str(max(5, asked // 10_000))])
    found = re.findall(r"^(\d+) requests", output, re.MULTILINE)
    counted["schemathesis, a running server"] += int(found[0]) if found else 0
    return passed


def _hypothesis(asked: int, counted: Counter[str]) -> bool:
    """What is missing, by the tests of the codecs, which cover more than they are asked to."""
    num_tests = 6 + 4 * 6
    os.environ["GUERDON_FUZZ_EXAMPLES"] = str(examples := max(100, asked // 10 // num_tests))
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=0", str(_HERE / "test_fuzz_codecs.py")]
    _, passed = _told([*command, "--rootdir", str(_HERE.parents[1])])
    counted["hypothesis, codecs"] += examples * num_tests
    return passed


def _told(arguments: list[str]) -> tuple[str, bool]:
    """What a program of Python prints, which is printed here, too, and whether it ended well."""
    lines = []
    with subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    return "".join(lines), process.returncode == 0


_KINDS = {"damaged": _damaged, "atheris": _atheris, "schemathesis": _schemathesis, "hypothesis": _hypothesis}


if __name__ == "__main__":
    main()
