"""The command in a shell: its help, colours, suggestions, exit statuses and completion."""

import argparse
import ast
import contextlib
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zoo
from client.echo_server import EchoProcess
from forks import Forks
from guerdon import cli, errors
from guerdon.cli import console, helps
from guerdon.cli.parser import FILES, FOLDERS, SHELLS, Parser
from guerdon.errors import Exit
from ports import free_port
from processes import environment
from tiers import slow_but

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "guerdon"]
COMMANDS = [
    "serve", "serve-critic", "serve-teacher", "serve-judge", "score", "logprobs", "reinforce", "ppo", "distill",
    "doctor", "check", "convert", "completion",
]  # fmt: skip
COLOURED, PLAIN = "\033[1;31mguerdon:\033[0m ", "guerdon: "


def parsers() -> dict[str, Parser]:
    """Each subcommand's parser; the whole command's as ""."""
    whole = cli.make_parser()
    choices = next(action.choices for action in whole._actions if isinstance(action, argparse._SubParsersAction))
    return {"": whole, **choices}


# Help


@pytest.mark.parametrize("columns", [80, 100, 250])
def test_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for parser in parsers().values():
        for text in (parser.format_help(), parser.format_all_help()):
            assert max(map(len, text.splitlines())) <= min(columns, 100)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_begins_with_examples_that_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, _, after = parsers()[command].format_help().partition("\nexamples:\n")
    assert len(before.splitlines()) <= 4
    block = after.partition("\n\n")[0].replace("\\\n", " ")
    lines = [line.strip() for line in block.splitlines() if not line.strip().startswith("#")]
    lines = [found[0] for line in lines for found in [re.search(r"(?<![/_])\bguerdon [^;)>]*", line)] if found]
    assert lines
    for line in lines:
        cli.make_parser().parse_args(shlex.split(line.replace("'", ""))[1:])
    assert capsys.readouterr() == ("", "")


def test_every_command_is_listed() -> None:
    assert list(parsers()) == ["", *COMMANDS]
    text = cli.make_parser().format_help()
    assert all(re.search(rf"^    {name}\b", text, re.MULTILINE) for name in COMMANDS)
    shown = [part for parser in parsers().values() for part in (parser.description, parser.epilog)]
    assert all(value in shown for value in vars(helps).values() if isinstance(value, str) and "\n" in value)


def shown_flags(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?--([\w.-]+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    "command",
    ["serve", "serve-critic", "serve-teacher", "serve-judge", "score", "logprobs", "reinforce", "ppo", "distill"],
)
def test_help_shows_ten_flags_and_help_all_shows_all(command: str) -> None:
    parser = parsers()[command]
    first, everything = shown_flags(parser.format_help()), shown_flags(parser.format_all_help())
    assert len(first - {"help", "help-all"}) == 10 and first < everything
    names = [action.option_strings for action in parser._actions if action.option_strings]
    assert everything == {next(name[2:] for name in flags if name.startswith("--")) for flags in names}


def test_help_all_shows_each_setting_with_its_default_in_its_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--help-all"])
    assert ended.value.code == Exit.DONE
    out = capsys.readouterr().out
    groups = re.findall(r"^(\w[\w, -]+):$", out, re.MULTILINE)
    assert {"authentication and TLS", "model", "multi-process", "request limits", "timeouts"} <= set(groups)
    assert len(set(groups)) == len(groups)
    model = out.partition("\nmodel:\n")[2].partition("\n\n")[0]
    assert "--name TEXT" in model and "--port" not in model and "--dtype" not in model
    text = " ".join(out.split())
    assert "HTTP port. 0: any free port. (default: 5555)" in text
    assert "--truncation {error,left,right}" in text
    assert "--deterministic, --no-deterministic" in text
    assert "--attribute-weights=-0.5,1" in out  # not broken at a hyphen
    assert "--models" not in out


def test_the_help_of_a_critic_shows_its_own_defaults() -> None:
    text = " ".join(parsers()["serve-critic"].format_all_help().split())
    assert "HTTP port. 0: any free port. (default: 5556)" in text
    assert "--betas X,Y Betas of AdamW. (default: 0.9,0.98)" in text
    assert "default: only on request." in text and "only on request. (default" not in text
    assert "--no-grpc Serve HTTP only." in text
    assert "--keep-best-mode {auto,max,min}" in text
    assert "MISSING" not in text


def test_the_command_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == Exit.CANNOT_START
    out, err = capsys.readouterr()
    assert out == "" and "guerdon serve ./my-reward-model" in err
    assert err.splitlines()[-2].startswith(PLAIN) and err.splitlines()[-1].startswith("help: ")


# Errors


@pytest.mark.parametrize(
    ("argv", "suggests"),
    [
        ("serv", "help: did you mean serve? `guerdon --help` "),
        ("scroe --x", "help: did you mean score? `guerdon --help` "),
        ("serve m --prot 1", "help: did you mean --port? `guerdon serve --help-all` "),
        ("serve m --max_lenght=1", "help: did you mean --max-length? `guerdon serve --help-all` "),
        ("serve m --dtype bflaot16", "help: did you mean bfloat16? `guerdon serve --help-all` "),
        ("serve m --zzz", "help: `guerdon serve --help-all` "),
    ],
)
def test_similar_words_are_suggested(argv: str, suggests: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv.split())
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
    line = console.advise(cls("it failed", 1.0) if cls is errors.Overloaded else cls("it failed"))
    assert line.isprintable() and len(line) > 20
    own = {errors.GuerdonError, errors.Cancelled, errors.MethodNotAllowed}  # which no command ends with by itself
    assert (line == console.advise(errors.GuerdonError())) == (cls in own)


# Colours


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "is_coloured"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (io.StringIO(), {}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (io.StringIO(), {"FORCE_COLOR": ""}, False),
    ],
)
def test_colours(
    stream: io.StringIO, variables: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm-256color"} | variables).items():
        monkeypatch.setenv(name, value)
    assert console.coloured("guerdon:", "red", stream) + " " == (COLOURED if is_coloured else PLAIN)


@pytest.mark.slow
def test_errors_at_a_real_terminal_are_coloured() -> None:
    ours, theirs = pty.openpty()
    env = {name: value for name, value in environment().items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen([*COMMAND, "serv"], stderr=theirs, env=env | {"TERM": "xterm-256color"}):
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # EIO: the command has exited
            while part := os.read(ours, 65536):
                written += part
    os.close(ours)
    assert written.startswith(COLOURED.rstrip().encode()) and b"\033[36mhelp:\033[0m" in written


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_progress_bar_is_for_terminals(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    (tmp_path / "scorer_of_ones.py").write_text("def score(texts):\n    return [1.0] * len(texts)\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    assert cli.main(["score", "--model", "scorer_of_ones:score", "in.jsonl", "-o", "out.jsonl"]) == Exit.DONE
    err = capsys.readouterr().err
    assert "1 samples in 1 rows" in err and ("%|" in err) == is_terminal
    assert is_terminal or err.startswith("1 samples in 1 rows")


# Exit statuses


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
        if re.search(r"exit\(|SystemExit\(", text := path.read_text(encoding="utf-8")):
            for given in ends(ast.parse(text)):
                assert not isinstance(given, ast.Constant), f"{path}:{given.lineno}"


@pytest.mark.slow
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
    for shell in SHELLS:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            assert cli.main(["completion", shell]) == Exit.DONE
        assert err.getvalue() == ""
        (folder / f"guerdon.{shell}").write_text(out.getvalue())
    (folder / "server.yaml").touch()
    (folder / "models").mkdir()
    return folder


TYPED = {
    "guerdon serv": {"serve", "serve-critic", "serve-teacher", "serve-judge"},
    "guerdon serve --log-f": {"--log-format"},
    "guerdon serve --log-format ": {"text", "json"},
    "guerdon serve --config ser": {"server.yaml"},
    "guerdon serve mod": {"models"},
    "guerdon serve-critic m --checkpoint-dir mod": {"models"},
    "guerdon serve --no-fsdp m --po": {"--port", "--pooling"},
    "guerdon reinforce run.yaml --rollouts.te": {"--rollouts.temperature"},
    "guerdon completion ": set(SHELLS),
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
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
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


def test_arguments_that_take_a_path_exist() -> None:
    dests = set()
    for parser in parsers().values():
        dests |= {action.dest for action in parser._actions}
    assert dests >= FILES | FOLDERS
    by_name = {dest for dest in dests if re.search(r"(_|\.)(dir|file|folder|path)$", dest)}
    assert by_name <= FILES | FOLDERS


ROWS = [{"text": f"text {i}"} for i in range(300)]
SLOW = "import time\n\n\ndef score(texts):\n    time.sleep(0.2)\n    return [float(len(text)) for text in texts]\n"
BROKEN = "def score(texts):\n    raise RuntimeError('broken inside')\n"
REINFORCE = "policy: {model: nowhere}\ndata: {prompts: prompts.jsonl}\nremote_rm: {reward_model: {port: 1}}\n"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in a fork that has imported torch."""
    program = tmp_path_factory.mktemp("bin") / "guerdon"
    program.write_text(FORKS.wrapper("guerdon"))
    program.chmod(0o755)
    return program


FORKS = Forks()


@pytest.fixture(scope="module")
def echo() -> Iterator[EchoProcess]:
    with EchoProcess() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands, with what they read."""
    monkeypatch.chdir(tmp_path)
    zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "model"))
    zoo.language_model("llama", tmp_path / "policy")
    write(tmp_path / "in.jsonl", ROWS)
    write(tmp_path / "crash.jsonl", [*ROWS[:100], {"text": "<crash>"}, *ROWS])
    write(tmp_path / "slow.jsonl", [{"text": "<slow>"}, *ROWS])
    write(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    for name, rows in (("whole", ROWS), ("part", ROWS[:20])):
        write(tmp_path / f"{name}.jsonl", [{**row, "rewards": [1.0], "weights_version": "another"} for row in rows])
    (tmp_path / "slow_scorer.py").write_text(SLOW)
    (tmp_path / "broken_scorer.py").write_text(BROKEN)
    (tmp_path / "reinforce.yaml").write_text(REINFORCE)
    (tmp_path / "bad.yaml").write_text("models: [{model: x, nmae: y}]\n")
    return tmp_path


def check(process: subprocess.Popen[str], status: int, num_lines: int = 2) -> None:
    """Checks the status, and that stderr has the error and the advice as its last lines, of `num_lines`."""
    _, err = process.communicate(timeout=120)
    lines = [line for line in err.splitlines() if not line.startswith("  ")]  # without notes
    assert (process.returncode, len(lines)) == (status, num_lines), err
    if num_lines:
        assert lines[-2].startswith("guerdon: ") and lines[-1].startswith("help: "), err


def start(program: list[str], *argv: str, stdout: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
    env = environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*program, *argv], stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)


QUICK = ("a row that the server fails at",)


CLIENT = {  # of commands without torch, each in a Python of its own, whose end is its own as well
    "another model's whole file": (["score", "--server", "URL", "in.jsonl", "-o", "whole.jsonl"], Exit.CANNOT_START),
    "another model's part": (["score", "--server", "URL", "in.jsonl", "-o", "part.jsonl"], Exit.CANNOT_START),
    "a row that the server fails at": (["score", "--server", "URL", "crash.jsonl", "-o", "out.jsonl"], Exit.FAILED),
    "no server": (["score", "--server", "DEAD", "in.jsonl", "-o", "out.jsonl"], Exit.FAILED),
    "no such model": (["score", "--server", "URL", "--name", "x", "in.jsonl", "-o", "out.jsonl"], Exit.FAILED),
    "a full disk": (["score", "--server", "URL", "in.jsonl", "-o", "-"], Exit.FAILED),
    "a mistyped setting": (["serve", "--config", "bad.yaml"], Exit.CANNOT_START),
    "no such file": (["convert", "nowhere.gguf", "out"], Exit.CANNOT_START),
}


@pytest.mark.parametrize("name", slow_but(QUICK, CLIENT))
def test_a_command_without_torch_ends_with_its_error(name: str, folder: Path, echo: EchoProcess) -> None:
    argv, status = CLIENT[name]
    urls = {"URL": echo.http_url, "DEAD": f"http://127.0.0.1:{free_port()}"}
    with open("/dev/full", "w") as full:
        stdout = full if name == "a full disk" else subprocess.DEVNULL
        check(start([sys.executable, "-m", "guerdon"], *(urls.get(word, word) for word in argv), stdout=stdout), status)
    assert (folder / "out.jsonl").exists() == (name == "a row that the server fails at")


def test_help_loads_neither_torch_nor_the_client() -> None:
    code = "import sys, guerdon.cli.subcommands; print({'torch', 'httpx', 'guerdon.client'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "set()\n"


MODEL = {
    "another model's whole file": (["score", "--model", "model", "in.jsonl", "-o", "whole.jsonl"], Exit.CANNOT_START),
    "another model's part": (["score", "--model", "model", "in.jsonl", "-o", "part.jsonl"], Exit.CANNOT_START),
    "no model": (["score", "--model", "nowhere/", "in.jsonl", "-o", "out.jsonl"], Exit.CANNOT_START),
    "a function that is not there": (["score", "--model", "slow_scorer:x", "in.jsonl", "-o", "-"], Exit.CANNOT_START),
    "a policy to serve": (["serve", "policy", "--port", "0"], Exit.CANNOT_START),
    "a taken port": (["serve", "model", "--port", "PORT", "--no-grpc"], Exit.CANNOT_START),
    "no critic": (["serve-critic", "nowhere/", "--port", "0"], Exit.CANNOT_START),
    "no teacher": (["serve-teacher", "nowhere/", "--port", "0"], Exit.CANNOT_START),
    "no rubric": (["serve-judge", "policy", "--rubric", "none.yaml", "--port", "0"], Exit.CANNOT_START),
    "no policy": (["reinforce", "reinforce.yaml"], Exit.CANNOT_START),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL)
def test_a_command_with_a_model_ends_with_its_error(name: str, folder: Path, forked: Path, echo: EchoProcess) -> None:
    argv, status = MODEL[name]
    port = echo.http_url.rpartition(":")[2]
    check(start([str(forked)], *(port if word == "PORT" else word for word in argv)), status)


@pytest.mark.slow
def test_a_function_that_fails_on_every_row_shows_one_traceback(folder: Path, forked: Path) -> None:
    process = start([str(forked)], "score", "--model", "broken_scorer:score", "in.jsonl", "-o", "out.jsonl")
    _, err = process.communicate(timeout=120)
    assert process.returncode == Exit.FAILED
    assert err.count("failed on a sample") == err.count("broken_scorer.py") == 1
    assert "300 failed, the first: the model failed on this sample: RuntimeError: broken" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["server", "model"])
def test_ctrl_c_says_nothing(where: str, folder: Path, forked: Path) -> None:
    with contextlib.ExitStack() as stack:
        if where == "server":
            server = stack.enter_context(EchoProcess(slow_s=60.0))
            process = start(
                [sys.executable, "-m", "guerdon"], "score", "--server", server.http_url, "slow.jsonl", "-o", "out.jsonl"
            )
            while not server.num_requests():
                time.sleep(0.02)
        else:
            process = start([str(forked)], "score", "--model", "slow_scorer:score", "in.jsonl", "-o", "out.jsonl")
            while not (folder / "out.jsonl").exists():
                time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        check(process, Exit.INTERRUPTED, num_lines=0)
