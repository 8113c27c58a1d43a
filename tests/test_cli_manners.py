"""The command in a shell: its help, its colours, what it suggests, how it ends, and what completes it."""

from __future__ import annotations

import argparse
import ast
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from guerdon import cli, errors
from guerdon.cli import completion, console, helps
from guerdon.cli.parsing import Parser
from guerdon.errors import Exit
from processes import environment

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "guerdon"]
COMMANDS = ["serve", "serve-critic", "score", "reinforce", "ppo", "bench", "doctor", "completion"]
RED_GUERDON, CYAN_HELP = "\033[1;31mguerdon:\033[0m", "\033[36mhelp:\033[0m"


def run(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process whose stdout and stderr are pipes."""
    env = plain_environment() | variables
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, env=env, timeout=60, check=False)


def at_terminal(*argv: str, **variables: str) -> str:
    """What the command writes to a terminal that is both its stdout and its stderr."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    env = plain_environment() | {"TERM": "xterm-256color"} | variables
    process = subprocess.Popen([*COMMAND, *argv], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:  # EIO: nobody has the other side any more
        pass
    finally:
        os.close(ours)
        process.wait(60)
    return written.decode().replace("\r\n", "\n")


def plain_environment() -> dict[str, str]:
    """This environment without what decides about colours and widths."""
    decides = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS")
    return {name: value for name, value in environment().items() if name not in decides}


def parsers() -> Iterator[tuple[str, Parser]]:
    """Each subcommand's name and parser."""
    for action in cli.make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


# What --help shows


@pytest.mark.parametrize("columns", [80, 100, 250])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = (dict(parsers())[command] if command else cli.make_parser()).format_help()
    assert max(map(len, text.splitlines())) <= min(columns, 100)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_begins_with_examples_that_can_be_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (dict(parsers())[command] if command else cli.make_parser()).format_help()
    before, _, after = text.partition("\nexamples:\n")
    assert len(before.splitlines()) <= 4
    block = after.partition("\n\n")[0].replace("\\\n", " ")
    lines = [line.strip() for line in block.splitlines() if not line.strip().startswith("#")]
    lines = [found[0] for line in lines for found in [re.search(r"(?<![/_])\bguerdon [^;)>]*", line)] if found]
    assert lines
    for line in lines:
        cli.make_parser().parse_args(shlex.split(line.replace("'", ""))[1:])
    assert capsys.readouterr() == ("", "")


def test_every_command_is_listed_with_its_own_help() -> None:
    assert [name for name, _ in parsers()] == COMMANDS
    text = cli.make_parser().format_help()
    assert all(re.search(rf"^    {name}\b", text, re.MULTILINE) for name in COMMANDS)
    notes = [value for name, value in vars(helps).items() if name.isupper()]
    assert all(any(note in (p.description, p.epilog) for _, p in parsers()) for note in notes[2:])


def test_flags_stand_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = dict(parsers())["serve"].format_help()
    groups = re.findall(r"^(\w[\w, ]+):$", text, re.MULTILINE)
    assert {"connections and keys", "model", "precision and devices", "limits"} <= set(groups)
    assert len(set(groups)) == len(groups)
    model = text.partition("\nmodel:\n")[2].partition("\n\n")[0]
    assert "--name TEXT" in model and "--port" not in model and "--dtype" not in model
    assert "--attribute-weights=-0.5,1" in text  # not broken at a hyphen, as at this width it would be


# What it says of mistakes


def test_the_command_alone_shows_its_help() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (Exit.CANNOT_START, "")
    assert "guerdon serve ./my-reward-model" in done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "guerdon: no command is given",
        "help: name one of those above: guerdon COMMAND --help",
    ]


@pytest.mark.parametrize(
    ("argv", "suggests"),
    [
        (["serv"], "help: did you mean serve? `guerdon --help` "),
        (["scroe", "--x"], "help: did you mean score? `guerdon --help` "),
        (["serve", "m", "--prot", "1"], "help: did you mean --port? `guerdon serve --help` "),
        (["serve", "m", "--max_lenght=1"], "help: did you mean --max-length? `guerdon serve --help` "),
        (["serve", "m", "--dtype", "bflaot16"], "help: did you mean bfloat16? `guerdon serve --help` "),
        (["bench", "http://h:1", "--secons", "1"], "help: did you mean --seconds? `guerdon bench --help` "),
        (["serve", "m", "--zzz"], "help: `guerdon serve --help` "),
    ],
)
def test_what_is_nearly_right_is_suggested(argv: list[str], suggests: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == Exit.CANNOT_START
    assert capsys.readouterr().err.splitlines()[-1].startswith(suggests)


def of_the_tree(cls: type[errors.GuerdonError]) -> Iterator[type[errors.GuerdonError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from of_the_tree(below)


@pytest.mark.parametrize("cls", sorted(set(of_the_tree(errors.GuerdonError)), key=lambda cls: cls.__name__))
def test_every_error_has_a_line_of_help(cls: type[errors.GuerdonError]) -> None:
    if issubclass(cls, errors.StartError):
        assert cls("it failed", "do this").help == "do this"
        return
    line = console.help_for(cls("it failed", 1.0) if cls is errors.Overloaded else cls("it failed"))
    assert line.isprintable() and len(line) > 20
    own = {errors.GuerdonError, errors.Cancelled, errors.MethodNotAllowed}  # which no command ends with by itself
    assert (line == console.help_for(errors.GuerdonError())) == (cls in own)


# Colours


def test_colours_at_a_terminal_only() -> None:
    assert at_terminal("serv").startswith(RED_GUERDON) and CYAN_HELP in at_terminal("serv")
    assert "\033" not in run("serv").stderr


@pytest.mark.parametrize(
    ("variables", "shows"),
    [
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
    ],
    ids=["NO_COLOR", "NO_COLOR-empty", "dumb", "forced-dumb", "NO_COLOR-forced"],
)
def test_a_terminals_colours_are_the_users_choice(variables: dict[str, str], shows: bool) -> None:
    written = at_terminal("serv", **variables)
    assert written.startswith(RED_GUERDON if shows else "guerdon: ")
    assert ("\033" in written) == shows


def test_colours_in_a_pipe_where_they_are_forced() -> None:
    assert run("serv", FORCE_COLOR="1").stderr.startswith(RED_GUERDON)
    assert run("serv", FORCE_COLOR="").stderr.startswith("guerdon: ")


# What moves


def test_a_bar_of_progress_is_for_terminals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scorer_of_ones.py").write_text("def score(texts):\n    return [1.0] * len(texts)\n")
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    argv = ["score", "--model", "scorer_of_ones:score", "in.jsonl", "-o"]
    piped = run(*argv, "piped.jsonl")
    assert piped.stderr.startswith("1 samples in 1 rows") and "%|" not in piped.stderr
    assert "%|" in at_terminal(*argv, "shown.jsonl")


# How it ends


def test_the_documentation_has_every_exit_status() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert told == [(str(status.value), status.name) for status in Exit]


def ends(tree: ast.AST) -> Iterator[ast.expr]:
    """What is given to sys.exit and os._exit."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("sys.exit", "os._exit", "exit", "SystemExit"):
            yield from node.args


def test_no_status_is_written_as_a_number() -> None:
    for path in sorted((ROOT / "src/guerdon").rglob("*.py")):
        for given in ends(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(given, ast.Constant), f"{path}:{given.lineno}"


def test_a_reader_that_leaves_gets_no_traceback() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [*COMMAND, "completion", "bash"], stdout=theirs, stderr=subprocess.PIPE, env=environment(), check=False
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (Exit.PIPE_CLOSED, b"")


# Completion


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each shell's script, as a user writes it there."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in completion.SHELLS:
        done = run("completion", shell)
        assert (done.returncode, done.stderr) == (0, "")
        (folder / f"guerdon.{shell}").write_text(done.stdout)
    (folder / "server.yaml").touch()
    (folder / "models").mkdir()
    return folder


TYPED = {
    "guerdon serv": {"serve", "serve-critic"},
    "guerdon serve --log-f": {"--log-format"},
    "guerdon serve --log-format ": {"text", "json"},
    "guerdon serve --config ser": {"server.yaml"},
    "guerdon serve mod": {"models"},
    "guerdon serve-critic m --checkpoint-dir mod": {"models"},
    "guerdon serve --no-fsdp m --po": {"--port", "--pooling"},
    "guerdon reinforce run.yaml --rollouts.te": {"--rollouts.temperature"},
    "guerdon bench http://h:1 --conc": {"--concurrency"},
    "guerdon completion ": set(completion.SHELLS),
}

BASH = """
source guerdon.bash
read -ra COMP_WORDS <<< "$1"
[[ $1 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
$(complete -p guerdon | sed 's/.*-F \\([^ ]*\\).*/\\1/') guerdon "${COMP_WORDS[COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(shell: str, command: list[str], folder: Path) -> set[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return {line.partition("\t")[0].rstrip("/ ") for line in done.stdout.splitlines()}


@pytest.mark.parametrize(("line", "words"), TYPED.items(), ids=[line.replace(" ", "_") for line in TYPED])
def test_bash_completes(line: str, words: set[str], scripts: Path) -> None:
    assert completed("bash", ["bash", "--norc", "-c", BASH, "bash", line], scripts) == words


@pytest.mark.parametrize(("line", "words"), TYPED.items(), ids=[line.replace(" ", "_") for line in TYPED])
def test_fish_completes(line: str, words: set[str], scripts: Path) -> None:
    code = f"source guerdon.fish; complete -C {shlex.quote(line)}"
    assert completed("fish", ["fish", "--no-config", "-c", code], scripts) >= words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_valid(shell: str, scripts: Path) -> None:
    completed(shell, [shell, "-n", f"guerdon.{shell}"], scripts)


def test_what_takes_a_path_is_there() -> None:
    dests = set()
    for _, parser in parsers():
        parser.fill()
        dests |= {action.dest for action in parser._actions}
    assert dests >= completion.FILES | completion.FOLDERS
    by_name = {dest for dest in dests if re.search(r"(_|\.)(dir|file|folder|path)$", dest)}
    assert by_name <= completion.FILES | completion.FOLDERS
