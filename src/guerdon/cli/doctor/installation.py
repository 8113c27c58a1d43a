"""What is installed: Python, guerdon, its extras and whether their versions are ones that it is tested with."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.specifiers import SpecifierSet

from guerdon.cli.doctor.findings import Finding, note, ok, problem
from guerdon.cli.doctor.requirements import Requirement, of_extra, parsed
from guerdon.errors import install_command

_OF_DEVELOPERS = ("dev", "docs", "fuzz")
_WHAT = {
    "grpc": "grpc:// URLs",
    "server": "serve, serve-critic, score --model",
    "actor": "reinforce, ppo",
    "plot": "bench --plot",
    "otel": "serve --traces",
    "lora": "low-rank adapters",
    "8bit": "the optimiser adamw_8bit",
    "data": "prompts from Parquet files and data sets",
    "wandb": "Weights & Biases",
    "mlflow": "MLflow",
    "ray": "guerdon.deploy.ray",
    "vllm": "rollouts by vLLM",
}
"""What each extra is for."""


def examine() -> Iterator[Finding]:
    """Python, the platform, guerdon, what it always needs, and every extra."""
    own = _metadata("guerdon")
    wanted = own["Requires-Python"] if own is not None else ">=3.11"
    told = f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}"
    if SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        yield ok("python", told)
    else:
        yield problem("python", told, f"guerdon needs Python {wanted}: make an environment with one")
    yield ok("platform", f"{platform.platform()}, {platform.machine()}")
    if own is None:
        yield note("guerdon", "run from a source tree, not installed", f"{install_command()}, to have what it requires")
        return
    yield ok("guerdon", own["Version"])
    requirements = _requirements(own)
    yield from _base([part for part in requirements if not part.extra])
    for extra in own.get_all("Provides-Extra") or []:
        if extra not in _OF_DEVELOPERS:
            yield _extra(extra, of_extra(requirements, extra))


def version_of(name: str) -> str | None:
    """The version of an installed distribution, without importing it; None where it is not there."""
    found = _metadata(name)
    return None if found is None else found["Version"]


def _base(requirements: list[Requirement]) -> Iterator[Finding]:
    missing, outside = _lacking(requirements)
    if missing or outside:
        yield problem("client", ", ".join([*missing, *outside]), install_command())
    else:
        yield ok("client", "all that a client needs: " + _versions(requirements))


def _extra(extra: str, requirements: list[Requirement]) -> Finding:
    subject, line = f"extra {extra}", install_command(extra)
    missing, outside = _lacking(requirements)
    what = f" ({_WHAT[extra]})" if extra in _WHAT else ""
    own = [part for part in requirements if part.extra == extra]  # those of the extras within have lines of their own
    if outside:  # pip would not have it so: what is tested is within
        return problem(subject, ", ".join(outside), line)
    if not requirements:
        return note(subject, f"not for this platform or Python{what}", "nothing; it is not needed for the rest")
    if missing:
        return note(subject, f"{', '.join(missing)}{what}", f"{line}, if you want it")
    return ok(subject, _versions(own) + what)


def _lacking(requirements: list[Requirement]) -> tuple[list[str], list[str]]:
    """What is not there, and what is there in a version outside of what is tested."""
    missing, outside = [], []
    for requirement in requirements:
        own = _metadata(requirement.name)
        if own is None:
            missing.append(f"{requirement.name} is missing")
            continue
        if not requirement.takes(own["Version"]):
            outside.append(f"{requirement.name} {own['Version']} is not {requirement.bounds}, which is tested")
        within = _requirements(own)
        for extra in requirement.extras:
            parts = of_extra(within, extra, requirement.name)
            absent = [part.name for part in parts if version_of(part.name) is None]
            missing += [f"{name} (of {requirement.name}[{extra}]) is missing" for name in absent]
    return missing, outside


def _requirements(own: metadata.PackageMetadata) -> list[Requirement]:
    return parsed(own.get_all("Requires-Dist") or [], own.get_all("Provides-Extra") or [])


def _versions(requirements: list[Requirement]) -> str:
    """Name and version of what is there."""
    found = [(part.name, version_of(part.name)) for part in requirements]
    return ", ".join(f"{name} {version}" for name, version in found if version is not None)


def _metadata(name: str) -> metadata.PackageMetadata | None:
    try:
        return metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
