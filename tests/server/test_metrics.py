"""The metrics as Prometheus reads them, and that page, dashboard and alerts speak of those that there are."""

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from guerdon import errors
from guerdon.assembly import build_service
from guerdon.errors import DeadlineExceeded
from guerdon.server import triton
from guerdon.server.metrics import COLLECTED, TABLE, Metrics
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig
from server.helpers import INFER, body_of, next_status

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/guerdon.json"
RULES = ROOT / "deploy/prometheus/guerdon.rules.yml"
SUFFIXES = {"counter": {"_total"}, "gauge": {""}, "histogram": {"_bucket", "_sum", "_count"}}
BUILT_IN = {"le", "instance", "job"}


def readable() -> dict[str, set[str]]:
    """The name of every series that can be asked for, with its labels."""
    names = {}
    for name, made in (TABLE | COLLECTED).items():
        for suffix in SUFFIXES[made.kind.__name__.lower()]:
            names[name + suffix] = {*made.labels} | BUILT_IN
    process = ("cpu_seconds_total", "resident_memory_bytes")
    return names | dict.fromkeys(("up", *(f"process_{of}" for of in process)), BUILT_IN)


# ------------------------------------------------------------------------------------------- as they are read


def test_names_and_units_are_as_prometheus_has_them() -> None:
    for name, made in (TABLE | COLLECTED).items():
        assert re.fullmatch(r"guerdon_[a-z0-9]+(_[a-z0-9]+)*", name)
        assert not re.search(r"_(total|count|sum|bucket|counter|gauge|histogram|ms|us|milliseconds|kb|mb)(_|$)", name)
        assert made.text[0].isupper() or made.text[0].isdigit(), name
        assert made.text.endswith("."), name
        assert "Histogram" not in str(made.kind) or made.buckets == tuple(sorted(made.buckets)) != (), name
        assert not re.search(r"seconds", name) or made.kind.__name__ == "Histogram", name


def test_the_body_is_in_a_requests_latency_and_not_in_its_wait() -> None:
    config = ServerConfig(port=0, grpc_port=None, models=[ModelConfig(model="scorers:score")])
    body, slow_s = body_of([[1, 2, 3]]), 0.4
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    service = build_service(config)
    with (
        RunningServer(service, config) as server,
        socket.create_connection(("127.0.0.1", httpx.URL(server.http_url).port), timeout=120) as connection,
    ):
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")  # from now on its time counts
        time.sleep(slow_s)
        connection.sendall(body)
        assert next_status(connection) == 200
    taken = {
        name: service.metrics.totals(f"guerdon_{name}_seconds", "_sum")["reward_model",]
        for name in ("e2e_request_latency", "request_queue_time")
    }
    assert 0 <= taken["request_queue_time"] <= taken["e2e_request_latency"] - slow_s
    assert "decoded" in TABLE["guerdon_request_queue_time_seconds"].text
    assert "head" in TABLE["guerdon_e2e_request_latency_seconds"].text
    assert not [name for name, made in (TABLE | triton.TABLE).items() if "arrival" in made.text], "which of the two?"


def test_a_request_is_counted_and_timed_and_no_series_tells_when_it_began() -> None:
    metrics = Metrics()
    metrics.request_done("m", 0.5, None)
    metrics.request_done("m", 0.5, DeadlineExceeded)
    text = metrics.render().decode()
    assert 'guerdon_requests_total{model="m",outcome="ok"} 1.0' in text
    assert 'guerdon_requests_total{model="m",outcome="DeadlineExceeded"} 1.0' in text
    assert 'guerdon_e2e_request_latency_seconds_count{model="m"} 2.0' in text
    assert "_created" not in text
    assert 0 < metrics.answered_s["m"] < metrics.totals("guerdon_e2e_request_latency_seconds", "_sum")["m",]


def test_what_is_read_is_prometheus_text_of_the_kinds_that_the_table_has() -> None:
    metrics = Metrics()
    told = {family.name: family.type for family in text_string_to_metric_families(metrics.render().decode())}
    for name, made in TABLE.items():
        assert told[name] == made.kind.__name__.lower(), name
    assert not sys.platform.startswith("linux") or told["process_resident_memory_bytes"] == "gauge"


# ------------------------------------------------------------------------------------------- Triton's


def test_tritons_numbers_are_made_of_ours() -> None:
    metrics = Metrics()
    name = 'a "quoted" name'
    requests = lambda: {name: (1, 3), "idle": (0, 0)}  # noqa: E731
    family = triton.Family(metrics, [name, "idle"], requests)
    metrics.watch(requests, requests, list, family.text)
    metrics.answered_s[name] = 0.25
    for outcome, count in (
        ("ok", 5), ("Overloaded", 2), ("DeadlineExceeded", 1), ("Cancelled", 1), ("ServerFault", 1),
        ("SampleFailed", 1), ("InvalidRequest", 4),
    ):  # fmt: skip
        metrics.add("guerdon_requests", count, name, outcome)
    metrics.add("guerdon_requests", 9, "unknown", "UnknownModel")
    metrics.batch(name, 8, 100, 0.5)
    metrics.batch(name, 4, 100, 0.5)
    metrics.observe("guerdon_request_queue_time_seconds", 0.125, name)
    metrics.observe("guerdon_request_inference_time_seconds", 0.5, name)
    told = {
        (s.name, s.labels["model"], s.labels.get("reason")): s.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for s in family.samples
        if s.name.startswith("nv_")
    }
    assert {key[0].removesuffix("_total"): value for key, value in told.items() if key[1:] == (name, None)} == {
        "nv_inference_request_success": 5.0,
        "nv_inference_count": 12.0,
        "nv_inference_exec_count": 2.0,
        "nv_inference_request_duration_us": 250_000.0,
        "nv_inference_queue_duration_us": 125_000.0,
        "nv_inference_compute_infer_duration_us": 500_000.0,
        "nv_inference_pending_request_count": 3.0,
    }
    failed = {key[2]: value for key, value in told.items() if key[1] == name and key[2]}
    assert failed == {"REJECTED": 3.0, "CANCELED": 1.0, "BACKEND": 2.0, "OTHER": 4.0}
    assert {model for _, model, _ in told} == {name, "idle"}
    assert {key[0].removesuffix("_total") for key in told} == set(triton.TABLE)


def test_tritons_counters_have_tritons_names() -> None:
    metrics = Metrics()
    text = triton.Family(metrics, ["m"], lambda: {"m": (0, 0)}).text()
    assert "# TYPE nv_inference_request_success counter\n" in text
    assert 'nv_inference_request_success{model="m",version="1"} 0\n' in text
    assert 'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 0\n' in text
    assert "_total" not in text


# ------------------------------------------------------------------------------------------- what speaks of them


@pytest.mark.parametrize("script", ["metrics_page", "grafana_dashboard"])
def test_what_is_made_of_the_code_is_up_to_date_and_a_change_is_seen(script: str, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / f"scripts/{script}.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    checked = run("--check")
    assert checked.returncode == 0, checked.stderr
    made = tmp_path / "made"
    assert run("--out", str(made)).returncode == 0
    made.write_text(made.read_text().replace("loss", "gain", 1))
    stale = run("--check", "--out", str(made))
    assert stale.returncode == 1 and f"{made} is out of date" in stale.stderr and f"scripts/{script}.py" in stale.stderr


def expressions() -> Iterator[tuple[str, str]]:
    """Where it stands, and every expression of the dashboard and the alerts."""
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], re.sub(r"label_values\((.*), \w+\)", r"\1", variable["definition"])
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from ((rule["alert"], rule["expr"]) for rule in group["rules"])


WORDS = {"or", "unless"}
UNSEEN = {
    "guerdon_component_mean", "guerdon_component_std", "guerdon_isolated_ends", "guerdon_judge_comparisons",
    "guerdon_groups", "guerdon_judge_disagreements", "guerdon_judge_other_mass", "guerdon_recheck_difference",
}  # fmt: skip
"""What is looked up when it is needed, and watched by nobody."""


def test_every_expression_asks_for_series_that_there_are_by_labels_that_they_have() -> None:
    known, asked = readable(), set()
    for where, expr in expressions():
        for grouping in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr):
            assert set(grouping.split(", ")) <= set().union(*known.values()), (where, grouping)
        bare = re.sub(r"\b(?:by|on) \([^)]*\)|\[[^]]*\]", "", expr)
        for name, labels, call in re.findall(r"\b([a-z]\w*)(?:\{([^}]*)\})?( *\()?", bare):
            if call or name in WORDS:
                continue
            assert name in known, (where, name)
            assert set(re.findall(r"(\w+)[=!]", labels)) <= known[name], (where, name, labels)
            asked.add(re.sub(r"_(total|bucket|sum|count)$", "", name))
        for counter in re.findall(r"\b(?:rate|increase)\((\w+)", expr):
            assert counter.endswith(("_total", "_bucket", "_sum", "_count")), (where, counter)
        for quantile in re.findall(r"histogram_quantile\([\d.]+, (.*)\)", expr):
            assert "_bucket" in quantile and re.search(r"by \([^)]*\ble\b", quantile), where
    assert set(TABLE | COLLECTED) - asked == UNSEEN


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels: list[dict[str, Any]] = dashboard["panels"]
    assert [p["title"] for p in panels if p["type"] == "row"] == [
        "Now", "Traffic", "Latency", "Queue", "Batches", "Shared prompts", "Errors",
        "Judges in words", "Critic", "Ranks and process",
    ]  # fmt: skip
    assert len({p["id"] for p in panels}) == len(panels)
    assert {v["name"] for v in dashboard["templating"]["list"]} == {"datasource", "instance", "model"}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"


def test_every_alert_stands_in_the_page_and_says_what_to_do() -> None:
    page = (ROOT / "docs/deploy/prometheus.md").read_text()
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in rules]
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        outcomes = re.findall(r'outcome=~?"([A-Z][\w|]*)"', rule["expr"])
        for outcome in "|".join(outcomes).split("|") if outcomes else []:
            assert hasattr(errors, outcome), outcome
