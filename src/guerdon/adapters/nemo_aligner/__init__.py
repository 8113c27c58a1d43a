"""NeMo-Aligner's remote clients by their names: for guerdon's servers, and for PyTriton's of the same tensors.

`cfg` is the section `remote_rm` or `remote_critic_rm` of NeMo-Aligner's YAML: a mapping, an omegaconf config, or any
object with these attributes. One client per process: data-parallel ranks request rewards and values for their own rows,
and one rank trains and saves with the gathered rows.
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
