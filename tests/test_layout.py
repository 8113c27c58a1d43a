"""Who may know whom, read from the imports themselves (also those inside functions)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
BASE = {
    "access",
    "colours",
    "config",
    "core",
    "durable",
    "errors",
    "exits",
    "extras",
    "fields",
    "logs",
    "messages",
    "metrics",
    "pictures",
    "tracing",
    "vocabulary",
    "yaml_files",
}
PARTS = {"wire", "client", "server", "engine", "distributed", "algorithms", "training", "actor"}

ROOMS = {  # room: the rooms that it may know besides itself
    **dict.fromkeys(BASE, BASE),
    "wire": BASE,
    "client": BASE | {"wire"},
    "server": BASE | {"wire"},
    "engine": BASE | {"distributed"},
    "distributed": BASE,
    "algorithms": set(),
    "training": BASE | {"distributed", "engine", "algorithms"},
    "actor": BASE | {"distributed", "client", "engine", "algorithms", "training"},
    "adapters": BASE | {"wire", "client"},
    "assembly": BASE | PARTS,
    "local": BASE | PARTS | {"assembly"},
    "reward_model_server": BASE | PARTS | {"assembly"},
    "critic_server_trainer": BASE | PARTS | {"assembly"},
    "deploy": BASE | {"assembly", "server"},
    "demo": BASE | {"client", "actor"},
    "flags": BASE,
    "console": BASE | {"distributed"},
    "bench": BASE | {"wire", "client", "console", "__init__"},
    "doctor": BASE | {"client", "console", "engine", "__init__"},
    "cli": BASE | PARTS | {"assembly", "local", "demo", "flags", "console", "bench", "doctor", "__init__"},
    "__main__": {"cli"},
    "__init__": {
        "actor",
        "client",
        "core",
        "critic_server_trainer",
        "engine",
        "errors",
        "local",
        "reward_model_server",
    },  # for type checkers; at run time they are loaded lazily
}
MORE = {  # path prefix: what it may know besides
    "adapters/trlx/": {"local"},  # whose reward model may be in the trainer's own process
}
TRANSPORTS = ("server/front/", "server/dashboard/pages.py", "server/runtime.py")
"""What of the server may know its transports; all else is the same under each of them."""

TORCH = {"torch", "transformers"}
BANNED = {  # path prefix: modules that it must not import
    **dict.fromkeys([*BASE, "bench", "client", "server", "flags", "cli"], TORCH),
    "wire": TORCH | {"asyncio", "grpc", "http", "httpx", "io", "os", "pathlib", "socket", "subprocess", "threading"},
    **dict.fromkeys(
        [
            "server/batching/budget.py",
            "server/batching/scheduler.py",
            "server/batching/lane.py",
            *(f"server/dashboard/{name}.py" for name in ("asked", "drift", "extremes", "recent", "scored", "traffic")),
            "server/rewards.py",
        ],
        TORCH | {"asyncio", "concurrent", "threading", "time"},
    ),
    **dict.fromkeys(["actor/settings.py", "actor/rollouts.py", "actor/data.py", "actor/rewards.py"], TORCH),
    "engine/text.py": {"torch"},
    "engine/packing.py": TORCH,
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that the file imports, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def offences(path: Path) -> Iterator[str]:
    """One line for each import that the house does not allow."""
    inside = path.relative_to(SRC / "guerdon").as_posix()
    room = inside.split("/")[0].removesuffix(".py")
    if room not in ROOMS:
        yield f"{path}:1: {room} is a new room: say in ROOMS whom it may know"
        return
    known = ROOMS[room].union(*(rooms for prefix, rooms in MORE.items() if inside.startswith(prefix)))
    banned = set().union(*(modules for prefix, modules in BANNED.items() if inside.startswith(prefix)))
    for line, name in imports(path):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if first == "guerdon" and target not in ROOMS:
            target = "__init__"
        if (first == "guerdon" and target != room and target not in known) or first in banned:
            yield f"{path}:{line}: {room} must not import {name}"
        elif room == "server" and name.startswith("guerdon.server.front") and not inside.startswith(TRANSPORTS):
            yield f"{path}:{line}: only the transports may import {name}"


@pytest.mark.parametrize("path", sorted((SRC / "guerdon").rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_keep_to_the_house(path: Path) -> None:
    assert not list(offences(path)), "\n".join(offences(path))
