"""Clients of a reward-model server, of a critic, of a teacher and of live weights; they need no torch."""

from guerdon.client.addresses import Credentials
from guerdon.client.calls import ModelSignature, Scores
from guerdon.client.critic_calls import CriticScores
from guerdon.client.critic_client import AsyncCriticClient, CriticClient
from guerdon.client.retry import RetryPolicy
from guerdon.client.reward_client import AsyncRewardClient, RewardClient
from guerdon.client.teacher_calls import TeacherAnswers
from guerdon.client.teacher_client import AsyncTeacherClient, TeacherClient
from guerdon.client.teacher_head import Head
from guerdon.client.weights_client import WeightsClient

__all__ = [
    "AsyncCriticClient",
    "AsyncRewardClient",
    "AsyncTeacherClient",
    "Credentials",
    "CriticClient",
    "CriticScores",
    "Head",
    "ModelSignature",
    "RetryPolicy",
    "RewardClient",
    "Scores",
    "TeacherAnswers",
    "TeacherClient",
    "WeightsClient",
]
