"""Clients of a reward-model server and of a critic; they need neither torch nor transformers."""

from guerdon.client.async_critic import AsyncCriticClient
from guerdon.client.calls import ModelSignature
from guerdon.client.clients import AsyncRewardClient, RewardClient
from guerdon.client.credentials import Credentials
from guerdon.client.critic import CriticClient
from guerdon.client.results import CriticScores, Scores
from guerdon.client.retry import RetryPolicy

__all__ = [
    "AsyncCriticClient",
    "AsyncRewardClient",
    "Credentials",
    "CriticClient",
    "CriticScores",
    "ModelSignature",
    "RetryPolicy",
    "RewardClient",
    "Scores",
]
