"""What is fuzzed, and how an input is judged: what cannot be read is refused by an error of the client's, all else is
answered.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import orjson
from tritonclient.grpc import service_pb2 as pb

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.critic_core import CheckpointInfo, Operation, OperationInfo, TrainReport, TrainRequest
from guerdon.errors import GuerdonError, InvalidRequest
from guerdon.server import reading
from guerdon.wire import bodies, kserve, kserve_answers, kserve_grpc, tensors
from guerdon.wire.forms import ALL_FORMS, FORMS, triton_repository
from guerdon.wire.kserve import ServedReply, ServedRequest
from guerdon.wire.tensors import InferReply, InferRequest, Tensor

EVERYTHING = ModelInfo(
    "reward_model",
    "fuzzed",
    outputs=("rewards", "attributes", "values", "step_rewards"),
    attribute_names=("a", "b"),
    vocab_size=1000,
    max_length=64,
    eos_token_id=2,
    takes_messages=True,
    takes_prompts=True,
    takes_labels=True,
)
PLAIN = ModelInfo("plain", "fuzzed", takes_prompts=True, takes_labels=True, takes_messages=True)
INFOS = (EVERYTHING, PLAIN, *(OperationInfo(f"critic_{o}", o, "critic") for o in Operation))
"""What is asked: a model with all outputs, one that gives rewards only, and every operation of a critic."""

_REPORT = TrainReport("", 1, "1", 0.5, [0.5], 3, 0.0, np.nan, 1.0, 1e-6, 1, 0)
_CHECKPOINT = CheckpointInfo("step-1", 1, 1, "1", {})


def whole(reply: InferReply, request: InferRequest) -> tuple[bytes, int | None]:
    """The body of an answer, and its JSON's length if binary tensors follow it."""
    made = kserve_answers.encode(reply, request)
    return b"".join(made.pieces), made.json_length


def binary(body: bytes, header_length: int | None, info: ModelInfo | OperationInfo) -> bool:
    """Whether KServe's body was accepted, and answered; any error but the client's own is raised."""

    def work() -> None:
        request = kserve.decode(body, header_length)
        reply = kserve.to_reply(_answer(kserve.to_request(request, info)), request, info)
        payload, length = whole(reply, request)
        kserve.decode_reply(payload, length)

    return _judged(work)


def grpc(data: bytes, info: ModelInfo | OperationInfo) -> bool:
    """As `binary`, of a protobuf message."""

    def work() -> None:
        request = kserve_grpc.decode(kserve_grpc.parse(data))
        reply = kserve.to_reply(_answer(kserve.to_request(request, info)), request, info)
        kserve_grpc.decode_reply(kserve_grpc.encode(reply))

    return _judged(work)


def form(path: str, body: bytes, query: dict[str, str], info: ModelInfo = EVERYTHING) -> bool:
    """As `binary`, of the body of a form."""

    def work() -> None:
        asked = ALL_FORMS[path].read(body, query)
        asked.check(info)
        reply = ScoreReply([], [], "1") if asked.request is None else _answer(asked.request)
        assert isinstance(reply, ScoreReply)
        bodies.write(asked.to_reply(reply, info))

    return _judged(work, ALL_FORMS[path].to_error)


def answer(body: bytes, header_length: int | None) -> bool:
    """Whether a client accepts what a server may have answered."""
    return _judged(lambda: kserve.decode_reply(body, header_length))


def source(body: bytes) -> bool:
    """Whether an admin's request to load other weights is accepted."""
    return _judged(lambda: triton_repository.source(body))


def _judged(work: Callable[[], Any], told: Callable[[GuerdonError], tuple[int, Any]] | None = None) -> bool:
    try:
        work()
    except GuerdonError as e:
        status, content = told(e) if told else (e.http, {"error": str(e)})
        if not (400 <= status < 500 or status == 501):
            raise AssertionError(f"status {status}") from e
        bodies.write(content)
        return False
    return True


def _answer(asked: ServedRequest) -> ServedReply:
    """What a service could answer; each sample is looked at as the service does before it computes anything."""
    if isinstance(asked, TrainRequest):
        return _REPORT
    if not isinstance(asked, ScoreRequest):
        return _CHECKPOINT if asked.operation in (Operation.SAVE, Operation.LOAD) else None
    results: list[Score | GuerdonError] = []
    lengths = []
    for i in range(len(asked)):
        row = asked.tokens[i] if asked.tokens is not None else np.zeros(1 + i % 3, np.int64)
        s = reading.sequence(row, asked, i)
        lengths.append(len(row))
        wrong = reading.find_fault(s, EVERYTHING)
        if asked.truncation is not None:
            reading.truncated(s, asked.truncation)
        steps = np.zeros(0 if s.steps is None else len(s.steps), np.float32)
        score = Score(0.5, np.zeros(2, np.float32), np.zeros(len(row), np.float32), steps)
        results.append(wrong if isinstance(wrong, InvalidRequest) else score)
    return ScoreReply(results, lengths, "1")


# --- inputs ------------------------------------------------------------------------------------------------

_TOKENS = np.array([[5, 6, 7, 2], [8, 9, 2, 0]])
_CONVERSATION = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4 — vier"}]
_PARTS: dict[str, Any] = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "What is 2+2?"}],
}


def requests() -> list[tuple[InferRequest, ModelInfo | OperationInfo]]:
    """Valid requests, and whom they ask."""
    texts = Tensor.of_texts("sentences", ["Grüße", "two 🙂"])
    lengths = Tensor.of("sequence_lengths", np.array([[4], [3]]))
    tokens = {"tokens": Tensor.of("tokens", _TOKENS), "sequence_lengths": lengths}
    hints = {
        "group_ids": Tensor.of("group_ids", np.array([7, 7])),
        "prompt_lengths": Tensor.of("prompt_lengths", np.array([[1], [2]])),
        "labels": Tensor.of_texts("labels", ['{"a": [1, null]}', "2"]),
        "prompts": Tensor.of_texts("prompts", ["a", "b"]),
    }
    conversations = [orjson.dumps(_CONVERSATION).decode()] * 2
    messages = {"messages": Tensor("messages", "BYTES", (2, 1), [c.encode() for c in conversations])}
    ids = {"input_ids": Tensor.of("input_ids", _TOKENS.astype(np.int32))}
    steps = {"step_positions": Tensor.of("step_positions", np.array([[0, 2], [1, -1]]))}
    train = {"tokens": tokens["tokens"]}
    train |= {n: Tensor.of(n, np.full((2, 3), 0.5, np.float32)) for n in ("returns", "prev_values", "mask")}
    rewarded = {name: train[name] for name in ("tokens", "mask")} | {"rewards": Tensor.of("rewards", np.ones((2, 1)))}
    tree = {name: Tensor.of(name, np.ones((2, 4), np.float32)) for name in ("returns", "prev_values", "mask")}
    tree |= tokens | {"parents": Tensor.of("parents", np.array([[-1], [0]]))}
    rule = {"gamma": 1.0, "lam_critic": 0.9, "lam_alpha": 0.05, "updates": 2}
    dummy = {"dummy_var": Tensor.of("dummy_var", np.zeros(1, np.int64))}
    metrics = {"metrics": Tensor("metrics", "BYTES", (1,), [b'{"reward": 0.5}'])}
    outputs = {"rewards": True, "errors": False, "values": True}
    critic = {info.operation: info for info in INFOS if isinstance(info, OperationInfo)}
    return [
        (InferRequest({"sentences": texts}, binary_default=True), PLAIN),
        (InferRequest(tokens | hints | steps, outputs, "7", {"timeout": 5_000_000, "priority": 2}), EVERYTHING),
        (InferRequest(messages | {"labels": hints["labels"]}), PLAIN),
        (InferRequest(ids, {"rewards": False}), EVERYTHING),
        (InferRequest(train, None, "", {"train_id": "a-1"}), critic[Operation.TRAIN]),
        (InferRequest(rewarded, {"report": True, "advantages": True}, "", rule), critic[Operation.TRAIN]),
        (InferRequest(tree, {"report": True}), critic[Operation.TRAIN]),
        (InferRequest({n: tree[n] for n in (*tokens, "parents")}, {"values": True}), EVERYTHING),
        (InferRequest(dummy | metrics), critic[Operation.SAVE]),
        (InferRequest(dummy), critic[Operation.STATE]),
    ]


FORM_BODIES: list[tuple[str, Any]] = [
    ("/get_reward", {"query": ["a b", "c d"], "prompts": ["a", "c"], "labels": [None, {"x": [1]}]}),
    ("/get_reward", {"query": "a b", "labels": 3}),
    ("/reward", {"prompt": _CONVERSATION[:1], "response": "4", "label": "4"}),
    ("/reward", {"prompt": "a", "response": "b", "model": "reward_model"}),
    ("/classify", {"input": ["a", "b"], "use_activation": True, "truncate_prompt_tokens": 3, "priority": -1}),
    ("/classify", {"messages": _CONVERSATION}),
    ("/classify", {"text": ["a"], "rid": ["1"]}),
    ("/pooling", {"input": [[1, 2], [3]], "task": "token_classify", "encoding_format": "base64", "endianness": "big"}),
    ("/score", {"text_1": "a", "text_2": ["b", {"content": [{"type": "text", "text": "c"}]}]}),
    ("/v1/score", {"queries": ["a", "b"], "documents": ["b", "c"]}),
    ("/encode", {"input_ids": [[1, 2], [3]], "rid": "x"}),
    ("/v1/embeddings", {"input": [1, 2, 3], "encoding_format": "float"}),
    ("/rerank", {"query": "a", "texts": ["b", "c"], "truncate": True, "raw_scores": False, "return_text": True}),
    ("/v1/rerank", {"query": {"text": "a"}, "documents": ["b", {"content": ["c"]}], "top_n": 1}),
    ("/v2/rerank", {"query": "a", "documents": {"text": "b"}, "return_documents": False}),
    ("/predict", {"inputs": [["a", "b"], ["c"]], "truncate": True, "parameters": {"function_to_apply": "softmax"}}),
    *((path, orjson.loads(body.example)) for path, form in ALL_FORMS.items() for body in form.bodies),
    (
        "/verify",
        {
            "responses_create_params": {"input": [_PARTS], "instructions": "be brief"},
            "response": {"output": [{"type": "reasoning"}, _PARTS | {"role": "assistant"}]},
            "instance_config": {"x": 1},
            "label": ["4"],
        },
    ),
    (
        "/compare",
        {"conversation_history": _CONVERSATION[:1], "response_objs": [{"output": [_PARTS]}] * 2, "principle": "brief"},
    ),
]
"""A valid body or more of each form."""

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, -0.0, 1e308,
    "", "x", "x" * 300, "\0", "é", "🙂", "\u2028", "NaN", "true", "null", "rewards", "errors", "values", "tokens",
    [], [[]], [0], [None], [[1, 2], [3]], ["a", 1], [[["a"]]], {}, {"a": {}}, {"name": "x"}, {"content": "x"},
    {"role": "user"}, "BYTES", "INT64", "FP32", "BF16", "default", "left", "base64", [2**62, 0], [0, 2**61], [-1, 2],
]  # fmt: skip
"""Values to stand where others stood."""

_KEYS = [
    "name", "datatype", "shape", "data", "parameters", "binary_data_size", "binary_data", "inputs", "outputs", "id",
    "model", "query", "prompts", "labels", "prompt", "response", "label", "input", "messages", "text", "input_ids",
    "text_1", "text_2", "truncate", "raw_scores", "rid", "priority", "timeout", "task", "shared_memory_region", "role",
    "content", "truncate_prompt_tokens", "use_activation", "add_special_tokens",
]  # fmt: skip
_PIECES = [orjson.dumps(value) for value in ODD] + [
    b"NaN", b"Infinity", b"-", b"1e999", b"\\ud800", b'"\\ud800"', b'{"a":1,"a":2}', b"\xff\xfe", b"\xed\xa0\x80",
    *(struct.pack("<I", n) for n in (0, 1, 2**31, 2**32 - 1)), *(struct.pack("<q", n) for n in (-1, 2**62, -(2**63))),
]  # fmt: skip

WORDS = [*(f'"{key}"'.encode() for key in _KEYS), *_PIECES]
"""What damaged inputs get, as bytes."""

_RARE = {"@deep": b"[" * 1010 + b"]" * 1010, "@objects": b'{"":' * 1010 + b"0" + b"}" * 1010, "@wide": b'["%s"%s]'}
_RARE["@wide"] %= (b"x" * 2000, b',""' * 2000)
"""What orjson does not write, or what is too large to be chosen often, by the text that stands for it."""


def text(rng: Random, value: Any) -> bytes:
    """The value as JSON, now and then with something rare in it."""
    if rng.random() < 0.1:
        mark = rng.choice(list(_RARE))
        return orjson.dumps(changed(rng, value, mark)).replace(b'"%s"' % mark.encode(), _RARE[mark])
    return orjson.dumps(value)


def all_changed(value: Any, odd: Any) -> Iterator[Any]:
    """The JSON value with each of its nodes once replaced by `odd`."""
    yield odd
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        for inner in all_changed(value[key], odd):
            other = value.copy()
            other[key] = inner
            yield other


def changed(rng: Random, value: Any, odd: Any = ...) -> Any:
    """The JSON value with one node of it another: replaced, by `odd` or any odd one, left out, doubled or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        value = dict(value)
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[rng.choice(_KEYS)] = rng.choice(ODD)
            case 2:
                value[rng.choice(_KEYS)] = value.pop(key)
            case _:
                value[key] = changed(rng, value[key], odd)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        value = list(value)
        i = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                del value[i]
            case 1:
                value.insert(i, value[i])
            case 2:
                value.insert(i, rng.choice(ODD))
            case _:
                value[i] = changed(rng, value[i], odd)
        return value
    return [value] if rng.random() < 0.1 else rng.choice(ODD) if odd is ... else odd


def damaged(rng: Random, data: bytes) -> bytes:
    """The bytes with a few of them others: flipped, cut, doubled, or odd pieces among them."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        i = rng.randrange(len(found) + 1)
        j = min(len(found), i + rng.choice((1, 1, 2, 4, 8, 64)))
        match rng.randrange(7):
            case 0:
                del found[i:j]
            case 1:
                found[i:i] = found[i:j]
            case 2:
                found[i:i] = rng.choice(_PIECES)
            case 3:
                found[i:j] = rng.choice(_PIECES)
            case 4:
                del found[i:]
            case 5:
                found[i:j] = rng.randbytes(j - i)
            case _:
                if i < len(found):
                    found[i] ^= 1 << rng.randrange(8)
    return bytes(found)


@dataclass(frozen=True)
class Input:
    """One input of a kind, and what judges it."""

    kind: str
    try_it: Callable[[], bool]


def inputs(kind: str, rng: Random) -> Input:
    """A valid request of that kind, of `KINDS`, or one that is not quite."""
    return Input(kind, KINDS[kind](rng))


def _some(rng: Random, made: list[Any]) -> Any:
    return made[rng.randrange(len(made))]


def _json_kind(rng: Random) -> Callable[[], bool]:
    value, info = _some(rng, _JSON_SEEDS)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        value = changed(rng, value)
    body = text(rng, value)
    if rng.random() < 0.3:
        body = damaged(rng, body)
    return lambda: binary(body, None, info)


def _binary_kind(rng: Random) -> Callable[[], bool]:
    (body, length), info = _some(rng, _BINARY_SEEDS)
    if rng.random() < 0.5:
        header = text(rng, changed(rng, orjson.loads(body[:length])))
        body, length = header + body[length:], len(header)
    if rng.random() < 0.6:
        body = damaged(rng, body)
    if rng.random() < 0.2:
        length = rng.choice((None, 0, 1, length - 1, length + 1, len(body), len(body) + 1))
    return lambda: binary(body, length, info)


def _protobuf_kind(rng: Random) -> Callable[[], bool]:
    data, info = _some(rng, _GRPC_SEEDS)
    if rng.random() < 0.9:
        data = damaged(rng, data)
    return lambda: grpc(data, info)


def _form_kind(rng: Random) -> Callable[[], bool]:
    path, value = _some(rng, FORM_BODIES)
    if rng.random() < 0.1:
        path = rng.choice(list(FORMS))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        value = changed(rng, value)
    body = text(rng, value)
    if rng.random() < 0.2:
        body = damaged(rng, body)
    query = {} if rng.random() < 0.8 else {rng.choice(("key", "model", "truncate", *_KEYS)): str(rng.choice(ODD))}
    return lambda: form(path, body, query)


def _answer_kind(rng: Random) -> Callable[[], bool]:
    (body, length), _ = _some(rng, _BINARY_SEEDS)
    header = orjson.loads(body[:length])
    written = text(rng, changed(rng, {"outputs": header["inputs"], "model_name": "m", "model_version": "1"}))
    body, length = written + body[length:], len(written)
    if rng.random() < 0.5:
        body = damaged(rng, body)
    return lambda: answer(body, length)


def _source_kind(rng: Random) -> Callable[[], bool]:
    config = orjson.dumps({"parameters": {"model": {"string_value": "org/rm"}}}).decode()
    body = text(rng, changed(rng, {"parameters": rng.choice(({"model": "org/rm"}, {"config": config}))}))
    if rng.random() < 0.3:
        body = damaged(rng, body)
    return lambda: source(body)


def as_json(request: InferRequest) -> Any:
    """The request as a body of JSON alone."""
    entries = [
        {"name": t.name, "shape": t.shape, "datatype": t.datatype, "data": tensors.to_json(t)}
        for t in request.inputs.values()
    ]
    body: dict[str, Any] = {"id": request.id, "parameters": request.parameters, "inputs": entries}
    if request.outputs is not None:
        outputs = request.outputs.items()
        body["outputs"] = [{"name": name, "parameters": {"binary_data": is_binary}} for name, is_binary in outputs]
    return orjson.loads(bodies.write(body))


def _typed(datatype: str) -> str:
    """The protocol's name for contents of that datatype: those of 8 to 32 bits share one."""
    for start, name in (("INT64", "int64"), ("INT", "int"), ("UINT64", "uint64"), ("UINT", "uint")):
        if datatype.startswith(start):
            return name
    return datatype.lower()


def text_of(request: InferRequest) -> bytes:
    """The same, written."""
    return orjson.dumps(as_json(request))


def as_typed(request: InferRequest) -> pb.ModelInferRequest:
    """The request as a message with typed contents."""
    message = kserve_grpc.encode_request(request, "m")
    del message.raw_input_contents[:]
    for entry, tensor in zip(message.inputs, request.inputs.values(), strict=True):
        values = tensor.data if isinstance(tensor.data, list) else tensor.data.ravel().tolist()
        getattr(entry.contents, f"{_typed(tensor.datatype)}_contents").extend(values)
    return message


_JSON_SEEDS = [(as_json(request), info) for request, info in requests()]
_BINARY_SEEDS = [(kserve.encode_request(request), info) for request, info in requests()]
_GRPC_SEEDS = [
    (message.SerializeToString(), info)
    for request, info in requests()
    for message in (kserve_grpc.encode_request(request, "m"), as_typed(request))
]

KINDS: dict[str, Callable[[Random], Callable[[], bool]]] = {
    "json": _json_kind,
    "binary": _binary_kind,
    "protobuf": _protobuf_kind,
    "forms": _form_kind,
    "answers": _answer_kind,
    "repository": _source_kind,
}
"""How inputs of each kind are made: damaged forms of valid ones."""
