"""Log-probs in other servers' JSON: however long the answer is, writing it takes a bounded part of memory."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.teacher_core import TokenLogprobs
from guerdon.wire import bodies
from guerdon.wire.forms import ALL_FORMS
from guerdon.wire.forms.logprob_texts import position_slices
from processes import by_itself
from tiers import slow_but

TOKENS, TOP = 16_384, 100
ROW = [*range(10_000, 10_000 + TOKENS)]
INFO = ModelInfo("teacher", "teacher", outputs=("logprobs",), max_top_k=TOP, vocab_size=152_000)

SGLANG = {"input_ids": ROW, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/v1/completions", {"prompt": ROW, "max_tokens": 0, "prompt_logprobs": TOP}),
    "vllm, echoed": ("/v1/completions", {"prompt": ROW, "max_tokens": 0, "echo": True, "logprobs": TOP}),
    "sglang": ("/generate", SGLANG | {"top_logprobs_num": TOP}),
    "sglang, flat": ("/generate", SGLANG | {"top_logprobs_num": TOP, "return_flat_raw_top_logprobs": True}),
    "sglang, given": ("/generate", SGLANG | {"token_ids_logprob": [*range(TOP)]}),
    "trl, binary": (
        "/get_sequence_logprobs/",
        {"sequences": [ROW], "prompt_lengths": [1], "top_logprobs": TOP, "response_format": "binary"},
    ),
    "trl": ("/get_sequence_logprobs/", {"sequences": [ROW], "prompt_lengths": [1], "top_logprobs": TOP}),
}

ENTRY_BYTES = 4 * 72 + 4 * 8 + 4 * 80
"""Of an id while it is written: four short strings and their references, and its JSON a few times."""

TOKEN_BYTES = 300
"""Of a token that was sent: its text and log-prob, where they are echoed."""


def resident_bytes(which: str) -> int:
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def reply(has_top: bool) -> ScoreReply:
    random = np.random.default_rng(0)

    def table(*shape: int) -> np.ndarray:
        return -random.exponential(9, shape).astype(np.float32)

    n = TOKENS - 1
    said = TokenLogprobs(table(n), ranks=random.integers(1, 152_000, n, np.int32))
    if has_top:
        said.top_ids, said.top_logprobs = random.integers(0, 152_000, (n, TOP), np.int32), table(n, TOP)
    else:
        said.given_logprobs = table(n, TOP)
    return ScoreReply([Score(math.nan, answer=said)], [TOKENS], "1", tokens=[np.array(ROW)])


@pytest.mark.parametrize("asked", slow_but(("trl",), ASKED))
@by_itself
def test_writing_takes_a_bounded_part_of_memory(asked: str) -> None:
    path, body = ASKED[asked]
    request = ALL_FORMS[path].read(bodies.write(body), {})
    assert request.request is not None and request.request.asks is not None
    (query,) = request.request.asks
    answered = reply(has_top=query.top_k > 0)
    before = resident_bytes("VmRSS")
    pieces = bodies.write_in_pieces(request.to_reply(answered, INFO))
    num_bytes = sum(map(len, pieces))
    at_once = next(position_slices(TOKENS)).stop * (TOP + 1)
    assert resident_bytes("VmHWM") - before < at_once * ENTRY_BYTES + TOKENS * TOKEN_BYTES
    # Counted before anything is computed, to refuse what is too large.
    assert num_bytes < query.sized(TOKENS - 1, 0).answer_bytes < 2.1 * num_bytes
