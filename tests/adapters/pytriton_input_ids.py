"""A PyTriton server that trlX could have: `input_ids` to `rewards` [b, 1], the sum of each row up to its first EOS.

`python pytriton_input_ids.py HTTP_PORT GRPC_PORT`
"""

import sys

import numpy as np

EOS = 2


def infer(input_ids: np.ndarray) -> dict[str, np.ndarray]:
    ends = (input_ids == EOS).argmax(axis=1)
    rewards = [row[: end + 1].sum() for row, end in zip(input_ids, ends, strict=True)]
    return {"rewards": np.array(rewards, np.float16)[:, None]}


def main() -> None:
    from pytriton.decorators import batch
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    config = TritonConfig(
        http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]), allow_grpc=True,
        http_address="127.0.0.1", grpc_address="127.0.0.1", allow_metrics=False,
    )  # fmt: skip
    with Triton(config=config) as triton:
        triton.bind(
            model_name="hh-rm",
            infer_func=batch(infer),
            inputs=[Tensor(name="input_ids", shape=(-1,), dtype=np.int32)],
            outputs=[Tensor(name="rewards", shape=(1,), dtype=np.float16)],
            config=ModelConfig(batching=True, max_batch_size=25),
        )
        triton.serve()


if __name__ == "__main__":
    main()
