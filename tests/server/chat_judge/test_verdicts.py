"""A judge's verdict is all of what the answer says, of the answer and not of its thinking, or there is an error."""

import asyncio
import gzip
import json
import re
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from guerdon.errors import SampleFailed
from guerdon.server.chat_judge.answer_cache import Flight
from guerdon.server.chat_judge.calling import MOST_BYTES, ChatCaller
from guerdon.server.chat_judge.parsing import AnswerParser, NoObject, ObjectFinder, Unreadable
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.thinking import answer_of
from guerdon.wire.chat_completions import ChatAnswer, read_answer
from processes import by_itself
from stand_in import Handler, serving_http

TEN = {"regex": r"Score: (\d+)", "highest": 10}
BARE = {"regex": r"(\d+)"}
JSON = {"json": "score"}
LONG = "All of it is right. " * 850
"""More than 16,384 characters."""


def read(text: str, **parse: Any) -> float:
    return AnswerParser(ParseConfig(**parse)).read(ChatAnswer(text, "stop"))


def refusal(text: str, **parse: Any) -> str:
    """Why the answer is not read."""
    with pytest.raises(Unreadable) as caught:
        read(text, **parse)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- numbers, words

WHOLE = [
    "7", "7.", "7.\n", "7. All is right", "7!", "7)", "7]", '7"', "7**", "7*", "7</score>", "7...", "7…", "7, because",
    "7; two errors", "7 points", "7 (of what was asked)", "7\n1. It is short", "7\n- 1 error", "7 — good", "7 - good",
    "7 of the claims", "7分", "7 12 words", "7/10", "7 / 10", "7/10.", "7 out of 10", "7 of 10", "7 out of 10.",
    "7**/10", "7 (out of 10)", "7) / 10",
]  # fmt: skip
LONGER = [
    "7.5", "7,5", "7.0", "7٫5", "7 .5", "7\n.5", "7..9", "7…9", "7:30", "7'000", "7_000", "7 000", "7\u202f000",
    "7,000", "7e1", "7E1", "7e-1", "7k", "7th", "7x", "7%", "7 %", "70%", "7 percent", "7/5", "7/100", "7 / 5",
    "7/10.5", "7/10/2026", "7 out of 5", "7 of 12", "7**/5", "7 (out of 5)",
    "7-8", "7–8", "7 - 8", "7~8", "7 to 8", "7 or 8", "7+1",
    "7 + 1", "7 ± 1", "7×10", "7*10", "7**2", "7^2", "7½", "7²", "7万", "7 1/2", "7 and a half", "7 point five",
    "7 hundred", "7 million", "7٧",
]  # fmt: skip


@pytest.mark.parametrize("score", WHOLE)
def test_a_whole_number_is_read(score: str) -> None:
    assert read(f"Well done. Score: {score}", **TEN) == 7


@pytest.mark.parametrize("score", LONGER)
def test_a_number_that_goes_on_is_never_read_in_part(score: str) -> None:
    """Also if an answer has a whole one before."""
    why = refusal(f"Perhaps a Score: 3. No, Score: {score}", **TEN)
    assert "is a part of more" in why or "is no number" in why, why


@pytest.mark.parametrize(
    "text",
    ["-7", "−7", " -7", "Score:-7", ".5", "7.5", "7,5", "1e1", "1e-1", "6-7", "6 - 7", "3+7", "½7", "x_7", "1 000",
     "1'000", "2**7", "7/10", "7 out of 10", "7 of 10", "6 or 7", "6 to 7", "12:07", "<7", "≥ 7"],
)  # fmt: skip
def test_a_number_that_has_begun_before_is_never_read_in_part(text: str) -> None:
    assert "is a part of more" in refusal(text, **BARE)
    assert "is a part of more" in refusal(f"All right: {text}.", **BARE)


@pytest.mark.parametrize(
    "text", ["7", "#7", "(7)", "$7", "Score-7", "No.7", "Score...7", "=7", "+7", "<b>7</b>", "*7*", "Q: 7"]
)
def test_a_number_may_stand_behind_signs(text: str) -> None:
    assert read(text, **BARE) == 7


@pytest.mark.parametrize(
    "text",
    ["7 ½", "7½", "7 and 1/2", "7 and half", "7 half", "7 & a half", "7&frac12;", "7 thirds", "7 dot 5", "7\\.5",
     "7**.5**", "7\u20095", "7 out of five", "7 stars of 5", "7 on a scale of 1 to 5", "7 : 10", "7|10", "7 through 8",
     "7 → 8", "7 -> 5", "7 minus 2", "7 plus 1", "7 times 2", "7 divided by 10", "7 x 1", "7 e1", "7 +/- 1", "7 or 8"],
)  # fmt: skip
def test_a_number_that_goes_on_in_words_is_never_read_in_part(text: str) -> None:
    assert "is a part of more" in refusal(f"Score: {text}", **TEN)


@pytest.mark.parametrize(
    "text",
    ["7", "7.", "7, because 2 of 3 hold", "7/10", "7 out of 10", "7 of 10 points", "7\n8", "7 and it is good",
     "7 (good)", "7\n\n2 points were lost", "7**", "7 - good", "7 | fine", "7; 2 errors", "7 points"],
)  # fmt: skip
def test_words_may_stand_behind_a_number(text: str) -> None:
    assert read(f"Score: {text}", **TEN) == 7


@pytest.mark.parametrize(
    "text", ["isn't good", "no good", "hardly good", "never good", "not very good", "neither good", "not a bad answer"]
)
def test_a_word_that_is_denied_is_no_verdict(text: str) -> None:
    assert "is a part of more" in refusal(text, regex="(good|bad)", values={"good": 1.0, "bad": 0.0})


@pytest.mark.parametrize(
    "text",
    ['[1,{"score":1}]', '{"score":1}\n[1,2,{"score":9}]', '{"score":1}\n[["x",{"score":9}]]',
     '{"score":1} {"scor\\u0065":9, bad}'],
)  # fmt: skip
def test_a_verdict_in_a_list_or_behind_an_escape_hides_those_before(text: str) -> None:
    with pytest.raises(NoObject, match="in malformed JSON, in an inner object, or in a list"):
        ObjectFinder("score").value(text)


@pytest.mark.parametrize("text", ['see [1] and {"score": 4}', '[note] {"score": 4}', '["a", 2] {"score": 4} [3]'])
def test_brackets_of_the_text_hide_nothing(text: str) -> None:
    assert ObjectFinder("score").value(text) == 4


def test_a_sign_between_numbers_is_no_minus() -> None:
    signed = {"regex": r"(-?\d+)"}
    assert [read(text, **signed) for text in ("-7", "Score: -7")] == [-7, -7]
    assert all("is a part of more" in refusal(text, **signed) for text in ("4-7", "4 -7", "1e-7", "Score-7"))


def test_a_scale_is_read_only_if_it_is_the_settings() -> None:
    percent = {"regex": r"^(\d+)", "highest": 100}
    assert [read(text, **percent) for text in ("70%", "70 %", "70/100", "70")] == [70] * 4
    assert all("is a part of more" in refusal(text, **percent) for text in ("7/10", "70‰"))
    assert "is a part of more" in refusal("Score: 7/10", regex=r"Score: (\d+)")


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"Verdict: (good|bad)", "Verdict: badly argued"),
        (r"Verdict: (\w+)", "Verdict: good-ish"),
        (r"Verdict: (\w+)", "Verdict: good/bad"),
        (r"(good|bad)", "Verdict: good/bad"),
        (r"(good|bad)", "It is not good."),
        (r"(good|bad)", "ungood"),
    ],
)
def test_a_word_is_whole(regex: str, text: str) -> None:
    values = {"good": 1.0, "bad": 0.0}
    assert "is a part of more" in refusal(text, regex=regex, values=values)
    for said in ("good", "good.", "**good**", "_good_", '"good"', "Good, I would say"):
        assert read(f"Verdict: {said}", regex=r"(?i)(good|bad)", values=values) == 1


@pytest.mark.parametrize(
    "behind",
    [", but bad", "\nbut bad", " but really bad", "; however, bad", " - no, bad", ". No, bad.", ". Wait, it is bad",
     " (or bad)", "**, but **bad**", "... actually bad", ", although the end is bad", ". Correction: bad",
     ", make that bad", ". On second thought, it is bad."],
)  # fmt: skip
def test_a_word_that_is_taken_back_is_no_verdict(behind: str) -> None:
    values = {"good": 1.0, "bad": 0.0}
    for regex in (r"Verdict: \**(\w+)", r"Verdict: \**(good|bad)"):
        why = refusal(f"Verdict: good{behind}", regex=regex, values=values)
        assert "is taken back" in why or "is a part of more" in why, why


OPEN = ["?", " (?)", "? No, bad.", " if X, bad otherwise", " unless X", ", provided X", " would be too kind", "~~ bad"]


@pytest.mark.parametrize(
    "behind",
    [*OPEN, " | bad", ", bad", "; bad.", " / bad", "|bad", "** | **bad**", " → bad", " => bad in the end", " -> bad",
     " vs. bad", " and bad", " and bad in parts", " - bad", " (bad)", ", bad otherwise", " — just kidding, it is bad"],
)  # fmt: skip
def test_a_word_that_is_left_open_or_leads_to_another_is_no_verdict(behind: str) -> None:
    for answer in (f"Verdict: good{behind}", f'{{"score": "good"}}{behind}'):
        parse = JSON if answer[0] == "{" else {"regex": r"Verdict: (\w+)"}
        why = refusal(answer, values={"good": 1.0, "bad": 0.0}, **parse)
        assert "is taken back" in why or "is questioned" in why, why


@pytest.mark.parametrize(
    "behind",
    [". The bad parts are few.", ", bad formatting aside", " (not bad)", " and not bad", " - no bad parts", ", fine",
     "\nBad: nothing", "\nIf you want more, ask.", "; bad would be too harsh", ". Would be better with tests."],
)  # fmt: skip
def test_another_word_may_stand_in_the_explanation(behind: str) -> None:
    values = {"good": 1.0, "bad": 0.0, "fine": 1.0}
    assert read(f"Verdict: good{behind}", regex=r"Verdict: (\w+)", values=values) == 1


def test_a_single_letter_is_no_article() -> None:
    letters = {"regex": r"Better: ([AB])", "values": {"A": 1.0, "B": 0.0}}
    for behind in (", but a bit long", " and a half", ", A is too long"):
        assert read(f"Better: B{behind}", **letters) == 0
    for behind in (", but A is close", " > A", ", A"):
        assert "is taken back" in refusal(f"Better: B{behind}", **letters)


@pytest.mark.parametrize(
    "behind",
    ["", ", but long", ". But the style is bad.", ". No bad words.", ". The other one is bad", ", though unbad",
     ", because nothing is bad", ", but badly typeset", " and clear", ". No errors.", ". Actually helpful."],
)  # fmt: skip
def test_words_may_stand_behind_a_word(behind: str) -> None:
    assert read(f"Verdict: good{behind}", regex=r"Verdict: (\w+)", values={"good": 1.0, "bad": 0.0}) == 1


@pytest.mark.parametrize(
    "behind",
    [", but really 3", ", no, 5", ". Wait, 5.", "; rather 5/10", " - actually, I would say 5", ", or 5",
     ". Correction: 5", ". Make that 5!", " but 5 out of 10", ", though 6 of 10"],
)  # fmt: skip
def test_a_number_that_is_taken_back_is_no_verdict(behind: str) -> None:
    why = refusal(f"Score: 7{behind}", **TEN)
    assert "is taken back" in why or "is a part of more" in why, why


@pytest.mark.parametrize(
    "behind",
    [", but 2 errors remain", ". No, 2 sources are missing", ", though it has 3 parts that are wrong", ", but long"],
)
def test_what_is_counted_is_no_other_verdict(behind: str) -> None:
    assert read(f"Score: 7{behind}", **TEN) == 7


@pytest.mark.parametrize(
    "behind",
    [*OPEN, "? Hmm, no: 3", "/10?", "/10, but really 3", "/10. No, 5/10.", "/10 (just kidding, 2/10)", ", 5.", "; 5",
     " (5)", " if correct, else 2", ". On reflection, 5.", " (revised: 3)", "\nFinal score: 5", "\n**Final**: 5",
     " is too high, so 4."],
)  # fmt: skip
def test_a_number_that_is_left_open_or_leads_to_another_is_no_verdict(behind: str) -> None:
    why = refusal(f"Score: 7{behind}", **TEN)
    assert "is taken back" in why or "is questioned" in why, why


@pytest.mark.parametrize(
    "scale",
    [" stars out of {}", " (max {})", ", maximum: {}.", " (scale 1-{})", " (on a {}-point scale)", " from {}",
     " on a scale of 1 to {}", " out of a maximum of {}", " points (of {})", " / {}"],
)  # fmt: skip
def test_a_scale_beside_a_number_is_the_settings_or_there_is_no_verdict(scale: str) -> None:
    assert read(f"Score: 3{scale.format(10)}", **TEN) == 3
    assert "is a part of more" in refusal(f"Score: 3{scale.format(5)}", **TEN)
    assert "is a part of more" in refusal(f"Score: 3{scale.format(10)}", regex=TEN["regex"])


@pytest.mark.parametrize(
    "behind",
    [" because of 2 errors", ", 2-3 errors", "; 2/3 of the facts", " (1) clear (2) short", " (5 for content)",
     " (was 3)", "\nIf it had tests, 9.", ". It would be 9 with tests.", "\nFinal answer: 42", " - because of 3 bugs"],
)  # fmt: skip
def test_numbers_may_stand_in_the_explanation(behind: str) -> None:
    assert read(f"Score: 7{behind}", **TEN) == 7


@pytest.mark.parametrize(
    "behind", ["+", "+/10", "-ish", "\u200b0", " less 2", " then 5", " minus two", ", minus 2: 5", " => 5"]
)
def test_a_number_that_is_counted_with_is_never_read_in_part(behind: str) -> None:
    assert "is a part of more" in refusal(f"Score: 7{behind}", **TEN)


def test_a_verdict_that_its_line_denies_is_none() -> None:
    for text in ("I won't give Score: 7", "It is not true that Score: 7"):
        assert "is denied" in refusal(text, **TEN)
    for text in ("It does not compile\nScore: 7", "It is not perfect. Score: 7"):
        assert read(text, **TEN) == 7


@pytest.mark.parametrize("blanks", [" ", "\n", "\t", " ("])
def test_blanks_behind_a_verdict_take_no_time(blanks: str) -> None:
    """Patterns that try each of their divisions take minutes for so many."""
    started = time.thread_time()
    assert read(f"Score: 7{blanks * 30_000}x", **TEN) == 7
    assert read(f"Verdict: good{blanks * 30_000}x", regex=r"Verdict: (\w+)", values={"good": 1.0, "bad": 0.0}) == 1
    assert time.thread_time() - started < 5


@pytest.mark.parametrize("between", ["' or '", "` and `", " / or "])
def test_verdicts_that_are_only_offered_are_none(between: str) -> None:
    """As in a prompt that the judge repeats."""
    text = f"I end with 'Verdict: good{between}Verdict: bad'."
    assert "leaves the choice" in refusal(text, regex=r"Verdict: (\w+)", values={"good": 1.0, "bad": 0.0})


# ----------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("behind", ["\nNo wait, 5.", "\n```\nCorrection: 5", ", or 5"])
def test_json_that_is_taken_back_is_no_verdict(behind: str) -> None:
    assert "is taken back" in refusal(f'{{"score": 9}}{behind}', json="score")
    assert read('{"score": 9}\nIt has 5 parts.', json="score") == 9


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (json.dumps({"reason": LONG, "parts": [{"score": 1}], "score": 9}), 9),
        ('{"score": 9, "reason": "' + LONG + '", "parts": [{"score": 1}]}', 9),
        (LONG + '{"score": 9}' + LONG, 9),
        ('```json\n{"parts": [{"score": 1}], "score": 9}\n```', 9),
        ('I answer with {"score": N}. {"score": 9}', 9),
        ('{"score": 3}\n{"score": 9}', 9),
        ('{"score": 9}\n{"note": "as you asked"}', 9),
        ('{"reason": "it says } and { and [", "score": 9}', 9),
        ('{"reason": "two\nlines", "score": 9}', 9),
        ('Of the set {a, b} and of \\frac{1}{2}: {"score": 9}', 9),
        ('See [1] and [the note {"score": 9}]', 9),
        ('{"score": 9.5}', 9.5),
        ('{"score": " 9 "}', 9),
    ],
)
def test_the_outer_object_has_the_verdict(text: str, value: float) -> None:
    assert read(text, **JSON) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"reason": "he said "no"", "parts": [{"score": 1}], "score": 9}', "malformed JSON"),
        ('{"reason": "a } b "c" d", "parts": [{"score": 1}], "score": 9}', "braces do not match"),
        ('{"reason": "' + LONG + '", "parts": [{"score": 1}]', "malformed JSON"),
        ('{"parts": [{"score": 1}], "score": 9,}', "malformed JSON"),
        ('{"score": 3}\n{"score": 9, "reason": "he said "no""}', "malformed JSON"),
        ('{"score": 3}\n{"final": {"score": 9}}', "inner object"),
        ('{"final": {"score": 9}}', "inner object"),
        ('[{"score": 3}, {"score": 9}]', "in a list"),
        ('[{"score": 3}, {"score": 9}', "malformed JSON"),
        ("{'score': 9}", "malformed JSON"),
        ('{"score": 3, "score": 9}', "'score' twice"),
        ('{"a" {"score": 4}', "malformed JSON"),
        ('{"score": 9}}', "braces do not match"),
        ('{"a":' * 200_000, "nested too deep"),
        ('{"score": 9, "a": ' + '{"score":' * 200_000 + "1" + "}" * 200_001, "nested too deep"),
        ('{"Score": 9}', "no JSON object with the key"),
        ('{"scores": 9}', "no JSON object with the key"),
        ('{"score": "9/10"}', "no number"),
        ('{"score": "nine"}', "no number"),
        ('{"score": [9]}', "is a list"),
        ('{"score": Infinity}', "no finite number"),
        ('{"score": "NaN"}', "no number"),
        ('{"score": 1e999}', "no finite number"),
        ('{"score": ' + "9" * 5000 + "}", "malformed JSON"),
    ],
)
def test_an_object_that_cannot_be_told_has_no_verdict(text: str, why: str) -> None:
    assert why in refusal(text, **JSON)


def test_formulas_and_code_are_no_json() -> None:
    assert read("\\frac{1}{2} if (a) { b } " * 1000 + '{"score": 9}', **JSON) == 9


@pytest.mark.parametrize("part", ['{"a":"}', '{"', "{", "{}{", '[{"a": 1}, '])
def test_the_time_of_reading_grows_as_the_answer_does(part: str) -> None:
    """A megabyte that is read again from each of its brackets takes minutes."""
    started = time.thread_time()
    refusal(part * (1_000_000 // len(part)), **JSON)
    assert time.thread_time() - started < 30


# ------------------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("9", "9"),
        ("<think>Score: 1</think>9", "\n9"),
        ("<think>\n\n</think>\n\n9", "\n\n\n9"),
        ("Score: 1</think>9", "9"),
        ("<think>a <think>1</think> 2</think> 9", "\n 9"),
        ("<think>1</think> 5 <think>2</think> 9", "\n 5 \n 9"),
        ("<thinking>1</thinking>9", "\n9"),
        ("<THINK>1</THINK>9", "\n9"),
        ("<reasoning>1</reasoning>9", "\n9"),
        ("<seed:think>1</seed:think>9", "\n9"),
        ("[THINK]1[/THINK]9", "\n9"),
        ("<|START_THINKING|>1<|END_THINKING|>9", "\n9"),
        ("<|begin_of_thought|>1<|end_of_thought|>9", "\n9"),
        ("<|channel>thought\n1<channel|>9", "\n9"),
        ("<unused94>thought\n1<unused95>9", "\n9"),
        ("<|begin_of_thought|>1", None),
        ("<|channel>thought\n1", None),
        ("<unused94>thought\n1", None),
        ("<|channel|>analysis<|message|>1<|end|><|start|>assistant<|channel|>final<|message|>9", "9"),
        ("It opens `<think>` and does not close it: 9", "It opens `<think>` and does not close it: 9"),
        ("<think>1", None),
        ("9 <think>1", None),
        ("<think>1 <think>2</think> 9", None),
        ("<think>1</think> 9 <think>2", None),
        ("<|channel|>analysis<|message|>1", None),
    ],
)
def test_thinking_is_no_part_of_the_answer(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_a_verdict_in_the_thinking_is_none() -> None:
    assert read("<think>Score: 3? No.</think>Score: 9", **TEN) == 9
    assert read("Score: 9 <think>or Score: 3?</think>", **TEN) == 9
    assert read('<think>{"score": 3}</think>{"score": 9}', **JSON) == 9
    assert read("<think>3</think>9") == 9
    for text in ("<think>Score: 9", "Score: 9<think>", "<thinking>I see. Score: 9"):
        assert "thinking is not closed" in refusal(text, **TEN)
    assert "matches nothing" in refusal("<think>Score: 9</think> I cannot tell.", **TEN)
    assert "matches nothing" in refusal("Score: 9</think>", **TEN)
    assert read('{"reason": "it opens <think> and never closes it", "score": 9}', **JSON) == 9


# -------------------------------------------------------------------------------------------------- over the wire


def completion(message: dict[str, Any], finish: str | None = "stop", num_choices: int = 1) -> ChatAnswer:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    answer = read_answer(json.dumps({"choices": [choice] * num_choices, "usage": usage}).encode())
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3), "whatever it says, it is paid for"
    return answer


THOUGHTS = [{"type": "thinking", "thinking": [{"type": "text", "text": "Score: 3"}]}]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Score: 9"},
        {"content": [{"type": "text", "text": "Score: 9"}]},
        {"content": [*THOUGHTS, {"type": "text", "text": "Score: 9"}]},
        {"content": [{"type": "text", "text": "I see."}, *THOUGHTS, {"type": "text", "text": "Score: 9"}]},
        {"content": [{"type": "redacted_thinking", "data": "x"}, {"type": "output_text", "text": "Score: 9"}]},
        {"content": [{"type": "reasoning", "text": "Score: 3"}, {"text": "Score: 9"}]},
        {"content": ["Score: 9"]},
        {"content": "Score: 9", "reasoning_content": "Score: 3"},
        {"content": "Score: 9", "reasoning": "Score: 3", "reasoning_details": [{"type": "reasoning.text"}]},
        {"content": "Score: 9", "tool_calls": [], "refusal": None, "annotations": []},
    ],
)
@pytest.mark.parametrize("finish", ["stop", None, "STOP", "end_turn", "eos_token"])
def test_the_text_of_an_answer_is_read(message: dict[str, Any], finish: str | None) -> None:
    answer = completion(message, finish)
    assert answer.outcome == "answered" and AnswerParser(ParseConfig(**TEN)).read(answer) == 9


@pytest.mark.parametrize(
    ("message", "finish", "outcome", "why"),
    [
        ({"content": ""}, "stop", "unusable", "it is empty"),
        ({"content": " \n"}, "stop", "unusable", "it is empty"),
        ({"content": None}, "stop", "unusable", "it is empty"),
        ({"content": []}, "stop", "unusable", "it is empty"),
        ({}, "stop", "unusable", "it is empty"),
        ({"content": None, "reasoning_content": "Score: 9"}, "stop", "unusable", "it is all thinking"),
        ({"content": None, "reasoning": "Score: 9"}, "stop", "unusable", "it is all thinking"),
        ({"content": THOUGHTS}, "stop", "unusable", "it is all thinking"),
        ({"content": None, "tool_calls": [{"id": "a"}]}, "tool_calls", "unusable", "it calls a tool"),
        ({"content": "Score: 9"}, "tool_calls", "unusable", "did not end by itself (finish_reason tool_calls)"),
        ({"content": "Score: 9"}, "error", "unusable", "did not end by itself (finish_reason error)"),
        ({"content": "Score: 9"}, "abort", "unusable", "did not end by itself (finish_reason abort)"),
        ({"content": "Score: 9"}, "length", "cut", "cut at its longest length"),
        ({"content": "Score: 9"}, "MAX_TOKENS", "cut", "cut at its longest length"),
        ({"content": None, "reasoning_content": "Score: 9"}, "length", "cut", "cut at its longest length"),
        ({"content": "Score: 9"}, "content_filter", "refused", "finish_reason content_filter"),
        ({"content": "Score: 9"}, "SAFETY", "refused", "finish_reason SAFETY"),
        ({"content": "Score: 9", "refusal": "I will not."}, "stop", "refused", "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "stop", "refused", "I will not."),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "stop", "unusable", "of the type image_url"),
        ({"content": [{"type": "text", "text": 9}]}, "stop", "unusable", "part 0 of its content is no text"),
    ],
)
def test_an_answer_without_a_whole_text_has_no_verdict(
    message: dict[str, Any], finish: str, outcome: str, why: str
) -> None:
    answer = completion(message, finish)
    assert answer.outcome == outcome
    with pytest.raises(Unreadable) as caught:
        AnswerParser(ParseConfig(**TEN)).read(answer)
    assert why in str(caught.value)


def test_of_several_choices_none_is_read() -> None:
    answer = completion({"content": "Score: 9"}, num_choices=2)
    assert answer.outcome == "unusable" and "it has 2 choices" in answer.fault


ANSWER = json.dumps({"choices": [{"message": {"content": "Score: 7"}, "finish_reason": "stop"}]}).encode()


@contextmanager
def answering(body: bytes, encoding: str) -> Iterator[str]:
    """The URL of a server that always answers so."""

    class Answering(Handler):
        def do_POST(self) -> None:
            self.read_body()
            assert self.headers["Accept-Encoding"] == "gzip, deflate"
            self.answer(body, content_encoding=encoding)

    with serving_http(Answering) as url:
        yield f"{url}/v1"


def said(body: bytes, encoding: str) -> str:
    async def call(url: str) -> str:
        config = ChatJudgeConfig(name="j", url=url, model="m", template="{response}", call_retries=0)
        caller = ChatCaller(config, "", Metrics())
        try:
            return (await caller.call(b"{}", Flight())).text
        finally:
            await caller.close()

    with answering(body, encoding) as url:
        return asyncio.run(call(url))


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (ANSWER, "identity"),
        (gzip.compress(ANSWER), "gzip"),
        (zlib.compress(ANSWER), "Deflate"),
        (gzip.compress(b" " * 1_000_000 + ANSWER), "gzip"),
    ],
    ids=["plain", "gzip", "deflate", "long"],
)
def test_answers_are_read_in_the_encodings_that_are_asked_for(body: bytes, encoding: str) -> None:
    assert said(body, encoding) == "Score: 7"


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (gzip.compress(ANSWER)[:-9], "gzip", "cut off"),
        (gzip.compress(ANSWER) + b"more", "gzip", "more follows"),
        (ANSWER, "gzip", "cannot be decompressed"),
        (ANSWER, "br", "the encoding 'br', not asked for"),
    ],
    ids=["cut off", "more", "plain", "unknown"],
)
def test_what_cannot_be_decompressed_is_told(body: bytes, encoding: str, message: str) -> None:
    with pytest.raises(SampleFailed, match=message):
        said(body, encoding)


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@by_itself
def test_a_bomb_takes_no_more_memory_than_an_answer_may() -> None:
    bomb = gzip.compress(bytes(4 * MOST_BYTES), 1)
    assert said(gzip.compress(ANSWER), "gzip") == "Score: 7"
    before = peak_bytes()
    with pytest.raises(SampleFailed, match="more than 16 MiB"):
        said(bomb, "gzip")
    assert peak_bytes() - before < 2 * MOST_BYTES
