"""The program and the answer of a response, by hand-written tables: what a reader of the Markdown would run."""

import textwrap

import pytest

from guerdon.verifiers.responses import answer_of, find_program

FENCED = "```python\nCODE\n```"
DOCSTRING = "'''Doubles.\n\n```\n>>> double(2)\n```\nand\n```python\n>>> double(3)\n```\n'''\nCODE"
COMMENTED = "# ```\n# double(2)\n# ```\ns = '```'\nCODE"


def indented(text: str, by: str) -> str:
    return textwrap.indent(text, by, lambda _: True)


@pytest.mark.parametrize(
    "response",
    [
        f"Like this:\n{FENCED}\nThat is it.",
        *(f"So:\n{indented(FENCED, ' ' * n)}\n" for n in (1, 2, 3)),
        "  ```python\nCODE\n  ```",
        "~~~python\nCODE\n~~~",
        "`````python\nCODE\n`````",
        "```python\nCODE\n`````",
        "```python\nCODE\n   ```",
        indented(FENCED, "> "),
        indented(FENCED, ">"),
        indented(FENCED, "> > "),
        "> ```python\n> CODE\nOutside.",
        "> ```python\n> CODE```\n> So.",
        "```python\nCODE\n",
        "```python\nCODE",
        f"{FENCED}\nIt prints:\n```\n4\n```\n",
        f"{FENCED}\n```text\n4\n```\n```python-repl\n>>> 4\n```\n```pycon\n>>> 4\n```\n~~~bash\npython a.py\n~~~",
        "```python\nCODE```\nThat is it.",
        "```python\nCODE ```\nIt prints:\n```\n4\n```\n",
        "```python\nCODE\n``` prints 4.\nBye.",
        f"1. So:\n\n{indented(FENCED, '   ')}\n2. Done.",
        f"1. So:\n{indented(FENCED, '    ')}",
        f"- a\n  - b\n\n{indented(FENCED, '    ')}",
        "- ```python\n  CODE\n  ```",
        "1.\t```python\n\tCODE\n\t```",
        "- > ```python\n  > CODE\n  > ```",
        "- So:\n  ```python\nCODE\n  ```\n\nBye.",
        "1. So:\n   ```python\n   CODE\n```\n",
        *(
            f"```{info}\nCODE\n```"
            for info in ("py", " Python ", "PYTHON3", "python3.11", "python:main.py", "{python}")
        ),
        *(
            f"```{info}\nCODE\n```"
            for info in ("{.python .numbered}", 'python title="a.py"', "python{1,3}", "py linenos")
        ),
        "```\nCODE\n```",
        "```\nprint(0)\n```\nor\n```\nCODE\n```",
        f"```python\nprint(0)\n```\nNo:\n{FENCED}",
        f"{FENCED}\n```python\n```\n```\n",
        f"```python\nprint(0)\n\nBetter, not closed:\n\n{FENCED}",
        "```python\nCODE\n```output\n4\n```",
        f"```python\ns = '''open\n```\nNo:\n{FENCED}",
        f"So:\r\n{FENCED}\r\n".replace("\n", "\r\n").replace("\r\r", "\r"),
        f"<details>\n<summary>Code</summary>\n\n{FENCED}\n\n</details>",
        f"<details>\n{FENCED}\n</details>",
        f"<answer>\n{FENCED}\n</answer>",
        f"<think>\n```python\nprint(0)\n```\n</think>\n{FENCED}",
        "<think>\n```python\nprint(0)\n```\n</think>\n```\nCODE\n```",
        f"<think>\n```python\nprint(0)\n</think>\n{FENCED}",
        f"The template opened it. ```python\n0\n</think>{FENCED}",
        f"**Code**:\n{FENCED}\n---\n# End",
    ],
)
def test_the_program_is_the_last_block_of_python(response: str) -> None:
    program = find_program(answer_of(response.replace("CODE", "print(2 * int(input()))")))
    assert program is not None and program.strip() == "print(2 * int(input()))"


@pytest.mark.parametrize(
    "code",
    [
        "if True:\n\tCODE", "def double(x):\n    '''Doubles.\n\n    ```\n    >>> double(2)\n    ```\n    '''\nCODE",
        DOCSTRING, COMMENTED, "s = '</think>'\nCODE", "CODE\n~~~", "print 'Python 2, or a mistake'",
    ],
)  # fmt: skip
def test_a_program_keeps_its_lines(code: str) -> None:
    for text in (f"a\n```python\n{code}\n```\nb", f"```python\n{code}\n```\nIt prints:\n```\n4\n```"):
        assert find_program(answer_of(text)) == f"{code}\n"
        assert find_program(indented(text, "> ")) == f"{code}\n"
        assert find_program(f"1. a\n\n{indented(text, '   ')}") == f"{code}\n"


@pytest.mark.parametrize(
    "response",
    [
        "", "print(1)", "Use `print(1)`.", "Use ```print(1)``` here.", "So:\n\n    print(1)\n", "```js\nlet x\n```",
        "```python\n```", "<think>\n```python\nprint(1)\n```", "```python\nprint(1)\n```\n</think>\nI do not know.",
    ],
)  # fmt: skip
def test_other_responses_have_no_program(response: str) -> None:
    assert find_program(answer_of(response)) is None


@pytest.mark.parametrize(
    "response",
    [
        "```\n" * 20_000,
        "```python\n" * 10_000,
        "```\nx y\n```\n" * 10_000,
        "```python\nx y\n" + "a ```\n" * 20_000,
        ">" * 50_000 + FENCED,
        "- " * 20_000,
        "```python\n" + "(" * 50_000 + "\n```",
        "```python\n" + "-" * 100_000 + "1\n```",
    ],
)
@pytest.mark.timeout(30)
def test_a_response_of_fences_alone_is_read_all_the_same(response: str) -> None:
    find_program(response)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("4", "4"),
        ("<think>2+2</think>4", "4"),
        ("2+2</think>\n4", "\n4"),
        ("\n<think>2+2", ""),
        ("It says '</think>' here", "It says '</think>' here"),
        ("Close `</think>` first.</think>4", "4"),
        ("<think>use `x`</think>\n4", "\n4"),
        ('<think>print "4"</think>4', "4"),
        ('<think>4</think>"4"', '"4"'),
        ("<think>\n```python\n4\n```</think>\n\n4", "\n\n4"),
        *(
            (f"{before}{start}2+2{end}4", "4")
            for before in ("", "\n")
            for start, end in (
                ("<thinking>", "</thinking>"),
                ("<thought>", "</thought>"),
                ("<reasoning>", "</reasoning>"),
                ("<seed:think>", "</seed:think>"),
                ("[THINK]", "[/THINK]"),
                ("◁think▷", "◁/think▷"),
                ("<|START_THINKING|>", "<|END_THINKING|>"),
                ("<|channel>thought\n", "<channel|>"),
                ("<unused94>thought\n", "<unused95>"),
            )
        ),
        *((f"2+2{end}4", "4") for end in ("[/THINK]", "</seed:think>", "◁/think▷", "<|END_THINKING|>", "<channel|>")),
        *((f"{start}2+2", "") for start in ("<thinking>", "<reasoning>", "[THINK]", "<|channel|>analysis<|message|>")),
        ("<think>a <think>b</think> c</think>4", "4"),
        ("<think>open <think> tags</think>4", "4"),
        ("<think>2</think>4 <think>5", "4 <think>5"),
        ("<think>2</think>4 <reasoning>5</reasoning>", "4 <reasoning>5</reasoning>"),
        ("s = f'<reasoning>{x}</reasoning>'", "s = f'<reasoning>{x}</reasoning>'"),
        ("Open it by <think> alone: 4", "Open it by <think> alone: 4"),
        ("<|channel|>analysis<|message|>2<|end|><|start|>assistant<|channel|>final<|message|>4", "4"),
        ("<|start|>assistant<|channel|>analysis<|message|>2", ""),
        ("<|channel|>final<|message|>4", "4"),
        ("analysisWe add 2.assistantfinal4", "4"),
        ("analysis of assistantships: 4", "analysis of assistantships: 4"),
    ],
)
def test_the_answer_stands_behind_the_thinking(response: str, answer: str) -> None:
    assert answer_of(response) == answer
