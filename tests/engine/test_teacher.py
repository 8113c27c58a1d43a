"""A teacher's answers equal those of transformers, one sequence at a time, whoever else asks what beside it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from guerdon.core import Score, Sequence
from guerdon.engine import logprobs as logprobs_module
from guerdon.engine import teacher as module
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import CheckpointError, SampleFailed, Unsupported
from guerdon.settings.config import TeacherConfig
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from processes import environment
from teaching import check, plain
from tiers import of_each_kind

ROWS = zoo.rows(0, ((40, 3), (20, 2)))
PROMPTS = [40, 40, 40, 20, 20, 4, 40]
EVERYTHING: dict[str, Any] = {
    "top_k": 5,
    "given": np.array([3, 7, -1]),
    "with_entropy": True,
    "with_ranks": True,
    "with_next": True,
    "with_hidden": True,
}


def build(folder: Path, **settings: Any) -> TeacherEngine:
    return TeacherEngine(load_policy(TeacherConfig(model=str(folder), **settings)))


def answers(engine: TeacherEngine, sequences: list[Sequence], path: str | None = None) -> list[TokenLogprobs]:
    found = []
    for result in engine.score(sequences, path=path):
        assert isinstance(result, Score) and result.answer is not None and np.isnan(result.reward)
        found.append(result.answer)
    return found


@pytest.mark.parametrize("name", of_each_kind([*zoo.DECODERS, *zoo.LANGUAGE_MODELS]))
def test_every_decoder_answers_as_transformers_shared_and_not(name: str, tmp_path: Path) -> None:
    folder = zoo.language_model(name, tmp_path)
    engine = build(folder)
    sequences = [
        Sequence(row, prompt_length=n if i % 2 else None, ask=LogprobQuery(**EVERYTHING))
        for i, (row, n) in enumerate(zip(ROWS, PROMPTS, strict=True))
    ]
    wanted = plain(folder, ROWS)
    for path in dict.fromkeys((engine.path, engine.path.partition("+")[0], "single")):
        engine.use(path)
        for answer, logits, s in zip(answers(engine, sequences, path), wanted, sequences, strict=True):
            check(answer, logits, s)
            assert answer.hidden is not None
            first = s.ask.first(s.prompt_length)  # type: ignore[union-attr]
            with torch.no_grad():
                rebuilt = engine.head(torch.from_numpy(answer.hidden))
            torch.testing.assert_close(rebuilt, logits[first - 1 : -1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_small_model_shares_and_a_recurrent_one_does_not(tmp_path: Path) -> None:
    assert build(zoo.language_model("llama", tmp_path / "llama")).path == "packed+shared"
    assert build(zoo.language_model("mamba", tmp_path / "mamba")).path == "single"


@pytest.mark.parametrize("size", [1, 7 * zoo.VOCAB_SIZE])
def test_sequences_may_ask_different_things_of_one_batch_in_any_chunks(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.LOGITS, "cpu", size + 3 * zoo.VOCAB_SIZE)  # the last slice of a chunk is shorter
    monkeypatch.setitem(logprobs_module.CACHED, "cpu", size)
    folder = zoo.language_model("gemma2", tmp_path)
    engine = build(folder)
    random = np.random.default_rng(0)
    row, other = ROWS[0], ROWS[1]
    queries = [
        LogprobQuery(),
        LogprobQuery(start=1, top_k=3),
        LogprobQuery(start=len(row), top_k=3, with_next=True),
        LogprobQuery(temperature=0.5, with_entropy=True),
        LogprobQuery(start=30, given=random.integers(-1, zoo.VOCAB_SIZE, (len(row) - 30, 4))),
        LogprobQuery(start=30, given=random.integers(0, zoo.VOCAB_SIZE, (len(row) - 30, 2)), top_k=1),
        LogprobQuery(start=35, with_logprobs=False, with_ranks=True),
        LogprobQuery(start=35, with_logprobs=False, with_hidden=True),
    ]
    sequences = [Sequence(row, prompt_length=40, ask=query) for query in queries]
    sequences += [Sequence(other, prompt_length=40, ask=queries[1]), Sequence(other[:1]), Sequence(other, ask=None)]
    logits = plain(folder, [s.tokens for s in sequences])
    for answer, own, s in zip(answers(engine, sequences), logits, sequences, strict=True):
        check(answer, own, s)
    hidden_only = answers(engine, sequences)[7]
    assert hidden_only.logprobs is None and hidden_only.hidden is not None
    assert hidden_only.hidden.shape == (len(row) - 35, zoo.HIDDEN)


def test_equal_prompts_go_through_the_head_once(tmp_path: Path) -> None:
    engine = build(zoo.language_model("llama", tmp_path))
    counted: list[int] = []
    head = engine.head

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        counted.append(len(hidden))
        return head(hidden)

    engine.head = counting  # type: ignore[assignment]
    prompt = np.arange(4, 44)
    rows = [np.concatenate([prompt, np.array([5 + i, 9, 11])]) for i in range(6)]
    answers(engine, [Sequence(row, prompt_length=40, ask=LogprobQuery(start=1)) for row in rows])
    # The last tokens' states are not read: 40 of the prompt, and 2 of each response.
    assert sum(counted) == 40 + 6 * 2


def test_nothing_is_done_by_the_head_if_only_hidden_states_are_asked_for(tmp_path: Path) -> None:
    engine = build(zoo.language_model("llama", tmp_path))

    def never(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    engine.head = never  # type: ignore[assignment]
    (answer,) = answers(engine, [Sequence(ROWS[0], ask=LogprobQuery(with_logprobs=False, with_hidden=True))])
    assert answer.hidden is not None and answer.hidden.dtype == np.float32


def test_hidden_states_come_in_the_models_dtype_or_rounded_to_bfloat16(tmp_path: Path) -> None:
    folder = zoo.language_model("llama", tmp_path)
    asked = LogprobQuery(with_logprobs=False, with_hidden=True)
    own, rounded = answers(
        build(folder), [Sequence(ROWS[0], ask=dataclasses.replace(asked, rounds_hidden=r)) for r in (False, True)]
    )
    assert own.hidden is not None and rounded.hidden is not None and rounded.hidden.dtype == np.uint16
    bits = (rounded.hidden.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(bits, torch.from_numpy(own.hidden).bfloat16().float().numpy())
    half = build(folder, dtype="bfloat16")
    (exact,) = answers(half, [Sequence(ROWS[0], ask=asked)])
    assert exact.hidden is not None and exact.hidden.dtype == np.uint16


def test_frequencies_that_depend_on_the_length_see_the_last_token(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = zoo.language_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=48)
    sequences = [Sequence(row) for row in zoo.rows(0, ((40, 3), (47, 3)))]
    for answer, s in zip(answers(build(folder, max_length=256), sequences), sequences, strict=True):
        check(answer, plain(folder, [s.tokens])[0], s)  # a new model each time: it remembers the longest


def test_a_sample_whose_numbers_are_not_finite_fails_alone(tmp_path: Path) -> None:
    engine = build(zoo.language_model("llama", tmp_path, tie_word_embeddings=False))
    with torch.no_grad():
        engine.trunk.get_input_embeddings().weight[7] = torch.nan
    fine, broken = np.arange(10, 40), np.concatenate([np.arange(10, 40), [7, 8, 9]])
    results = engine.score([Sequence(fine), Sequence(broken, ask=LogprobQuery(start=20))])
    assert isinstance(results[0], Score) and isinstance(results[1], SampleFailed)
    assert "logits for asked token 1" in str(results[1]) and "--dtype float32" in str(results[1])


def test_a_model_without_a_language_models_head_is_refused(tmp_path: Path) -> None:
    """transformers would make up a head, or take the tied embeddings for one."""
    for name, tied in (("llama", False), ("llama", True), ("gpt2", True)):
        folder = zoo.checkpoint(name, tmp_path / f"{name}-{tied}", tie_word_embeddings=tied)
        with pytest.raises(CheckpointError, match="a head for rewards and none for the next token"):
            build(folder)
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["LlamaForCausalLM" if name == "llama" else "GPT2LMHeadModel"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=r"lack lm_head|score"):
            build(folder)
    with pytest.raises(CheckpointError, match="encoder"):
        build(zoo.checkpoint("bert", tmp_path / "bert"))


def test_a_head_that_is_more_than_a_matrix_is_not_given_away(tmp_path: Path) -> None:
    engine = build(zoo.language_model("llama", tmp_path))
    engine._model.config.final_logit_softcapping = 3.0  # which its code does not apply
    with pytest.raises(Unsupported, match="not one matrix times its hidden states"):
        engine.head_file()


def test_its_info_tells_what_it_is(tmp_path: Path) -> None:
    engine = build(zoo.tokenizer(zoo.language_model("opt-projected", tmp_path)), name="kind", max_top_k=7)
    info = engine.info
    assert (info.name, info.kind, info.outputs, info.max_top_k) == ("kind", "teacher", ("logprobs",), 7)
    assert info.takes_text and info.takes_messages and info.tokenizer and info.vocabulary and info.is_by_token
    assert info.hidden_size == 16 and info.source == str(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_memory_does_not_grow_with_tokens_times_vocabulary(name: str, tmp_path: Path) -> None:
    """All logits of 32,768 tokens and 152,000 ids would take 19 GB; gemma2's soft cap copies those that are there."""
    narrow = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = zoo.language_model(name, tmp_path, vocab_size=152_000, max_position_embeddings=8192, **narrow)
    command = [sys.executable, str(Path(__file__).parent / "teacher_memory.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=580)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.partition("GROWN ")[2]) < 1024, done.stdout
