"""Compares the installed distributions with what guerdon's metadata requires, extra by extra."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from packaging import requirements
from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, slots=True)
class Requirement:
    """A required distribution; `extra` is the extra of guerdon that requires it, empty if always required."""

    name: str
    extras: tuple[str, ...]
    versions: SpecifierSet
    extra: str

    def takes(self, version: str) -> bool:
        """Whether the version is in range, pre-releases included."""
        return self.versions.contains(version, prereleases=True)

    @property
    def bounds(self) -> str:
        """Returns the range, lower bound first, such as `>=2.9,<3`."""
        return ",".join(sorted(map(str, self.versions), reverse=True))


def parse_requirements(lines: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """Returns the requirements for this platform, in order: unconditional ones and those of the extras."""
    found = []
    for asked in map(requirements.Requirement, lines):
        wanted = tuple(sorted(asked.extras))
        if asked.marker is None or asked.marker.evaluate({"extra": ""}):
            found.append(Requirement(asked.name, wanted, asked.specifier, ""))
            continue
        of = [extra for extra in extras if asked.marker.evaluate({"extra": extra})]
        found += [Requirement(asked.name, wanted, asked.specifier, extra) for extra in of]
    return found


def of_extra(all_of_them: Iterable[Requirement], extra: str, own: str = "guerdon") -> list[Requirement]:
    """Returns the requirements of an extra, including those of the extras that it contains."""
    all_of_them = list(all_of_them)
    found: dict[str, Requirement] = {}
    for requirement in all_of_them:
        if requirement.extra == extra and requirement.name == own:
            for other in requirement.extras:
                found |= {part.name: part for part in of_extra(all_of_them, other, own)}
        elif requirement.extra == extra:
            found[requirement.name] = requirement
    return list(found.values())


def version_of(name: str) -> str | None:
    """Returns the version of a distribution without importing it; None if it is not installed."""
    found = read_metadata(name)
    return None if found is None else found["Version"]


def find_lacking(requirements: list[Requirement]) -> tuple[list[str], list[str]]:
    """Returns what is missing, and what has an untested version."""
    missing, outside = [], []
    for requirement in requirements:
        own = read_metadata(requirement.name)
        if own is None:
            missing.append(f"{requirement.name} is missing")
            continue
        if not requirement.takes(own["Version"]):
            outside.append(f"{requirement.name} {own['Version']} is not {requirement.bounds}, the tested range")
        within = requirements_of(own)
        for extra in requirement.extras:
            parts = of_extra(within, extra, requirement.name)
            absent = [part.name for part in parts if version_of(part.name) is None]
            missing += [f"{name} (of {requirement.name}[{extra}]) is missing" for name in absent]
    return missing, outside


def requirements_of(own: metadata.PackageMetadata) -> list[Requirement]:
    return parse_requirements(own.get_all("Requires-Dist") or [], own.get_all("Provides-Extra") or [])


def describe_versions(requirements: list[Requirement]) -> str:
    """Returns names and versions of what is installed."""
    found = [(part.name, version_of(part.name)) for part in requirements]
    return ", ".join(f"{name} {version}" for name, version in found if version is not None)


def read_metadata(name: str) -> metadata.PackageMetadata | None:
    try:
        return metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
