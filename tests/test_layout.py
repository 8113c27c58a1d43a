"""Checks the architecture: which room may import which, no import cycles, no module name with two meanings.

A room is a folder with modules of its own or a single module beside such folders, named by its path under
`src/guerdon`. Imports inside functions count as well.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
BASE = {
    "core", "critic_core", "durable", "endings", "errors", "judge_core", "memory", "messages",
    "padded_rows", "plots", "settings", "teacher_core", "tensor_files", "thinking", "trees", "vocabulary",
}  # fmt: skip
PARTS = {"wire", "client", "kinds", "server", "engine", "distributed", "training", "actor"}

ROOMS = {  # top room: the other top rooms that it may import
    **dict.fromkeys(BASE, BASE),
    "wire": BASE,
    "client": BASE | {"wire"},
    "kinds": BASE | {"wire", "distributed", "engine", "training"},  # the last three inside `load`
    "server": BASE | {"wire", "kinds"},
    "engine": BASE | {"distributed"},
    "distributed": BASE,
    "training": BASE | {"distributed", "engine"},
    "actor": BASE | {"distributed", "client", "engine", "training"},
    "verifiers": BASE,
    "adapters": BASE | {"wire", "client"},
    "assembly": BASE | PARTS,
    "local": BASE | PARTS | {"assembly"},
    "deploy": BASE | {"assembly", "server"},
    "cli": BASE | PARTS | {"assembly", "local", "__init__"},
    "__main__": {"cli"},
    "__init__": {
        "adapters",
        "client",
        "core",
        "critic_core",
        "errors",
        "local",
        "engine",
    },  # for type checkers; lazy at run time
}
MORE = {  # path prefix: what it may import besides
    "adapters/trlx.py": {"local"},  # its reward model may run in the trainer's own process
    "adapters/nemo_aligner/reward_model_server.py": {"assembly", "distributed", "engine", "server"},
    "adapters/nemo_aligner/critic_server_trainer.py": {"assembly", "distributed", "engine", "server", "training"},
    "adapters/nemo_aligner/reinforce_actor.py": {"actor", "distributed", "engine", "training"},
}
TRANSPORTS = ("server/front/", "server/runtime.py")
"""The only modules of the server that may import `server/front`: the rest does not depend on the transport."""

ALONE = "training/algorithms/"
"""The room of pure functions: it imports nothing else of ours."""

TORCH = {"torch", "transformers"}
BANNED = {  # path prefix: modules that it must not import
    **dict.fromkeys([*BASE, "client", "kinds", "server"], TORCH),
    **dict.fromkeys([f"cli/{name}" for name in ("__init__", "console", "helps", "parser", "subcommands")], TORCH),
    "wire": TORCH | {"asyncio", "grpc", "http", "httpx", "io", "os", "pathlib", "socket", "subprocess", "threading"},
    **dict.fromkeys(
        [
            "server/batching/halving.py",
            "server/batching/scheduler.py",
            *(f"server/batching/{name}.py" for name in ("fair_queue", "jobs", "prefixes", "room")),
            *(f"server/page/{name}.py" for name in ("snapshot", "drift", "extremes", "history", "traffic")),
        ],
        TORCH | {"asyncio", "concurrent", "threading", "time"},
    ),
    **dict.fromkeys(
        [f"actor/{name}.py" for name in ("rollouts", "prompts", "prompt_sources", "remote_rewards")], TORCH
    ),
    "kinds/sum.py": {"concurrent", "threading", "time"},
    "engine/checkpoint/text.py": {"torch"},
    "engine/packing.py": TORCH,
}

MAY_IMPORT = {"client/teacher_head.py": {"torch"}, "kinds/critic.py": {"torch"}}
"""Modules that import what their room must not, inside a function and only if it is installed."""

PATH_TO_READ = (  # in this order, a newcomer reads how a score is made
    "core.py",
    "wire/kserve.py",
    "server/service.py",
    "server/batching/jobs.py",
    "server/batching/scheduler.py",
    "server/batching/loop.py",
    "engine/packing.py",
    "engine/forward.py",
    "engine/engine.py",
    "engine/attention/cascade.py",
)

PATH_OF_A_KIND = ("kinds/kind.py", "kinds/all_kinds.py", "kinds/teachers.py", "kinds/samples.py", "server/service.py")
"""In this order, whoever adds a kind of model reads how one goes from its file to its reply."""

CHOOSES_VLLM = {"actor/generation.py", "actor/vllm_generator.py"}
"""The first imports the second inside the function that makes it, because vLLM may not be installed."""

MODULES = sorted((SRC / "guerdon").rglob("*.py"))


def inside(path: Path) -> str:
    """The path under `src/guerdon`."""
    return path.relative_to(SRC / "guerdon").as_posix()


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that the file imports, `from a import b` as a.b."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def offences(path: Path) -> Iterator[str]:
    """One line for each import that the architecture does not allow."""
    where = inside(path)
    room = where.split("/")[0].removesuffix(".py")
    if room not in ROOMS:
        yield f"{path}:1: {room} is a new room: say in ROOMS what it may import"
        return
    known = ROOMS[room].union(*(rooms for prefix, rooms in MORE.items() if where.startswith(prefix)))
    banned = set().union(*(modules for prefix, modules in BANNED.items() if where.startswith(prefix)))
    banned -= MAY_IMPORT.get(where, set())
    for line, name in imports(path):
        first, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if first == "guerdon" and target not in ROOMS:
            target = "__init__"
        if (first == "guerdon" and target != room and target not in known) or first in banned:
            yield f"{path}:{line}: {room} must not import {name}"
        elif where.startswith(ALONE) and first == "guerdon" and not rest.startswith(ALONE.replace("/", ".")):
            yield f"{path}:{line}: {ALONE} must not import {name}"
        elif room == "server" and name.startswith("guerdon.server.front") and not where.startswith(TRANSPORTS):
            yield f"{path}:{line}: only the transports may import {name}"


def room_of() -> Callable[[str], str]:
    """Returns the function that names a module's room."""
    has_folders = {inside(p.parent.parent) for p in MODULES if p.name == "__init__.py" and p.parent.name != "guerdon"}

    def room(where: str) -> str:
        parts = where.removesuffix(".py").split("/")
        folder = "/".join(parts[:-1])
        return "/".join(parts) if folder in has_folders or not folder else folder

    return room


def imported(of: Callable[[str], str]) -> dict[str, set[str]]:
    """Returns what the modules import, by importer; `of` names what a module counts as, itself or its room."""
    by_name = {".".join(("guerdon", *inside(p).removesuffix(".py").split("/"))): of(inside(p)) for p in MODULES}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        own = of(inside(path))
        graph.setdefault(own, set())
        if path.name == "__init__.py":  # re-exports its own room's names
            continue
        for _, name in imports(path):
            target = by_name.get(name) or by_name.get(name.rpartition(".")[0])
            if target is not None and target != own:
                graph[own].add(target)
    return graph


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of rooms or modules each of which can be reached from each other."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen, todo = set(), [name]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        reached[name] = seen
    groups = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph if a in reached[a]}
    return [set(group) for group in groups]


@pytest.mark.parametrize("path", MODULES, ids=inside)
def test_imports_follow_the_architecture(path: Path) -> None:
    assert not list(offences(path)), "\n".join(offences(path))


def test_no_rooms_import_each_other_in_a_circle() -> None:
    found = circles(imported(room_of()))
    assert not found, f"import cycles between rooms: {found}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = [circle for circle in circles(imported(lambda where: where)) if circle != CHOOSES_VLLM]
    assert not found, f"import cycles between modules: {found}"


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_no_module_name_stands_twice() -> None:
    names = Counter(path.stem for path in MODULES if path.stem not in ("__init__", "__main__"))
    assert not {name for name, count in names.items() if count > 1}


@pytest.mark.parametrize(("path", "most"), [(PATH_TO_READ, 2_000), (PATH_OF_A_KIND, 900)])
def test_the_paths_to_read_are_short(path: tuple[str, ...], most: int) -> None:
    lines = {where: len((SRC / "guerdon" / where).read_text(encoding="utf-8").splitlines()) for where in path}
    assert sum(lines.values()) <= most, f"move what a first reader does not need: {lines}"
