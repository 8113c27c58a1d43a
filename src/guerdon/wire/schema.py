"""Every tensor that models and operations take or give, one row each, and the parameters of a request.

A model's metadata, the codecs of server and client and the tables of the docs are made from these rows. A client still
names each output that it reads itself: `_OUTPUTS` in `client/calls.py`, `_TABLES` in `client/teacher_calls.py`.

Axes: B samples; T tokens, as wide as the client sends them; K as many as the longest row has; A attributes; R is 1, or
A without merging; W scored tokens of the sample with the most; N rows of a train request, or scored tokens of all
samples; H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import lru_cache
from math import nan
from typing import Any

from guerdon.core import ModelInfo, Score
from guerdon.critic_core import Operation, OperationInfo
from guerdon.errors import GuerdonError

Info = ModelInfo | OperationInfo
Has = Callable[[Info], bool]
Spec = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape (-1: any) of a tensor, without a model's batch axis; an operation has none."""

_FLOATS = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A tensor, and which models and operations have it.

    `at` is the attribute of the request that it fills, or of a sample's Score that it shows: `answer.NAME` is one of
    the kind's own answer. An input fills it with a list of texts, JSON values or int64 rows, with the axes "B 1" int64
    `[B]`. An output with the axes "B 1" shows a number, or an array's length; with others an array of as many axes
    without B. None is a sample that has none. `pad` fills rows behind their end. The datatype is the model's own if it
    is empty. Triton's config and replies to requests that name no outputs have only what `is_listed`, for
    clients such as PyTriton's send and request all that the config lists.
    """

    name: str
    datatype: str
    axes: str
    at: str
    has: Has
    about: str
    pad: float = 0
    is_listed: bool = True

    @property
    def is_answered(self) -> bool:
        """Whether it shows a part of the kind's own answer."""
        return self.at.startswith("answer.")

    def parts_of(self, results: ListLike[Score | GuerdonError]) -> list[Any]:
        """Returns what an output shows of each sample's result; None for one that has none or failed."""
        parts: list[Any] = [None if isinstance(one, GuerdonError) else one for one in results]
        for name in self.at.split("."):
            parts = [None if part is None else getattr(part, name) for part in parts]
        return parts

    def datatype_of(self, info: Info) -> str:
        """Returns the datatype that it has in a reply of the model."""
        return self.datatype or _FLOATS.get(getattr(info, "dtype", ""), "FP32")

    def spec(self, info: Info) -> Spec:
        """Returns the tensor as that model or operation has it."""
        axes, sizes = self.axes.split(), {"1": 1}
        if isinstance(info, ModelInfo):
            num_attributes = (0 if info.adds_attributes else len(info.attribute_names)) or -1
            sizes |= {"A": num_attributes, "R": 1 if info.merges_attributes else num_attributes, "H": info.hidden_size}
            axes = axes[1:]
        return self.name, self.datatype_of(info), tuple(sizes.get(axis, -1) for axis in axes)


def _model(has: Callable[[ModelInfo], bool]) -> Has:
    return lambda info: isinstance(info, ModelInfo) and has(info)


def _gives(output: str) -> Has:
    return lambda info: output in getattr(info, "outputs", ())


def _does(*operations: Operation) -> Has:
    return lambda info: isinstance(info, OperationInfo) and info.operation in operations


_EVERY = _model(lambda _: True)
_TOKENS = _model(lambda info: info.takes_tokens)
_TEACHER = _gives("logprobs")
_TRAIN = _does(Operation.TRAIN, Operation.VALIDATE)
_SAVE, _LOAD = _does(Operation.SAVE), _does(Operation.LOAD)
_SWITCH = _does(Operation.SAVE, Operation.LOAD, Operation.OFFLOAD, Operation.ONLOAD)
_REPORT = _does(Operation.TRAIN, Operation.VALIDATE, Operation.SAVE, Operation.LOAD)

# fmt: off
# Inputs of models: name, datatype, axes, attribute of the ScoreRequest, who has it, what it is.
SENTENCES = Field("sentences", "BYTES", "B 1", "texts", _model(lambda info: info.takes_text),
                  "texts; special tokens are added only for an encoder")
MESSAGES = Field("messages", "BYTES", "B 1", "messages", _model(lambda info: info.takes_messages),
                 'each a JSON list of `{"role", "content"}`, for the checkpoint\'s chat template')
TOKENS = Field("tokens", "INT64", "B T", "tokens", _TOKENS,
               "token ids, right-padded with anything; needs `sequence_lengths`")
LENGTHS = Field("sequence_lengths", "INT64", "B 1", "lengths", _TOKENS,
                "number of a row's tokens")
INPUT_IDS = Field("input_ids", "INT32", "B T", "tokens", _TOKENS,
                  "token ids as trlX sends them: a row ends with its first EOS, or at T; a teacher's always at T")
GROUPS = Field("group_ids", "INT64", "B 1", "groups", _EVERY,
               "hint: equal for samples of one prompt")
PROMPT_LENGTHS = Field("prompt_lengths", "INT64", "B 1", "prompt_lengths", _EVERY,
                       "number of the prompt's tokens")
TARGET_IDS = Field("target_ids", "INT64", "B W K", "given", _TEACHER,
                   "ids whose log-probs are wanted, per scored token, or [B,K] for all of a sample; pads are -1", -1)
TEACHER_PROMPTS = Field("teacher_prompts", "BYTES", "B 1", "asks", _TEACHER,
                        "a prompt of the teacher's own per row, as JSON: a text, ids, messages, or `null`",
                        is_listed=False)
TEACHERS = Field("teachers", "BYTES", "B 1", "asks", _TEACHER,
                 "who answers a row, as JSON: a teacher's name, an object of names and weights, or `null`",
                 is_listed=False)
PROMPTS = Field("prompts", "BYTES", "B 1", "prompts", _model(lambda info: info.takes_prompts),
                "texts before the responses; listed only for models that read them")
LABELS = Field("labels", "BYTES", "B 1", "references", _model(lambda info: info.takes_labels),
               "a JSON value per row, or `null`; listed only if a function reads it")
STEPS = Field("step_positions", "INT64", "B K", "steps", _gives("step_rewards"),
              "positions of the tokens whose values are step rewards, padded with -1", -1)
PARENTS = Field("parents", "INT64", "B 1", "parents", _gives("values"),
                "beside `tokens`: the row that each follows as a segment of a tree, -1 if it begins one",
                is_listed=False)

# Inputs of a critic's operations; `at` is the attribute of the TrainRequest or ControlRequest.
TRAIN_TOKENS = replace(TOKENS, axes="N T", has=_TRAIN, about="token ids, right-padded with anything")
RETURNS = Field("returns", "FP32", "N T-1", "returns", _TRAIN, "the target of each token's value")
PREV_VALUES = Field("prev_values", "FP32", "N T-1", "prev_values", _TRAIN, "the values before the update")
MASK = Field("mask", "FP32", "N T-1", "mask", _TRAIN, "above 0 for each token that counts")
TRAIN_REWARDS = Field("rewards", "FP32", "N T-1", "rewards", _TRAIN,
                      "in place of `returns` and `prev_values`, which the critic estimates; or [N,1], one a row",
                      is_listed=False)
TRAIN_PARENTS = replace(PARENTS, axes="N 1", has=_TRAIN)
TRAIN_LENGTHS = replace(LENGTHS, axes="N 1", has=_TRAIN, is_listed=False)
DUMMY = Field("dummy_var", "INT64", "1", "", _does(*{*Operation} - {Operation.TRAIN, Operation.VALIDATE}),
              "without meaning: PyTriton's clients must send a tensor")
METRICS = Field("metrics", "BYTES", "1", "metrics", _SAVE,
                "a JSON object of at most 64 numbers that are kept with the checkpoint")
CHECKPOINT = Field("checkpoint", "BYTES", "1", "checkpoint", _LOAD, "a checkpoint's name; default: the newest")

# Outputs of models; `at` is the attribute of a sample's Score.
REWARDS = Field("rewards", "FP32", "B R", "reward", _gives("rewards"),
                "the raw reward; [B] if `input_ids` came; R is 1, with `--no-merge-attributes` as many as attributes")
ATTRIBUTES = Field("attributes", "FP32", "B A", "attributes", _gives("attributes"),
                   "all components; names, separated by commas, in the reply's parameter `attribute_names`", nan)
MORE_ATTRIBUTES = replace(ATTRIBUTES, is_listed=False, has=_model(
    lambda info: not info.merges_attributes and not ATTRIBUTES.has(info)))
VALUES = Field("values", "FP32", "B T", "values", _gives("values"), "one value a token, padded with 0")
STEP_REWARDS = Field("step_rewards", "FP32", "B K", "steps", _gives("step_rewards"),
                     "step rewards, padded with NaN", nan)
STEP_COUNTS = Field("step_counts", "INT64", "B 1", "steps", _gives("step_rewards"), "number of steps per row")
EXCEEDED = Field("exceeded", "INT32", "B 1", "", _model(lambda info: not _TEACHER(info)),
                 "always 0; older NeMo-Aligner clients read it")
OUT_LENGTHS = replace(LENGTHS, is_listed=False, has=lambda info: VALUES.has(info) or _TEACHER(info),
                      about="number of tokens per sample")
ERRORS = Field("errors", "BYTES", "B 1", "", _EVERY,
               "only if requested by name: empty, or why this sample failed", is_listed=False)

# Outputs of teachers.
LOGPROBS = Field("logprobs", "FP32", "B W", "answer.logprobs", _TEACHER,
                 "of the actual tokens, padded with 0; W is the largest count")
LOGPROB_COUNTS = Field("logprob_counts", "INT64", "B 1", "answer.num_asked", _TEACHER,
                       "number of scored tokens per sample")
TOP_IDS = Field("top_ids", "INT32", "B W K", "answer.top_ids", _TEACHER,
                "the likeliest ids, best first, padded with -1", -1, is_listed=False)
TOP_LOGPROBS = Field("top_logprobs", "FP32", "B W K", "answer.top_logprobs", _TEACHER,
                     "of `top_ids`, padded with 0", is_listed=False)
REST = Field("rest_logprobs", "FP32", "B W", "answer.rest", _TEACHER,
             "of all ids but `top_ids` together", is_listed=False)
TARGET_LOGPROBS = Field("target_logprobs", "FP32", "B W K", "answer.given_logprobs", _TEACHER,
                        "of `target_ids`; 0 for pads", is_listed=False)
ENTROPY = Field("entropy", "FP32", "B W", "answer.entropy", _TEACHER,
                "of the whole distribution, in nats", is_listed=False)
RANKS = Field("ranks", "INT32", "B W", "answer.ranks", _TEACHER,
              "number of ids at least as likely as the actual token, itself included", is_listed=False)
TOKEN_IDS = Field("token_ids", "INT32", "B W", "answer.tokens", _TEACHER,
                  "the actual tokens, of samples that were sent as text, too", -1, is_listed=False)
NEXT_IDS = Field("next_ids", "INT32", "B K", "answer.next_ids", _TEACHER,
                 "the likeliest ids after the last token; K is 1 without `top_k`", -1, is_listed=False)
NEXT_LOGPROBS = Field("next_logprobs", "FP32", "B K", "answer.next_logprobs", _TEACHER,
                      "of `next_ids`", is_listed=False)
CHUNKS = Field("chunks", "INT32", "B W", "answer.chunks", _gives("chunks"),
               "with `student_tokenizer`: equal for tokens with shares of one sum, -1 for tokens without, whose "
               "log-prob is NaN", -1)
HIDDEN_STATES = Field("hidden_states", "", "N H", "answer.hidden", _TEACHER,
                      "the head's input: a row per scored token, sample after sample",
                      is_listed=False)
HIDDEN_OFFSETS = Field("hidden_offsets", "INT64", "B+1", "answer.hidden", _TEACHER,
                       "offsets of the samples' rows in `hidden_states`", is_listed=False)

# Outputs of a critic's operations.
LOSS = Field("loss_mean", "FP32", "1", "loss", _TRAIN, "the mean loss of the tokens that count, in the first pass")
STATUS = Field("status", "INT64", "1", "", _SWITCH, "0")
STATE = Field("state", "BYTES", "1", "", _does(Operation.STATE), "the CriticState, as JSON")
REPORT = Field("report", "BYTES", "1", "", _REPORT,
               "the TrainReport or the checkpoint, as JSON with `null` for non-finite numbers", is_listed=False)
ADVANTAGES = Field("advantages", "FP32", "N T-1", "advantages", _TRAIN, "of a request with rewards", is_listed=False)
OUT_RETURNS = replace(RETURNS, about="of a request with rewards", is_listed=False)
# fmt: on

INPUTS = (
    *(SENTENCES, MESSAGES, TOKENS, LENGTHS, INPUT_IDS, GROUPS, PROMPT_LENGTHS, TARGET_IDS, PROMPTS, LABELS, STEPS),
    *(TEACHER_PROMPTS, TEACHERS),
    *(PARENTS, TRAIN_TOKENS, RETURNS, PREV_VALUES, MASK, TRAIN_REWARDS, TRAIN_PARENTS, TRAIN_LENGTHS),
    *(DUMMY, METRICS, CHECKPOINT),
)
OPERATION_OUTPUTS = (LOSS, STATUS, STATE, REPORT, ADVANTAGES, OUT_RETURNS)
OUTPUTS = [
    *(REWARDS, ATTRIBUTES, VALUES, STEP_REWARDS, STEP_COUNTS, EXCEEDED, LOGPROBS, LOGPROB_COUNTS, OUT_LENGTHS),
    *(TOP_IDS, TOP_LOGPROBS, REST, TARGET_LOGPROBS, ENTROPY, RANKS, TOKEN_IDS, NEXT_IDS, NEXT_LOGPROBS),
    *(CHUNKS, HIDDEN_STATES, HIDDEN_OFFSETS, MORE_ATTRIBUTES, ERRORS),
    *OPERATION_OUTPUTS,
]
MODEL_OUTPUTS = {field.name: field for field in OUTPUTS if field not in OPERATION_OUTPUTS}


_UNIT = {"type": "number", "minimum": 0, "maximum": 1}

PARAMETERS: dict[str, dict[str, Any]] = {
    "timeout": {"type": "integer", "minimum": 0, "description": "microseconds from arrival; 0: the server's own limit"},
    "priority": {"type": "integer", "minimum": 0, "description": "1 goes first; 0 is the default"},
    "binary_data_output": {"type": "boolean"},
    "train_id": {"type": "string", "description": "names a train request, which is applied once"},
    "gamma": {**_UNIT, "description": "discounts the rewards of a train request"},
    "lam_critic": {**_UNIT, "description": "GAE's lambda of the returns that the critic learns from rewards"},
    "lam_policy": {**_UNIT, "description": "GAE's lambda of the advantages; lam_critic without it"},
    "lam_alpha": {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "lambda of the advantages is 1 - 1 / (lam_alpha * tokens of the row), at least 0",
    },
    "updates": {"type": "integer", "minimum": 1, "description": "passes of a train request over its rows"},
    "top_k": {"type": "integer", "minimum": 0, "description": "a teacher's likeliest ids per scored token"},
    "temperature": {"type": "number", "exclusiveMinimum": 0, "description": "divides a teacher's logits"},
    "start": {"type": "integer", "minimum": 1, "description": "the first token that a teacher scores"},
    "hidden_dtype": {"type": "string", "enum": ["bfloat16"], "description": "rounds a teacher's hidden states"},
}
"""The parameters of a request, as JSON schemas."""
IGNORED = "^(sequence|triton)_"
"""Triton's own parameters, which its clients add and which change nothing here, as a pattern."""
ALL_PARAMETERS = {"properties": PARAMETERS, "patternProperties": {IGNORED: {}}, "additionalProperties": False}


@lru_cache(maxsize=64)
def inputs_of(info: Info) -> dict[str, Field]:
    """Returns each input that the model or operation takes by its name, the listed ones first."""
    return {field.name: field for field in sorted(INPUTS, key=_is_extra) if field.has(info)}


@lru_cache(maxsize=64)
def outputs_of(info: Info) -> dict[str, Field]:
    """Returns each output that may be requested by its name: those that the model's info names, listed ones, others."""
    found = {field.name: field for field in sorted(OUTPUTS, key=_is_extra) if field.has(info)}
    first = info.outputs if isinstance(info, ModelInfo) else ()
    return {name: found[name] for name in (*(name for name in first if name in found), *found)}


def add_output(field: Field) -> None:
    """Adds an output that only models of a new kind give."""
    OUTPUTS.append(field)
    MODEL_OUTPUTS[field.name] = field
    outputs_of.cache_clear()


def _is_extra(field: Field) -> bool:
    return not field.is_listed


def table(found: Iterable[Field]) -> str:
    """Returns a Markdown table of the tensors."""
    lines = ["| tensor | datatype | shape | content |", "| --- | --- | --- | --- |"]
    for field in found:
        datatype, shape = field.datatype or ", ".join(_FLOATS.values()), f"[{field.axes.replace(' ', ',')}]"
        if field in INPUTS and datatype.startswith("INT"):
            datatype = "INT64, INT32"
        if field in INPUTS and field.axes == "B 1":
            shape += " or [B]"
        lines.append(f"| `{field.name}` | {datatype} | {shape} | {field.about} |")
    return "\n".join(lines) + "\n"
