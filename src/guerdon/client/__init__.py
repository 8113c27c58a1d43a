"""Clients of a reward-model server; they need neither torch nor transformers."""

from guerdon.client.calls import ModelSignature
from guerdon.client.clients import AsyncRewardClient, RewardClient
from guerdon.client.results import Scores
from guerdon.client.retry import RetryPolicy

__all__ = ["AsyncRewardClient", "ModelSignature", "RetryPolicy", "RewardClient", "Scores"]
