"""`guerdon check` finds each planted fault of a wrong server, and none in guerdon, whatever the form."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import judged
import zoo
from cli import wrong_server
from guerdon import cli
from guerdon.cli.check_forms import FORMS
from guerdon.cli.check_trials import TRIALS
from guerdon.errors import Exit
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import JudgeConfig, ModelConfig, TeacherConfig
from ports import free_port
from processes import environment
from served import Serve
from server.helpers import tried_again
from tiers import slow_but

ALSO = {
    "drifting": {"reference", "batch", "padding", "neighbours", "order", "concurrency", "endings", "BOS", "unicode",
                 "long inputs", "truncation", "empty", "unknown ids", "malformed", "one bad", "time-outs"},
    "sigmoid": {"endings", "BOS", "unicode", "long inputs"},
    "mean of the batch": {"order"},
    "pads are read": {"batch", "order", "long inputs"},
    "sorted by length": {"padding", "long inputs"},
    "answers mixed up": {"one bad"},
    "ids clamped": {"one bad"},
    "NaN": {"batch"},
}  # fmt: skip
"""Other trials that cannot but see a fault as well."""


IN_FOLDERS = ("rm", "encoder", "sliding", "rebuilt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    zoo.tokenizer(zoo.checkpoint("llama", folder / "rm"))
    zoo.tokenizer(zoo.checkpoint("bert", folder / "encoder"))
    zoo.tokenizer(zoo.checkpoint("mistral-sliding", folder / "sliding", num_labels=3))
    zoo.tokenizer(zoo.checkpoint("qwen2", folder / "rebuilt"))  # transformers gives its tokenizer a normaliser
    zoo.tokenizer(zoo.language_model("llama", folder / "lm"))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    models: list[Any] = [ModelConfig(model=str(folder / name), name=name) for name in IN_FOLDERS]
    models.append(
        ModelConfig(
            model=str(zoo.tokenizer(zoo.checkpoint("llama", folder / "steps", "tokcls", num_labels=2))),
            name="steps",
            step_separator="<extra_0>",
        )
    )
    models.append(TeacherConfig(model=str(folder / "lm"), name="lm"))
    models.append(TeacherConfig(model=str(folder / "lm"), name="short", max_length=48))
    models.append(JudgeConfig(model=str(folder / "lm"), name="judge", rubric=judged.write(folder), max_other_mass=1.0))
    return serve(*models)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status of the command, and each trial by its name."""
    status = cli.main(["check", "--json", *map(str, argv)])
    captured = capsys.readouterr()
    if status == Exit.CANNOT_START:
        return status, {"": {"outcome": "fell short", "why": captured.err}}
    told = json.loads(captured.out)
    trials = {trial["name"]: trial for trial in told["trials"]}
    assert list(trials) == [trial.name for trial in TRIALS]
    assert told["faults"] == sum(trial["outcome"] == "fell short" for trial in trials.values())
    assert status == (Exit.FAILED if told["faults"] else Exit.DONE)
    return status, trials


SILENT = (
    "",
    "cut at the left",
)
"""An innocent server, and one of the faults that change numbers without a word."""


def faults(trials: dict[str, dict[str, str]]) -> dict[str, str]:
    return {name: trial["why"] for name, trial in trials.items() if trial["outcome"] == "fell short"}


@pytest.mark.parametrize("fault", slow_but(SILENT, wrong_server.FAULTS))
@tried_again  # requests must meet within a tenth of a second for some of them
def test_each_planted_fault_is_found(fault: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with wrong_server.serving(folder / "rm", fault) as url:
        argv = (url, "--reference", folder / "rm", "--timeout", 5 if fault == "one at a time" else 60)
        _, trials = run(capsys, *argv)
    found = faults(trials)
    if not wrong_server.FAULTS[fault]:
        assert not found
    if not fault:
        skipped = [name for name, trial in trials.items() if trial["outcome"] == "not applicable"]
        assert not skipped, "this server can be asked all"
    if not wrong_server.FAULTS[fault]:
        return
    assert wrong_server.FAULTS[fault] in found
    assert found.keys() - {wrong_server.FAULTS[fault]} <= ALSO.get(fault, set()), found


@pytest.mark.slow
def test_a_sigmoid_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with wrong_server.serving(folder / "rm", "sigmoid") as url:
        _, trials = run(capsys, url, "--reference", folder / "rm")
    assert trials["reference"]["why"].endswith("it is a sigmoid of the raw score")


OF_REWARDS = [form.name for form in FORMS if form.gives == "rewards" and not form.name.startswith("infinity")]
NAMING = {form.name: form.names_model for form in FORMS}
"""Others ask the first model, `rm` or `lm`."""
OF_TEACHERS = [form.name for form in FORMS if form.gives != "rewards"]


@pytest.mark.parametrize(
    ("model", "form"),
    [
        *slow_but(("rm",), ((model, "kserve") for model in (*IN_FOLDERS, "lm", "short", "judge"))),
        *slow_but((), (("rm", form) for form in ("trlx", *OF_REWARDS))),
        pytest.param("encoder", "vllm-score", marks=pytest.mark.slow),
        ("lm", OF_TEACHERS[0]),
        *slow_but((), (("lm", form) for form in OF_TEACHERS[1:])),
        pytest.param("judge", "vllm-score", marks=pytest.mark.slow),
    ],
)
def test_guerdon_has_none(
    model: str, form: str, folder: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with_reference = ["--reference", folder / model] if (folder / model).exists() else []
    named = ["--name", model] if form in ("kserve", "trlx") or NAMING[form] else []
    status, trials = run(capsys, server.http_url, "--form", form, *named, *with_reference)
    assert status == Exit.DONE, faults(trials)
    held = {name for name, trial in trials.items() if trial["outcome"] == "held"}
    assert held >= {"answers", "repeat", "batch", "padding", "neighbours", "order", "concurrency", "long inputs",
                    "truncation", "empty", "malformed", "one bad", "time-outs", "NaN", "versions"}  # fmt: skip
    assert not with_reference or "labels" in form or form == "sglang-score" or "reference" in held


def test_a_scorer_of_lengths_has_none(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    status, trials = run(capsys, serve(ModelConfig(model="served:shortness")).http_url)
    assert status == Exit.DONE, faults(trials)
    assert ", of 7 different scores" in trials["answers"]["why"]
    for name in ("unicode", "long inputs", "truncation"):
        assert trials[name]["why"] == "texts of equal length score alike, whatever they say", name


@pytest.mark.slow
def test_another_models_limit_is_not_taken(folder: Path, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    first = TeacherConfig(model=str(folder / "lm"), name="lm", max_length=48)
    server = serve(first, ModelConfig(model=str(folder / "rm"), name="rm"))
    status, trials = run(capsys, server.http_url, "--form", "openrlhf")  # no request names a model: `rm` answers
    assert status == Exit.DONE, faults(trials)
    assert trials["truncation"]["why"].startswith("512 tokens are refused")


def test_a_scorer_of_stars_has_none(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    status, trials = run(capsys, serve(ModelConfig(model="served:stars")).http_url)
    assert status == Exit.DONE, faults(trials)
    assert trials["truncation"]["why"] == "scores are coarse: some words score alike"


@pytest.mark.slow
def test_ctrl_c_waits_for_no_request(folder: Path) -> None:
    with wrong_server.serving(folder / "rm", "stuck after 40") as url:
        command = [sys.executable, "-m", "guerdon", "check", url, "--timeout", "50"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        assert process.stdout is not None
        while "order" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.5)  # most of the requests at once are open now
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == Exit.INTERRUPTED


@tried_again
def test_a_server_that_leaves_requests_open_is_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with wrong_server.serving(folder / "rm", "stuck after 0") as url:
        status, trials = run(capsys, url, "--timeout", 0.5)
    assert status == Exit.CANNOT_START and "left a request of the form vllm-classify open" in trials[""]["why"]


def test_what_cannot_be_asked_is_misuse(
    folder: Path, server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "form.yaml").write_text("name: mine\npath: /predict\n")
    for argv, why in {
        (f"http://127.0.0.1:{free_port()}",): "gave no answer",
        ("http://a:b@",): "is malformed",
        ("grpc://127.0.0.1:5557",): "trials go over HTTP",
        (server.http_url, "--form", "vllm"): "no form vllm",
        (server.http_url, "--form", str(tmp_path / "form.yaml")): "is no form",
        (server.http_url, "--timeout", "0"): "not above 0",
        (server.http_url, "--timeout", "inf"): "not above 0",
        (server.http_url, "--tolerance", "nan"): "not above 0",
        (server.http_url, "--max-length", "31"): "the trials need 32",
        (server.http_url, "--name", "steps"): "(kserve: 400",
        (server.http_url, "--name", "nobody"): "answers no known form",
        (server.http_url, "--name", "rm", "--form", "openrlhf"): "name no model",
        (server.http_url, "--name", "lm", "--form", "vllm-score"): "answers no vllm-score (vllm-score: 400",
        (server.http_url, "--reference", str(tmp_path)): "cannot be loaded",
        (server.http_url, "--name", "rm", "--reference", str(folder / "lm")): "which transformers would make up",
    }.items():
        status, trials = run(capsys, *argv)
        assert status == Exit.CANNOT_START and why in trials[""]["why"], argv


@pytest.mark.slow
def test_a_form_may_be_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = {"name": "mine", "path": "/classify", "ids": {"model": "m", "input": "$ids"}, "read": "data.[].probs"}
    (tmp_path / "form.json").write_text(json.dumps(form))
    with wrong_server.serving(folder / "rm") as url:
        status, trials = run(capsys, url, "--form", tmp_path / "form.json", "--reference", folder / "rm")
    assert status == Exit.DONE, faults(trials)
    assert {name for name, trial in trials.items() if trial["outcome"] == "not applicable"} == {
        "BOS",
        "unicode",
        "names",
    }


@pytest.mark.slow
def test_it_speaks_first_and_needs_no_torch(folder: Path) -> None:
    code = "import sys; from guerdon import cli; s = cli.main(sys.argv[1:]); assert 'torch' not in sys.modules; exit(s)"
    with wrong_server.serving(folder / "rm", "sigmoid") as url:
        command = [sys.executable, "-c", code, "check", url]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"checking {url}" and lines[-1].endswith("0 fell short, 3 not applicable")
    assert [line.split("  ")[0] for line in lines if "needs --reference" in line] == ["not applicable"] * 3


def test_the_page_lists_every_trial_and_form() -> None:
    page = (Path(__file__).parents[2] / "docs/conformance.md").read_text()
    for trial in TRIALS:
        assert f"| {trial.name} | {trial.asks} |" in page
    for form in FORMS:
        assert f"| `{form.name}` | `{form.path}` | {', '.join(form.takes())}" in page
