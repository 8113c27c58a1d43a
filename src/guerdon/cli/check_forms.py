"""The forms by which `guerdon check` asks a server: bodies with places for samples, and where a reply has its numbers.

A form is a row of `FORMS`, or a user's file with the same keys; KServe's has tensors, and a class of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import orjson
import yaml

from guerdon.errors import ConfigError, InvalidRequest
from guerdon.wire import kserve, schema
from guerdon.wire.tensors import DTYPES, InferRequest, Tensor, pad_rows

if TYPE_CHECKING:  # every command imports this module; few need the client
    from guerdon.client.calls import ModelSignature

LENGTH_HEADER = "inference-header-content-length"
"""KServe's header with the number of bytes of JSON before binary tensors."""


class TextPair(NamedTuple):
    """A sample in text: a response, and the prompt before it."""

    prompt: str
    response: str


Sample = list[int] | TextPair | None
"""Token ids, or texts; None stands for what is no sample."""
Numbers = list[np.ndarray | None]
"""The numbers of each sample; None if it has none."""


@dataclass(frozen=True)
class AskedForm:
    """A server's protocol: the path, the bodies for each kind of sample, and the place of the numbers in a reply.

    In a body `$ids`, `$texts`, `$lists` (of a text each), `$prompts`, `$responses` and `$ones` are lists with an entry
    a sample; `$row`, `$text` and `$response` are those of the only sample; `$prompt` is of the first, and `$model` the
    model's name. `read` is a path of keys: `[]` goes through the samples, `*` through a list or an object of one
    sample's numbers. `gives` names what a number is: a reward, a log-prob of each token but the first, or the
    probability of a label.
    """

    name: str
    path: str
    read: str
    ids: Any = None
    texts: Any = None
    gives: str = "rewards"

    def takes(self) -> list[str]:
        """Returns the kinds of samples that have a body: ids, texts."""
        return [kind for kind in ("ids", "texts") if getattr(self, kind) is not None]

    @property
    def names_model(self) -> bool:
        """Whether requests name a model."""
        return "$model" in f"{self.path} {self.ids} {self.texts}"

    def takes_one(self, kind: str) -> bool:
        """Whether a request has one sample only."""
        body = repr(getattr(self, kind))
        return not any(f"'${name}'" in body for name in ("ids", "texts", "lists", "responses"))

    def request(self, samples: Sequence[Sample], kind: str, model: str) -> tuple[dict[str, str], bytes]:
        """Returns the headers and the body of a request for the samples, all of one kind."""
        pairs = [(one.prompt, one.response) if isinstance(one, TextPair) else (None, None) for one in samples]
        texts = [None if prompt is None else prompt + str(response) for prompt, response in pairs]
        lists: dict[str, Any] = {
            "ids": samples,
            "texts": texts,
            "prompts": [p for p, _ in pairs],
            "responses": [r for _, r in pairs],
        }
        first = {name: values[0] if values else None for name, values in lists.items()}
        places: dict[str, Any] = {f"${name}": values for name, values in lists.items()}
        places |= {"$row": first["ids"], "$text": first["texts"], "$response": first["responses"]}
        places |= {"$prompt": first["prompts"] or "", "$model": model, "$ones": [1] * len(samples)}
        places["$lists"] = [[text] for text in texts]
        body = _fill(getattr(self, kind), places)
        return {"Content-Type": "application/json"}, orjson.dumps(body)

    def numbers(self, body: bytes, headers: Any) -> Numbers:
        """Returns the numbers in a reply; raises InvalidRequest if it has none where they should be."""
        try:
            reply = orjson.loads(body)
        except orjson.JSONDecodeError as e:
            raise InvalidRequest(f"the reply is no strict JSON ({e})") from None
        before, has_samples, after = self.read.rpartition("[]")
        try:
            found = _at(reply, _keys(before)) if before else reply
            rows = found if has_samples else [found]
            if rows and isinstance(rows[0], dict) and "index" in rows[0]:
                rows = sorted(rows, key=lambda row: row["index"])
            return [None if row is None else np.array(_flat(row, _keys(after)), np.float64) for row in rows]
        except (KeyError, IndexError, TypeError, ValueError):
            raise InvalidRequest(
                f"the reply has no {self.read or 'number'}: {body[:80].decode(errors='replace')}"
            ) from None


def _keys(path: str) -> list[str]:
    return [key for key in path.split(".") if key]


def _fill(template: Any, places: dict[str, Any]) -> Any:
    if isinstance(template, dict):
        return {name: _fill(value, places) for name, value in template.items()}
    if isinstance(template, list):
        return [_fill(value, places) for value in template]
    return places.get(template, template) if isinstance(template, str) else template


def _at(value: Any, keys: list[str]) -> Any:
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def _flat(value: Any, keys: list[str]) -> list[float]:
    """Returns the numbers below a value; null entries, as of a sequence's first token, are left out."""
    if value is None:
        return []
    if keys and keys[0] == "*":
        inner = list(value.values()) if isinstance(value, dict) else value
        if inner and isinstance(inner[0], dict) and "label" in inner[0]:
            inner = sorted(inner, key=lambda entry: str(entry["label"]))
        return [number for entry in inner for number in _flat(entry, keys[1:])]
    if keys:
        return _flat(_at(value, keys[:1]), keys[1:])
    if isinstance(value, list):
        return [number for entry in value for number in _flat(entry, [])]
    return [float(value)]


_INPUT: dict[str, Any] = {"model": "$model", "input": "$ids", "use_activation": False}
_TASK = {"task": "classify"}
_RANKED = {"model": "$model", "query": "$prompt"}
_LABELS: dict[str, Any] = {"query": [160, 161, 162], "items": "$ids", "label_token_ids": [170, 180]}

FORMS = (
    AskedForm("vllm-classify", "/classify", "data.[].probs", _INPUT, _INPUT | {"input": "$texts"}),
    AskedForm("vllm-pooling", "/pooling", "data.[].data", _INPUT | _TASK, _INPUT | _TASK | {"input": "$texts"}),
    AskedForm(
        "vllm-score", "/score", "data.[].score",
        texts={"model": "$model", "text_1": "$prompts", "text_2": "$responses", "use_activation": False},
    ),
    AskedForm(
        "vllm-rerank", "/v1/rerank", "results.[].relevance_score",
        texts=_RANKED | {"documents": "$responses", "use_activation": False},
    ),
    AskedForm(
        "infinity-classify", "/classify", "data.[].*.score", texts=_INPUT | {"input": "$texts", "raw_scores": True}
    ),
    AskedForm(
        "infinity-rerank", "/rerank", "results.[].relevance_score",
        texts=_RANKED | {"documents": "$responses", "raw_scores": True},
    ),
    AskedForm("tei-predict", "/predict", "[].*.score", texts={"inputs": "$lists", "raw_scores": True}),
    AskedForm(
        "tei-rerank", "/rerank", "[].score", texts={"query": "$prompt", "texts": "$responses", "raw_scores": True}
    ),
    AskedForm("sglang-classify", "/classify", "[].embedding", {"input_ids": "$ids"}, {"text": "$texts"}),
    AskedForm("sglang-encode", "/encode", "[].embedding", {"input_ids": "$ids"}, {"text": "$texts"}),
    AskedForm(
        "sglang-embeddings", "/v1/embeddings", "data.[].embedding",
        {"model": "$model", "input": "$ids"}, {"model": "$model", "input": "$texts"},
    ),
    AskedForm("openrlhf", "/get_reward", "rewards.[]", texts={"query": "$texts", "prompts": "$prompts"}),
    AskedForm("llama-factory", "/v1/score/evaluation", "scores.[]", texts={"model": "$model", "messages": "$texts"}),
    AskedForm("slime", "/reward?ending=false", "", texts={"prompt": "$prompt", "response": "$response"}),
    AskedForm(
        "vllm-completions", "/v1/completions", "choices.[].prompt_logprobs.*.*.logprob",
        {"model": "$model", "prompt": "$ids", "max_tokens": 1, "prompt_logprobs": 0}, gives="logprobs",
    ),
    AskedForm(
        "vllm-generate", "/inference/v1/generate", "prompt_logprobs.*.*.logprob",
        {"model": "$model", "token_ids": "$row", "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}},
        gives="logprobs",
    ),
    AskedForm(
        "sglang-generate", "/generate", "[].meta_info.input_token_logprobs.*.0",
        {
            "input_ids": "$ids", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
            "logprob_start_len": 0,
        },
        gives="logprobs",
    ),
    AskedForm(
        "trl-logprobs", "/get_sequence_logprobs/", "logprobs.[].*.-1",
        {"sequences": "$ids", "prompt_lengths": "$ones", "top_logprobs": 1}, gives="logprobs",
    ),
    AskedForm("sglang-score", "/v1/score", "scores.[]", _LABELS | {"apply_softmax": True}, gives="labels"),
    AskedForm("vllm-labels", "/generative_scoring", "data.[].score", {"model": "$model"} | _LABELS, gives="labels"),
)  # fmt: skip
"""Each form; of several that a server answers, KServe's and then the first is tried."""

NAMES = ("kserve", "trlx", *(form.name for form in FORMS))
"""The names of all forms."""


def read_form(path: str) -> AskedForm:
    """Returns the form in a YAML or JSON file; raises ConfigError."""
    help_text = "give name, path, read, and ids or texts, as docs/conformance.md shows"
    try:
        return msgspec.convert(yaml.safe_load(Path(path).read_text(encoding="utf-8")), AskedForm)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as e:
        raise ConfigError(f"{path} is no form: {e}", help_text) from e


@dataclass(frozen=True)
class KServe(AskedForm):
    """KServe's form with binary tensors, for Triton, PyTriton and guerdon; trlX's tensor `input_ids` as well."""

    signature: ModelSignature | None = None
    pad: int = 0

    @classmethod
    def of(cls, signature: ModelSignature, name: str) -> KServe:
        """Returns the form `name` of a model by its metadata."""
        has, path = signature.inputs, "/v2/models/$model/infer"
        tensors = {"kserve": (schema.TOKENS.name, schema.INPUT_IDS.name), "trlx": (schema.INPUT_IDS.name,)}[name]
        ids = next((tensor for tensor in tensors if tensor in has), None)
        gives = schema.LOGPROBS.name if schema.LOGPROBS.name in signature.outputs else schema.REWARDS.name
        texts = schema.SENTENCES.name if name == "kserve" and schema.SENTENCES.name in has else None
        return cls(name, path, "", ids, texts, gives, signature)

    def takes_one(self, kind: str) -> bool:
        """Whether a request has one sample only: rows of `input_ids` have no lengths."""
        return kind == "ids" and self.ids == schema.INPUT_IDS.name

    def request(self, samples: Sequence[Sample], kind: str, model: str) -> tuple[dict[str, str], bytes]:
        """Returns the headers and the body of a request; rows of ids are padded with `pad`."""
        assert self.signature is not None
        types, tensors = self.signature.inputs, []
        if kind == "ids":
            rows = [row if isinstance(row, list) else [] for row in samples]
            table = pad_rows(rows, np.int64, self.pad, max([1, *map(len, rows)]))
            tensors = [Tensor.of(self.ids, table.astype(DTYPES[types[self.ids]]))]
            if (lengths := schema.LENGTHS.name) in types:
                counts = np.array([[len(row)] for row in rows]).reshape(-1, 1)
                tensors.append(Tensor.of(lengths, counts.astype(DTYPES[types[lengths]])))
        else:
            texts: dict[str, Any] = {schema.SENTENCES.name: "".join}
            if self.gives == schema.REWARDS.name:  # a teacher would leave out the log-probs of the prompts
                texts[schema.PROMPTS.name] = lambda pair: pair[0]
            for name in texts.keys() & types.keys():
                cells = [texts[name](one).encode() if isinstance(one, TextPair) else b"\xff\xfe" for one in samples]
                tensors.append(Tensor(name, "BYTES", (len(cells), 1), cells))
        outputs = {name: True for name in (self.gives, schema.LOGPROB_COUNTS.name) if name in self.signature.outputs}
        body, length = kserve.encode_request(InferRequest({tensor.name: tensor for tensor in tensors}, outputs))
        return {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(length)}, body

    def numbers(self, body: bytes, headers: Any) -> Numbers:
        """Returns the numbers in a reply; raises InvalidRequest."""
        length = headers.get(LENGTH_HEADER)
        reply = kserve.decode_reply(body, None if length is None else int(length))
        found = {tensor.name: np.asarray(tensor.data) for tensor in reply.outputs if tensor.name != "errors"}
        if self.gives not in found:
            raise InvalidRequest(f"the reply has no tensor {self.gives}, but {', '.join(found) or 'none'}")
        rows = found[self.gives].astype(np.float64)
        if (counts := found.get(schema.LOGPROB_COUNTS.name)) is not None:
            return [row[:count] for row, count in zip(rows, np.ravel(counts).tolist(), strict=True)]
        return [np.ravel(row) for row in rows]
