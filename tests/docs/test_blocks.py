"""Runs the commands and the Python of the README and other pages unchanged, on tiny checkpoints."""

import dataclasses
import json
import math
import re
import shutil
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import ROOT, Reader, blocks_of, commands
from safetensors.numpy import load_file

import chats
import zoo
from demo import parts
from guerdon import CriticClient, RewardClient
from served import reward_model
from tiers import slow_but

PROMPTS = [{"prompt": f"Question {i}: what is {i}+2?"} for i in range(64)]


def is_target(command: str) -> None:
    """`make X`: the Makefile has it. It would install an environment; CI runs `make test`."""
    assert re.search(rf"^{command.split()[1]}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE), command


def has_extras(command: str) -> None:
    """`pip install '.[EXTRA]'`: pyproject.toml has it. CI's own environment is made this way."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"[\w-]+", command.partition("[")[2])
    assert named and not {*named} - {*extras}, command


def is_the_pinned_torch(command: str) -> None:
    """`pip install torch==X --index-url CPU`: PyTorch's index for CPUs, and the version of the constraints."""
    pinned = re.search(r"^torch(==\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and command == f"pip install torch{pinned[1]} --index-url https://download.pytorch.org/whl/cpu"


def is_the_makefiles(command: str) -> None:
    """`source .venv/bin/activate`: make's environment is there."""
    assert re.search(r"^VENV +:= \.venv$", (ROOT / "Makefile").read_text(), re.MULTILINE), command


NOT_RUN = {
    r"make \w+": is_target,
    r"pip install torch==\S+ --index-url \S+": is_the_pinned_torch,
    r"pip install (?:-c constraints\.txt )?'\.\[[\w,-]+\]'": has_extras,
    r"python3 -m venv \.venv|source \.venv/bin/activate": is_the_makefiles,
}
"""Commands that are only checked, because they make the environment in which the rest runs."""


def policy(folder: Path) -> None:
    zoo.tokenizer(zoo.language_model("llama", folder))


def prompts(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))


def read(page: Path, reader: Reader) -> None:
    for block in blocks_of(page):
        reader.read(block)


def judge(reader: Reader) -> None:
    """Writes a small judge that knows `yes` and `no`, but says them no more often than anything else."""
    folder = zoo.language_model("llama", reader.folder / "my-judge", vocab_size=chats.VOCAB_SIZE)
    chats.save("chatml", folder, words=("yes", "no"))


def check_the_browsers_page(reader: Reader) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{reader.ports['5555']}/", timeout=120) as answer:
        assert "text/html" in answer.headers["content-type"] and b"guerdon" in answer.read()


def check_scores_and_policy(reader: Reader) -> None:
    rows = [json.loads(line) for line in (reader.folder / "scored.jsonl").read_text().splitlines()]
    assert rows and all(len(row["rewards"]) == 2 and all(map(math.isfinite, row["rewards"])) for row in rows)
    assert (reader.folder / "out/run/curves.png").stat().st_size > 10_000
    assert (reader.folder / "out/run/checkpoints/step-000002/policy/model.safetensors").exists()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Reads in a folder with what `make demo` leaves, to which the quick start's own names are links."""
    folder = tmp_path_factory.mktemp("pages")
    made = folder / "out/demo"
    reward_model(made / parts.REWARD_MODEL)
    policy(made / parts.POLICY)
    prompts(made / parts.PROMPTS)
    links = {"my-reward-model": parts.REWARD_MODEL, "my-policy": parts.POLICY, "prompts.jsonl": parts.PROMPTS}
    for name, target in links.items():
        (folder / name).symlink_to(made / target)
    with Reader(folder, NOT_RUN) as reader:
        yield reader


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", slow_but(("README.md",), ["README.md", "docs/guides/first_run.md"]))
def test_a_page_does_what_it_says(page: str, reader: Reader) -> None:
    shutil.rmtree(reader.folder / "out/run", ignore_errors=True)
    (reader.folder / "scored.jsonl").unlink(missing_ok=True)
    read(ROOT / page, reader)
    check_the_browsers_page(reader)
    if page != "README.md":
        check_scores_and_policy(reader)
        assert reader.ports["5559"] in reader.servers


@pytest.mark.slow
def test_the_critics_page_does_what_it_says(reader: Reader) -> None:
    shutil.rmtree(reader.folder / "critic", ignore_errors=True)
    read(ROOT / "docs/critic.md", reader)
    assert list((reader.folder / "critic/journal").iterdir())


@pytest.mark.slow
def test_the_teachers_page_does_what_it_says(reader: Reader) -> None:
    if not (reader.folder / "my-model").exists():
        (reader.folder / "my-model").symlink_to(reader.folder / "my-policy")
    for block in [*blocks_of(ROOT / "docs/teacher.md"), *blocks_of(ROOT / "docs/teacher_forms.md")]:
        if block.language in ("", "python"):
            reader.read(block)
    assert "weight" in load_file(reader.folder / "head.safetensors")


@pytest.mark.slow
def test_the_recipes_for_distillation_do_what_they_say(reader: Reader) -> None:
    for name in ("my-model", "my-maths-model", "my-student"):
        if not (reader.folder / name).exists():
            (reader.folder / name).symlink_to(reader.folder / "my-policy")
    read(ROOT / "docs/teacher_recipes.md", reader)


@pytest.mark.slow
def test_a_critics_warm_up_from_a_file_goes_on_where_it_stopped(reader: Reader) -> None:
    lines = [json.dumps({"tokens": [3 + i, 4, 5, 6], "prompt_length": 2, "reward": i % 2}) + "\n" for i in range(130)]
    file = reader.folder / "experience.jsonl"
    blocks = [*blocks_of(ROOT / "docs/critic.md"), *blocks_of(ROOT / "docs/critic_training.md")]
    serve, run = (
        next(b for b in blocks if text in b.text) for text in ("guerdon serve-critic ./", "python warm_up.py")
    )
    reader.read(dataclasses.replace(serve, text=serve.text.replace("./critic", "./warm-critic")))
    reader.read(blocks[blocks.index(run) - 1])
    with CriticClient(f"http://127.0.0.1:{reader.ports['5556']}") as critic:
        for count, step in ((64, 1), (130, 3), (130, 3)):
            file.write_text("".join(lines[:count]))
            reader.read(run)
            assert (critic.state().step, critic.state().num_unsaved) == (step, 0)


@pytest.mark.slow
def test_the_judges_page_does_what_it_says(reader: Reader) -> None:
    judge(reader)
    for block in blocks_of(ROOT / "docs/judge.md"):
        if block.language in ("", "python") or block.text.startswith("# rubric.yaml"):
            reader.read(dataclasses.replace(block, text=block.text.replace("--rubric", "--max-other-mass 1 --rubric")))
    with RewardClient(f"http://127.0.0.1:{reader.ports['5555']}", "judge") as client:
        scores = client.score(texts=["What? That."], prompts=["What? "])
    assert (
        scores.attribute_names == ("correct", "brief", "other_mass", "label_entropy") and scores.attributes is not None
    )
    assert math.isclose(scores.rewards[0], 2 * scores.attributes[0, 0] + scores.attributes[0, 1], rel_tol=1e-5)


@pytest.mark.slow
def test_the_page_of_judges_that_compare_does_what_it_says(reader: Reader) -> None:
    judge(reader)
    for block in blocks_of(ROOT / "docs/comparing.md"):
        if block.language != "text":
            reader.read(dataclasses.replace(block, text=block.text.replace("--rubric", "--max-other-mass 1 --rubric")))
    with RewardClient(f"http://127.0.0.1:{reader.ports['5555']}", "judge") as client:
        scores = client.score(texts=["What? That.", "What? This."], prompts=["What? "] * 2)
    assert scores.attribute_names == ("correct", "brief", "other_mass", "disagreed", "label_entropy")
    assert math.isclose(scores.rewards.sum(), 0, abs_tol=1e-5)


@pytest.mark.slow
def test_the_page_of_samples_criteria_does_what_it_says(reader: Reader) -> None:
    judge(reader)
    for block in blocks_of(ROOT / "docs/sample_criteria.md"):
        reader.read(dataclasses.replace(block, text=block.text.replace("--rubric", "--max-other-mass 1 --rubric")))
    with RewardClient(f"http://127.0.0.1:{reader.ports['5555']}", "judge") as client:
        scores = client.score(texts=["What? That."], prompts=["What? "], labels=[["Is it?"]])
    assert scores.attribute_names == ("correct", "sample_criteria", "other_mass", "label_entropy")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")
def test_the_page_about_child_processes_does_what_it_says(reader: Reader) -> None:
    blocks = blocks_of(ROOT / "docs/verifiers.md")
    for block in blocks:
        if block.language in ("", "python"):
            reader.read(block)
    labels = [json.loads(block.text) for block in blocks if block.language == "json"]
    programs = ["print(2 * int(input()))", "def double(x):\n    return 2 * x"]
    for port, asked in (("5560", ["\\boxed{4}"]), ("5559", [f"```python\n{program}\n```" for program in programs])):
        with RewardClient(f"http://127.0.0.1:{reader.ports[port]}") as client:
            scores = client.score(texts=asked, prompts=[""] * len(asked), labels=labels if port == "5559" else ["2+2"])
        assert scores.raise_for_failed().rewards.tolist() == [1.0] * len(asked)


@pytest.mark.slow
def test_the_guide_to_scoring_does_what_it_says(reader: Reader) -> None:
    held_out = (ROOT / "examples/demo" / parts.HELD_OUT).read_text().splitlines()
    rows = [json.loads(line) for line in held_out]
    cut = [row | {"prompt": row["prompt"][:40], "responses": [text[:40] for text in row["responses"]]} for row in rows]
    (reader.folder / "out/demo" / parts.HELD_OUT).write_text("".join(json.dumps(row) + "\n" for row in cut))
    (reader.folder / "scored_pairs.jsonl").unlink(missing_ok=True)
    for block in blocks_of(ROOT / "docs/guides/score.md"):
        if block.language in ("", "python"):
            reader.read(block)
    assert len((reader.folder / "scored_pairs.jsonl").read_text().splitlines()) == 120
    assert (reader.folder / "pairs.png").stat().st_size > 20_000


@pytest.mark.slow
def test_the_guide_to_distillation_does_what_it_says(reader: Reader) -> None:
    """The models' places and the number of steps are those that `make demo` and the guide's file have."""
    made, out = reader.folder / "out/demo", reader.folder / "out/distill"
    zoo.tokenizer(zoo.language_model("llama", made / "run/checkpoints/step-000060/policy", seed=1))
    shutil.copy(made / parts.PROMPTS, made / parts.VALIDATION)
    shutil.copy(made / parts.PROMPTS, made / parts.HELD_OUT)
    (reader.folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks_of(ROOT / "docs/guides/distill.md"):
        reader.read(block)
        if (out / "curves.png").exists() and not (out / "checkpoints/step-000040").exists():
            (out / "checkpoints/step-000040").symlink_to("step-000002")
    assert (reader.folder / "out/one_layer_distilled/curves.png").stat().st_size > 10_000


def test_a_shell_block_is_split_into_commands() -> None:
    text = "# why\none \\\n  two\n\ncat > f <<'END'\na\n# b\nEND\nthree\n"
    assert commands(text) == ["one \\\n  two", "cat > f <<'END'\na\n# b\nEND", "three"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```\nfalse\n```\n", "line 1: false ended with 1"),
        ("text\n\n```\ntrue\nguerdon scoer in.jsonl\n```\n", "line 3: guerdon scoer"),
        ("```python\nfrom guerdon import NoSuchClient\n```\n", "NoSuchClient"),
        ("```\nguerdon serve ./my-reward-model --dtype int3\n```\n", "int3"),
        ("```yaml\na: 1\n```\n", "which file"),
        ("```\nmake nothing\n```\n", "make nothing"),
        ("```\npip install '.[nothing]'\n```\n", "nothing"),
    ],
    ids=["command", "guerdon", "python", "server", "yaml", "make", "pip"],
)
def test_a_failing_block_is_reported(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text)
    with Reader(tmp_path, NOT_RUN) as reader, pytest.raises(AssertionError, match=re.escape(reason)):
        read(tmp_path / "page.md", reader)
