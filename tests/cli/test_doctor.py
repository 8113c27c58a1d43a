"""Tests `guerdon doctor` on this machine, on real servers, and on broken ones."""

import contextlib
import importlib
import json
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import served
import zoo
from guerdon import __version__, cli
from guerdon.cli import doctor
from guerdon.cli.doctor_model import examine_model, is_model
from guerdon.cli.findings import Finding
from guerdon.engine.native.library import find
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig
from guerdon.settings.sources import CRITIC_PORTS
from ports import free_port
from processes import environment
from served import Serve, reward_model
from server.keys import ADMIN, SCORE, bearer, keyed
from stand_in import Handler, serving_http
from tiers import slow_but

MODELS = [ModelConfig(model="scorers:score")]
SECOND = [ModelConfig(model="scorers:score", name="sums")]


@pytest.fixture(scope="module")
def running(serve: Serve) -> RunningServer:
    return serve(*MODELS, grpc_port=0)


def by_subject(found: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found}


def in_a_process(*argv: str, path: Path | None = None, **variables: str) -> tuple[int, dict[str, Finding]]:
    """Returns the exit status and the findings of the command in a process, with `path` first on the module path."""
    env = environment() | variables
    if path is not None:
        env["PYTHONPATH"] = f"{path}:{env['PYTHONPATH']}"
    command = [sys.executable, "-m", "guerdon", "doctor", "--json", *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    found = [Finding(**finding) for finding in told["findings"]]
    assert told["problems"] == sum(finding.level == "problem" for finding in found)
    assert all(bool(finding.help) == (finding.level != "ok") for finding in found), "what to do stands by all else"
    return done.returncode, {finding.subject: finding for finding in found}


def run(*argv: str) -> int:
    return cli.main(["doctor", *argv])


def distribution(folder: Path, name: str, version: str, more: str = "") -> None:
    """Makes an installed distribution of that version, as pip does."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")


def test_this_machine_has_no_problem_and_its_findings_are_true(capsys, monkeypatch):
    monkeypatch.setenv("GUERDON_API_KEYS", f"score me {SCORE}")
    monkeypatch.setenv("GUERDON_API_KEY", SCORE)
    assert run() == 0
    out = capsys.readouterr().out
    lines = {text.split(":")[0].split(None, 1)[-1]: text for text in out.splitlines() if ":" in text}
    assert lines["python"].startswith("ok ") and platform.python_version() in lines["python"]
    assert lines["guerdon"] == f"ok       guerdon: {__version__}"
    assert metadata.version("transformers") in lines["extra server"]
    assert "packed+shared" in lines["attention on cpu"]
    assert lines["kernels on cpu"].startswith("ok       kernels on cpu: compiled for ") == (find()[0] is not None)
    assert "set: servers started here require a key" in lines["GUERDON_API_KEYS"]
    assert "set: clients send it" in lines["GUERDON_API_KEY"]
    assert SCORE not in out and "me" not in lines["GUERDON_API_KEYS"].split()
    assert out.splitlines()[-1].startswith("no problem, ")


def test_a_keys_variable_without_keys_is_a_problem(monkeypatch):
    for text, level in ((",", "problem"), ("# score me key", "problem"), (" ", "ok"), (f",score me {SCORE}", "ok")):
        monkeypatch.setenv("GUERDON_API_KEYS", text)
        found = by_subject(doctor.examine_machine())["GUERDON_API_KEYS"]
        assert found.level == level, text
        assert ("servers started here require a key" in found.text) == (SCORE in text)


def test_the_ports_are_the_servers_defaults():
    assert set(doctor.PORTS) == {ServerConfig.port, ServerConfig.grpc_port, *CRITIC_PORTS.values()}


def test_a_port_that_is_taken_names_who_has_it(running, monkeypatch):
    taken, silent = int(running.http_url.rsplit(":", 1)[1]), int(running.grpc_url.rsplit(":", 1)[1])
    free = free_port()
    what = {taken: "guerdon serve, HTTP", silent: "guerdon serve, gRPC", free: "guerdon serve, HTTP"}
    monkeypatch.setattr(doctor, "PORTS", what)
    found = by_subject(doctor.examine_machine())
    assert found[f"port {taken}"].level == "note"
    assert found[f"port {taken}"].text.startswith(f"taken by guerdon {__version__}")
    assert found[f"port {silent}"].level == "note" and "--grpc-port" in found[f"port {silent}"].help
    assert found[f"port {free}"].level == "ok"


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path):
    assert doctor.check_cache({"HF_HOME": "/proc/none"}).level == "problem"
    found = doctor.check_cache({"HF_HOME": str(tmp_path / "new"), "HF_HUB_OFFLINE": "1"})
    assert found.level in ("ok", "note") and str(tmp_path / "new" / "hub") in found.text
    assert not (tmp_path / "new").exists(), "looking makes nothing"
    assert str(tmp_path / "other") in doctor.check_cache({"HF_HUB_CACHE": str(tmp_path / "other")}).text


def test_certificates_that_cannot_be_read_are_a_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("GUERDON_CA_FILE", str(tmp_path / "none.pem"))
    found = by_subject(doctor.examine_machine())["client's credentials"]
    assert found.level == "problem" and "none.pem" in found.text


def test_a_proxy_is_noted(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "localhost")
    found = by_subject(doctor.examine_machine())["proxy"]
    assert found.level == "note" and "except for localhost" in found.text and "proxy.example" not in found.text


def test_our_requirements_are_read_as_pip_reads_them():
    own = metadata.metadata("guerdon")
    for extra in ["", *own.get_all("Provides-Extra")]:
        wanted = {
            (p.name, str(p.specifier))
            for p in map(Requirement, own.get_all("Requires-Dist"))
            if (p.marker is None) == (not extra) and (p.marker is None or p.marker.evaluate({"extra": extra}))
        }
        ours = doctor.requirements_of("guerdon", extra, with_contained=False)
        assert {(part.name, str(part.specifier)) for part in ours} == {w for w in wanted if w[0] != "guerdon"}, extra
    found = doctor.requirements_of("guerdon", "actor")
    assert {"torch", "matplotlib", "tensorboard"} <= {part.name for part in found}


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        ('sys_platform == "win32"', False),
        ('sys_platform != "win32"', True),
        ('python_version < "3.11"', False),
        ('python_version >= "3.11"', True),
        ('(sys_platform == "linux" and python_version < "99") and extra == "x"', sys.platform == "linux"),
    ],
)
def test_requirements_of_other_platforms_are_skipped(marker, holds, tmp_path, monkeypatch):
    distribution(tmp_path, "something", "1.0", f"Requires-Dist: other<2,>=1; {marker}\nProvides-Extra: x\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found = [part.name for extra in ("", "x") for part in doctor.requirements_of("something", extra)]
    assert found == (["other"] if holds else [])


@pytest.mark.slow
def test_an_untested_version_is_a_problem_and_a_missing_package_a_note(tmp_path, monkeypatch):
    distribution(tmp_path, "transformers", "4.40.0")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    found = by_subject(doctor.examine_installation())
    for extra in ("server", "actor"):
        assert found[f"extra {extra}"].level == "problem"
        assert "transformers 4.40.0 is not >=5.2,<6" in found[f"extra {extra}"].text
        assert found[f"extra {extra}"].help == f"pip install '.[{extra}]' in a clone of guerdon"
    assert found["extra plot"].level == "ok"
    missing = [part for part in found.values() if "is missing" in part.text]
    assert all(part.level == "note" and "pip install '.[" in part.help for part in missing)


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported_is_a_problem(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    status, found = in_a_process(path=tmp_path)
    assert status == 1
    assert found["torch"].level == "problem" and "libcudart.so.12" in found["torch"].text


def test_without_torch_this_is_the_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (found,) = doctor.examine_devices()
    assert found.level == "note" and found.help == "pip install '.[server]' in a clone of guerdon, to serve models"


def test_a_slower_path_is_noted_and_a_failing_model_is_a_problem(monkeypatch):
    from transformers import AttentionInterface

    from guerdon.engine.attention import registry

    def refuse() -> None:
        raise NotImplementedError("no registry")

    monkeypatch.setattr(registry, "register", refuse)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", AttentionInterface._global_mapping.copy())
    AttentionInterface._global_mapping.pop(registry.NAME, None)
    found = doctor._check_attention("cpu")
    assert found.level == "note" and found.text.startswith("single: ") and "no registry" in found.text
    assert doctor._check_attention("meta").level == "problem"


def test_a_server_is_examined_over_both_transports(running):
    for url in (running.http_url, running.grpc_url):
        found = list(doctor.examine_server(url))
        assert [finding.level for finding in found] == ["ok"] * 3
        assert found[0].text.startswith("live; answers within")
        assert found[1].text == f"guerdon {__version__}, the same as here"
        assert found[2].text.startswith("model reward_model is ready")
    assert "float32" in next(f for f in doctor.examine_server(running.http_url) if "model" in f.text).text


def test_an_unloaded_model_is_noted(tmp_path):
    config = keyed(tmp_path, models=[ModelConfig(model=str(reward_model(tmp_path / "rm"))), *SECOND])
    with served.running(config=config) as started:
        url = started.http_url.replace("://", f"://x:{ADMIN}@")
        unload = f"{started.http_url}/v2/repository/models/reward_model/unload"
        assert httpx.post(unload, headers=bearer(ADMIN)).status_code == 200
        found = list(doctor.examine_server(url))
    unloaded = next(finding for finding in found if finding.level == "note")
    assert unloaded.text == "model reward_model is unavailable: unloaded" and "admin" in unloaded.help
    assert any(finding.text.startswith("model sums is ready") for finding in found)


@pytest.mark.parametrize("scheme", slow_but(("http",), ["http", "grpc"]))
def test_an_unreachable_server_is_a_problem(scheme, capsys, no_devices):
    assert run(f"{scheme}://127.0.0.1:{free_port()}") == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("problem ") and told[1].lstrip().startswith("help: ")
    assert told[-1].startswith("1 problem, ")


def test_a_wrong_port_and_a_wrong_url_are_problems(running):
    grpc_port, http_port = (url.rsplit(":", 1)[1] for url in (running.grpc_url, running.http_url))
    for url in (f"http://127.0.0.1:{grpc_port}", f"grpc://127.0.0.1:{http_port}", "ftp://host:1", "grpc://host"):
        (found,) = doctor.examine_server(url)
        assert found.level == "problem" and found.help, url


@pytest.fixture
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the check of the devices, which takes a second."""
    monkeypatch.setattr(doctor, "examine_devices", lambda: iter(()))


@contextlib.contextmanager
def answering(status: int, body: bytes, **bodies: bytes) -> Iterator[int]:
    """Yields the port of another kind of server, which always answers this; `bodies` by the path's last part."""

    class Other(Handler):
        def do_GET(self) -> None:
            self.answer(bodies.get(self.path.rpartition("/")[2], body), status)

        do_POST = do_GET

    with serving_http(Other) as url:
        yield int(url.rpartition(":")[2])


def test_a_server_of_something_else_is_a_problem():
    with answering(404, b"") as port:
        (found,) = doctor.examine_server(f"http://127.0.0.1:{port}")
    assert found.level == "problem" and "404" in found.text


PAGE, NAMED = b"<html>Log in first</html>", b'{"name": "other", "version": 2}'


@pytest.mark.parametrize(
    ("body", "bodies"),
    [
        (PAGE, {}),
        pytest.param(b"", {}, marks=pytest.mark.slow),
        *slow_but((), [(b"\xff\xfe", {}), (b"[" * 100_000, {}), (b"null", {}), (b"[]", {})]),
        *slow_but((), [(PAGE, {"v2": NAMED}), (PAGE, {"v2": NAMED, "index": b'{"models": []}'})]),
    ],
    ids=["page", "empty", "no text", "deep", "null", "list", "page for the models", "no list of models"],
)
def test_an_answer_of_another_protocol_is_a_problem_and_no_traceback(body, bodies, monkeypatch, capsys, no_devices):
    with answering(200, body, **bodies) as port:
        monkeypatch.setattr(doctor, "PORTS", {port: "guerdon serve, HTTP"})
        assert run(f"http://127.0.0.1:{port}", "--json") == 1
    found = [Finding(**finding) for finding in json.loads(capsys.readouterr().out)["findings"]]
    wrong = [finding for finding in found if "open inference protocol" in finding.text and finding.level == "problem"]
    assert wrong[-1].level == "problem" and wrong[-1].help and wrong[-1].subject == f"http://127.0.0.1:{port}"
    assert any(finding.subject == f"port {port}" for finding in found)


def test_models_without_a_name_are_skipped():
    index = b'[7, {"name": "m", "state": "READY"}, {"name": ["x"], "state": null}]'
    with answering(200, b"", v2=NAMED, index=index) as port:
        texts = [finding.text for finding in doctor.examine_server(f"http://127.0.0.1:{port}")]
    assert texts[1:3] == ["other 2, a server of the open inference protocol", "model m is ready"]


@pytest.mark.parametrize("host", ["x..y", "a" * 300, "a\x00b", "h\ud800", "-\xfc.\xe4"])
def test_an_invalid_host_is_a_problem_and_no_traceback(host):
    (found,) = doctor.examine_server(f"http://{host}:80")
    assert found.level == "problem" and found.help


def test_a_missing_key_is_a_problem_and_one_in_the_url_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("GUERDON_API_KEY", raising=False)
    config = keyed(tmp_path, models=MODELS)
    with served.running(config=config) as started:
        for url in (started.http_url, started.grpc_url):
            found = list(doctor.examine_server(url))
            assert found[-1].level == "problem" and "GUERDON_API_KEY" in found[-1].help
            assert "needs a key" in found[-1].text and url not in found[-1].text, "the server's own words, once"
            scheme, rest = url.split("://")
            found = list(doctor.examine_server(f"{scheme}://x:{SCORE}@{rest}"))
            assert {finding.level for finding in found} == {"ok"}, found
            assert SCORE not in str(found)


def test_a_finding_is_one_line_and_its_help_another():
    assert str(Finding("ok", "a", "b")) == "ok       a: b\n"
    assert str(Finding("problem", "a", "b", "c")) == "problem  a: b\n         help: c\n"


def test_servers_are_asked_first(capsys, no_devices) -> None:
    assert run("http://127.0.0.1:9", "--json") == 1
    found = [finding["subject"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    assert found[:2] == ["http://127.0.0.1:9", "python"]


CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def findings(folder: Path) -> dict[str, Finding]:
    """The findings by the last words of their subject, empty for the model itself."""
    level = logging.getLogger("guerdon").level
    found = list(examine_model(str(folder)))
    assert logging.getLogger("guerdon").level == level
    return {finding.subject.removeprefix(str(folder)).removeprefix(", "): finding for finding in found}


def test_a_reward_model(tmp_path: Path) -> None:
    found = findings(zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "model")))
    levels = dict.fromkeys(["", "path", "proved", "tokenizer", "endings", "reward", "memory"], "ok")
    levels |= {} if find()[0] else {"bits": "note"}
    assert {subject: finding.level for subject, finding in found.items()} == {**levels, "endings, differences": "note"}
    assert repr("</s>\n") in found["endings"].text and "TRL" in found["endings"].text
    assert "decoder (llama), outputs rewards" in found[""].text
    assert found["path"].text.startswith("packed+shared")
    assert found["tokenizer"].text == f"with a chat template; EOS {zoo.EOS}, pad {zoo.PAD}"
    assert f"last_non_pad (pad {zoo.PAD})" in found["reward"].text


@pytest.mark.parametrize("task", ["SEQ_CLS", "CAUSAL_LM"])
def test_an_adapter_is_told_with_its_base(tmp_path: Path, task: str) -> None:
    peft = pytest.importorskip("peft")
    base = zoo.tokenizer(zoo.language_model("llama", tmp_path / "base"))
    classes = {"SEQ_CLS": AutoModelForSequenceClassification, "CAUSAL_LM": AutoModelForCausalLM}
    model = peft.get_peft_model(classes[task].from_pretrained(base), peft.LoraConfig(task_type=task, r=4))
    model.save_pretrained(tmp_path / "model")
    found = findings(tmp_path / "model")
    assert ("reward" if task == "SEQ_CLS" else "language model") in found[""].text
    assert found["adapter"].text.startswith(f"LORA, rank 4 of {base}, merged when it is loaded")
    base.rename(tmp_path / "moved")
    lacking = findings(tmp_path / "model")[""]
    assert lacking.level == "problem" and f"there is no folder {base}" in lacking.text and "--base" in lacking.help


def test_files_of_another_program_are_named(tmp_path: Path) -> None:
    (tmp_path / "model_world_size_2_rank_0.pt").write_bytes(b"a part")
    found = findings(tmp_path)[""]
    assert found.level == "problem" and "verl's FSDP ranks" in found.text and "verl.model_merger" in found.help


def test_a_reward_model_whose_pad_is_its_eos(tmp_path: Path) -> None:
    folder = zoo.configure(zoo.checkpoint("llama", tmp_path / "model"), pad_token_id=zoo.EOS)
    found = findings(folder)
    assert found["reward"].level == "note" and "read before it" in found["reward"].text
    assert found["tokenizer"].level == "note" and found["tokenizer"].text.startswith("none")


def test_an_encoder_is_not_said_to_share_prompts(tmp_path: Path) -> None:
    found = findings(zoo.checkpoint("bert", tmp_path / "model"))
    assert "encoder (bert)" in found[""].text
    assert found["path"].level == "ok" and found["path"].text.startswith("packed:")
    assert "to train" not in found["memory"].text


def test_a_language_model_says_how_its_answers_end(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.language_model("llama", tmp_path / "model"), chat_template=CHATML)
    found = findings(folder)
    assert "causal language model (llama)" in found[""].text
    assert found["reward"].level == "note" and "without a reward head" in found["reward"].text
    assert found["endings"].level == "ok" and repr("</s>\n") in found["endings"].text
    assert f"(ids [{zoo.EOS}, " in found["endings"].text
    assert "to train all of them" in found["memory"].text


def test_a_template_that_refuses_a_conversation_is_a_note(tmp_path: Path) -> None:
    refusing = "{{ raise_exception('only tools') }}"
    folder = zoo.tokenizer(zoo.language_model("llama", tmp_path / "model"), chat_template=refusing)
    found = findings(folder)["endings"]
    assert found.level == "note" and "only tools" in found.text and "ending" in found.help


def test_an_output_layer_of_its_own_counts(tmp_path: Path) -> None:
    tied, own = (
        findings(zoo.language_model("llama", tmp_path / str(tied), vocab_size=90_000, tie_word_embeddings=tied))
        for tied in (True, False)
    )
    counts = [int(found["memory"].text.partition(" ")[0].replace(",", "")) for found in (tied, own)]
    assert counts[1] - counts[0] == 90_000 * zoo.HIDDEN


def test_memory_is_counted_by_parameters(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "model")
    count = sum(tensor.numel() for name, tensor in zoo.tensors(folder).items() if not name.startswith("score"))
    assert findings(folder)["memory"].text.startswith(f"{count:,} parameters")


@pytest.mark.parametrize(
    ("name", "essence"),
    [
        ("nowhere/at/all", "no folder"),
        ("nowhere.gguf", "no file"),
        ("model.gguf", "guerdon convert"),
        ("empty", "config.json"),
        ("download", "download/model.gguf FOLDER"),
        ("half", "half/model.gguf FOLDER"),
    ],
)
def test_what_cannot_be_loaded_is_one_problem_with_help(tmp_path: Path, name: str, essence: str) -> None:
    for folder in (tmp_path, tmp_path / "empty", tmp_path / "download", tmp_path / "half"):
        folder.mkdir(exist_ok=True)
        if folder.name != "empty":
            (folder / "model.gguf").touch()
    (tmp_path / "half/config.json").write_text("{}")
    (found,) = examine_model(str(tmp_path / name))
    assert found.level == "problem"
    assert essence in f"{found.text} {found.help}"


@pytest.mark.parametrize(
    ("argument", "expected"),
    [("./model", True), ("some-org/model", True), ("model.gguf", True), ("http://a:1", False), ("grpc://a:1", False),
     ("localhost:5555", False)],
)  # fmt: skip
def test_an_argument_names_a_model_or_a_server(argument: str, expected: bool) -> None:
    assert is_model(argument) is expected
