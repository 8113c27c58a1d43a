"""NeMo-Aligner's HTTPCommunicator with the sections of an actor's YAML: `drive_nemo_aligner.py CHECKOUT YAML TOKENS`.

TOKENS is a JSON list of rows of token ids. The calls are those of RemoteGPTRMClient and RemoteGPTRMCriticClient, whose
own modules want megatron and CUDA. Prints {"rewards": ..., "values": ..., "loss": ..., "status": ...} of what the YAML
has a section for.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from omegaconf import OmegaConf

sys.path.insert(0, sys.argv[1])

from nemo_aligner.servers.http_communicator import HTTPCommunicator


def padded(rows: list[list[int]], width: int) -> dict[str, np.ndarray]:
    tokens = np.zeros((len(rows), width), np.int64)
    for out, row in zip(tokens, rows, strict=True):
        out[: len(row)] = row
    return {"tokens": tokens, "sequence_lengths": np.array([[len(row)] for row in rows], np.int64)}


def rewards(cfg: Any, rows: list[list[int]]) -> dict[str, Any]:
    server = cfg.reward_model
    communicator = HTTPCommunicator.create_http_communicator_from_dict({server.name: (server.ip, server.port)})
    sent = communicator.send_data_to_server(server_name=server.name, data=padded(rows, cfg.pad_to_length))
    told = sent.result()["rewards"]
    communicator.close()
    assert told.shape == (len(rows), 1) and told.dtype == np.float32
    return {"rewards": told[:, 0].tolist()}


def critic(cfg: Any, rows: list[list[int]]) -> dict[str, Any]:
    names, at = cfg.critic.name, (cfg.critic.ip, cfg.critic.port)
    communicator = HTTPCommunicator.create_http_communicator_from_dict(dict.fromkeys(names.values(), at))
    sent = padded(rows, cfg.pad_to_length)
    told = communicator.send_data_to_server(server_name=names.infer, data=sent).result()
    width = max(map(len, rows))
    values = np.ascontiguousarray(told["values"][:, : width - 1], np.float32)
    mask = (np.arange(width - 1) < np.array([[len(row) - 1] for row in rows])).astype(np.float32)
    rollout = {"tokens": sent["tokens"][:, :width], "returns": values + 1, "prev_values": values, "mask": mask}
    trained = communicator.send_data_to_server(server_name=names.train, data=rollout, batching=False).result()
    empty = {"dummy_var": np.array([0])}
    saved = communicator.send_data_to_server(server_name=names.save, data=empty, batching=False).result()
    communicator.close()
    return {
        "rewards": told["rewards"][:, 0].tolist() if cfg.combine_rm_and_critic_server else None,
        "values": values.tolist(),
        "loss": trained["loss_mean"].tolist(),
        "status": saved["status"].tolist(),
    }


if __name__ == "__main__":
    cfg = OmegaConf.load(sys.argv[2])
    with open(sys.argv[3]) as file:
        rows = json.load(file)
    told = rewards(cfg.remote_rm, rows) if "remote_rm" in cfg else critic(cfg.remote_critic_rm, rows)
    print(json.dumps(told))
