"""NeMo-Aligner's remote clients by their names: for guerdon's servers, and for PyTriton's of the same tensors.

`cfg` is the section `remote_rm` or `remote_critic_rm` of NeMo-Aligner's YAML: a mapping, an omegaconf config, or any
object with these attributes. Each client is for one process: where data-parallel ranks have parts of a rollout, each
asks for its own rewards and values, and one of them trains and saves with what it gathered of all.
"""

from guerdon.adapters.nemo_aligner.critic import RemoteGPTRMCriticClient
from guerdon.adapters.nemo_aligner.futures import RMCriticFuture, RMFuture, RMTrainFuture, SaveFuture
from guerdon.adapters.nemo_aligner.remote import START_S
from guerdon.adapters.nemo_aligner.reward import RemoteGPTRMClient
from guerdon.adapters.nemo_aligner.settings import ANSWER_S

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
