"""What the start proves stands in the command's output, in the model's configuration, on the page and in `doctor`."""

import itertools
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import zoo
from guerdon.cli.doctor_model import examine_model
from guerdon.engine.native.library import find
from guerdon.settings.config import ModelConfig, ServerConfig
from processes import environment
from served import running

DATED = "{{ strftime_now('%d %b') }}" + zoo.CHAT_TEMPLATE
PROOFS = [
    "tokens are those of tokenizer.json (60 texts)",
    "the chat template prints the date (strftime_now): the same messages score differently another time",
    "other later tokens change nothing (0.0)",
    "same bits in any batch" if find()[0] else f"bits may change with the batch: {find()[1]}",
    "neighbours and siblings change nothing in 6 swaps (0.0)",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path), chat_template=DATED)


def test_a_server_shows_them(folder: Path) -> None:
    config = ServerConfig(port=0, grpc_port=0, models=[ModelConfig(model=str(folder), name="rm")])
    with running(config) as server, httpx.Client(base_url=server.http_url) as client:
        parameters = client.get("/v2/models/rm/config").json()["parameters"]
        (shown,) = client.get("/dashboard/snapshot").json()["models"]
    assert parameters["proofs"]["string_value"].split("\n") == PROOFS
    assert shown["proofs"] == PROOFS


def test_the_command_prints_them(folder: Path) -> None:
    command = [sys.executable, "-m", "guerdon", "serve", str(folder), "--name", "rm", "--port", "0", "--grpc-port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        lines = list(itertools.takewhile(lambda line: "ready at" not in line, process.stdout))
        process.terminate()
        process.communicate(timeout=60)
    assert f"guerdon: rm, proved: {'; '.join(PROOFS)}\n" in lines, lines


def test_the_doctor_shows_them(folder: Path, tmp_path: Path) -> None:
    language = zoo.tokenizer(zoo.language_model("llama", tmp_path / "language"), chat_template=DATED)
    for model in (folder, language):
        found = list(examine_model(str(model)))
        texts = [(finding.level, finding.text) for finding in found if finding.text in PROOFS]
        is_note = [any(word in proof for word in ("date", "bits may change")) for proof in PROOFS]
        assert texts == [("note" if note else "ok", proof) for note, proof in zip(is_note, PROOFS, strict=True)]
        (dated,) = [finding for finding in found if finding.subject == f"{model}, template"]
        assert "chat_template.jinja" in dated.help
