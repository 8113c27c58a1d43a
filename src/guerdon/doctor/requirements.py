"""What guerdon says that it requires, read from its own metadata without a library for that."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?")
_CLAUSE = re.compile(r"(\w+)\s*(==|!=|<=|>=|<|>)\s*[\"']([^\"']*)[\"']")
_BOUND = re.compile(r"(==|!=|<=|>=|<|>)\s*([\w.]+)")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A distribution, its own extras that are wanted, the versions that will do, and the extra of ours it belongs to.

    `extra` is empty for what is always required; `bounds` is as the metadata has it, such as `>=2.9,<3`.
    """

    name: str
    extras: tuple[str, ...]
    bounds: str
    extra: str

    def takes(self, version: str) -> bool:
        """Whether that version will do, by its numbers: 2.9.0+cpu and 2.9.0rc1 are 2.9.0."""
        return all(_compared(_numbers(version), sign, _numbers(bound)) for sign, bound in _BOUND.findall(self.bounds))


def parsed(lines: Iterable[str]) -> list[Requirement]:
    """The requirements that hold on this platform, in their order."""
    found = []
    for text in lines:
        match = _REQUIREMENT.fullmatch(text.strip())
        if match is None:
            continue
        name, extras, bounds, marker = match.groups()
        clauses = _CLAUSE.findall(marker or "")
        extra = next((value for word, _, value in clauses if word == "extra"), "")
        if all(_holds(*clause) for clause in clauses if clause[0] != "extra"):
            wanted = tuple(part.strip() for part in (extras or "").split(",") if part.strip())
            ordered = sorted(part.strip() for part in bounds.split(",") if part.strip())
            found.append(Requirement(name, wanted, ",".join(reversed(ordered)), extra))
    return found


def of_extra(requirements: Iterable[Requirement], extra: str, own: str = "guerdon") -> list[Requirement]:
    """What the extra brings, with that of the extras that it names itself."""
    requirements = list(requirements)
    found: dict[str, Requirement] = {}
    for requirement in requirements:
        if requirement.extra == extra and requirement.name == own:
            for other in requirement.extras:
                found |= {part.name: part for part in of_extra(requirements, other, own)}
        elif requirement.extra == extra:
            found[requirement.name] = requirement
    return list(found.values())


def numbers_hold(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=3.11`."""
    return Requirement("", (), bounds, "").takes(version)


def _holds(word: str, sign: str, value: str) -> bool:
    if word == "python_version":
        return _compared(sys.version_info[:2], sign, _numbers(value))
    if word == "sys_platform":
        return (sys.platform == value) == (sign == "==")
    return True


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else (0,)


def _compared(have: tuple[int, ...], sign: str, want: tuple[int, ...]) -> bool:
    width = max(len(have), len(want))
    have, want = (numbers + (0,) * (width - len(numbers)) for numbers in (have, want))
    return {
        "==": have == want,
        "!=": have != want,
        "<": have < want,
        "<=": have <= want,
        ">": have > want,
        ">=": have >= want,
    }[sign]
