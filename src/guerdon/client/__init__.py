"""Clients of a reward-model server and of a critic; they need neither torch nor transformers."""

from guerdon.client.addresses import Credentials
from guerdon.client.calls import ModelSignature, Scores
from guerdon.client.critic_calls import CriticScores
from guerdon.client.critic_client import AsyncCriticClient, CriticClient
from guerdon.client.retry import RetryPolicy
from guerdon.client.reward_client import AsyncRewardClient, RewardClient

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
