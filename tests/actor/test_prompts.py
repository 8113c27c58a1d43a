"""Prompts from every kind of file, tokenised as the policy needs them, and dealt out by step and seed alone."""

import gzip
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import zoo
from guerdon.actor.prompt_sources import check_prompts
from guerdon.actor.prompts import SKIPPED, Prompts, check_sendable
from guerdon.errors import ConfigError
from guerdon.settings.actors import DataConfig, RemoteRewardConfig

TEXTS = [f"prompt number {i}" for i in range(10)]


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = zoo.tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TEMPLATE)
    return AutoTokenizer.from_pretrained(folder)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def prompts_of(
    path: str,
    tokenizer: Any,
    seed: int = 0,
    limit: int | None = None,
    per_step: int = 3,
    out: Path | None = None,
    **kw: Any,
) -> Prompts:
    config = DataConfig(prompts=path, **{"num_validation": 2, **kw})
    out = Path(path).parent if out is None else out
    return Prompts(config, tokenizer, prompts_per_step=per_step, max_prompt_length=limit, seed=seed, output_dir=out)


def saved(kind: str, folder: Path) -> str:
    """The texts in a file or a folder of that kind."""
    rows = [{"prompt": text, "other": 1} for text in TEXTS]
    if kind.startswith("jsonl"):
        return write(folder / f"prompts.{kind}", rows)
    data = datasets.Dataset.from_list(rows)
    if kind == "parquet":
        data.to_parquet(str(folder / "prompts.parquet"))
        return str(folder / "prompts.parquet")
    if kind == "saved":
        data.save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    if kind == "saved-dict":
        datasets.DatasetDict({"train": data}).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    (folder / "folder").mkdir()
    write(folder / "folder" / "train.jsonl", rows)
    return str(folder / "folder")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "saved", "saved-dict", "folder"])
def test_prompts_come_from_every_kind_of_source(
    kind: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    prompts = prompts_of(saved(kind, tmp_path), tokenizer)
    assert [prompt.text for prompt in prompts.training] == TEXTS[:8]
    assert [prompt.text for prompt in prompts.validation] == TEXTS[8:]
    assert [prompt.id for prompt in prompts.training + prompts.validation] == list(range(10))
    for prompt in prompts.training:
        assert prompt.tokens.dtype == np.int64 and prompt.messages is None
        assert prompt.tokens.tolist() == tokenizer(prompt.text).input_ids


def test_a_hub_id_that_is_not_there_is_told(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot load the data set nobody/nothing, split train"):
        prompts_of("nobody/nothing", tokenizer)


@pytest.mark.parametrize("path", ["missing.jsonl", "./nowhere", "/no/such/folder"])
def test_a_path_that_is_not_there_is_told(path: str, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        prompts_of(path, tokenizer)


# ------------------------------------------------------------------------------------------- before a model is loaded


def checked(rows: list[dict[str, Any]], folder: Path, **settings: Any) -> None:
    check_prompts(DataConfig(prompts=write(folder / "p.jsonl", rows), **{"num_validation": 0, **settings}))


def test_sound_prompts_pass_the_check(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    checked([{"prompt": "a"}, {"prompt": chat}, {"prompt": parts}], tmp_path, template=True)
    checked([{"question": "a"}], tmp_path, field="question")
    checked([{"prompt": "a"}], tmp_path, validation=write(tmp_path / "v.jsonl", [{"prompt": "b"}]), num_validation=9)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"p\.jsonl, row 1 \(from 0\): it has no field prompt, only text"),
        ({"prompt": 7}, "row 1 .* prompt is neither text nor a list of messages"),
        ({"prompt": []}, "row 1 .* non-empty list"),
        ({"prompt": ["a"]}, "row 1 .* message 0 is a str"),
        ({"prompt": [{"content": "a"}]}, "row 1 .* message 0 needs a role"),
        ({"prompt": [{"role": "user"}]}, "row 1 .* message 0 needs a content"),
    ],
)
def test_a_row_that_no_template_takes_is_told_without_a_tokenizer(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked([{"prompt": "a"}, row], tmp_path)
    validation = write(tmp_path / "p.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(ConfigError, match=message):
        check_prompts(DataConfig(prompts=write(tmp_path / "t.jsonl", [{"prompt": "a"}]), validation=validation))


def test_a_source_without_a_prompt_to_train_on_is_told_without_a_tokenizer(tmp_path: Path) -> None:
    for rows, settings in (([], {}), ([{"prompt": "a"}], {"num_validation": 5})):
        with pytest.raises(ConfigError, match="has no prompt to train on"):
            checked(rows, tmp_path, **settings)
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.jsonl, line 1: not valid JSON"):
        check_prompts(DataConfig(prompts=str(tmp_path / "broken.jsonl")))


# ------------------------------------------------------------------------------------------- tokenising


def test_messages_go_through_the_template_and_ask_for_an_answer(tokenizer: Any, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    path = write(tmp_path / "p.jsonl", [{"prompt": chat}])
    (prompt,) = prompts_of(path, tokenizer, num_validation=0).training
    want = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.text == want and prompt.messages == tuple(chat)
    assert prompt.tokens.tolist() == tokenizer(want, add_special_tokens=False).input_ids
    assert prompt.tokens.tolist().count(tokenizer.bos_token_id) == 1  # the template's own
    assert want != tokenizer.apply_chat_template(chat, add_generation_prompt=False, tokenize=False)


def test_an_answer_that_is_begun_is_gone_on_with(tokenizer: Any, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well"}]
    (prompt,) = prompts_of(write(tmp_path / "p.jsonl", [{"prompt": chat}]), tokenizer, num_validation=0).training
    assert prompt.text.endswith("Well")


def test_bare_prompts_of_a_policy_with_a_template_are_told_once(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": f"why {i}"} for i in range(6)])
    with caplog.at_level(logging.WARNING):
        prompts_of(path, tokenizer, template=True)
        assert "chat template" not in caplog.text
        prompts_of(path, tokenizer)
    assert caplog.text.count("although the policy's tokenizer has a chat template: set data.template") == 1


def test_text_goes_through_the_template_if_configured(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"question": "why"}])
    (prompt,) = prompts_of(path, tokenizer, num_validation=0, template=True, field="question").training
    chat = [{"role": "user", "content": "why"}]
    assert prompt.text == tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert prompt.messages == tuple(chat)


@pytest.mark.parametrize("adds", ["$A", "<s> $A", "<s> $A </s>"])
def test_text_gets_the_bos_that_the_tokenizer_gives_and_never_two(adds: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=adds, special_tokens=[("<s>", zoo.BOS), ("</s>", zoo.EOS)]
    )
    path = write(tmp_path / "p.jsonl", [{"prompt": "hello"}, {"prompt": "<s>hello"}])
    plain, written = prompts_of(path, tokenizer, num_validation=0).training
    hello = tokenizer("hello", add_special_tokens=False).input_ids
    assert plain.tokens.tolist() == [zoo.BOS] * ("<s>" in adds) + hello
    assert written.tokens.tolist() == [zoo.BOS, *hello]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"other": 1}, "row 1 .* no field prompt, only other"),
        ({"prompt": 3}, "row 1 .* neither text nor a list of messages"),
        ({"prompt": []}, "row 1 .* non-empty list"),
        ({"prompt": [{"content": "x"}]}, "row 1 .* needs a role"),
        ({"prompt": "\ud800"}, "line 2: not valid JSON"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(row: dict[str, Any], says: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        prompts_of(write(tmp_path / "p.jsonl", [{"prompt": "fine"}, row]), tokenizer)


def test_an_empty_prompt_asks_for_nothing(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path))
    path = write(tmp_path / "p.jsonl", [{"prompt": "fine"}, {"prompt": ""}])
    assert prompts_of(path, tokenizer, num_validation=1).validation[0].tokens.tolist() == [zoo.BOS]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ConfigError, match=r"row 1 .* the prompt is empty"):
        prompts_of(path, tokenizer)


def test_without_a_tokenizer_or_a_template_there_are_no_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ConfigError, match="no tokenizer"):
        prompts_of(path, None)
    bare = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path, chat_template=None))
    with pytest.raises(ConfigError, match="no chat template") as raised:
        prompts_of(path, bare)
    assert "as text without data.template" in raised.value.help


# ------------------------------------------------------------------------------------------- too long


def test_long_prompts_are_reported_and_never_cut(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["short", "a much longer prompt " * 20, "brief", "another longer prompt " * 30]
    path = write(tmp_path / "p.jsonl", [{"prompt": text} for text in texts])
    lengths = [len(tokenizer(text).input_ids) for text in texts]
    with caplog.at_level(logging.WARNING):
        prompts = prompts_of(path, tokenizer, num_validation=0, limit=max(lengths[0], lengths[2]))
    assert [prompt.text for prompt in prompts.training] == ["short", "brief"]
    assert [(s.row, s.num_tokens) for s in prompts.skipped] == [(1, lengths[1]), (3, lengths[3])]
    assert f"2 prompts are longer than {max(lengths[0], lengths[2])} tokens: row 1 ({lengths[1]})" in caplog.text
    rows = [json.loads(line) for line in (tmp_path / SKIPPED).read_text().splitlines()]
    assert rows == [{"source": path, "row": row, "num_tokens": lengths[row]} for row in (1, 3)]
    prompts_of(path, tokenizer)
    assert not (tmp_path / SKIPPED).exists()


def test_long_prompts_stop_the_run_if_configured(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS])
    with pytest.raises(ConfigError, match="10 prompts are longer than 2 tokens"):
        prompts_of(path, tokenizer, max_prompt_length=2, long_prompts="error")
    with pytest.raises(ConfigError, match="no prompt to train on, beside 0 to validate on and 10 too long"):
        prompts_of(path, tokenizer, max_prompt_length=2)
    assert len((tmp_path / SKIPPED).read_text().splitlines()) == 10, "all are named in the file"
    with pytest.raises(ConfigError, match="max_prompt_length is 50, and the policy has room for 40"):
        prompts_of(path, tokenizer, max_prompt_length=50, limit=40)


# ------------------------------------------------------------------------------------------- batches


def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own(tokenizer: Any, tmp_path: Path) -> None:
    prompts = prompts_of(write(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS]), tokenizer)
    dealt = [prompt.id for step in range(1, 9) for prompt in prompts.batch(step)]  # 24 of 8 prompts: three epochs
    epochs = [dealt[i : i + 8] for i in (0, 8, 16)]
    assert all(Counter(epoch) == Counter(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert prompts.epoch(8) == 3.0


def test_a_steps_prompts_depend_on_step_and_seed_alone(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS])

    def dealt(seed: int, steps: list[int], **kw: Any) -> list[list[int]]:
        prompts = prompts_of(path, tokenizer, seed=seed, **kw)
        return [[prompt.id for prompt in prompts.batch(step)] for step in steps]

    forwards = dealt(1, [1, 2, 3, 4, 5, 6])
    assert dealt(1, [6, 3, 5, 1, 4, 2]) == [forwards[i] for i in (5, 2, 4, 0, 3, 1)]
    assert dealt(2, [1, 2, 3, 4, 5, 6]) != forwards
    assert dealt(1, [1, 2, 3], shuffle=False) == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    assert dealt(1, [1], per_step=20, shuffle=False) == [[i % 8 for i in range(20)]]


def test_prompts_to_validate_on_may_come_from_elsewhere(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS])
    other = write(tmp_path / "v.jsonl", [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}])
    prompts = prompts_of(path, tokenizer, validation=other)
    assert [prompt.text for prompt in prompts.validation] == ["one", "two"] and len(prompts.training) == 10
    assert prompts_of(path, tokenizer, num_validation=0).validation == []
    with pytest.raises(ConfigError, match="no prompt to train on, beside 10 to validate on"):
        prompts_of(path, tokenizer, num_validation=10)


def test_the_digest_tells_other_prompts(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in TEXTS]
    first = prompts_of(write(tmp_path / "p.jsonl", rows), tokenizer).digest
    assert prompts_of(write(tmp_path / "moved.jsonl", rows), tokenizer).digest == first
    assert prompts_of(write(tmp_path / "q.jsonl", rows[::-1]), tokenizer).digest != first
    assert prompts_of(write(tmp_path / "r.jsonl", rows), tokenizer, num_validation=3).digest != first


def test_validation_may_be_another_split(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {split: [{"prompt": f"{split} {i}"} for i in range(3)] for split in ("train", "test")}
    splits = datasets.DatasetDict({split: datasets.Dataset.from_list(rows[split]) for split in rows})
    splits.save_to_disk(str(tmp_path / "saved"))
    source = str(tmp_path / "saved")
    for split, text in ((None, "train 0"), ("test", "test 0")):
        prompts = prompts_of(source, tokenizer, validation=source, validation_split=split)
        assert prompts.training[0].text == "train 0" and prompts.validation[0].text == text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"send": "messages"}, "where.send is messages, and the prompt of row 0 is plain text"),
        ({"pad_to_length": 8}, "where.pad_to_length is 8, and prompt and response may have"),
    ],
)
def test_prompts_that_cannot_be_sent_are_told_at_the_start(
    settings: dict[str, Any], says: str, tokenizer: Any, tmp_path: Path
) -> None:
    prompts = prompts_of(write(tmp_path / "p.jsonl", [{"prompt": text} for text in TEXTS]), tokenizer)
    with pytest.raises(ConfigError, match=says):
        check_sendable(prompts, "where", RemoteRewardConfig(**settings), 6)
    check_sendable(prompts, "where", RemoteRewardConfig(pad_to_length=1000), 6)
