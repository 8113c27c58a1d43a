"""What stands for OpenRLHF's critic, with batches as its trainer sends them, padded on either side."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import served
from guerdon.adapters.openrlhf_critic import CriticActor as ServedCritic
from guerdon.adapters.openrlhf_critic import _gather
from guerdon.errors import ConfigError


def strategy(folder: Path, **ds: int) -> SimpleNamespace:
    """The flags that the critic reads."""
    ckpt = SimpleNamespace(path=str(folder), save_steps=-1, disable_ds=False, load_enable=False)
    parallel = SimpleNamespace(**{"ring_attn_size": 1, "tensor_parallel_size": 1, **ds})
    return SimpleNamespace(args=SimpleNamespace(ds=parallel, ckpt=ckpt, train=SimpleNamespace(max_epochs=1)))


def test_values_are_those_before_the_actions_wherever_the_padding_is(tmp_path: Path) -> None:
    rows = [torch.tensor([5, 6, 7, 8, 9]), torch.tensor([10, 11, 12])]
    left = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 10, 11, 12]]), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    right = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    masks = torch.tensor([[1, 0, 1], [0, 1, 1]]), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    with served.critic(tmp_path) as server:
        critic = ServedCritic(1, 0)
        critic.init_model_from_pretrained(strategy(tmp_path), server.http_url, 10)
        data = {"sequences": [left[0], right[0]], "attention_mask": [left[1], right[1]], "action_mask": [*masks]}
        short, long = critic.execute_batch("forward", data, 0, 2)
        a, b = critic._critic.infer(tokens=[row.numpy() for row in rows]).values
        np.testing.assert_array_equal(short, [[a[1], 0, a[3]], [0, b[0], b[1]]])
        np.testing.assert_array_equal(long, [[0, a[1], a[2], a[3]], [b[0], b[1], 0, 0]])

        returns = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        e = SimpleNamespace(
            sequences=left[0], attention_mask=left[1], action_mask=masks[0], values=short, returns=returns
        )
        critic.execute_batch("append", {"experience": [e]}, 0, 1)
        status = critic.fit()
    assert [row.tolist() for row in _gather(returns, left[1])] == [[0, 1, 2, 3], [5, 6]]
    learnt = [(a[1], 1), (a[3], 3), (b[0], 5), (b[1], 6)]
    assert status["critic_loss"] == pytest.approx(0.5 * np.mean([(v - r) ** 2 for v, r in learnt]), rel=1e-5)
    assert status["values"] == pytest.approx(np.mean([v for v, _ in learnt]), rel=1e-5)


def test_one_process_asks_and_its_copies_do_nothing(tmp_path: Path) -> None:
    copy = ServedCritic(2, 1)
    copy.init_model_from_pretrained(strategy(tmp_path, ring_attn_size=2), "http://unused", 10)
    assert copy.execute_batch("forward", {"sequences": [1, 2, 3]}, 0, 3) == [None] * 3
    assert copy.fit() == {}
    with pytest.raises(ConfigError, match="has 8 processes, and a served critic needs 1") as caught:
        ServedCritic(8, 0).init_model_from_pretrained(strategy(tmp_path), "http://unused", 10)
    assert "--critic.num_gpus_per_node 1" in str(caught.value.help)
