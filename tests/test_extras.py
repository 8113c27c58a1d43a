"""What each extra installs is what its code imports; the commands in messages work, and one function writes them."""

import ast
import functools
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from guerdon.errors import SERVER_MODULES, StartError, install_command, require_modules
from linked_environment import EXTRAS, PROJECT, ROOT, linked, required
from processes import environment
from tiers import slow_but

CODE = {  # path prefix in src/guerdon: the extra that its code is for; the longest prefix counts
    "": "",
    "wire/kserve_grpc.py": "grpc",
    "client/grpc_transport.py": "grpc",
    **dict.fromkeys(("server", "kinds", "engine", "training", "distributed", "assembly.py", "local.py"), "server"),
    "server/chat_judge": "server",
    "verifiers/mathematics.py": "math",
    "verifiers": "server",
    "actor": "actor",
    "cli/check_reference.py": "server",
    "deploy": "ray",
    "plots.py": "plot",
}
OPTIONAL = {  # path in src/guerdon: what it imports inside a function, if the extra is installed
    "training/lora.py": "lora",
    "engine/checkpoint/merging.py": "lora",
    "training/optimiser.py": "8bit",
    "engine/checkpoint/converting.py": "gguf",
    "server/tracing.py": "otel",
    "client/driver.py": "otel",
    "actor/prompt_sources.py": "data",
    "actor/vllm_generator.py": "vllm",
    "cli/doctor.py": "server",
    "client/teacher_head.py": "server",
    "client/faces.py": "server",
}
TRACKERS = {"actor/trackers.py": ("wandb", "mlflow")}
NAMES = {"mlflow-skinny": "mlflow"}
"""Modules of distributions that are not installed here, if they have another name."""


def code_of(extra: str) -> list[str]:
    """The paths of the modules whose extra it is, adapters of trainers left out: these have the trainer's libraries."""
    paths = [path.relative_to(ROOT / "src/guerdon").as_posix() for path in (ROOT / "src/guerdon").rglob("*.py")]
    own = {path: CODE[max((p for p in CODE if path.startswith(p)), key=len)] for path in paths}
    return sorted(path for path, name in own.items() if name == extra and not path.startswith("adapters"))


@functools.cache
def third_party(path: str) -> list[tuple[str, bool]]:
    """The top names that a module imports, the standard library's left out, and whether inside a function."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield child.module or "", inside
            yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    tree = ast.parse((ROOT / "src/guerdon" / path).read_text(encoding="utf-8"))
    tops = [(name.split(".")[0], inside) for name, inside in walk(tree, False)]
    return [(top, inside) for top, inside in tops if top not in sys.stdlib_module_names and top != "guerdon"]


def modules_of(extra: str) -> set[str]:
    """The top names that can be imported where an extra is installed and nothing else."""
    return set().union(*map(modules_of_distribution, required(extra)))


@functools.cache
def modules_of_distribution(name: str) -> set[str]:
    try:
        files = importlib.metadata.distribution(name).files or []
    except importlib.metadata.PackageNotFoundError:
        return {NAMES.get(name, name)}
    return {file.parts[0].removesuffix(".py").split(".")[0] for file in files}


@pytest.mark.slow
@pytest.mark.parametrize("extra", slow_but(("server",), EXTRAS))
def test_an_extra_brings_what_its_code_imports(extra: str) -> None:
    has = modules_of(extra)
    lacking = []
    for path in code_of(extra):
        more = {OPTIONAL[path]} if path in OPTIONAL else {*TRACKERS.get(path, ())}
        optional = set().union(*map(modules_of, more))
        for name, inside in third_party(path):
            if name not in has and not (inside and name in optional):
                lacking.append(f"{path} imports {name}")
    assert not lacking


@pytest.mark.slow
def test_the_table_of_optional_imports_has_no_idle_line() -> None:
    for path, extra in OPTIONAL.items():
        own = modules_of(CODE[max((p for p in CODE if path.startswith(p)), key=len)])
        assert any(inside and name not in own and name in modules_of(extra) for name, inside in third_party(path)), path


@pytest.mark.slow
def test_an_environment_of_links_lacks_what_the_extra_does_not_bring(tmp_path: Path) -> None:
    made = linked("grpc", tmp_path / "grpc")
    done = made.run("-c", "import guerdon, grpc, google.protobuf, tritonclient.grpc, torch")
    assert "No module named 'torch'" in done.stdout
    assert made.run("-c", "import guerdon.client.grpc_transport").returncode == 0


def test_the_client_alone(tmp_path: Path) -> None:
    """Public names, help and advice without torch and without gRPC."""
    asked = {
        ("serve", "model"): "server",
        ("serve-critic", "model"): "server",
        ("score", "--model", "model", "rows.jsonl", "-o", "out.jsonl"): "server",
        ("convert", "model.gguf", "out"): "server",
        ("reinforce", "run.yaml"): "",
        ("score", "rows.jsonl", "-o", "out.jsonl", "--server", "grpcs://127.0.0.1:1"): "grpc",
        ("score", "rows.jsonl", "-o", "out.jsonl", "--server", "http://127.0.0.1:1", "--plot", "a.png"): "plot",
    }
    script = f"""
import contextlib, io, json, sys, traceback, guerdon
from guerdon import cli
names, outputs = {{}}, []
for name in guerdon.__all__:
    try:
        getattr(guerdon, name)
    except Exception as e:
        names[name] = repr(e)
for args in [*{[*asked]!r}, ["--help"], ["score", "--help"], ["serve", "--help-all"], ["reinforce", "--help"]]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            status = cli.main([*args])
        except SystemExit as e:
            status = e.code
    outputs.append((status or 0, out.getvalue()))
heavy = [name for name in ("torch", "transformers", "grpc") if name in sys.modules]
print(json.dumps([names, outputs, heavy]))
"""
    done = linked("", tmp_path / "client").run("-c", script)
    names, outputs, heavy = json.loads(done.stdout.splitlines()[-1])
    assert not heavy
    # Of the public names these compute in the user's own process.
    assert all(name.startswith(("Local", "Reinforce", "RewardModelServer", "CriticServer")) for name in names), names
    for (args, extra), (status, output) in zip(asked.items(), outputs, strict=False):
        assert status == 2 and "Traceback" not in output, args
        assert not extra or f"pip install '.[{extra}]'" in output, args
    for status, output in outputs[len(asked) :]:
        assert status == 0 and "usage: guerdon" in output.lower()


@pytest.mark.slow
def test_the_advised_command_installs(tmp_path: Path) -> None:
    pip, install, what = shlex.split(install_command("server").removesuffix(" in a clone of guerdon"))
    assert (pip, install) == ("pip", "install")
    shutil.copytree(ROOT / "src/guerdon", tmp_path / "src/guerdon")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(  # without its dependencies, which would be downloaded
        [sys.executable, "-m", "pip", "install", what, "--dry-run", "--no-deps", "--no-index", "--no-build-isolation"],
        cwd=tmp_path, env=environment() | {"PYTHONPATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "guerdon" in done.stdout and "does not provide the extra" not in done.stderr


def test_only_one_function_says_how_to_install() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for path in [*(ROOT / "src").rglob("*.py"), *pages]:
        has_advice = re.search(r"pip install (--upgrade )?'?guerdon\b", path.read_text())
        assert path.name == "errors.py" or not has_advice, path
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        assert path.name == "errors.py" or not re.search(r"pip install '?\.", text), path
        for extra in re.findall(r"install_command\(['\"](\w+)['\"]\)", text):
            assert extra in PROJECT["optional-dependencies"], f"{path}: {extra}"


def test_the_modules_of_the_server_are_those_of_its_extra() -> None:
    listed = [line for extra in ("server", "grpc") for line in PROJECT["optional-dependencies"][extra]]
    brought = {re.split(r"[\[<>=; ]", line)[0].replace("-", "_") for line in listed}
    only_some = {"guerdon", "offapi", "sentencepiece", "uvloop", "accelerate", "markdown_it_py"}
    assert brought - only_some == {*SERVER_MODULES}


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (["no_a"], "no_a is not installed"),
        (["no_a", "no_b"], "no_a and no_b are not installed"),
        (["no_a", "no_b", "no_c"], "no_a, no_b and no_c are not installed"),
    ],
)
def test_only_what_is_missing_is_named(missing: list[str], says: str) -> None:
    with pytest.raises(StartError) as raised:
        require_modules("orjson", *missing, "numpy", extra="server")
    assert (str(raised.value), raised.value.help) == (says, install_command("server"))
    require_modules("orjson", "numpy", extra="server")


@pytest.mark.parametrize(
    "code",
    [
        "from guerdon import LocalRewardModel",
        *slow_but(
            ("import guerdon.cli, sys\nsys.exit(guerdon.cli.main(['serve', 'x']))",),
            [
                "import guerdon\nguerdon.LocalTeacher",
                "from guerdon import ReinforceActor",
                "import guerdon.cli, sys\nsys.exit(guerdon.cli.main(['serve', 'x']))",
                "import guerdon.cli, sys\nsys.exit(guerdon.cli.main(['doctor', 'x']))",
            ],
        ),
    ],
)
def test_a_bare_install_says_what_to_install(code: str, tmp_path: Path) -> None:
    done = linked("", tmp_path / "client").run("-c", code)
    assert done.returncode in (1, 2) and "torch, transformers, safetensors, " in done.stdout, done.stdout
    assert "are not installed" in done.stdout and install_command("server") in done.stdout
    assert "No module named" not in done.stdout, done.stdout
