"""What the documentation names exists: functions of the walk, files, links, commands, flags, settings, metrics."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch.distributed.run as torchrun
import yaml

import zoo
from guerdon import cli
from guerdon.adapters import trl, trl_critic, trlx, verl
from guerdon.cli.doctor_model import examine_model
from guerdon.engine.native.library import find
from guerdon.errors import ConfigError, Exit
from guerdon.server.metrics import COLLECTED, TABLE
from guerdon.server.runtime import check_addresses
from guerdon.settings.actors import DistillRunConfig, PPORunConfig, ReinforceRunConfig
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.settings.fields import from_mapping
from guerdon.settings.yaml_files import read_yaml
from processes import environment
from served import briefly, running

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRAINERS = sorted((ROOT / "docs/trainers").glob("*.md"))
DEPLOY = sorted((ROOT / "docs/deploy").glob("*.md"))
GUIDES = sorted(
    page for folder in ("guides", "coming_from", "config", "api") for page in (ROOT / "docs" / folder).glob("*.md")
)
EVERY = [*PAGES, *TRAINERS, *DEPLOY, *GUIDES]


def name_of(page: Path) -> str:
    """A page's path, the same in every process."""
    return page.relative_to(ROOT).as_posix()


def test_the_actors_walk_goes_through_functions_that_exist() -> None:
    text = (ROOT / "docs/walk.md").read_text().partition("## An actor's step")[2]
    steps = re.findall(r"^ ?(\d+)  (\S+)\.py +(\S+)", text, re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(1, 12))
    for _, path, name in steps:
        found = importlib.import_module("guerdon." + path.replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(
        r"`((?:src|tests|benchmarks|docs)/[\w./]+|(?:server|wire|engine|client|training)/\w+\.py)`", text
    ):
        assert (ROOT / path).exists() or (ROOT / "src/guerdon" / path).exists(), path


parser = functools.cache(cli.make_parser)


@functools.cache
def helps() -> list[str]:
    """The help of each command, torchrun's, and that of the load test."""
    texts = [parser().format_help(), torchrun.get_args_parser().format_help()]
    for action in parser()._subparsers._group_actions:  # type: ignore[union-attr]
        texts += [command.format_all_help() for command in action.choices.values()]  # type: ignore[union-attr]
    script = [sys.executable, ROOT / "benchmarks/server_load.py", "--help"]
    texts.append(subprocess.run(script, capture_output=True, text=True, check=True, env=environment()).stdout)
    return texts


def settings() -> dict[str, type]:
    """The paths of all settings of the actors, each with its command's dataclass."""

    def within(cls: type, prefix: str) -> Iterator[str]:
        for name, hint in typing.get_type_hints(cls).items():
            yield prefix + name
            if dataclasses.is_dataclass(hint):
                yield from within(typing.cast(type, hint), f"{prefix}{name}.")

    return {path: cls for cls in (PPORunConfig, ReinforceRunConfig, DistillRunConfig) for path in within(cls, "")}


@pytest.mark.parametrize("page", TRAINERS, ids=lambda page: page.name)
def test_what_the_trainers_pages_use_of_guerdon_exists(page: Path) -> None:
    text = page.read_text()
    for module, names in re.findall(r"^from (guerdon[\w.]*) import (.+)$", text, re.MULTILINE):
        for name in names.split(", "):
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), name
    for command in re.findall(r"^guerdon .*$", text, re.MULTILINE):
        for flag in re.findall(r"--[a-z][a-z-]+", command):
            assert any(flag in text for text in helps()), flag


@pytest.mark.parametrize(
    ("page", "functions"),
    [
        ("trl", [trl.reward_function]),
        ("trl_critic", [trl_critic.use_critic]),
        ("verl", [verl.compute_score]),
        ("trlx", [trlx.create_reward_fn]),
    ],
    ids=["trl", "trl_critic", "verl", "trlx"],
)
def test_the_adapters_arguments_stand_in_their_pages(page: str, functions: list[Callable[..., object]]) -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / f"docs/trainers/{page}.md").read_text(), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"\w+", row)}
    of_trainers = {"data_source", "solution_str", "ground_truth", "extra_info", "by_verl", "trainer"}
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    assert told - {"triton_host"} == arguments - of_trainers - {"triton_host"}


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=name_of)
def test_flags_and_metrics_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "README.md":  # whose table of trainers has their flags
        text = re.sub(r"^\| .*docs/trainers/.*$", "", text, flags=re.MULTILINE)
    others = r"^(?:docker|curl|kubectl|pip|\.venv/bin/pip) (?:.*\\\n)*.*$"  # with flags of their own
    text = re.sub(others, "", text, flags=re.MULTILINE)
    for flag in re.findall(r"`[^`]*?(--[a-z][a-z-]+)", text):
        assert any(flag in text for text in helps()), flag
    for metric in re.findall(r"guerdon_[a-z]+_?[a-z_]*[a-z]", text):
        names = {metric, re.sub("_(total|bucket|sum|count)$", "", metric)}
        assert names & {*TABLE, *COLLECTED}, metric


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_settings_and_names_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for path in re.findall(
        r"`((?:policy|data|rollouts|run|reinforce|ppo|distill|reference|teacher|remote_rm|remote_critic_rm|parallel)\.[a-z_.]+)",
        text,
    ):
        assert path in settings() or path.endswith((".yaml", ".py")), path
    for name in re.findall(r"`(guerdon\.(?:[A-Z]\w*|(?:adapters|deploy|client|actor)[\w.]*\w))", text):
        parts = name.split(".")
        for i in range(len(parts) - 1, 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:i]))
                break
            except ModuleNotFoundError:
                continue
        for part in parts[i:]:
            found = (
                getattr(found, part) if hasattr(found, part) else importlib.import_module(f"{found.__name__}.{part}")
            )


def taken(words: list[str]) -> object:
    """0 where the command's parser takes the words, or what it would end with."""
    try:
        parser().parse_args(words)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("page", [*EVERY, *sorted((ROOT / "examples").rglob("*.md"))], ids=name_of)
def test_commands_are_taken_by_the_parser(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ |torchrun .* -m )?guerdon (.+)", line)
            if found is None or found[1].startswith("COMMAND"):
                continue
            words = [word for word in shlex.split(found[1], comments=True) if word != "&"]
            status = taken(words)
            assert not status, f"{line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", EVERY, ids=name_of)
def test_files_of_settings_are_taken(page: Path) -> None:
    for block in re.findall(
        r"^```yaml\n(# (?:run|server|critic)\.yaml.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        given = yaml.safe_load(block)
        if "policy" in given:
            kinds = {"remote_critic_rm": PPORunConfig, "teacher": DistillRunConfig}
            from_mapping(next((kinds[name] for name in given if name in kinds), ReinforceRunConfig), given)
        else:
            from_mapping(ServerConfig, given)


PAGE = (ROOT / "docs/security.md").read_text()
ROWS = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| ---")][
    1:
]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)} | {
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:40])
def test_every_threats_test_exists(row: list[str]) -> None:
    threat, holds, shown = row
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
    assert threat.strip() and holds.strip() and named
    assert re.sub(r"`tests/[\w/]+\.py::\w+`,?", "", shown).strip() == "", "a test that is not named as the others are"
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert name in functions(ROOT / path), f"{path} has no {name}"


def test_the_page_has_the_threats_that_a_review_asks_for() -> None:
    threats = " ".join(row[0].lower() for row in ROWS)
    for word in ("without a key", "traversal", "smuggling", "bombs", "deserialisation", "log", "timing", "role"):
        assert word in threats, word


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.getcwd []", "a: !!python/name:os.system", "a: !x 1"])
def test_yaml_makes_plain_values_only(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read_yaml(path)


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o400, False), (0o640, True), (0o644, True)])
def test_a_file_of_keys_that_others_may_read_is_told(
    mode: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"score me {'k' * 16}\n")
    path.chmod(mode)
    check_addresses(ServerConfig(api_keys_file=str(path), port=0, grpc_port=None))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * is_told
    assert (f"{path} is secret, and others may read it" in caplog.text) is is_told


DATED = "{{ strftime_now('%d %b') }}" + zoo.CHAT_TEMPLATE
PROOFS = [
    "tokens are those of tokenizer.json (60 texts)",
    "the chat template prints the date (strftime_now): the same messages score differently another time",
    "other later tokens change nothing (0.0)",
    "same bits in any batch" if find()[0] else f"bits may change with the batch: {find()[1]}",
    f"neighbours and siblings change nothing {'' if find()[0] else 'in 6 swaps '}(0.0)",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path), chat_template=DATED)


def test_a_server_shows_them(folder: Path) -> None:
    config = ServerConfig(port=0, grpc_port=0, models=[ModelConfig(model=str(folder), name="rm")])
    with running(config=config) as server, httpx.Client(base_url=server.http_url) as client:
        parameters = client.get("/v2/models/rm/config").json()["parameters"]
        (shown,) = client.get("/dashboard/snapshot").json()["models"]
    assert parameters["proofs"]["string_value"].split("\n") == PROOFS
    assert shown["proofs"] == PROOFS


def test_the_command_prints_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("guerdon.server.runtime.run", briefly())
    assert cli.main(["serve", str(folder), "--name", "rm", "--port", "0", "--grpc-port", "0"]) == Exit.DONE
    assert f"guerdon: rm, proved: {'; '.join(PROOFS)}\n" in "".join(capsys.readouterr())


def test_the_doctor_shows_them(folder: Path, tmp_path: Path) -> None:
    language = zoo.tokenizer(zoo.language_model("llama", tmp_path / "language"), chat_template=DATED)
    for model in (folder, language):
        found = list(examine_model(str(model)))
        texts = [(finding.level, finding.text) for finding in found if finding.text in PROOFS]
        is_note = [any(word in proof for word in ("date", "bits may change")) for proof in PROOFS]
        assert texts == [("note" if note else "ok", proof) for note, proof in zip(is_note, PROOFS, strict=True)]
        (dated,) = [finding for finding in found if finding.subject == f"{model}, template"]
        assert "chat_template.jinja" in dated.help
