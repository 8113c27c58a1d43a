"""`guerdon doctor MODEL` on small checkpoints: what it says of head, endings, tokens and memory, and of bad ones."""

import json
import logging
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import zoo
from guerdon.cli.doctor_model import examine_model, is_model
from guerdon.cli.findings import Finding

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


def with_config(folder: Path, **settings: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_a_reward_model(tmp_path: Path) -> None:
    found = findings(zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "model")))
    levels = dict.fromkeys(["", "path", "proved", "tokenizer", "endings", "reward", "memory"], "ok")
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
    folder = with_config(zoo.checkpoint("llama", tmp_path / "model"), pad_token_id=zoo.EOS)
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
