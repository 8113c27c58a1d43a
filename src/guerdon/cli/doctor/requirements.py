"""What guerdon says that it requires, read from its own metadata."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging import requirements
from packaging.specifiers import SpecifierSet


@dataclass(frozen=True, slots=True)
class Requirement:
    """A distribution, its own extras that are wanted, the versions that will do, and the extra of ours it belongs to.

    `extra` is empty for what is always required.
    """

    name: str
    extras: tuple[str, ...]
    versions: SpecifierSet
    extra: str

    def takes(self, version: str) -> bool:
        """Whether that version will do; a pre-release does where its number is within."""
        return self.versions.contains(version, prereleases=True)

    @property
    def bounds(self) -> str:
        """The versions as text, the lower bound first, such as `>=2.9,<3`."""
        return ",".join(sorted(map(str, self.versions), reverse=True))


def parsed(lines: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """The requirements that hold on this platform, in their order: those of all installs, and those of these extras."""
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
    """What the extra brings, with that of the extras that it names itself."""
    all_of_them = list(all_of_them)
    found: dict[str, Requirement] = {}
    for requirement in all_of_them:
        if requirement.extra == extra and requirement.name == own:
            for other in requirement.extras:
                found |= {part.name: part for part in of_extra(all_of_them, other, own)}
        elif requirement.extra == extra:
            found[requirement.name] = requirement
    return list(found.values())
