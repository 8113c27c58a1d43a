"""A user's function in child processes: each limit ends its own sample with all its processes, and nothing else."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.distributed.ranks import Ranks
from guerdon.engine.functions import FunctionScorer
from guerdon.engine.isolation import process_tree
from guerdon.engine.isolation.isolated import IsolatedScorer
from guerdon.errors import CheckpointError, ChildEnded, ConfigError, InvalidRequest, SampleFailed, StartError
from guerdon.settings.config import ModelConfig
from guerdon.settings.fields import check_settings
from server.helpers import wait_until
from troubles import RAISED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")

NO_TOKENS = np.zeros(0, dtype=np.int64)
PATIENT_S = 60.0
"""A deadline that no sample of these tests reaches, however busy the machine is."""


class Asked:
    """Scores single texts by an isolated function; knows its processes."""

    def __init__(self, scorer: IsolatedScorer, others: set[int]) -> None:
        self._scorer = scorer
        self._others = others
        self.seen: set[int] = set()

    def __call__(self, text: str) -> Any:
        (result,) = self._scorer.score([Sequence(NO_TOKENS, text=text)])
        self.seen |= self.processes()
        return result

    def processes(self) -> set[int]:
        """Returns the template, the keepers, and all below them."""
        return below() - self._others


@contextmanager
def isolated(function: str = "troubles:trouble", **settings: Any) -> Iterator[Asked]:
    """An isolated function with one child; afterwards no process of it is left."""
    config = ModelConfig(model=function, name="f", isolate=True, **{"children": 1, **settings})
    check_settings(config)
    others = below()
    scorer = IsolatedScorer(config)
    ask = Asked(scorer, others)
    try:
        yield ask
    finally:
        scorer.discard()
        wait_until(lambda: not [pid for pid in ask.seen if is_alive(pid)])


def below() -> set[int]:
    """The processes below this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def sleeping() -> list[int]:
    """The processes `sleep 600` of this machine that these tests have started."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "600"]]


@pytest.fixture(scope="module")
def patient() -> Iterator[Asked]:
    """A child whose deadline is far."""
    with isolated(sample_deadline_s=PATIENT_S, sample_memory_mb=512) as ask:
        yield ask


@pytest.mark.parametrize(
    ("text", "reason", "why"),
    [
        ("SEGV", "signal", "ended its child process by SIGSEGV,"),
        ("READ_NULL", "signal", "by SIGSEGV"),
        ("KILL", "signal", "by SIGKILL, as by the kernel when memory runs out"),
        ("EXIT", "exit", "with exit status 3"),
        ("BOMB", "processes", "processes, more than 16.*sample_processes allows more"),
        ("MANY", "processes", "processes, more than 16"),
        ("2GB", "memory", "more than 512 MiB of memory.*sample_memory_mb allows more"),
        ("2GB_IN_PARTS", "memory", "more than 512 MiB of memory"),
        ("2GB_SHARED", "memory", "more than 512 MiB of memory"),
        ("GARBAGE", "garbage", "something else than an answer"),
        ("KILL_KEEPER", "keeper", "ended the process that watches it"),
        ("STOP_KEEPER", "keeper", r"or stopped it, after \d\.\d s"),
        ("STOP_SELF", "signal", "stopped its child process by SIGSTOP"),
        ("STOP_TEMPLATE", "keeper", r"after \d\.\d s"),
    ],
)
def test_a_sample_that_ends_its_child_fails_alone(patient: Asked, text: str, reason: str, why: str) -> None:
    result = patient(text)
    assert isinstance(result, ChildEnded) and result.reason == reason
    with pytest.raises(ChildEnded, match=why):
        raise result
    assert patient("fine").reward == 4.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("SYS_EXIT", r"the function raised SystemExit: 4 \(troubles.py, line \d+\)"),
        ("RAISE", "the function raised ValueError: invalid literal"),
        ("NAN", "the function returned nan for this sample"),
        ("TWO", "the function returned 2 rewards for 1 samples"),
        ("FILE", r"the function raised OSError: .*File too large"),
    ],
)
def test_a_sample_that_raises_fails_in_a_child_that_goes_on(patient: Asked, text: str, why: str) -> None:
    patient("fine")
    before = patient.processes()
    result = patient(text)
    assert type(result) is SampleFailed
    with pytest.raises(SampleFailed, match=why):
        raise result
    assert patient.processes() == before


def test_an_exception_keeps_its_class_and_the_beginning_of_its_text() -> None:
    with isolated("troubles:raising", sample_deadline_s=PATIENT_S) as ask:
        ask("fine")
        before = ask.processes()
        for text, (_, what) in RAISED.items():
            result = ask(text)
            assert type(result) is SampleFailed and what in str(result)
            assert re.search(r" \(troubles.py, line \d+\)$", str(result))
        for text in ("hostile", "number"):
            assert "the function raised ValueError: setting an array element" in str(ask(text))
        assert ask("fine").reward == 4.0 and ask.processes() == before


def test_a_sample_that_closes_its_output_is_scored_and_its_child_replaced(patient: Asked) -> None:
    for text in ("CLOSE_STDOUT", "NO_STDERR"):
        before = patient.processes()
        assert patient(text).reward == len(text)
        assert patient.processes() != before
        assert patient("PRINT").reward == 5.0


def test_a_stopped_template_is_resumed_with_its_keepers(patient: Asked) -> None:
    assert patient("STOP_ALL").reward == 8.0
    assert patient("fine").reward == 4.0


def test_what_a_sample_prints_is_logged_in_part(patient: Asked, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert patient("PRINT").reward == 5.0
    (line,) = [record.getMessage() for record in caplog.records if "printed" in record.getMessage()]
    assert line.startswith("f: a sample printed 'xxx") and len(line) < 1_100


def test_what_a_sample_leaves_behind_is_ended_with_it(patient: Asked) -> None:
    before = sleeping()
    assert patient("LEAVE").reward == 5.0
    wait_until(lambda: sleeping() == before)


def test_a_child_that_closes_its_channel_is_replaced(patient: Asked) -> None:
    result = patient("CLOSE")
    assert isinstance(result, ChildEnded) and result.reason in ("exit", "garbage")
    assert patient("fine").reward == 4.0


@pytest.mark.parametrize("text", ["HANG", "HANG_IN_C", "PAUSE", "IGNORE", "ORPHANS"])
def test_a_hang_ends_at_its_deadline_and_not_before(text: str) -> None:
    with isolated(sample_deadline_s=0.5, sample_cpu_s=PATIENT_S) as ask:
        started = time.monotonic()
        result = ask(text)
        assert time.monotonic() - started >= 0.5
        assert isinstance(result, ChildEnded) and result.reason == "deadline"
        assert "no answer within its deadline of 0.5 s" in str(result)
        wait_until(lambda: len(ask.processes()) == 3)  # template, keeper and a fresh child


def test_cpu_time_counts_over_all_processes() -> None:
    with isolated(sample_deadline_s=PATIENT_S, sample_cpu_s=0.3) as ask:
        result = ask("HANG_IN_C")
    assert isinstance(result, ChildEnded) and result.reason == "cpu"
    assert "used more than 0.3 s of CPU time" in str(result)


def test_the_function_gets_what_it_gets_without_isolation() -> None:
    labels: list[Any] = ["a", 2**70, {"b": [1.5, None, True]}, "ünïcode\u2028", ""]
    sequences = [
        Sequence(NO_TOKENS, text=f"prompt {i}answer", prompt=f"prompt {i}", reference=label)
        for i, label in enumerate(labels)
    ]
    sequences += [Sequence(NO_TOKENS, text="answer", prompt="other", reference=1), Sequence(NO_TOKENS, text="no label")]
    plain = FunctionScorer(ModelConfig(model="troubles:whole", name="f"))
    with_children = IsolatedScorer(ModelConfig(model="troubles:whole", name="f", isolate=True, children=2))
    try:
        assert with_children.info.why == "troubles:whole in 2 child processes"
        assert dataclasses.replace(with_children.info, why=plain.info.why) == plain.info
        expected, got = plain.score(sequences), with_children.score(sequences)
    finally:
        with_children.discard()
    assert [type(result) for result in expected] == [Score] * 5 + [InvalidRequest] * 2
    for one, other in zip(expected, got, strict=True):
        assert type(one) is type(other)
        assert one.reward == other.reward if isinstance(one, Score) else str(one) == str(other)


def test_tokens_arrive_as_arrays() -> None:
    scorer = IsolatedScorer(ModelConfig(model="troubles:total", isolate=True, children=1))
    try:
        assert scorer.score([Sequence(np.arange(10_000))])[0].reward == float(np.float32(np.arange(10_000).sum()))
    finally:
        scorer.discard()


def test_children_get_no_keys_and_what_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("MY_DATA", "here")
    with isolated("troubles:environment", pass_env=["MY_DATA"]) as ask:
        names = ("OPENAI_API_KEY", "MY_DATA", "PATH", "TMPDIR")
        assert [ask(name).reward for name in names] == [0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="pass_env names NOWHERE, which is not set here"):
        IsolatedScorer(ModelConfig(model="troubles:trouble", isolate=True, pass_env=["NOWHERE"]))


def test_temporary_files_go_with_the_children() -> None:
    with isolated("troubles:temporary") as ask:
        path = Path(str(ask("any")).split("ValueError: ")[1].split(" (")[0])
        assert path.exists()
    assert not path.parent.parent.exists()


def test_an_ended_template_and_its_keepers_are_replaced() -> None:
    with isolated() as ask:
        assert ask("fine").reward == 4.0
        (template,) = {process.pid for process in psutil.Process().children()} & ask.processes()
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: not is_alive(template))
        assert isinstance(ask("KILL_KEEPER"), ChildEnded)  # the last keeper of the old template
        assert ask("again").reward == 5.0


@pytest.mark.parametrize(
    ("function", "error", "why"),
    [
        ("hanging_import:f", StartError, "hanging_import:f is not imported within 0.5 s"),
        ("crashing_import:f", CheckpointError, "importing crashing_import:f ended its process"),
        ("nowhere:f", CheckpointError, "cannot import nowhere:f: ModuleNotFoundError"),
        ("leaving_import:f", CheckpointError, "cannot import leaving_import:f: SystemExit: this is a script"),
        ("rewarding:deferred", CheckpointError, "rewarding:deferred is asynchronous"),
    ],
)
def test_an_import_that_fails_refuses_the_start(function: str, error: type[StartError], why: str) -> None:
    before = below()
    import_s = 0.5 if function.startswith("hanging") else 60.0
    with pytest.raises(error, match=why) as caught:
        IsolatedScorer(ModelConfig(model=function, isolate=True, import_deadline_s=import_s))
    assert caught.value.help
    wait_until(lambda: below() <= before)


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="children is 3, but isolate is off"):
        check_settings(ModelConfig(model="troubles:trouble", children=3))
    with pytest.raises(ConfigError, match=r"isolate is on, but .* is a checkpoint"):
        build_scorer(ModelConfig(model=str(tmp_path), isolate=True))
    with pytest.raises(ConfigError, match="max_batch_tokens is 9, but troubles:trouble is isolated"):
        build_scorer(ModelConfig(model="troubles:trouble", isolate=True, max_batch_tokens=9))
    with pytest.raises(ConfigError, match=r"std is 2.0, but troubles:trouble is a function"):
        build_scorer(ModelConfig(model="troubles:trouble", isolate=True, std=2.0))
    with pytest.raises(ConfigError, match=r"programs:verify runs in a child process only") as caught:
        build_scorer(ModelConfig(model="guerdon.verifiers.programs:verify"))
    assert "isolate: true" in caught.value.help


def test_only_the_first_tensor_parallel_rank_computes() -> None:
    config = ModelConfig(model="troubles:trouble", isolate=True, children=1)
    first, second = (IsolatedScorer(config, Ranks(rank=rank, size=2, tensor_size=2)) for rank in (0, 1))
    try:
        texts = [Sequence(NO_TOKENS, text=text) for text in ("one", "EXIT", "three")]
        results = first.score(texts)
        assert [type(result) for result in results] == [Score, ChildEnded, Score]
        assert len(second.score(texts)) == 3
        assert first.max_batch_tokens > 1  # one command at a time: with all samples of a batch
    finally:
        first.discard()
        second.discard()


def test_the_descendants_of_a_process_are_found_and_ended() -> None:
    script = "import os, time; os.fork(); os.fork(); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: len(process_tree.descendants(process.pid)) == 3)
    found = process_tree.descendants(process.pid)
    assert process_tree.measure(found).num_processes == 3
    assert process_tree.measure(found).memory_bytes > 0
    process_tree.kill([*found, process.pid])
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in found))
    assert os.getpid() not in found and -process.returncode == signal.SIGKILL


def test_a_process_that_ends_is_known_from_one_that_closed_its_files() -> None:
    script = "import os, sys; os.close(1); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.read() == b"" and not process_tree.is_exiting(process.pid)
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, until `wait` reaps it
        assert process_tree.is_exiting(process.pid)
