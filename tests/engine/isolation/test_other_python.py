"""An isolated function in another environment, whose packages clash with the server's."""

import json
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from guerdon.client import RewardClient
from guerdon.errors import ConfigError
from guerdon.local import LocalRewardModel
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.settings.fields import check_settings, from_mapping
from served import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")
MODULE = """\
import sys, numpy, judged
def score(responses, labels=None):
    assert not any(name in sys.modules for name in ("torch", "transformers", "guerdon.server"))
    return [judged.VERSION + float(label) for label in labels]
def where(responses):
    raise ValueError(sys.prefix)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with a module of the tests' own name, and the server's packages behind its own.

    It has another version of guerdon, which must not answer the server's.
    """
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "theirs.py").write_text(MODULE)
    (packages / "judged.py").write_text("VERSION = 7.5\n")
    (packages / "guerdon").mkdir()
    (packages / "guerdon/__init__.py").write_text("raise ImportError('another version')\n")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_a_function_runs_with_the_packages_of_its_environment(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module is not even there for the server, and `judged` is another one here."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it would have this guerdon
    python = str(environment / "bin/python")
    data = {"models": [
        {"model": f"theirs:{name}", "name": name, "isolate": {"python": python}, "children": 2}
        for name in ("score", "where")
    ]}  # fmt: skip
    config = from_mapping(ServerConfig, data)
    check_settings(config)
    assert config.models[0].isolate is True and config.models[0].isolate_python == python
    with running(*config.models) as server:
        with RewardClient(server.http_url, "score") as client:
            scores = client.score(texts=["a"] * 20, prompts=[""] * 20, labels=[*range(20)]).raise_for_failed()
        assert scores.rewards.tolist() == [7.5 + i for i in range(20)]
        with RewardClient(server.http_url, "where") as client:
            error = client.score(texts=["a"], prompts=[""]).errors[0] or ""
        assert f"the function raised ValueError: {environment}" in error


def test_a_python_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    for name, line in (("other", "true"), ("killed", "kill -9 $$")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o700)
    for python, message in (
        (str(tmp_path / "other"), "it is no Python"),
        (str(tmp_path / "killed"), "it ended with status -9, without a word"),
        (str(tmp_path / "none"), "No such file"),
        (str(tmp_path / "bare/bin/python"), "No module named"),
    ):
        with pytest.raises(
            ConfigError, match=f"isolate.python is {python}, which cannot be used: .*{message}"
        ) as refused:
            LocalRewardModel("theirs:score", isolate=True, isolate_python=python)
        assert f"{python} -m pip install msgspec numpy pyyaml" in refused.value.help


def test_it_needs_isolation() -> None:
    with pytest.raises(ConfigError, match="isolate_python is p, but isolate is off"):
        check_settings(ModelConfig(model="theirs:score", isolate_python="p"))
    with pytest.raises(ConfigError, match="unknown setting isolate_pyhton"):
        from_mapping(ModelConfig, json.loads('{"model": "theirs:score", "isolate": {"pyhton": "p"}}'))
