"""That docs/security.md promises only what a test shows, and that settings are data."""

import ast
import re
from pathlib import Path

import pytest

from guerdon.errors import ConfigError
from guerdon.server.runtime import check_addresses
from guerdon.settings.config import ServerConfig
from guerdon.settings.sources import read_yaml

ROOT = Path(__file__).parents[1]
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
