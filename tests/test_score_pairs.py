"""`guerdon score` with pairs: its table and its picture, through a real server and in this process."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import judged
import served
import zoo
from guerdon import LocalJudge, cli
from guerdon.client import RewardClient
from guerdon.client.score_file import score_file
from guerdon.server.runtime import RunningServer
from ports import free_port

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with served.plain(folder) as running:
        yield running


@pytest.fixture(scope="module")
def pairs(folder: Path) -> Path:
    """Pairs of texts, of messages with and without a prompt, by two subsets; the last line is no pair."""
    rows = []
    for i, (one, other) in enumerate(zip(served.samples(24)[::2], served.samples(24)[1::2], strict=True)):
        chosen, rejected = one["response"], other["response"]
        asked = [{"role": "user", "content": one["prompt"]}]
        said = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
        row = [
            {"prompt": one["prompt"], "chosen": chosen, "rejected": rejected},
            {"prompt": asked, "chosen": said[0], "rejected": said[1]},
            {"chosen": [*asked, *said[0]], "rejected": [*asked, *said[1]]},
        ][i % 3]
        rows.append(row | {"subset": ("easy", "hard")[i % 2]})
    rows.append({"prompt": "Hello", "responses": ["a", "b", "c"]})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(*argv: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Returns the status of `guerdon score` and what it writes to stderr."""
    try:
        status = cli.main(["score", *map(str, argv)])
    except SystemExit as e:
        status = e.code
    return status, capsys.readouterr().err


@pytest.mark.slow
def test_the_table_is_what_transformers_scores_say(
    server: RunningServer, folder: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "rm")
    wins: dict[str, list[bool]] = {"easy": [], "hard": []}
    for line in pairs.read_text(encoding="utf-8").splitlines()[:-1]:
        row = json.loads(line)
        made = []
        for text in (row["chosen"], row["rejected"]):
            asked = row.get("prompt", [])
            if isinstance(asked, str):
                asked, text = [{"role": "user", "content": asked}], [{"role": "assistant", "content": text}]
            ids = tokenizer.apply_chat_template([*asked, *text], tokenize=True, return_dict=False)
            made.append(np.array(ids, np.int32))
        chosen, rejected = zoo.reference(folder / "rm", made)
        wins[row["subset"]].append(bool(chosen > rejected))
    expected = {
        name: f"{np.mean(found):.1%}" for name, found in (*wins.items(), ("all pairs", wins["easy"] + wins["hard"]))
    }
    for where in (("--server", server.http_url), ("--model", folder / "rm", "--deterministic")):
        out = tmp_path / f"{where[0][2:]}.jsonl"
        status, err = run(*where, "--template", pairs, "-o", out, capsys=capsys)
        assert status == 0
        summary, blank, _, *lines = err.splitlines()
        assert summary.startswith("27 samples in 13 rows") and not blank
        assert [(line[:9].strip(), line.split()[-3]) for line in lines] == list(expected.items())
        assert [line.split()[-6] for line in lines] == ["6", "6", "12"]
        assert all(len(json.loads(line)["rewards"]) in (2, 3) for line in out.open())


@pytest.mark.slow
def test_a_second_run_draws_without_scoring(
    server: RunningServer, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "out.jsonl", tmp_path / "pairs.png"
    _, first = run("--server", server.http_url, pairs, "-o", out, capsys=capsys)
    scored = out.read_bytes()
    status, second = run("--server", server.http_url, "--plot", picture, pairs, "-o", out, capsys=capsys)
    assert status == 0 and out.read_bytes() == scored
    assert "(13 rows from an earlier run)" in second
    *told, note = first.splitlines()
    assert note.startswith("note: the model has a chat template") and "--template" in note
    assert second.splitlines()[1:] == told[1:]
    assert picture.read_bytes().startswith(PNG) and picture.stat().st_size > 20_000
    dead = f"http://127.0.0.1:{free_port()}"  # which cannot say whose rewards these are
    assert run("--server", dead, pairs, "-o", out, capsys=capsys)[0] == 1


def test_failed_samples_fail_their_pairs_and_resume_with_them(server: RunningServer, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = ["good", served.FAILS, "longer", "x"]
    rows = [{"chosen": a, "rejected": b, "category": a[0]} for a in texts for b in texts if a != b]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served.sums(tmp_path) as sums, RewardClient(sums.http_url, model="flaky") as client:
        first = score_file(client, source, out, progress=False)
        lines = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(lines[:5]))
        again = score_file(client, source, out, progress=False)
    assert again.num_resumed == 5 and str(again.pairs) == str(first.pairs)
    total = first.pairs.total()
    assert (len(total), total.num_failed, total.accuracy) == (6, 6, 0.5)
    assert first.pairs.categories["l"].accuracy == 1 and first.pairs.categories["x"].accuracy == 0


def test_a_judge_compares_the_responses_of_a_row_alone(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.language_model("llama", tmp_path / "model", seed=1))
    prompt, pairs = judged.PROMPTS[0], [judged.RESPONSES[:2], ["red", "blue green"]]
    wanted = []
    for first, second in pairs:
        won = judged.wanted_verdict(folder, prompt, first, second)[0]
        wanted.append([won @ judged.COMPARED_WEIGHTS, (1 - won) @ judged.COMPARED_WEIGHTS])
    assert wanted[0][0] != wanted[0][1]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with LocalJudge(folder, judged.write(tmp_path, judged.COMPARING), max_other_mass=1.0) as judge:
        for num_kept in (0, 1):
            if num_kept:
                out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
            assert score_file(judge, source, out, progress=False).num_resumed == num_kept
            made = [json.loads(line)["rewards"] for line in out.read_text().splitlines()]
            assert np.allclose(made, wanted, atol=2e-4), num_kept


@pytest.mark.parametrize("text", ["fine", "bad"])
def test_rows_without_pairs_have_a_picture_but_no_table(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nans.py").write_text("def score(texts):\n    return [float(t) if t != 'bad' else t for t in texts]\n")
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n{"text": "2.5"}\n{"text": "2.5"}\n' if text == "fine" else '{"text": "bad"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    picture = tmp_path / "rewards.png"
    argv = ("--model", "nans:score", "--plot", picture, source, "-o", tmp_path / "out.jsonl")
    status, err = run(*argv, capsys=capsys)
    sys.modules.pop("nans", None)
    assert status == (text == "bad") and "accuracy" not in err
    assert picture.read_bytes().startswith(PNG)


def test_what_prevents_a_picture_is_said_before_scoring(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    find = importlib.util.find_spec
    cases = (
        ("pairs.pdf", "--plot pairs.pdf is not a .png file", find),
        (tmp_path / "absent" / "a.png", "there is no folder", find),
        ("pairs.png", "--plot needs matplotlib", lambda name: None if name == "matplotlib" else find(name)),
    )
    for name, message, found in cases:
        monkeypatch.setattr("guerdon.cli.score_plot.find_spec", found)
        status, err = run("--server", "127.0.0.1:1", "--plot", name, pairs, "-o", out, capsys=capsys)
        assert status == 2 and message in err and not out.exists()
    assert "[plot]" in err
