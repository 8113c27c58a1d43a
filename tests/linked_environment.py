"""Environments that have what one extra of guerdon brings, and nothing else: made in a moment, of links.

Each is a virtual environment whose packages are links into this interpreter's own, of the distributions that the extra
requires, directly or not. So a module that only `dev` brings is not there.
"""

import importlib.metadata
import os
import subprocess
import tomllib
import venv
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import guerdon

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEVELOPMENT = ("dev", "docs", "fuzz", "manifests")
EXTRAS = ("", *(extra for extra in PROJECT["optional-dependencies"] if extra not in DEVELOPMENT))
"""What users install; "" is the client alone."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which guerdon's sources can be imported."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *args: object, timeout_s: float = 250.0, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs its Python with these arguments; the output has both streams in one."""
        plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [self.python, *map(str, args)], env={**plain, "OMP_NUM_THREADS": "1", **env}, timeout=timeout_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip


def linked(extra: str, folder: Path) -> Environment:
    """Makes the environment of an extra; raises PackageNotFoundError if this one lacks a part of it."""
    venv.EnvBuilder(symlinks=True).create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    owners: dict[tuple[str, ...], set[str]] = defaultdict(set)
    places: dict[tuple[str, ...], Path] = {}
    for name in required(extra):
        for file in importlib.metadata.distribution(name).files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                for depth in range(1, len(file.parts) + 1):
                    owners[file.parts[:depth]].add(name)
                places[file.parts] = Path(str(file.locate()))
    for parts, place in places.items():
        # The highest folder that belongs to one distribution alone; a namespace belongs to several.
        depth = next(depth for depth in range(1, len(parts) + 1) if len(owners[parts[:depth]]) == 1)
        target, source = site.joinpath(*parts[:depth]), place
        for _ in range(len(parts) - depth):
            source = source.parent
        if not target.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    (site / "guerdon.pth").write_text(str(Path(guerdon.__file__).parents[1]) + "\n")
    return Environment(folder)


def required(extra: str) -> set[str]:
    """Returns the distributions that guerdon with the extra requires, directly or not, by their plain names."""
    found: dict[str, set[str]] = {}
    todo = list(_own_requirements(extra))
    while todo:
        requirement = todo.pop()
        name, extras = requirement.name.lower().replace("_", "-"), {"", *requirement.extras}
        new = extras - found.setdefault(name, set())
        found[name] |= new
        try:
            lines = importlib.metadata.requires(name) or [] if new else []
        except importlib.metadata.PackageNotFoundError:
            lines = []  # `linked` raises it
        for part in map(Requirement, lines):
            if part.marker is None or any(part.marker.evaluate({"extra": own}) for own in new):
                todo += [part]
    return set(found)


def _own_requirements(extra: str) -> Iterator[Requirement]:
    lines: Iterable[str] = PROJECT["dependencies"]
    if extra:
        lines = PROJECT["optional-dependencies"][extra]
        yield from _own_requirements("")
    for requirement in map(Requirement, lines):
        if requirement.name == "guerdon":
            for other in requirement.extras:
                yield from _own_requirements(other)
        elif requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement
