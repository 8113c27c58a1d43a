"""`guerdon logprobs`: the numbers are plain transformers', a killed run goes on, and other settings are refused."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import zoo
from guerdon import LocalTeacher, TeacherClient, cli
from guerdon.client import logprob_file
from guerdon.client.logprob_file import SETTINGS, write_logprobs
from guerdon.errors import Exit, InvalidRequest, StartError
from guerdon.settings.config import TeacherConfig
from served import running
from teaching import plain

PROMPTS = ["What is 2+2?\n", "Name a colour: "]
RESPONSES = [["4", "It is four, I think."], ["blue", "rather red"]]
TOP_K = 5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("teacher")))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(folder: Path) -> dict[tuple[int, int], dict[str, np.ndarray]]:
    """The ten lines of docs/teacher_offline.md, by row and sample."""
    found = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        shard = load_file(path)
        for i, key in enumerate(zip(shard["rows"].tolist(), shard["samples"].tolist(), strict=True)):
            span = slice(shard["offsets"][i], shard["offsets"][i + 1])
            found[key] = {name: shard[name][span] for name in ("tokens", "logprobs", "top_ids", "top_logprobs")}
    return found


def check(found: dict[str, np.ndarray], folder: Path, ids: list[int], first: int) -> None:
    """Asserts that a sample's tables are those of transformers' logits in float32."""
    (logits,) = plain(folder, [np.array(ids)])
    table = torch.log_softmax(logits, -1)[first - 1 : -1].numpy()
    np.testing.assert_array_equal(found["tokens"], ids[first:])
    np.testing.assert_allclose(found["logprobs"], table[np.arange(len(table)), ids[first:]], atol=1e-5)
    np.testing.assert_allclose(found["top_logprobs"], -np.sort(-table, 1)[:, :TOP_K], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(table, found["top_ids"], 1), found["top_logprobs"], atol=1e-5)


def test_every_form_of_row_has_transformers_numbers(teacher: Path, tmp_path: Path) -> None:
    conversation = [{"role": "user", "content": PROMPTS[0]}]
    rows = [
        *({"prompt": p, "responses": r} for p, r in zip(PROMPTS, RESPONSES, strict=True)),
        {"prompt": conversation, "response": "four"},
        {"tokens": [5, 9, 2, 7, 11], "prompt_length": 2},
        {"text": "a text alone"},
    ]
    out = tmp_path / "out"
    argv = ["logprobs", "--model", str(teacher), "--top-k", str(TOP_K), str(write(tmp_path / "in.jsonl", rows)), "-o"]
    assert cli.main([*argv, str(out)]) == Exit.DONE
    found = read(out)
    assert [*found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0)]
    tokenizer = AutoTokenizer.from_pretrained(teacher)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for row, (prompt, responses) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for i, response in enumerate(responses):
            check(found[row, i], teacher, encode(prompt + response), len(encode(prompt)))
    check(found[3, 0], teacher, rows[3]["tokens"], 2)
    check(found[4, 0], teacher, encode("a text alone"), 1)
    whole = [*conversation, {"role": "assistant", "content": "four"}]
    ids = tokenizer.apply_chat_template(whole, return_dict=False)
    check(found[2, 0], teacher, ids, len(ids) - len(found[2, 0]["tokens"]))
    assert "four" in tokenizer.decode(found[2, 0]["tokens"])
    told = json.loads((out / SETTINGS).read_text())
    assert told["top_k"] == TOP_K and len(told["weights_version"]) == 16 and told["tokenizer"]


def test_a_failed_sample_has_no_tokens_and_says_why(teacher: Path, tmp_path: Path) -> None:
    rows = [{"tokens": [3, 4, 5]}, {"tokens": [3, 10**6]}, {"tokens": [6, 7]}]
    with running(TeacherConfig(model=str(teacher))) as server, TeacherClient(server.http_url) as client:
        summary = write_logprobs(client, write(tmp_path / "in.jsonl", rows), tmp_path / "out", top_k=TOP_K)
    assert (summary.num_failed, summary.num_rows, summary.num_tokens) == (1, 3, 3)
    _, facts = logprob_file.read_shard(next((tmp_path / "out").glob("shard-*")))
    assert [*json.loads(facts["errors"])] == ["1"] and "vocabulary" in summary.first_error
    assert [len(one["tokens"]) for one in read(tmp_path / "out").values()] == [2, 0, 1]


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was(teacher: Path, tmp_path: Path) -> None:
    """Each shard has three rows; the killed run's are kept, byte for byte. It writes no more than thirty."""
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(0, 60, 30).tolist(), "prompt_length": 9} for _ in range(400)]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out"
    code = (
        "import sys, time; from guerdon.client import logprob_file as f; from guerdon import TeacherClient\n"
        "f.SHARD_BYTES = 3000\n"
        "left, write = iter(range(int(sys.argv[4]))), f.durable.write_new\n"
        "f.durable.write_new = lambda *some: write(*some) if next(left, None) is not None else time.sleep(600)\n"
        "f.write_logprobs(TeacherClient(sys.argv[1]), sys.argv[2], sys.argv[3], top_k=5, progress=False)"
    )
    with running(TeacherConfig(model=str(teacher))) as server:
        argv = [sys.executable, "-c", code, server.http_url, str(source), str(out)]
        for _ in range(3):
            process = subprocess.Popen([*argv, "30"])
            begun = len([*out.glob("shard-*")])
            while len([*out.glob("shard-*")]) < begun + 4 and process.poll() is None:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept = {path: path.read_bytes() for path in out.glob("shard-*")}
        assert 0 < len(read(out)) < len(rows)
        assert subprocess.run([*argv, "1000"], check=False).returncode == 0
        assert all(path.read_bytes() == data for path, data in kept.items())
        found = read(out)
        assert [*found] == [(i, 0) for i in range(len(rows))]
        for i in (0, 100, 399):
            check(found[i, 0], teacher, rows[i]["tokens"], 9)

        with TeacherClient(server.http_url) as client:
            again = write_logprobs(client, source, out, top_k=5)
            assert again.num_resumed == again.num_rows == 400
            with pytest.raises(StartError, match="was begun with top_k 5, this run has 6"):
                write_logprobs(client, source, out, top_k=6)
            with pytest.raises(StartError, match="begun with temperature"):
                write_logprobs(client, source, out, top_k=5, temperature=2.0)
            with pytest.raises(StartError, match="rows of another file"):
                write_logprobs(client, write(tmp_path / "other.jsonl", rows[::-1]), out, top_k=5)
    other = zoo.tokenizer(zoo.language_model("llama", tmp_path / "other", seed=1))
    with (
        running(TeacherConfig(model=str(other))) as server,
        TeacherClient(server.http_url) as client,
        pytest.raises(StartError, match="is by the weights"),
    ):
        write_logprobs(client, source, out, top_k=5)


def test_numbers_of_another_dtype_are_not_mixed_in(teacher: Path, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", [{"tokens": [5, 9, 2]}]), tmp_path / "out"
    with LocalTeacher(teacher) as exact:
        write_logprobs(exact, source, out, progress=False)
        with (
            LocalTeacher(teacher, dtype="bfloat16") as rounded,
            pytest.raises(StartError, match="with dtype 'float32'"),
        ):
            write_logprobs(rounded, source, out, progress=False)
        settings = json.loads((out / SETTINGS).read_bytes())
        (out / SETTINGS).write_text(json.dumps({name: value for name, value in settings.items() if name != "dtype"}))
        assert write_logprobs(exact, source, out, progress=False).num_resumed == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"tokens": []}, "not a list of ids"),
        ({"tokens": [1, "2"]}, "not a list of ids"),
        ({"tokens": [1, 2], "prompt_length": 3}, "prompt_length is 3"),
        ({"prompt": "a", "responses": []}, "no responses"),
        ({"question": "a"}, "none of the forms"),
        ({"messages": [{"role": "user", "content": "a"}]}, "its messages end with the user's"),
    ],
)
def test_a_malformed_row_is_named_before_anything_is_asked(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": "fine"}, row])
    with TeacherClient("http://127.0.0.1:9") as client, pytest.raises(StartError, match=f"line 2: .*{says}"):
        write_logprobs(client, source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_ids_than_the_teacher_gives_are_refused_before_a_row(teacher: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"tokens": [1, 2]}])
    with (
        running(TeacherConfig(model=str(teacher), max_top_k=4)) as server,
        TeacherClient(server.http_url) as client,
        pytest.raises(InvalidRequest, match="top_k"),
    ):
        write_logprobs(client, source, tmp_path / "out", top_k=5)


def test_rows_of_another_tokenizer_are_refused(teacher: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"tokens": [40, 41]}])
    config = TeacherConfig(model=str(teacher), student_tokenizer=str(teacher))
    with (
        running(config) as server,
        TeacherClient(server.http_url) as client,
        pytest.raises(StartError, match="a student with another tokenizer"),
    ):
        write_logprobs(client, source, tmp_path / "out", top_k=0)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_damaged_settings_are_named(text: str, teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / SETTINGS).write_text(text)
    with LocalTeacher(teacher) as local, pytest.raises(StartError, match=f"{SETTINGS} is damaged"):
        write_logprobs(local, write(tmp_path / "in.jsonl", [{"tokens": [1, 2]}]), tmp_path / "out")


@pytest.mark.slow
def test_100_000_tokens_grow_the_process_by_less_than_300_mb(teacher: Path, tmp_path: Path) -> None:
    """At 64 ids a token the tables have 52 MB: two shards, of which one is held twice at a time."""
    rng = np.random.default_rng(0)
    rows = [{"tokens": rng.integers(0, 60, 101).tolist()} for _ in range(1000)]
    code = (
        "import resource, sys; from guerdon.client import logprob_file as f; from guerdon import TeacherClient\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"
        "client = TeacherClient(sys.argv[1]); client.config(); before = peak()\n"
        "print(f.write_logprobs(client, *sys.argv[2:], top_k=60, progress=False).num_tokens, peak() - before)"
    )
    source = write(tmp_path / "in.jsonl", rows)
    with running(TeacherConfig(model=str(teacher), max_top_k=64)) as server:
        argv = [sys.executable, "-c", code, server.http_url, str(source), str(tmp_path / "out")]
        num_tokens, grown = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    assert int(num_tokens) == 100_000
    assert len([*(tmp_path / "out").glob("shard-*")]) == 2
    assert int(grown) < 300e6
