"""Keys that no field takes, for every body: misspelt ones are refused, others ignored with a line in the log."""

import json
import logging

import msgspec
import orjson
import pytest

from guerdon.errors import InvalidRequest
from guerdon.wire import kserve, long_json, unknown_keys
from guerdon.wire.forms import sglang_logprobs, vllm_control, vllm_logprobs
from guerdon.wire.forms.form import Keys


def every(kind: type[Keys]) -> list[type[Keys]]:
    below = [one for child in kind.__subclasses__() for one in every(child)]
    return [kind, *below] if kind.example != "{}" and not below else below


BODIES = [*every(Keys), kserve.RequestBody, vllm_control.UpdateBody]
EVERY = pytest.mark.parametrize(
    "kind", BODIES, ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
)


def example(kind: type[msgspec.Struct]) -> dict[str, object]:
    found: dict[str, object] = {"inputs": []} if kind is kserve.RequestBody else json.loads(kind.example)
    return found


@EVERY
def test_a_misspelt_key_is_refused_with_the_one_that_was_meant(kind):
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    long_enough = [name for name in names if len(name) >= 7]
    for name in long_enough:
        misspelt = name[:3] + name[4:]
        with pytest.raises(InvalidRequest, match=rf"has the unknown key '{misspelt}'; did you mean {name}\?$"):
            unknown_keys.read(orjson.dumps(example(kind) | {misspelt: None}), kind)


@EVERY
def test_other_keys_are_ignored_and_said_once(kind, caplog, monkeypatch):
    monkeypatch.setattr(unknown_keys, "_said", set())
    plain = unknown_keys.read(orjson.dumps(example(kind)), kind)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            made = unknown_keys.read(orjson.dumps(example(kind) | {"a_stranger": [1]}), kind)
            assert isinstance(made, kind) and msgspec.to_builtins(made) == msgspec.to_builtins(plain)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "the body of a request has the unknown key 'a_stranger', which is ignored"


@pytest.mark.parametrize("long", [0, 4 * long_json.PIECE])
@pytest.mark.parametrize(
    ("kind", "body", "where"),
    [
        (
            sglang_logprobs.SGLangGenerateBody,
            {"text": "a", "sampling_params": [{}, {"logprobs_temprature": 2}]},
            r"sampling_params\[1\] has the unknown key 'logprobs_temprature'; did you mean logprobs_temperature",
        ),
        (
            vllm_logprobs.GenerateBody,
            {"token_ids": [5], "sampling_params": {"promt_logprobs": 1}},
            "sampling_params has the unknown key 'promt_logprobs'; did you mean prompt_logprobs",
        ),
        (
            kserve.RequestBody,
            {"inputs": [], "parameter": {"temperature": 2}},
            "the body has the unknown key 'parameter'; did you mean parameters",
        ),
        (
            kserve.RequestBody,
            {"inputs": [], "outputs": [{"name": "a", "paramters": {"binary_data": True}}]},
            r"outputs\[0\] has the unknown key 'paramters'; did you mean parameters",
        ),
    ],
)
def test_misspelt_keys_are_found_at_any_depth_and_length(long, kind, body, where):
    with pytest.raises(InvalidRequest, match=where):
        unknown_keys.read(orjson.dumps({"first": [7] * long} | body | {"last": "x" * long}), kind)


def test_what_else_is_wrong_comes_first():
    with pytest.raises(InvalidRequest, match="the body has no 'prompt'"):
        unknown_keys.read(b'{"promt": "a", "max_token": 1}', vllm_logprobs.CompletionsBody)


def test_strangers_cost_neither_time_nor_log(caplog, monkeypatch):
    monkeypatch.setattr(unknown_keys, "_said", set())
    strangers = {f"stranger {i:06}": 0 for i in range(20_000)}
    with caplog.at_level(logging.WARNING):
        unknown_keys.read(orjson.dumps({"prompt": "a"} | strangers), vllm_logprobs.CompletionsBody)
    assert len(caplog.records) == 100


def test_a_newer_servers_reply_may_have_more(caplog):
    with caplog.at_level(logging.WARNING):
        reply = kserve.decode_reply(b'{"outputs": [], "parameter": 1, "a_stranger": 2}', None)
    assert reply.outputs == [] and not caplog.records
