"""The public names, and which modules importing them loads."""

import pytest

import guerdon
from guerdon import errors

ERRORS = [name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, Exception)]


def test_the_public_names() -> None:
    assert {*guerdon.__all__} - {*ERRORS} == {
        "AsyncCriticClient",
        "AsyncRewardClient",
        "AsyncTeacherClient",
        "CriticClient",
        "CriticServerTrainer",
        "Gae",
        "Head",
        "LocalJudge",
        "LocalRewardModel",
        "LocalTeacher",
        "ReinforceActor",
        "RetryPolicy",
        "RewardClient",
        "RewardModelServer",
        "Scores",
        "TeacherAnswers",
        "TeacherClient",
        "WeightsClient",
        "TrainReport",
        "__version__",
    }


def test_every_error_is_a_public_name() -> None:
    assert {"GuerdonError", "InvalidRequest", "Overloaded", "Unreachable"} <= {*ERRORS} <= {*guerdon.__all__}
    assert guerdon.InvalidRequest is errors.InvalidRequest
    assert guerdon.__all__ == sorted(guerdon.__all__)
    with pytest.raises(AttributeError, match="no attribute 'InvalidRequests'"):
        _ = guerdon.InvalidRequests


def test_each_public_name_loads() -> None:
    for name in guerdon.__all__:
        assert getattr(guerdon, name) is not None
