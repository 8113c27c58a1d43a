"""PyTriton with a reward model's tensors, batched as NeMo-Aligner's server sets it up by default."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from scorer import Scorer

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="folder, or `null`")
parser.add_argument("--port", type=int, required=True)
args = parser.parse_args()
scorer = None if args.model == "null" else Scorer(args.model)


@batch
def infer(tokens: np.ndarray, sequence_lengths: np.ndarray) -> dict[str, np.ndarray]:
    if scorer is None:
        return {"rewards": np.zeros((len(tokens), 1), dtype=np.float32)}
    rewards = scorer.padded(torch.from_numpy(tokens), torch.from_numpy(sequence_lengths[:, 0]))
    return {"rewards": rewards.float().numpy()[:, None]}


with Triton(
    config=TritonConfig(http_address="127.0.0.1", http_port=args.port, allow_grpc=False, allow_metrics=False)
) as triton:
    triton.bind(
        model_name="reward_model",
        infer_func=infer,
        inputs=[Tensor(name=name, shape=(-1,), dtype=np.int64) for name in ("tokens", "sequence_lengths")],
        outputs=[Tensor(name="rewards", shape=(1,), dtype=np.float32)],
        config=ModelConfig(
            max_batch_size=9_999_999,
            batcher=DynamicBatcher(max_queue_delay_microseconds=2000, preferred_batch_size=[16]),
        ),
    )
    triton.serve()
