"""NeMo-RL's value model on a served critic, called as its PPO calls it; tests/trainers has NeMo-RL's own loop."""

from pathlib import Path

import numpy as np
import pytest
import torch

import served
import zoo
from guerdon.adapters.critics import connect
from guerdon.adapters.nemo_rl_critic import ServedValue
from guerdon.critic_core import TrainRequest
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest
from guerdon.settings.config import CriticConfig, ServerConfig
from training.plain import PlainCritic

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
    settings = ServerConfig(port=0, grpc_port=None, critic=config)
    with (
        served.running(settings) as server,
        connect(server.http_url) as critic,
        pytest.raises(GuerdonError, match="--checkpoint-dir"),
    ):
        ServedValue(critic, "ppo").save_checkpoint(str(tmp_path / "step_1"))
