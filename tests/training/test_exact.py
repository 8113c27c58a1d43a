"""A train request against plain transformers and torch's AdamW, one sequence at a time: losses, norms, every weight."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import LR, build, same, values, weights
from plain import PlainCritic, difference, request, tree

import zoo
from guerdon.critic_core import TrainRequest
from guerdon.training.critic_trainer import CriticTrainer
from guerdon.trees import flatten
from tiers import of_each_kind, slow_but

SHARED = ((40, 5), (20, 3), (3, 3))
"""Two prompts with several responses, and three rows that share nothing worth sharing; a prefix and a twin."""
APART = ((1, 1),) * 7


def assert_trained_alike(trainer: CriticTrainer, folder: Path, asked: list[TrainRequest], **settings: Any) -> None:
    """Trains both on the requests, and if it has biases a third in float64, which says what has a gradient."""
    size = trainer._config.global_batch_size
    plain = PlainCritic(folder, lr=LR, **settings)
    has_bias = any("bias" in name for name in plain.parameters)
    exact = PlainCritic(folder, lr=LR, dtype=torch.float64, **settings) if has_bias else None
    before = weights(trainer)
    for one in asked:
        report = trainer.train(one)
        losses, norms = plain.train(one, size)
        if exact is not None:
            exact.train(one, size)
        np.testing.assert_allclose(report.losses, losses, rtol=1e-5)
        np.testing.assert_allclose(report.grad_norm, norms[-1], rtol=1e-5)
    after = weights(trainer)
    assert after.keys() == plain.parameters.keys()
    for name, parameter in plain.parameters.items():
        want, got = parameter.detach(), after[name]
        if exact is not None and "bias" in name:
            # The true gradient of a key's bias is 0, and AdamW makes of its rounding as large a step as of any other.
            found = exact.gradients()
            learns = found[name].abs() > 1e-7 * max(gradient.abs().max() for gradient in found.values())
            got = torch.where(learns, got, want)
        assert difference(got, want) <= 1e-5, name
        assert difference(after[name], before[name]) > 1e-4, f"{name} did not move"


@pytest.mark.parametrize("name", of_each_kind(zoo.DECODERS))
def test_every_architecture_learns_what_plain_torch_does(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    trainer = build(folder)
    assert trainer.engine.path == zoo.PATHS[name], trainer.engine.info.why
    assert_trained_alike(trainer, folder, [request(zoo.rows(0, SHARED))])


@pytest.mark.parametrize("path", slow_but(("packed+shared", "padded"), ("packed+shared", "packed", "padded", "single")))
def test_every_path_learns_what_plain_torch_does(path: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("qwen3", tmp_path)
    trainer = build(folder)
    trainer.engine.path = path
    trainer.engine.use(path)
    assert_trained_alike(trainer, folder, [request(zoo.rows(0, SHARED))])


@pytest.mark.parametrize("groups", [SHARED, pytest.param(APART, marks=pytest.mark.slow)], ids=["shared", "apart"])
@pytest.mark.parametrize("size", slow_but((4, 100), (1, 4, 100)), ids=["each", "several", "one"])
def test_every_size_of_the_global_batch_learns_what_plain_torch_does(size: int, groups: Any, tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    rows = zoo.rows(1, groups, least=4)
    assert_trained_alike(build(folder, global_batch_size=size), folder, [request(rows)])


@pytest.mark.parametrize("count", slow_but((6,), (4, 5, 6, 10)))
def test_any_number_of_rows_learns_what_plain_torch_does(count: int, tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    rows = zoo.rows(2, SHARED)[:count]
    trainer = build(folder)
    assert_trained_alike(trainer, folder, [request(rows)])
    assert trainer.state()["step"] == -(-count // 5)


@pytest.mark.parametrize(
    "settings",
    slow_but(
        ({"loss_clip_val": 0.0}, {"gradient_clip_val": 0.1}),
        [{"loss_clip_val": 0.0}, {"loss_clip_val": 5.0}, {"gradient_clip_val": 0.0}, {"gradient_clip_val": 0.1}],
    ),
    ids=str,
)
def test_every_setting_of_the_loss_learns_what_plain_torch_does(settings: dict[str, float], tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    plain = {name: value or float("inf") for name, value in settings.items()}
    assert_trained_alike(build(folder, **settings), folder, [request(zoo.rows(0, SHARED))], **plain)


@pytest.mark.slow
def test_request_after_request_with_values_in_between(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    trainer, rows = build(folder), zoo.rows(0, SHARED)
    plain = PlainCritic(folder, lr=LR)
    for i in range(3):
        asked = request(zoo.rows(i, SHARED), seed=i)
        report = trainer.train(asked)
        losses, _ = plain.train(asked, 5)
        np.testing.assert_allclose(report.losses, losses, rtol=1e-5)
        with torch.no_grad():
            want = np.concatenate([plain.values(row).numpy() for row in rows])
        np.testing.assert_allclose(values(trainer, rows), want, atol=1e-4 * want.std())


def changing_rope(kind: str, folder: Path) -> Path:
    """A checkpoint whose rotary embedding is another beyond 48 tokens; dynamic, at every length."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 48}
        return zoo.checkpoint("phi3", folder, rope_parameters=rope, original_max_position_embeddings=48)
    return zoo.checkpoint("llama", folder, rope_parameters=rope | {"factor": 2.0}, max_position_embeddings=48)


@pytest.mark.parametrize("kind", slow_but(("dynamic",), ("dynamic", "longrope")))
def test_values_asked_for_before_leave_no_trace_in_training(kind: str, tmp_path: Path) -> None:
    """Both keep what they derived from the longest sequence, and scoring derives it without gradients."""
    folder = changing_rope(kind, tmp_path)
    rows = zoo.rows(0, SHARED)
    assert min(map(len, rows)) < 48 < max(map(len, rows))
    asked, told = build(folder, max_length=256), build(folder, max_length=256)
    for seed in range(2):
        values(told, rows)
        assert told.train(request(rows, seed=seed)) == asked.train(request(rows, seed=seed))
    assert same(weights(asked), weights(told))


@pytest.mark.parametrize("length", slow_but((80,), (49, 80)))
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_has_in_training_the_length_of_serving(
    kind: str, length: int, tmp_path: Path
) -> None:
    """With a full mask, as PPO sends it, each row is as long in training as in serving."""
    folder = changing_rope(kind, tmp_path)
    random = np.random.default_rng(0)
    shape = (5, length - 1)
    asked = TrainRequest(
        "full",
        random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, (5, length)),
        random.standard_normal(shape).astype(np.float32),
        random.standard_normal(shape).astype(np.float32),
        np.ones(shape, np.float32),
    )
    trainer, plain = build(folder, max_length=256), PlainCritic(folder, lr=LR)
    with torch.no_grad():
        want = np.concatenate([plain.values(row).numpy() for row in asked.tokens])
    np.testing.assert_allclose(values(trainer, list(asked.tokens)), want, atol=1e-4 * want.std())
    losses, norms = plain.train(asked, 5)
    report = trainer.train(asked)
    np.testing.assert_allclose(report.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(report.grad_norm, norms[-1], rtol=1e-5)


@pytest.mark.parametrize("name", slow_but(("llama",), ("llama", "gemma2")))
def test_activations_computed_twice_change_nothing(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    plain, twice = build(folder), build(folder, activation_checkpointing=True)
    asked = request(zoo.rows(0, SHARED))
    assert plain.train(asked) == twice.train(asked)
    assert same(weights(plain), weights(twice))


def test_a_standardised_critic_learns_standardised_values(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    rows = zoo.rows(0, SHARED)
    asked = request(rows)
    want = PlainCritic(folder, lr=LR)
    plain_values = want.values
    want.values = lambda tokens: (plain_values(tokens) - 0.25) / 2.0  # type: ignore[method-assign]
    losses, _ = want.train(asked, 5)
    trainer = build(folder, mean=0.25, std=2.0)
    np.testing.assert_allclose(trainer.train(asked).losses, losses, rtol=1e-5)
    got = weights(trainer)
    for name, parameter in want.parameters.items():
        assert difference(got[name], parameter.detach()) <= 1e-5, name


NAMES = ("llama", "gptj", "mistral", "gemma2")
"""One whose path is packed, one that is run row by row, and two with windows."""


def flattened(asked: TrainRequest) -> TrainRequest:
    """One row a segment: its ancestors' tokens, which are masked out, and its own."""
    assert asked.parents is not None and asked.lengths is not None
    rows, columns = [], []
    for i, parent in enumerate(asked.parents):
        own = slice(0, asked.lengths[i])
        before = rows[parent] if parent >= 0 else np.zeros(0, np.int64)
        rows.append(np.concatenate([before, asked.tokens[i, own]]))
        entries = [getattr(asked, name)[i, own] for name in ("returns", "prev_values", "mask")]
        columns.append(np.pad(np.stack(entries), ((0, 0), (len(before), 0)))[:, 1:])
    width = max(map(len, rows))
    tokens = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    tables = np.stack([np.pad(c, ((0, 0), (0, width - 1 - c.shape[1]))) for c in columns], axis=1)
    return TrainRequest("flat", tokens, *tables.astype(np.float32))


@pytest.mark.parametrize("name", slow_but(("llama",), NAMES))
@pytest.mark.parametrize("budget", [4096, 60], ids=["one micro-batch", "cut"])
def test_a_tree_has_the_gradients_of_its_flattened_sequences(name: str, budget: int, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    trainer = build(folder, max_batch_tokens=budget, global_batch_size=100)
    assert trainer.engine.path == zoo.PATHS[name]
    assert_same_gradients(trainer, folder, tree())


@pytest.mark.slow
def test_a_comb_has_the_gradients_of_its_flattened_sequences(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    parents = [-1]
    for i in range(11):  # at each segment of the spine, which are the even ones, one more leaf
        parents += [2 * i, 2 * i]
    assert_same_gradients(build(folder, global_batch_size=100), folder, tree(parents=parents, length=17))


def assert_same_gradients(trainer: CriticTrainer, folder: Path, asked: TrainRequest) -> None:
    (batch,) = trainer._batches(asked)
    trainer._add_gradients(batch)
    plain, flat = PlainCritic(folder, lr=LR), flattened(asked)
    for i in range(len(flat)):
        targets = (torch.from_numpy(np.nan_to_num(x[i])) for x in (flat.returns, flat.prev_values, flat.mask))
        returns, before, mask = targets
        v = plain.values(flat.tokens[i])[:-1]
        clipped = before + torch.clamp(v - before, -0.2, 0.2)
        worse = torch.maximum((v - returns) ** 2, (clipped - returns) ** 2)
        (0.5 * (mask * worse).sum() / float(flat.mask.sum())).backward()
    parameters = trainer._trained
    assert parameters.keys() == plain.parameters.keys()
    for key, parameter in plain.parameters.items():
        own, want = parameters[key].grad, parameter.grad
        assert own is not None and want is not None
        assert (own - want).norm() <= 1e-5 * want.norm() + 1e-9, key


def test_steps_on_trees_are_those_on_flattened_sequences(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    trainer, plain = build(folder, global_batch_size=100), PlainCritic(folder, lr=LR)
    for seed in range(3):
        report = trainer.train(tree(seed))
        losses, norms = plain.train(flattened(tree(seed)), 100)
        np.testing.assert_allclose((report.losses, [report.grad_norm]), (losses, norms), rtol=1e-5)
        assert report.num_tokens == (tree(seed).mask > 0).sum()


def test_a_tree_is_its_paths_bit_for_bit_and_is_never_cut(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    by_paths, whole, tight = (build(folder, global_batch_size=size) for size in (6, 6, 2))
    flat, roots = flatten(tree())
    assert roots.tolist() == [0] * 6 + [6]
    reports = [by_paths.train(flat), whole.train(tree()), tight.train(tree())]
    assert same(weights(by_paths), weights(whole)) and same(weights(by_paths), weights(tight))
    assert by_paths.weights_version == whole.weights_version
    assert [report.losses for report in reports] == [reports[0].losses] * 3 and len(reports[0].losses) == 2
    assert whole.validate(tree()).losses == by_paths.validate(flat).losses
