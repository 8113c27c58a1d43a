"""What the adapters of critics share: rows of responses, and checkpoints beside a trainer's."""

import json
from pathlib import Path

import numpy as np
import pytest

import served
import zoo
from guerdon.adapters.critics import NOTE, at_tokens_before, before_responses, connect, load_beside, save_beside
from guerdon.errors import ConfigError, InvalidRequest


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
