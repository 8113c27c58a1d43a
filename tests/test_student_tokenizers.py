"""Teachers of students with another tokenizer: the same characters have the log-probs of plain transformers."""

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer

import other_tokenizers
import zoo
from guerdon import LocalTeacher, TeacherClient
from guerdon.errors import CheckpointError, ConfigError, InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import TeacherConfig
from served import Serve
from teaching import plain
from tiers import slow_but

PAIRS = [
    ("bytes-small", "bytes-large"), ("bytes-large", "bytes-digits"), ("bytes-digits", "pieces"),
    ("pieces", "bytes-large"), ("pieces-large", "pieces"), ("pieces", "unigram"), ("unigram", "bytes-small"),
    ("words", "bytes-digits"), ("bytes-large", "words"), ("unigram", "pieces-large"), ("bytes-small", "unigram"),
]  # fmt: skip
LOSSLESS = {"bytes-small", "bytes-large", "bytes-digits", "pieces", "pieces-large"}
PROMPT = "the other thing is"
TEXTS = [
    " the other thing is singing",
    " def add(x, y):\n    return x + y  # 12345\n\n\n",
    " 日本語のテキスト、这是测试",
    " 😀👩‍👩‍👧 naïve e\u0301te\u0301 Straße",
    "  two  blanks, \t tabs   and an end ",
    " привет, мир! 'never again'; x1y2z3",
    " ',,,\u200b\u00a0½²Ⅷ",
]
SEAMS = [("the: ", "日本語"), ("the:", "é a"), ("x", "😀ж"), ("日", "本語 é")]
"""Prompts and responses; characters of several tokens stand where they meet, or one token lies over it."""
NEAR = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model for each kind of tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for seed, kind in enumerate(other_tokenizers.KINDS):
        size = other_tokenizers.save(kind, folder / kind)
        zoo.language_model("llama", folder / kind, seed=seed, vocab_size=size)
    return folder


def student_row(tokenizer: Any, text: str, prompt: str = PROMPT) -> tuple[list[int], int]:
    """The ids of prompt and response, and how many are the prompt's."""
    before = tokenizer.encode(prompt, add_special_tokens=False)
    return [*before, *tokenizer.encode(text, add_special_tokens=False)], len(before)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text without what the student's vocabulary lacks."""
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text.replace(" <unk>" if "words" in tokenizer.name_or_path else "<unk>", "")


def spelled(tokenizer: Any, ids: list[int]) -> list[bytes]:
    """The bytes of each token, by the names of a lossless tokenizer's tokens."""
    names = tokenizer.convert_ids_to_tokens(ids)
    if "bytes" in tokenizer.name_or_path:
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the others are written as 256, 257 and so on
        order = [*shown, *(byte for byte in range(256) if byte not in shown)]
        byte_of = dict(zip(map(chr, [*shown, *range(256, 512)]), order, strict=False))
        return [bytes(byte_of[char] for char in name) for name in names]
    found = [bytes([int(n[3:5], 16)]) if n.startswith("<0x") else n.replace("▁", " ").encode() for n in names]
    return [found[0].removeprefix(b" "), *found[1:]]


def ends(tokenizer: Any, ids: list[int], text: str | None = None) -> list[int]:
    """Where each token ends, in bytes of the text: of a lossy tokenizer by decoding every prefix, or of a given text by
    the tokenizer's own offsets."""
    if tokenizer.name_or_path.rpartition("/")[2] in LOSSLESS:
        return np.cumsum([len(token) for token in spelled(tokenizer, ids)]).tolist()
    if text is None:
        return [len(decoded(tokenizer, ids[:i]).encode()) for i in range(1, len(ids) + 1)]
    fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    fast.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    found = fast.encode(text, add_special_tokens=False)
    assert found.ids == ids
    starts = [*(start for start, _ in found.offsets[1:]), len(text)]
    # Of several tokens of the same characters the last one ends there.
    at = [end if end <= after else start for (start, end), after in zip(found.offsets, starts, strict=True)]
    return [len(text[:end].encode()) for end in at]


@pytest.mark.parametrize(("student", "teacher"), slow_but({"bytes-digits"}, PAIRS))
def test_chunks_are_the_smallest_and_have_the_teachers_own_logprobs(student: str, teacher: str, folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(folder / student)
    other = AutoTokenizer.from_pretrained(folder / teacher)
    rows = [*(student_row(own, text) for text in TEXTS), *(student_row(own, text, prompt) for prompt, text in SEAMS)]
    with LocalTeacher(folder / teacher, student_tokenizer=str(folder / student)) as local:
        answers = local.logprobs(tokens=[row for row, _ in rows], prompt_lengths=[n for _, n in rows])
    assert answers.errors == [None] * len(rows) and answers.chunks is not None
    num_aligned = num_tokens = 0
    for (row, length), logprobs, chunks in zip(rows, answers.logprobs, answers.chunks, strict=True):
        text = decoded(own, row)
        ids = other.encode(text, add_special_tokens=False)
        own_ends, other_ends = ends(own, row), ends(other, ids, text)
        assert own_ends[-1] == len(text.encode()) and (teacher not in LOSSLESS or other_ends[-1] == own_ends[-1])
        start = own_ends[length - 1]
        (logits,) = plain(folder / teacher, [np.array(ids)])
        table = torch.log_softmax(logits, -1).numpy()
        by_token = [0.0, *table[np.arange(len(ids) - 1), ids[1:]].astype(np.float64).tolist()]
        assert len(chunks) == len(logprobs) == len(row) - length
        assert np.isnan(logprobs).tolist() == (chunks == -1).tolist()
        whole = {*itertools.accumulate((len(char.encode()) for char in text), initial=0)}
        cuts = sorted(end for end in {*own_ends} & {*other_ends} & whole if end >= start)
        spans = {*itertools.pairwise(cuts)}
        seen = []
        for chunk in np.unique(chunks[chunks >= 0]).tolist():
            members = np.flatnonzero(chunks == chunk)
            first, last = int(members[0]), int(members[-1])
            assert {*chunks[first : last + 1].tolist()} <= {chunk, -1}
            span = (own_ends[length + first - 1], own_ends[length + last])
            # The reference: what transformers gives to the teacher's own tokens of these characters.
            begun, stop = (next(i for i, end in enumerate(other_ends) if end >= edge) + 1 for edge in span)
            assert other_ends[begun - 1] == span[0] and other_ends[stop - 1] == span[1], (span, text)
            expected = sum(by_token[begun:stop])
            assert abs(float(logprobs[members].astype(np.float64).sum()) - expected) < NEAR * max(1, stop - begun)
            assert np.ptp(logprobs[members]) == 0
            seen.append(span)
        assert {span for span in seen if span[0] < span[1]} <= spans and len({*seen}) == len(seen)
        if teacher in LOSSLESS:
            assert {*seen} == spans
        num_aligned += int((chunks >= 0).sum())
        # All may be aligned but those of a token of the teacher's that begins in the prompt.
        num_tokens += sum(end > cuts[0] for end in own_ends[length:])
    assert num_aligned == num_tokens if {student, teacher} <= LOSSLESS else num_aligned > 0.3 * num_tokens


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    models: list[Any] = [
        TeacherConfig(model=str(folder / "bytes-large"), student_tokenizer=str(folder / "pieces")),
        TeacherConfig(model=str(folder / "bytes-large"), name="plain"),
    ]
    return serve(*models, grpc_port=0)


def test_the_response_is_scored_in_the_teachers_own_template(server: RunningServer, folder: Path) -> None:
    """With the end of an answer, which both write in their own way; over HTTP and gRPC."""
    own, other = (AutoTokenizer.from_pretrained(folder / kind) for kind in ("pieces", "bytes-large"))
    row, length = student_row(own, "the thing")
    row.append(own.eos_token_id)
    chat = [{"role": "user", "content": "日本語?"}]
    before = other.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    text = own.decode(row[:-1])[len(own.decode(row[:length])) :]
    ids = [*before, *other.encode(text, add_special_tokens=False), other.eos_token_id]
    (logits,) = plain(folder / "bytes-large", [np.array(ids)])
    table = torch.log_softmax(logits, -1).numpy()
    expected = table[np.arange(len(before) - 1, len(ids) - 1), ids[len(before) :]]
    for url in (server.http_url, server.grpc_url):
        with TeacherClient(str(url)) as client:
            for prompt in (chat, before):
                answers = client.logprobs(tokens=[row], prompt_lengths=[length], teacher_prompts=[prompt])
                assert (answers.chunks[0] >= 0).all()
                assert float(answers.logprobs[0].sum()) == pytest.approx(float(expected.sum()), abs=NEAR * len(ids))
                assert float(answers.logprobs[0][-1]) == pytest.approx(float(expected[-1]), abs=NEAR)
    asked = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    body = {"input_ids": row, **asked, "teacher_prompts": [chat], "prompt_lengths": [length]}
    reply = httpx.post(f"{server.http_url}/generate", json=body)
    entries = reply.json()["meta_info"]["input_token_logprobs"][1:]
    assert [token for _, token, _ in entries] == row[length:]
    np.testing.assert_allclose([value for value, _, _ in entries], answers.logprobs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("teacher", ["bytes-large", "pieces-large", "unigram"])
@pytest.mark.parametrize("text", ["the thing is", " the thing", "4\r\nfour", "ж✓ the"])
def test_a_prompt_of_ids_puts_no_blank_before_the_response(teacher: str, text: str, folder: Path) -> None:
    """Tokenizers as of sentencepiece write one before a text by itself; within a text they do not."""
    own, other = (AutoTokenizer.from_pretrained(folder / kind) for kind in ("bytes-small", teacher))
    before = other.encode("the other room\n", add_special_tokens=False)
    ids = other.encode("the other room\n" + text, add_special_tokens=False)
    assert ids[: len(before)] == before
    (logits,) = plain(folder / teacher, [np.array(ids)])
    table = torch.log_softmax(logits, -1)[np.arange(len(ids) - 1), ids[1:]][len(before) - 1 :]
    known = [
        float(value) for value, token in zip(table, ids[len(before) :], strict=True) if token != other.unk_token_id
    ]
    row = own.encode(text, add_special_tokens=False)
    with LocalTeacher(folder / teacher, student_tokenizer=str(folder / "bytes-small")) as local:
        rows, lengths, prompts = [row, row], [0, 0], [before, [*before, 10**12]]
        answers = local.logprobs(tokens=rows, prompt_lengths=lengths, teacher_prompts=prompts, token_ids=True)
    assert answers.errors[0] is None and "outside the vocabulary" in answers.errors[1]
    assert float(np.nansum(answers.logprobs[0])) == pytest.approx(sum(known), abs=NEAR * len(ids))
    assert answers.tokens[0].tolist() == row


def test_what_cannot_be_aligned_is_marked(server: RunningServer, folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(folder / "pieces")
    row, length = student_row(own, "the ")
    byte = [own.convert_tokens_to_ids(f"<0x{value:02X}>") for value in "é😀".encode()]
    rows = [
        [*row, *byte[:1]],  # cut off within a character
        [*row, byte[0], *own.encode("thing", add_special_tokens=False)],
        [
            *row,
            own.convert_tokens_to_ids("<turn>"),
            *own.encode("thing", add_special_tokens=False),
        ],  # no character
        [*row, *byte],
        [*row, byte[0], own.convert_tokens_to_ids("<turn>"), *own.encode("thing", add_special_tokens=False)],
        [*row, *byte],
    ]
    with TeacherClient(server.http_url) as client:
        answers = client.logprobs(tokens=rows, prompt_lengths=[*[length] * 5, len(row) + 1])
        cut, broken, special, whole, lost, within = answers.chunks
        assert cut[-1] == -1 and broken[len(row) - length] == -1 and broken[-1] >= 0
        assert special[len(row) - length] == -1 and (special >= 0).sum() == len(special) - 1
        assert (whole >= 0).all()
        assert (lost[len(row) - length :][:2] == -1).all() and lost[-1] >= 0
        assert within[0] == -1 and (within[1:] >= 0).all()  # the prompt has a character's first byte
        # The characters before and after have the log-probs that they have without.
        plain_rows = client.logprobs(tokens=[row], prompt_lengths=[length])
        n = (cut >= 0).sum()
        assert n >= len(row) - length - 1
        np.testing.assert_allclose(answers.logprobs[0][: n - 1], plain_rows.logprobs[0][: n - 1], rtol=0, atol=1e-6)
        alone = client.logprobs(tokens=[own.encode("the thing", add_special_tokens=False)])
        assert alone.errors == [None]


def test_what_a_student_of_another_tokenizer_cannot_have_is_refused(server: RunningServer, folder: Path) -> None:
    own = AutoTokenizer.from_pretrained(folder / "pieces")
    with TeacherClient(server.http_url) as client:
        for ask in (lambda: client.top(2, tokens=[[300, 301]]), lambda: client.logprobs(tokens=[[300]], entropy=True)):
            with pytest.raises(InvalidRequest, match="another tokenizer's ids, and gives their log-probs alone: leave"):
                ask()
        answers = client.logprobs(tokens=[[300, 99999], [300, 301]])
        assert "outside the student's tokenizer" in answers.errors[0] and answers.errors[1] is None
        assert client.logprobs(texts=["the thing"]).errors == [None]  # as any teacher
        for mixture in ({"plain": 1, "teacher": 1}, {"teacher": 1, "plain": 1}):
            with pytest.raises(InvalidRequest, match="cannot be mixed"):
                client.logprobs(tokens=[[300, 301]], teachers=mixture)
        assert client.logprobs(tokens=[[300, 301]] * 2, teachers=["plain", "teacher"]).errors == [None] * 2
        names = client.config()["parameters"]
    assert json.loads(names["tokenizer"]["string_value"])["tokens"]
    reply = httpx.post(f"{server.http_url}/tokenize", json={"model": "teacher", "prompt": "the thing"})
    assert reply.json()["tokens"] == own.encode("the thing", add_special_tokens=False)


def test_a_tokenizer_that_cannot_be_read_is_one_clear_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    zoo.language_model("llama", tmp_path / "bare")
    for student, error in (("empty", ConfigError), ("absent", ConfigError), ("broken", CheckpointError)):
        with pytest.raises(error, match=student):
            LocalTeacher(folder / "pieces", student_tokenizer=str(tmp_path / student))
    with pytest.raises(ConfigError, match=r"no tokenizer in .*bare"):
        LocalTeacher(tmp_path / "bare", student_tokenizer=str(folder / "pieces"))


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_with_another_tokenizer(folder: Path) -> None:
    """REINFORCE with the log-ratio of each chunk as the reward of its tokens: the reverse KL to the teacher falls.

    The teacher's head is scaled, so that it is sure of something.
    """
    torch.manual_seed(0)
    sharp = AutoModelForCausalLM.from_pretrained(folder / "bytes-small", dtype=torch.float32)
    sharp.lm_head.weight.data *= 6
    sharp.save_pretrained(folder / "sharp")
    AutoTokenizer.from_pretrained(folder / "bytes-small").save_pretrained(folder / "sharp")
    tokenizer = AutoTokenizer.from_pretrained(folder / "bytes-large")
    policy = AutoModelForCausalLM.from_pretrained(folder / "bytes-large", dtype=torch.float32)
    optimiser = torch.optim.Adam(policy.parameters(), lr=3e-3)
    prompt = torch.tensor([tokenizer.encode(PROMPT, add_special_tokens=False)] * 64)
    size = prompt.shape[1]
    divergences = []
    with LocalTeacher(folder / "sharp", student_tokenizer=str(folder / "bytes-large")) as local:
        for _ in range(40):
            with torch.no_grad():
                rows = policy.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0,
                                       max_new_tokens=8, min_new_tokens=8)  # fmt: skip
            own = torch.log_softmax(policy(rows).logits[:, size - 1 : -1], -1).gather(2, rows[:, size:, None])[..., 0]
            answers = local.logprobs(tokens=rows.numpy(), prompt_lengths=[size] * len(rows))
            reward = np.zeros(own.shape, np.float32)
            for i, (logprobs, chunks) in enumerate(zip(answers.logprobs, answers.chunks, strict=True)):
                for chunk in np.unique(chunks[chunks >= 0]):
                    members = chunks == chunk
                    reward[i, members] = logprobs[members].sum() - own[i].detach().numpy()[members].sum()
            known = np.array([chunks >= 0 for chunks in answers.chunks])
            divergences.append(-reward[known].mean())
            advantage = torch.from_numpy(np.where(known, reward - reward[known].mean(), 0))
            optimiser.zero_grad()
            (-(advantage * own).mean()).backward()
            optimiser.step()
    assert np.mean(divergences[-5:]) < 0.8 * np.mean(divergences[:5]), divergences
