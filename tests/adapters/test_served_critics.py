"""Adapters of critics: rows of responses, checkpoints, OpenRLHF's batches and NeMo-RL's value model."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import served
import zoo
from guerdon.adapters.critics import NOTE, at_tokens_before, before_responses, connect, load_beside, save_beside
from guerdon.adapters.nemo_rl_critic import ServedValue
from guerdon.adapters.openrlhf_critic import CriticActor as ServedCritic
from guerdon.adapters.openrlhf_critic import _gather
from guerdon.critic_core import TrainRequest
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest
from guerdon.settings.config import CriticConfig
from training.plain import PlainCritic


def test_a_responses_numbers_are_at_the_tokens_before_its_own() -> None:
    tokens = [np.array([5, 6, 7, 8, 9]), np.array([5, 6])]  # two and one of them are responses
    placed = at_tokens_before([np.array([0.5, -1.0]), np.array([2.0])], tokens)
    assert [row.tolist() for row in placed] == [[0.0, 0.0, 0.5, -1.0], [2.0]]
    values = [np.array([10.0, 11.0, 12.0, 13.0, 14.0]), np.array([20.0, 21.0])]
    assert [row.tolist() for row in before_responses(values, [2, 1])] == [[12.0, 13.0], [20.0]]


def test_a_critic_goes_back_to_the_trainers_checkpoint(tmp_path: Path) -> None:
    rows = zoo.rows()[:3]
    ones = [np.ones(len(row) - 1, np.float32) for row in rows]
    with served.critic(tmp_path) as server, connect(server.http_url) as critic:
        critic.train(rows, ones, ones, ones, train_id="run:1").result()
        save_beside(critic, tmp_path / "global_step_1/critic", 1)
        (saved,) = critic.state().checkpoints
        assert saved.metrics["trainer_step"] == 1.0
        before = critic.infer(tokens=rows).values
        critic.train(rows, ones, ones, ones, train_id="run:2").result()
        with pytest.raises(InvalidRequest, match="'run:2' was used for another request"):
            critic.train(rows, ones, ones, ones, updates=2, train_id="run:2").result()
        load_beside(critic, tmp_path / "global_step_1/critic")
        assert all(np.array_equal(a, b) for a, b in zip(before, critic.infer(tokens=rows).values, strict=True))
        critic.train(rows, ones, ones, ones, updates=2, train_id="run:2").result()  # undone, so it is new

        with pytest.raises(ConfigError, match=r"has no .*global_step_2"):
            load_beside(critic, tmp_path / "global_step_2")
        (tmp_path / NOTE).write_text(json.dumps({"checkpoint": "checkpoint-000099-step-9"}))
        with pytest.raises(InvalidRequest, match="checkpoint-000099-step-9"):
            load_beside(critic, tmp_path)


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


SIZE = 3  # the global batch of served.critic


def make_batch() -> dict[str, torch.Tensor]:
    """Right-padded rows whose second half is the response, of which the second row does not count."""
    random = np.random.default_rng(0)
    rows = zoo.rows()[:SIZE]
    width = max(map(len, rows)) + 3
    ids, mask = torch.zeros(SIZE, width, dtype=torch.int64), torch.zeros(SIZE, width)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, len(row) // 2 : len(row)] = 1
    return {
        "input_ids": ids,
        "input_lengths": torch.tensor([len(row) for row in rows]),
        "token_mask": mask,
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        "returns": torch.from_numpy(random.standard_normal((SIZE, width)).astype(np.float32)),
    }


def test_values_and_updates_are_plain_torchs_and_resume_with_the_trainer(tmp_path: Path) -> None:
    with served.critic(tmp_path) as server, connect(server.http_url) as critic:
        value, plain, batch = ServedValue(critic, "ppo"), PlainCritic(tmp_path / "rm", lr=9e-6), make_batch()
        batch["values"] = values = value.get_values(batch)["values"]
        for i, length in enumerate(batch["input_lengths"].tolist()):
            expected = plain.values(batch["input_ids"][i, :length].numpy()).detach()
            np.testing.assert_allclose(values[i, 1:length], expected[:-1], rtol=1e-5, atol=1e-5)
            assert values[i, 0] == 0 and not values[i, length:].any()

        columns = (batch[name][:, 1:].numpy() for name in ("returns", "values", "token_mask"))
        returns, before, mask = columns
        request = TrainRequest("", batch["input_ids"].numpy(), returns, before, mask * np.array([[1], [0], [1]]))
        losses, norms = plain.train(request, SIZE)
        tried = value.train(batch, None, eval_mode=True)
        assert critic.state().step == 0
        done = value.train(batch, None)
        assert tried["loss"].item() == done["loss"].item() == pytest.approx(losses[0], rel=1e-5)
        assert done["grad_norm"].item() == pytest.approx(norms[0], rel=1e-5)
        metrics = done["all_mb_metrics"]
        assert metrics["global_valid_toks"] == [request.mask.sum()] and metrics["lr"] == [9e-6]
        counted = request.mask > 0
        errors = (returns - before)[counted]
        explained = 1 - metrics["residual_sq_mean"][0] / metrics["returns_sq_mean"][0]  # as NeMo-RL computes it
        assert explained == pytest.approx(1 - errors.var() / returns[counted].var(), rel=1e-4)

        value.save_checkpoint(str(tmp_path / "step_1"), optimizer_path=None)
        after = value.get_values(batch)["values"]
        value.train(batch | {"values": after}, None)
        resumed = ServedValue(critic, "ppo", weights_path=tmp_path / "step_1")
        assert torch.equal(resumed.get_values(batch)["values"], after)
        resumed.train(batch | {"values": values}, None)  # the second update again, with other numbers
        assert critic.state().step == 2
        with pytest.raises(InvalidRequest, match="'ppo:0' was used for another request"):
            ServedValue(critic, "ppo").train(batch | {"values": after}, None)
        ServedValue(critic, "another").train(batch, None)
        assert critic.state().step == 3
        with pytest.raises(ConfigError, match=r"has no .*step_9"):
            ServedValue(critic, "ppo", weights_path=tmp_path / "step_9")


def test_a_critic_without_checkpoints_cannot_be_saved(tmp_path: Path) -> None:
    config = CriticConfig(model=str(served.reward_model(tmp_path / "rm")))
    with (
        served.running(critic=config) as server,
        connect(server.http_url) as critic,
        pytest.raises(GuerdonError, match="--checkpoint-dir"),
    ):
        ServedValue(critic, "ppo").save_checkpoint(str(tmp_path / "step_1"))
