"""A PyTriton server of NeMo-Aligner's four models: `python pytriton_critic.py HTTP_PORT GRPC_PORT`.

A reward is a sequence's sum modulo 1000 and a value its token times the weight, from 1 on; training adds the sum of
the masked returns to the weight. Everything has one width, 8, as PyTriton's batcher joins only equal shapes. Training
on the first token 7 takes a minute.
"""

import sys
import time
from typing import Any

import numpy as np

WIDTH = 8
SLOW_TOKEN = 7


class Critic:
    def __init__(self) -> None:
        self.weight = 1.0
        self.num_saved = 0

    def reward(self, tokens: np.ndarray, sequence_lengths: np.ndarray) -> dict[str, np.ndarray]:
        assert tokens.shape[1] == WIDTH
        sums = [float(row[:n].sum() % 1000) for row, n in zip(tokens, sequence_lengths.reshape(-1), strict=True)]
        return {"rewards": np.array(sums, np.float32)[:, None]}

    def infer(self, tokens: np.ndarray, sequence_lengths: np.ndarray) -> dict[str, np.ndarray]:
        return {"values": (tokens * self.weight).astype(np.float32)} | self.reward(tokens, sequence_lengths)

    def train(self, requests: list[Any]) -> list[dict[str, np.ndarray]]:
        (asked,) = requests
        tokens, returns, mask = (np.asarray(asked.data[name]) for name in ("tokens", "returns", "mask"))
        if tokens[0, 0] == SLOW_TOKEN:
            time.sleep(60)
        self.weight += float((returns * mask).sum())
        return [{"loss_mean": np.array([self.weight], np.float32)}]

    def save(self, requests: list[Any]) -> list[dict[str, np.ndarray]]:
        self.num_saved += 1
        return [{"status": np.array([self.num_saved], np.int64)} for _ in requests]


def main() -> None:
    from pytriton.decorators import batch
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    address: dict[str, Any] = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1", "allow_metrics": False}
    config = TritonConfig(http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]), allow_grpc=True, **address)
    critic = Critic()
    rows = [
        Tensor(name="tokens", shape=(-1,), dtype=np.int64, optional=True),
        Tensor(name="sequence_lengths", shape=(-1,), dtype=np.int64, optional=True),
    ]
    rewards = Tensor(name="rewards", shape=(1,), dtype=np.float32)
    values = Tensor(name="values", shape=(-1,), dtype=np.float32)
    targets = [Tensor(name=name, shape=(-1, -1), dtype=np.float32) for name in ("returns", "prev_values", "mask")]
    learning = [Tensor(name="tokens", shape=(-1, -1), dtype=np.int64), *targets]
    batched, single = ModelConfig(batching=True, max_batch_size=9_999_999), ModelConfig(batching=False)
    with Triton(config=config) as triton:
        for name, function, inputs, outputs, how in (
            ("reward_model", batch(critic.reward), rows, [rewards], batched),
            ("critic_infer", batch(critic.infer), rows, [values, rewards], batched),
            ("critic_train", critic.train, learning, [Tensor(name="loss_mean", shape=(1,), dtype=np.float32)], single),
            (
                "critic_save",
                critic.save,
                [Tensor(name="dummy_var", shape=(1,), dtype=np.int64)],
                [Tensor(name="status", shape=(1,), dtype=np.int64)],
                single,
            ),
        ):
            triton.bind(model_name=name, infer_func=function, inputs=inputs, outputs=outputs, config=how)
        triton.serve()


if __name__ == "__main__":
    main()
