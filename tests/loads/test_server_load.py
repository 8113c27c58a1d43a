"""benchmarks/server_load.py against real servers: what it sends, tells and writes, and how it ends."""

import asyncio
import json
import os
import pty
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import load_generator
import served
import server_load
import zoo
from guerdon.client.reward_client import AsyncRewardClient
from guerdon.errors import Exit, StartError, StorageFailed
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig
from load_generator import NOT_SENT, Answer, ClientLoad, Extent, poisson
from load_requests import Load, RandomTokens, Request, Shape
from load_summary import notes, summarise
from loads import load_scorers
from ports import free_port
from processes import environment
from served import Serve
from server.keys import SCORE, keyed

SCRIPT = Path(__file__).parents[2] / "benchmarks/server_load.py"
SHORT = ("--prompt-tokens", "30", "--response-tokens", "4", "--max-length", "40", "--concurrency", "4")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    """A reward model with a tokenizer, one without, functions, and a sum."""
    folder = tmp_path_factory.mktemp("load")
    with_text = str(served.reward_model(folder / "rm"))
    models = [
        ModelConfig(model=with_text),
        ModelConfig(model=str(zoo.checkpoint("llama", folder / "ids", num_labels=1)), name="ids"),
        ModelConfig(model="loads.load_scorers:lengths", name="lengths"),
        ModelConfig(model="loads.load_scorers:slow", name="slow"),
        ModelConfig(model="loads.load_scorers:held", name="held"),
        ModelConfig(model="served:flaky", name="flaky"),
    ]
    total = RewardConfig(name="total", components=[ComponentConfig(model="ids"), ComponentConfig(model="lengths")])
    return serve(*models, grpc_port=0, rewards=[total])


def load_test(*argv: str) -> int:
    """The exit status of the script in this process."""
    return server_load.run([*argv, "--no-progress"])


def told(tmp_path: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON."""
    file = tmp_path / "out.json"
    return load_test(*argv, "--json", str(file)), json.loads(file.read_bytes())


def test_a_run_reports_what_was_sent_answered_and_computed(server, tmp_path, capsys):
    plot = tmp_path / "out.png"
    status, out = told(tmp_path, server.http_url, *SHORT, "--requests", "24", "--warmup", "2", "--plot", str(plot))
    assert status == 0 and not out["failures"]
    assert (out["requests"], out["answered"], out["sequences"]) == (24, 24, 24 * 8)
    assert out["sequences_per_s"] == pytest.approx(192 / out["seconds"])
    work = out["work"]
    assert 0 < work["computed_tokens"] < work["received_tokens"], "the prompts were shared"
    assert out["received_tokens"] == work["received_tokens"], "of texts the server alone knows the tokens"
    assert work["batch_sequences"] == 192, "the warm-up is not counted"
    latency = out["latency_ms"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"] <= 1e3 * out["seconds"]
    assert 0 < out["compute_ms"]["p50"] < latency["max"]
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000
    table, errors = capsys.readouterr()
    assert "192" in table and "p99" in table and "% of received" in table and "random texts" in table
    assert errors == ""


def test_grpc_has_the_same_numbers_but_no_counters(server, tmp_path):
    status, out = told(tmp_path, server.grpc_url, *SHORT, "--requests", "10", "--responses", "3")
    assert status == 0
    assert (out["requests"], out["sequences"]) == (10, 30)
    assert out["work"] is None and out["received_tokens"] is None
    assert out["compute_ms"]["p50"] > 0


def test_a_load_is_fitted_to_a_model_that_takes_ids_alone(server, tmp_path):
    """Its vocabulary has 300 ids, and its sequences 256 tokens."""
    status, out = told(tmp_path, server.http_url, "--model", "ids", "--requests", "6", "--concurrency", "2")
    assert status == 0 and not out["failures"]
    assert 0.75 * zoo.MAX_LENGTH < out["load"]["shape"]["max_length"] <= zoo.MAX_LENGTH
    assert "random token ids" in out["load"]["told"]
    assert out["received_tokens"] == out["work"]["received_tokens"], "the client's own count is the server's"


def test_texts_are_fitted_with_room_for_those_of_more_tokens(server, tmp_path):
    status, out = told(tmp_path, server.http_url, "--requests", "20", "--responses", "4", "--spread", "1")
    assert status == 0 and out["load"]["shape"]["max_length"] < zoo.MAX_LENGTH


def test_a_sum_has_the_work_of_its_models(server, tmp_path):
    status, out = told(tmp_path, server.http_url, "--model", "total", *SHORT, "--requests", "4", "--responses", "2")
    assert status == 0
    assert out["work"]["model"] == "" and out["work"]["received_tokens"] == 2 * out["received_tokens"]
    assert any("all its models" in note for note in out["notes"])


def test_json_may_go_to_the_terminal_alone(server, capsys):
    assert load_test(server.http_url, "--model", "lengths", *SHORT, "--requests", "2", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2


def test_seconds_end_a_run(server, tmp_path):
    for _ in range(5):  # in one of them the machine does not stall for all the time
        status, out = told(tmp_path, server.http_url, "--model", "lengths", *SHORT, "--seconds", "0.5")
        assert status == 0 and out["requests"] >= 4
        assert 0.4 < out["seconds"] < 30
        if out["requests"] > 4:
            return
    pytest.fail("no request was sent after the first ones")


def test_failed_samples_fail_the_run_and_are_reported(server, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p ", "responses": ["a", "unscorable"]}\n{"prompt": "p ", "responses": ["a", "b"]}\n')
    status, out = told(tmp_path, server.http_url, "--model", "flaky", "--data", str(rows), "--requests", "10")
    assert status == 1
    assert (out["answered"], out["sequences"], out["failed_sequences"]) == (10, 15, 5)
    assert [(failure["kind"], failure["count"]) for failure in out["failures"]] == [("SampleFailed", 5)]
    assert "SampleFailed 5 times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bounds", "status"),
    [
        (("--fail-p99-ms", "60000", "--fail-below", "0.001"), 0),
        (("--fail-p99-ms", "0.001"), 1),
        (("--fail-below", "1000000000"), 1),
    ],
)
def test_bounds_decide_the_exit_status(server, capsys, bounds, status):
    assert load_test(server.http_url, "--model", "lengths", *SHORT, "--requests", "4", *bounds) == status
    assert ("does not hold" in capsys.readouterr().out) == bool(status)


def test_errors_at_the_start_say_what_to_do(server, tmp_path):
    missing = str(tmp_path / "none" / "x.png")
    for argv, what in (
        ((f"http://127.0.0.1:{free_port()}", "--wait-s", "0"), "cannot connect"),
        ((f"grpc://127.0.0.1:{free_port()}", "--wait-s", "0"), "cannot connect|no sign of life"),
        ((server.http_url, "--model", "other"), "unknown model 'other'; served here: .*reward_model"),
        ((server.http_url, "--data", str(tmp_path / "none.jsonl")), "cannot read"),
        ((server.http_url, "--plot", "out.pdf"), "not a .png file"),
        ((server.http_url, "--plot", missing), "there is no folder"),
        ((server.http_url, "--json", str(tmp_path)), "is a folder"),
        ((server.http_url, "--json", "/proc/none.json"), "cannot write /proc/none.json: "),
        (("ftp://127.0.0.1:1",), "is malformed: give http"),
        (("http://127.0.0.1:99999",), "Port out of range"),
        ((server.http_url, "--template"), "--data is not"),
        ((server.http_url, "--vocab-size", "9"), "gets text"),
        ((server.http_url, "--data", "x", "--responses", "2", "--spread", "0"), "--responses, --spread are for"),
        ((server.http_url, "--data", "x", "--seed", "1"), "--seed is for the random load"),
    ):
        with pytest.raises(StartError, match=what) as e:
            load_test(*argv)
        assert e.value.help


def test_files_are_tried_before_the_load_and_left_as_they_were(tmp_path):
    """No server is there: what is told is of the files, or that."""
    new, old, nowhere = tmp_path / "new.json", tmp_path / "old.json", f"http://127.0.0.1:{free_port()}"
    old.write_text("before")
    for file in (new, old):
        with pytest.raises(StartError, match="cannot connect"):
            load_test(nowhere, "--wait-s", "0", "--json", str(file))
    assert not new.exists() and old.read_text() == "before"
    with pytest.raises(StartError, match="is a folder"):
        load_test(nowhere, "--wait-s", "0", "--json", str(tmp_path))


def test_a_file_that_cannot_be_written_is_named(server, capsys):
    with pytest.raises(StorageFailed, match="cannot write /dev/full: No space left"):
        load_test(server.http_url, "--model", "lengths", *SHORT, "--requests", "2", "--json", "/dev/full")
    assert "sequences/s" in capsys.readouterr().out, "the table is not lost with it"


def test_a_seed_goes_with_rows_that_come_at_random_times(server, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "alone"}\n')
    argv = ("--data", str(rows), "--rate", "50", "--seed", str(2**63 - 1), "--requests", "4")
    status, out = told(tmp_path, server.http_url, *argv)
    assert status == 0 and out["load"]["seed"] == 2**63 - 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--rate", "0"),
        ("--requests", "0"),
        ("--seconds", "nan"),
        ("--spread", "-1"),
        ("--spread", "11"),
        ("--seed", str(2**63)),
        ("--prompt-tokens", "1e12"),
        ("--responses", "1000000"),
        ("--max-length", "1" + "0" * 9),
        ("--timeout-s", "1e300"),
        ("--requests", "1" + "0" * 5000),
    ],
)
def test_numbers_that_mean_nothing_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        load_test("http://127.0.0.1:1", *flags)
    assert "is not a" in capsys.readouterr().err


def test_a_key_comes_as_every_clients_does_and_is_never_told(tmp_path, monkeypatch, capsys):
    config = keyed(tmp_path, models=[ModelConfig(model="loads.load_scorers:lengths")])
    monkeypatch.delenv("GUERDON_API_KEY", raising=False)
    with served.running(config=config) as running:
        url, few = running.http_url, (*SHORT, "--requests", "3")
        with pytest.raises(StartError, match="key") as refused:
            load_test(url, *few)
        assert "GUERDON_API_KEY" in refused.value.help
        in_url = url.replace("http://", f"http://x:{SCORE}@")
        status, out = told(tmp_path, in_url, *few)
        assert status == 0 and out["work"] is not None, "the metrics were read with it"
        monkeypatch.setenv("GUERDON_API_KEY", SCORE)
        assert load_test(url, *few) == 0
    assert SCORE not in capsys.readouterr().out + json.dumps(out)


class SlowToMake(RandomTokens):
    """A load that keeps the client from sending."""

    def request(self, index: int) -> Request:
        time.sleep(0.02)
        return super().request(index)


def driven(
    url: str,
    model: str,
    rate: float | None,
    requests: int,
    max_open: int = 1024,
    kind: type[Load] = RandomTokens,
    answers: list[Answer] | None = None,
) -> list[Answer]:
    """The answers of a load of single sequences, open with a rate and one at a time without."""
    answers = [] if answers is None else answers

    async def drive() -> list[Answer]:
        async with AsyncRewardClient(url, model, max_in_flight=1 << 20) as client:
            driver = ClientLoad(client, kind(Shape(4, 4, 1, 0.1, 16), 0, 9), 30.0, answers.append, max_open)
            if rate is None:
                await driver.closed(1, Extent(None, requests))
            else:
                await driver.open(poisson(rate, Extent(None, requests), 0))
        return answers

    return asyncio.run(drive())


class LastFrees(RandomTokens):
    """A load whose twentieth request lets the model `held` answer."""

    def request(self, index: int) -> Request:
        if index == 19:
            load_scorers.go.set()
        return super().request(index)


def test_a_rate_does_not_wait_for_answers(server):
    load_scorers.go.clear()
    answers = driven(server.http_url, "held", 100.0, 20, kind=LastFrees)
    assert len(answers) == 20 and not any(answer.error for answer in answers), "there is none before the last is sent"
    assert len({answer.sent_s for answer in answers}) == 20
    waited = driven(server.http_url, "slow", None, 2)
    assert waited[1].sent_s >= load_scorers.SLOW_S, "but places do"


def test_a_rate_is_kept_on_average(server):
    answers = driven(server.http_url, "lengths", 200.0, 200)
    assert max(answer.sent_s for answer in answers) == pytest.approx(1.0, rel=0.35)


def test_a_client_that_cannot_keep_up_says_so(server):
    answers = driven(server.http_url, "lengths", 1000.0, 40, kind=SlowToMake)
    assert answers[-1].late_s > 0.5 and all(answer.late_s <= answer.seconds for answer in answers)
    summary = summarise(answers, None, 0.0, rate=1000.0)
    assert summary.sent_per_s is not None and summary.sent_per_s < 60
    assert any("could not keep up" in note for note in notes(summary))
    for _ in range(10):  # in one of them the machine does not stall
        at_leisure = driven(server.http_url, "slow", 20.0, 6)
        assert all(answer.late_s + load_scorers.SLOW_S <= answer.seconds for answer in at_leisure), (
            "it is no delay of the server's"
        )
        if max(answer.late_s for answer in at_leisure) < 0.1 < load_scorers.SLOW_S:
            break
    else:
        pytest.fail("a client that could keep up was late each time")
    assert all(answer.late_s == 0 for answer in driven(server.http_url, "lengths", None, 3, kind=SlowToMake))


def test_waiting_for_the_last_answers_is_no_idleness(server, monkeypatch):
    """By this clock one request is made for 0.2 s, 0.15 of them busily, and answered after 0.8 s more."""
    now = {"wall": 100.0, "cpu": 10.0}
    clock = SimpleNamespace(perf_counter=lambda: now["wall"], process_time=lambda: now["cpu"])
    monkeypatch.setattr(load_generator, "time", clock)

    def answered(answer: Answer) -> None:
        assert not answer.error
        now["wall"] += 0.8

    async def drive() -> float:
        async with AsyncRewardClient(server.http_url, "slow") as client:
            await client.info()
            driver = ClientLoad(client, Busy(Shape(4, 4, 1, 0.1, 16), 0, 9), 30.0, answered)
            await driver.open(poisson(5.0, Extent(None, 1), 0))
            return driver.cores

    class Busy(RandomTokens):
        def request(self, index: int) -> Request:
            now["wall"] += 0.2
            now["cpu"] += 0.15
            return super().request(index)

    assert asyncio.run(drive()) == pytest.approx(0.75), "0.15 where the wait is counted"
    assert now["wall"] == pytest.approx(101.0)


class EightFree(list):
    """Answers of which the eighth lets the model `held` answer."""

    def append(self, answer: Answer) -> None:
        super().append(answer)
        if len(self) == 8:
            load_scorers.go.set()


def test_what_is_due_while_too_many_wait_is_not_sent(server):
    load_scorers.go.clear()
    answers = driven(server.http_url, "held", 1e4, 12, max_open=4, answers=EightFree())
    assert [answer.error for answer in answers[:8]] == [NOT_SENT] * 8
    assert [answer.error for answer in answers[8:]] == [""] * 4


def test_a_server_that_is_gone_is_told_and_not_asked_without_a_break():
    started = time.perf_counter()
    answers = driven(f"http://127.0.0.1:{free_port()}", "m", None, 4)
    assert [answer.error for answer in answers] == ["Unreachable"] * 4
    assert time.perf_counter() - started > 0.3


@pytest.mark.slow
def test_the_script_shows_its_progress_on_a_terminal(server):
    """A real process, whose stderr is a terminal and whose stdout is none."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 100))
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 4096):
                shown.extend(part)
        except OSError:  # Linux's end of a terminal
            pass

    reader = threading.Thread(target=read)
    reader.start()
    argv = [sys.executable, SCRIPT, server.http_url, "--model", "slow", *SHORT, "--requests", "9"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=its, text=True, env=environment(), timeout=120)
    os.close(its)
    reader.join()
    os.close(ours)
    assert done.returncode == 0, shown.decode()
    assert b"/9 requests" in shown and b"sequences/s" in shown
    assert done.stdout.startswith("load test: slow at ") and "\x1b" not in done.stdout


def test_the_script_ends_with_its_error():
    argv = [sys.executable, SCRIPT, f"http://127.0.0.1:{free_port()}", "--wait-s", "0"]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=120)
    what, advice = done.stderr.splitlines()
    assert done.returncode == Exit.CANNOT_START and what.startswith("guerdon: ") and advice.startswith("help: ")


def test_neither_torch_nor_matplotlib_is_imported_without_need():
    code = f"import sys; sys.path.append({str(SCRIPT.parent)!r})\nimport server_load, guerdon.cli.doctor\n"
    code += "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
