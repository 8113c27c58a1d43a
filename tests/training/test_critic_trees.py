"""Trees of segments against their flattened sequences, in plain transformers and torch, one sequence at a time."""

from pathlib import Path

import numpy as np
import pytest
import torch
from critics import LR, build, same, weights
from plain import PlainCritic, tree

import zoo
from guerdon.critic_core import TrainRequest
from guerdon.training.critic_trainer import CriticTrainer
from guerdon.trees import flatten

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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [4096, 60], ids=["one micro-batch", "cut"])
def test_a_tree_has_the_gradients_of_its_flattened_sequences(name: str, budget: int, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    trainer = build(folder, max_batch_tokens=budget, global_batch_size=100)
    assert trainer.engine.path == ("single" if name == "gptj" else "packed+shared")
    assert_same_gradients(trainer, folder, tree())


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
