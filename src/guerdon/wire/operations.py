"""Whatever is served, as tensors: one way in and one way out for all transports."""

from __future__ import annotations

from guerdon.core import (
    CheckpointInfo,
    ControlRequest,
    CriticState,
    ModelInfo,
    OperationInfo,
    ScoreReply,
    ScoreRequest,
    TrainReport,
    TrainRequest,
)
from guerdon.wire import critic, reward_model
from guerdon.wire.kserve import InferReply, InferRequest

Asked = ScoreRequest | TrainRequest | ControlRequest
"""What a request asks for: of a model its scores, of a critic an operation."""

Answer = ScoreReply | TrainReport | CheckpointInfo | CriticState | None
"""What answers it: a TrainReport to train and validate, a CheckpointInfo to save and load, a CriticState to state."""


def to_request(request: InferRequest, info: ModelInfo | OperationInfo) -> Asked:
    """What the tensors ask of the model or operation; raises InvalidRequest naming what of them is wrong."""
    if isinstance(info, OperationInfo):
        return critic.to_operation_request(request, info)
    return reward_model.to_score_request(request, info)


def to_reply(answer: Answer, request: InferRequest, info: ModelInfo | OperationInfo) -> InferReply:
    """The tensors that answer `request`; raises the error of a failed row that the request did not ask to be told."""
    if isinstance(info, OperationInfo):
        assert not isinstance(answer, ScoreReply)
        return critic.to_operation_reply(answer, request, info)
    assert isinstance(answer, ScoreReply)
    return reward_model.to_infer_reply(answer, request, info)
