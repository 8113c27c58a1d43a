"""Verdicts on two responses in the forms of public projects: invented answers are read, malformed ones fail."""

import json
from typing import Any

import pytest

from guerdon.errors import ConfigError
from guerdon.server.chat_judge.parsing import AnswerParser, Unreadable
from guerdon.settings.chat_judges import ChatJudgeConfig, ParseConfig
from guerdon.settings.fields import check_settings, from_mapping
from guerdon.settings.rubrics import ComparingConfig
from guerdon.wire.chat_completions import ChatAnswer

THOUGHT = '<think>At first [[B]], <answer>[[B]]</answer>, {"score_1": 1, "score_2": 5, "ranking": 6}.</think>\n'


def read(preset: Any, text: str) -> float:
    return AnswerParser(ParseConfig(preset=preset)).read(ChatAnswer(text))


def genrm(one: Any, two: Any, ranking: Any, **more: Any) -> str:
    return json.dumps({**more, "score_1": one, "score_2": two, "ranking": ranking})


def said_by_genrm() -> list[tuple[str, float]]:
    """Thirty answers: all rankings, with scores that agree, alone, in prose, fenced, nested and thought about."""
    agreeing = {1: (5, 1), 2: (4, 2), 3: (4, 3), 4: (3, 4), 5: (2, 4), 6: (1, 5)}
    made = []
    for ranking, (one, two) in agreeing.items():
        text, value = genrm(one, two, ranking), (6 - ranking) / 5
        made += [
            (text, value),
            (f"Response 1 is {one}/5. So:\n```json\n{text}\n```", value),
            (THOUGHT + text + "\n", value),
            (json.dumps({"rubric_evaluations": [{"score": 1}], "overall": json.loads(text)}), value),
            (f"An example is {genrm(3, 3, 3)}. Mine: {genrm(str(one), f'{two}.0', ranking, note='{x}')}", value),
        ]
    return made


def said_by_rm_r1() -> list[tuple[str, float]]:
    made = []
    for letter, value in (("A", 1.0), ("B", 0.0)):
        verdict = f"<answer>[[{letter}]]</answer>"
        made += [
            (verdict, value),
            (f"{verdict}\n", value),
            (f"  {verdict}  ", value),
            (f"<answer>\n[[{letter}]]\n</answer>", value),
            (f"<answer> [[{letter}]] </answer>", value),
            (f"<type>Chat</type><rubric>Short (40%)</rubric><eval>Fine.</eval>\n\n{verdict}", value),
            (f"<type>Reasoning</type><solution>x = {{4}}</solution><eval>[1] ok</eval>{verdict}", value),
            (f"I end with <answer>[[A]]</answer> or <answer>[[B]]</answer>.\nSo {verdict}", value),
            (THOUGHT + verdict, value),
            (THOUGHT + f"Both are good.\n{verdict}", value),
            (f"<think>hm</think>{verdict}", value),
            (f"Chatbot A says [[x]]. {verdict}", value),
            (f"Verdict: {verdict}.", value),
            (f"**{verdict}**", value),
            (f"{verdict}\nI have compared both in full.", value),
        ]
    return made


def said_in_brackets() -> list[tuple[str, float]]:
    worth = {"A": 1.0, "B": 0.0, "C": 0.5, "tie": 0.5, "A>>B": 1.0, "A>B": 0.75, "A=B": 0.5, "B>A": 0.25, "B>>A": 0.0}
    made = [(f"[[{letter}]]", value) for letter, value in worth.items()]
    made += [(f"Both read well.\nMy final verdict is: [[{letter}]]", value) for letter, value in worth.items()]
    made += [(f"{THOUGHT}So [[{letter}]].", value) for letter, value in worth.items()]
    return [*made, ("[[ a ]]", 1.0), ("I say [[A]] or [[B]].\nHere: **[[b]]**", 0.0), ("See [1] and [[A]]\n", 1.0)]


@pytest.mark.parametrize(
    ("preset", "answers"),
    [("genrm", said_by_genrm()), ("rm_r1", said_by_rm_r1()), ("brackets", said_in_brackets())],
)
def test_thirty_answers_are_read(preset: str, answers: list[tuple[str, float]]) -> None:
    assert len(answers) == 30
    for text, value in answers:
        assert read(preset, text) == pytest.approx(value), text


MALFORMED = {
    "genrm": [
        ("", "no JSON object"),
        ("Both are good.", "no JSON object"),
        ('{"score_1": 4, "score_2": 3}', "no JSON object"),
        ('{"score_1": 4, "ranking": 2}', "score_2 is 'None', and no number"),
        (genrm(4, 3, 0), "ranking is 0, and may be 1 to 6"),
        (genrm(4, 3, 7), "ranking is 7"),
        (genrm(0, 3, 5), "score_1 is 0, and may be 1 to 5"),
        (genrm(4, 6, 5), "score_2 is 6"),
        (genrm(True, 3, 5), "score_1 is 'True', and no number"),
        (genrm([4], 3, 2), "score_1 is"),
        (genrm("four", 3, 2), "score_1 is 'four'"),
        (genrm(None, 3, 2), "score_1 is 'None'"),
        (genrm(float("nan"), 3, 2), "score_1 is nan, and may be"),
        (genrm(5, 1, 6), "scores prefer one response and its ranking 6 the other"),
        (genrm(4, 3, 2)[:-1], "malformed JSON"),
        (genrm(4, 3, 2) + ' {"ranking": ', "malformed JSON"),
        ('{"score_1": 4, "score_2": 3, "ranking": 2, "ranking": 5}', "twice"),
        (json.dumps([json.loads(genrm(4, 3, 2))]), "in a list"),
        ("<think>" + genrm(4, 3, 2), "thinking is not closed"),
        (json.dumps({"overall": 3}), "no number"),
        ('{"score_1": 4, "score_2": 3, "score_1": 5, "ranking": 2}', "score_1 is 'given twice'"),
        (genrm(4, 3, int("9" * 400)), "and may be 1 to 6"),
        (genrm(4, 3, 2) + "\n```\nNo wait, the ranking is 5.", "taken back"),
        (f'{{"overall": {genrm(4, 3, 2)}}} I mean {genrm(3, 4, 5)[:-1]}', "malformed JSON"),
    ],
    "rm_r1": [
        ("", "it has no <answer>"),
        ("[[A]]", "it has no <answer>"),
        ("<answer>A</answer>", "and not"),
        ("<answer>[A]</answer>", "and not"),
        ("<answer>[[C]]</answer>", "and not"),
        ("<answer>[[A]] or [[B]]</answer>", "and not"),
        ("<answer>[[A]][[B]]</answer>", "and not"),
        ("<answer>[[A]]", "is not closed"),
        ("<answer></answer>", "and not"),
        ("<answer>[[A]]</answer> <answer>[[?]]</answer>", "and not"),
        ("<answer>[[A]]</answer> or rather <answer>[[B]]", "is not closed"),
        ("<answer>[[A]]</answer> But [[B]] is better.", "goes on after </answer>"),
        ("<answer>[[A]]</answer>\nBut [[B]] is better.", "another verdict"),
        ("<answer>[[A]]</answer> if A is better, <answer>[[B]]</answer> if B is.", "goes on after </answer>"),
        ("<answer>[[A]]</answer> or <answer>[[B]]</answer>", "another verdict"),
        ("<answer>[[A]]</answer>. Actually, B is better.", "goes on after </answer>"),
        ("<answer>[[A]]</answer>\nNo wait, B is better.", "taken back"),
        ("B has the text <answer>[[B]]</answer>, <answer>[[A]]</answer>", "another verdict"),
        ("<answer>[[A]]</answer>\nB has <answer>[[B]]</answer> in it.", "goes on after </answer>"),
        ("It is not <answer>[[A]]</answer>", "is denied"),
        ("<think><answer>[[A]]</answer>", "thinking is not closed"),
        ("<answer>not [[A]]</answer>", "and not"),
    ],
    "brackets": [
        ("", "no verdict in double brackets"),
        ("A", "no verdict in double brackets"),
        ("[A]", "no verdict in double brackets"),
        ("[[A]", "no verdict in double brackets"),
        ("[[]]", "is none of"),
        ("[[D]]", "is none of"),
        ("[[A or B]]", "is none of"),
        ("[[5]]", "is none of"),
        ("[[A]]\n[[rating]]", "is none of"),
        ("Either [[A]] or [[B]].", "another verdict"),
        ("[[A]] [[B]]", "another verdict"),
        ("[[A]] if A is better\n[[B]] if B is better\n[[C]] if neither is", "has a condition"),
        ('It is not really "[[A]]".', "is denied"),
        ("I cannot say [[A]]", "is denied"),
        ("[[A]], or rather a tie", "taken back"),
        ("[[A]] | B", "taken back"),
        ("[[A]]?", "is questioned"),
        ("[[A]] would be too kind", "has a condition"),
        ("<think>[[A]]", "thinking is not closed"),
    ],
}


@pytest.mark.parametrize(
    ("preset", "text", "why"), [(preset, *one) for preset, several in MALFORMED.items() for one in several]
)
def test_a_malformed_answer_is_no_number(preset: str, text: str, why: str) -> None:
    with pytest.raises(Unreadable) as refused:
        read(preset, text)
    assert why in str(refused.value)


def judge(**settings: Any) -> ChatJudgeConfig:
    made = {"url": "http://host/v1", "model": "m", "cache": "c", "compare": ComparingConfig()}
    return ChatJudgeConfig(**{**made, **settings})


def test_a_presets_name_is_enough() -> None:
    data = {"url": "http://host/v1", "model": "m", "cache": "c", "parse": "rm_r1", "compare": {}}
    made = from_mapping(ChatJudgeConfig, data)
    check_settings(made)
    assert made.parse == ParseConfig(preset="rm_r1") and "[The Start of Chatbot A's Response]" in made.question
    for preset in ("genrm", "brackets"):
        check_settings(judge(parse=ParseConfig(preset=preset)))
    check_settings(judge(parse=ParseConfig(preset="genrm"), template="{reference}"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parse": ParseConfig(preset="j2"), "template": "{response_a} {response_b}"}, "parse.preset is 'j2'"),
        ({"parse": ParseConfig(preset="genrm", regex="(x)")}, "preset and regex are both given"),
        ({"parse": ParseConfig(preset="genrm"), "compare": None}, "which reads verdicts on two responses"),
        ({"parse": ParseConfig(preset="genrm"), "template": "{response_a}"}, "unknown field"),
        ({"parse": ParseConfig(preset="rm_r1"), "template": "{response_a}"}, "no {response_b}"),
        ({"template": "{response_a} {response_b}"}, "parse has verdicts beyond 0 to 1"),
        ({"template": "{response_a} {response_b}", "parse": ParseConfig(values={"A": 2.0})}, "beyond 0 to 1"),
        ({"template": "{response}", "parse": ParseConfig(values={"A": 1.0})}, "unknown field"),
    ],
)
def test_what_does_not_go_together_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_settings(judge(**settings))
    assert message in str(refused.value)
