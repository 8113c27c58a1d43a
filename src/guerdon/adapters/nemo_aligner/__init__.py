"""NeMo-Aligner's remote clients by their names: for guerdon's servers, and for PyTriton's of the same tensors.

`cfg` is the section `remote_rm` or `remote_critic_rm` of NeMo-Aligner's YAML: a mapping, an omegaconf config, or any
object with these attributes. Each client is for one process: if data-parallel ranks hold parts of a rollout, each asks
for its own rewards and values, and one of them trains and saves with what it has gathered from all.
"""

from guerdon.adapters.nemo_aligner.remote_clients import (
    ANSWER_S,
    START_S,
    RemoteGPTRMClient,
    RemoteGPTRMCriticClient,
    RMCriticFuture,
    RMFuture,
    RMTrainFuture,
    SaveFuture,
)

__all__ = [
    "ANSWER_S",
    "START_S",
    "RMCriticFuture",
    "RMFuture",
    "RMTrainFuture",
    "RemoteGPTRMClient",
    "RemoteGPTRMCriticClient",
    "SaveFuture",
]
