"""Clients of a reward-model server, of a critic and of a teacher; they need neither torch nor transformers."""

from guerdon.client.addresses import Credentials
from guerdon.client.calls import ModelSignature, Scores
from guerdon.client.critic_calls import CriticScores
from guerdon.client.critic_client import AsyncCriticClient, CriticClient
from guerdon.client.retry import RetryPolicy
from guerdon.client.reward_client import AsyncRewardClient, RewardClient
from guerdon.client.teacher_calls import TeacherAnswers
from guerdon.client.teacher_client import AsyncTeacherClient, TeacherClient
from guerdon.client.teacher_head import Head

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
]
