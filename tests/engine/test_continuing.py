"""The path `shared`: a prompt once, its responses from copies of its cache, beside plain transformers one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import judged
import zoo
from guerdon import LocalJudge, RewardClient
from guerdon.assembly import build_scorer, build_service, build_trainer
from guerdon.core import Score, Sequence
from guerdon.engine import continuing
from guerdon.engine.engine import Engine
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig, TeacherConfig, TokenRewardConfig
from served import Serve
from teaching import plain
from tiers import of_each_kind, slow_but

QUICK = ("lfm2",)  # has convolutions; those with recurrences in chunks are slow, but in test_independence.py


def make_rows() -> list[np.ndarray]:
    """Groups with long and short responses, a tree of three levels, a bare prompt, and responses of a single token."""
    rows, random = zoo.rows(0, groups=((70, 4), (25, 3), (3, 2), (60, 1))), np.random.default_rng(1)
    prompt, turn, *ends = (random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in (33, 40, 1, 7, 90, 12))
    tree = [np.concatenate([prompt, turn, end]) for end in ends[:3]]
    return [*rows, prompt, np.concatenate([prompt, ends[3]]), np.concatenate([prompt, turn]), *tree]


def build(folder: Path, **settings: Any) -> Engine:
    engine = build_scorer(ModelConfig(model=str(folder), **settings))
    assert isinstance(engine, Engine) and engine.path == "shared", engine.info.why  # type: ignore[union-attr]
    return engine


def outcomes(engine: Any, rows: list[np.ndarray]) -> list[Score]:
    found = engine.score([Sequence(row) for row in rows])
    assert all(isinstance(one, Score) for one in found), found
    return found


def assert_close(got: np.ndarray, want: np.ndarray, most: float = 1e-5) -> None:
    assert np.sqrt(np.square(got - want).mean()) <= most * np.sqrt(np.square(want).mean())


def assert_exact(engine: Engine, rows: list[np.ndarray], want: list[np.ndarray]) -> None:
    found = outcomes(engine, rows)
    assert_close(np.array([one.reward for one in found]), np.array([values[-1, 0] for values in want]))
    for one, values in zip(found, want, strict=True):
        assert_close(one.values, values[:, 0])


@pytest.mark.parametrize("name", slow_but(QUICK, zoo.HYBRIDS))
def test_rewards_values_and_logprobs_equal_transformers_one_by_one(name: str, tmp_path: Path) -> None:
    folder, rows = zoo.checkpoint(name, tmp_path / "critic", "openrlhf-critic"), make_rows()
    want = zoo.reference_tokens(folder, rows)
    for max_batch_tokens, pads, least_saved in ((8192, False, 128), (150, False, 1), (8192, True, 1), (150, True, 128)):
        engine = build(folder, max_batch_tokens=max_batch_tokens)
        engine.continuation.pads, engine.continuation.least_saved = pads, least_saved
        assert_exact(engine, rows, want)
    language = zoo.language_model(name, tmp_path / "teacher")
    teacher: Any = build_scorer(TeacherConfig(model=str(language)))
    assert teacher.path == "shared", teacher.info.why
    model = AutoModelForCausalLM.from_pretrained(language, attn_implementation="eager").eval()
    rows = [row for row in rows if len(row) > 1]
    for row, found in zip(rows, outcomes(teacher, rows), strict=True):
        ids = torch.from_numpy(row)
        with torch.no_grad():
            table = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        assert_close(found.answer.logprobs[-len(row) + 1 :], table.gather(1, ids[1:, None])[:, 0].numpy())


def forwards(engine: Engine, rows: list[np.ndarray]) -> list[tuple[int, int]]:
    """Scores the rows; returns the shape of each forward's tokens."""
    shapes: list[tuple[int, int]] = []
    count = lambda _, args: shapes.append(tuple(args[0].shape))  # noqa: E731
    handle = engine.trunk.get_input_embeddings().register_forward_pre_hook(count)
    outcomes(engine, rows)
    handle.remove()
    return shapes


def limit(engine: Engine, budget: int) -> None:
    """Limits copies of caches to the budget, but not what a micro-batch holds."""
    plan = engine.batcher.plan
    engine.batcher.plan = lambda path, rows, limits, _: plan(path, rows, limits, 1000)  # type: ignore[method-assign]
    engine.max_batch_tokens = budget


def test_a_prompt_is_computed_once_and_copies_stay_within_the_budget(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    prompt, *ends = (random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in (100, 30, 25, 25, 10))
    rows = [np.concatenate([prompt, end]) for end in ends]
    engine = build(zoo.checkpoint("qwen3_5_text", tmp_path, "openrlhf"))
    assert sorted(forwards(engine, rows)) == [(1, 10), (1, 100), (3, 30)]
    short = [row[80:] for row in rows]  # to share 20 tokens saves less than a forward costs
    assert sorted(forwards(engine, short)) == [(1, 30), (3, 50)]
    limit(engine, 90)  # a cache counts as about 10 tokens
    assert sorted(forwards(engine, rows)) == [(1, 10), (1, 25), (1, 100), (2, 30)]


@pytest.mark.slow
def test_beyond_the_budget_a_level_is_computed_again(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    turns = [random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in (40, 30, 20, 10, 11)]
    rows = [np.concatenate([*turns[: n + 1], turns[4]]) for n in range(4)]
    folder = zoo.checkpoint("lfm2", tmp_path, "openrlhf-critic")
    engine = build(folder)
    engine.continuation.least_saved = 1
    once = forwards(engine, rows)
    limit(engine, 8)
    again = forwards(engine, rows)
    assert sum(n for _, n in once) < sum(n for _, n in again) < sum(map(len, rows)) + 100
    assert_exact(engine, rows, zoo.reference_tokens(folder, rows))


@pytest.mark.slow
def test_training_computes_each_row_alone_and_serving_shares(tmp_path: Path) -> None:
    trainer: Any = build_trainer(CriticConfig(model=str(zoo.checkpoint("qwen3_5_text", tmp_path, "openrlhf-critic"))))
    engine, rows = trainer.engine, make_rows()
    assert engine.path == "shared" and "gradients are the plain one's" in engine.info.why
    with torch.enable_grad():
        assert [batch.rows for batch in engine.plan(rows)] == [[i] for i in range(len(rows))]
    with engine.no_gradients():
        assert len(list(engine.plan(rows))) == 1


def no_copy(_: Any) -> Any:
    raise TypeError("it cannot be copied")


@pytest.mark.parametrize(
    ("place", "name", "instead", "why"),
    [
        (continuing, "copied", lambda cache, count=1: cache, "shared: differs from the plain forward"),
        (DynamicCache, "__copy__", no_copy, "shared: it cannot be copied"),
    ],
)
def test_a_cache_that_cannot_be_copied_is_not_used(
    place: Any, name: str, instead: Any, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, instead, raising=False)
    engine: Any = build_scorer(ModelConfig(model=str(zoo.checkpoint("qwen3_5_text", tmp_path, "openrlhf"))))
    assert engine.path == "single" and why in engine.info.why, engine.info.why


def test_a_copy_shares_no_tensor_and_keeps_what_was_one_object() -> None:
    inner = {"a": torch.ones(1, 2), "n": 3}
    cache = DynamicCache()
    cache.own = [inner, inner, torch.tensor(2.0)]  # type: ignore[attr-defined]
    copy = continuing.copied(cache, 3)
    copy.own[0]["a"] += 1
    assert copy.own[1]["a"] is copy.own[0]["a"] and copy.own[1]["a"].shape == (3, 2) and copy.own[2] == 2
    assert type(copy) is DynamicCache and copy.own[0]["n"] == 3 and inner["a"].sum() == 2
    assert continuing.num_bytes(cache) == 12 and continuing.copied(None, 2) is None


@pytest.mark.parametrize("name", of_each_kind(["lfm2", "qwen3_next"]))
def test_step_rewards_and_judges_on_this_path(name: str, tmp_path: Path) -> None:
    folder, mark = zoo.tokenizer(zoo.language_model(name, tmp_path / "lm")), 77
    settings = {"reward": TokenRewardConfig(ids=[9, 30], form="probability"), "step_separator": "I"}
    engine: Any = build_scorer(ModelConfig(model=str(folder), step_reduction="product", **settings))
    assert engine.path == "shared" and engine.info.step_separator_ids != ()
    rows = [np.where(row == mark, mark + 1, row) for row in make_rows()]
    for row in rows:
        row[:: max(2, len(row) // 3)] = engine.info.step_separator_ids[0]
    found = engine.score([Sequence(row) for row in rows])
    for row, one, logits in zip(rows, found, plain(folder, rows), strict=True):
        want = logits[:, [9, 30]].softmax(-1)[row == engine.info.step_separator_ids[0], 0].numpy()
        np.testing.assert_allclose(one.steps, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(one.reward, np.prod(want.astype(np.float64)), rtol=1e-4, atol=1e-5)
    wanted = judged.wanted(folder)
    rubric = judged.write(tmp_path)
    with LocalJudge(str(folder), rubric, max_other_mass=1.0) as judge:
        scores = judge.score(prompts=judged.PROMPTS, texts=judged.TEXTS)
        assert "shared" in str(judge._info().path)
    np.testing.assert_allclose(scores.rewards, wanted["rewards"], rtol=1e-5, atol=1e-5)
    assert scores.attributes is not None
    np.testing.assert_allclose(scores.attributes[:, :-2], wanted["values"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_prompt_longer_than_memory_fails_alone(tmp_path: Path, serve: Serve) -> None:
    folder = zoo.checkpoint("lfm2", tmp_path)
    made: list[Any] = []

    def load(config: ServerConfig) -> Any:
        service = build_service(config)
        made.append(service.catalog.entries["reward_model"].served)
        made[0].trunk.register_forward_pre_hook(short_of_memory, with_kwargs=True)
        return service

    def short_of_memory(_: Any, __: Any, named: dict[str, torch.Tensor]) -> None:
        if named["input_ids"].shape[-1] > 100:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    server = serve(ModelConfig(model=str(folder)), build=load)
    assert made[0].path == "shared"
    short, random = zoo.rows(0, groups=((60, 3), (20, 2))), np.random.default_rng(5)
    prompt = random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, 150)
    long = [np.append(prompt, random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n)) for n in (5, 9)]
    with RewardClient(server.http_url) as client:
        scores = client.score(tokens=[*short, *long])
    assert_close(np.array(scores.rewards[: len(short)]), zoo.reference(folder, short))
    for error in scores.errors[len(short) :]:
        assert "failed on this sample for lack of memory" in str(error) and "9 GiB" in str(error)
    assert not any(scores.errors[: len(short)]) and made[0].path == "shared"
