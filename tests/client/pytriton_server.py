"""A PyTriton server of NeMo-Aligner's reward_model tensors: `python pytriton_server.py HTTP_PORT GRPC_PORT`.

The reward of tokens is their sum modulo 1000, that of a text its length; a text "nan" gets NaN.
"""

import atexit
import os
import signal
import subprocess
import sys
import sysconfig
from typing import Any

import numpy as np


def start(http_port: int, grpc_port: int, script: str = __file__) -> subprocess.Popen[bytes]:
    """Starts the server in a process of its own, which takes some seconds to be ready."""
    # Triton's Python backend is linked against libpython, which need not be where the loader looks.
    libraries = os.pathsep.join(filter(None, (sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH"))))
    return subprocess.Popen(
        [sys.executable, script, str(http_port), str(grpc_port)],
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Has the server end Triton and remove its workspace, which takes seconds; this process waits for it at its end."""
    process.send_signal(signal.SIGINT)
    atexit.register(process.wait, timeout=120.0)


def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    if "sentences" in inputs:
        texts = [bytes(text).decode() for text in inputs["sentences"].reshape(-1)]
        rewards = [float("nan") if text == "nan" else float(len(text)) for text in texts]
    else:
        lengths = inputs["sequence_lengths"].reshape(-1)
        rewards = [float(row[:n].sum() % 1000) for row, n in zip(inputs["tokens"], lengths, strict=True)]
    return {"rewards": np.array(rewards, np.float32).reshape(-1, 1)}


def main() -> None:
    from pytriton.decorators import batch
    from pytriton.model_config import ModelConfig, Tensor
    from pytriton.triton import Triton, TritonConfig

    def optional(name: str, dtype: Any) -> Any:
        return Tensor(name=name, shape=(-1,), dtype=dtype, optional=True)

    address: dict[str, Any] = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1", "allow_metrics": False}
    config = TritonConfig(http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]), allow_grpc=True, **address)
    with Triton(config=config) as triton:
        triton.bind(
            model_name="reward_model",
            infer_func=batch(infer),
            inputs=[optional("sentences", bytes), optional("tokens", np.int64), optional("sequence_lengths", np.int64)],
            outputs=[Tensor(name="rewards", shape=(1,), dtype=np.float32)],
            config=ModelConfig(batching=True, max_batch_size=9_999_999),
        )
        triton.serve()


if __name__ == "__main__":
    main()
