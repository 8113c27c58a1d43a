"""Mathematical answers against labels: each row has labels of one value, answers of that value, and of others.

The values are known by hand; nothing here asks math-verify what it thinks.
"""

import itertools
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from guerdon.verifiers.mathematics import verify

TABLE: dict[str, tuple[list[Any], list[str], list[str]]] = {
    "small": (
        [0.00005, "0.00005", "5e-5", "5E-05", "1/20000", "5 \\cdot 10^{-5}", "$5\\times10^{-5}$", "5×10^-5", "5·10⁻⁵"],
        ["\\boxed{0.00005}", "\\boxed{5e-05}", "It is 5e-5.", "\\boxed{5 \\times 10^{-5}}", "It is 5×10^-5."],
        ["\\boxed{0.00004}", "\\boxed{0.000051}", "\\boxed{5e}", "\\boxed{0}", "\\boxed{-0.00005}", "5e5"],
    ),
    "tiny": (
        [1e-07, "1e-07", "0.0000001", "10^{-7}", "$1e-7$"],
        ["\\boxed{0.0000001}", "$10^{-7}$", "\\boxed{1e-7}", "\\boxed{\\frac{1}{10^7}}"],
        ["\\boxed{0}", "\\boxed{0.0000002}", "\\boxed{e-7}", "\\boxed{10^{-8}}"],
    ),
    "smallest": ([1e-300, "1e-300"], ["\\boxed{1e-300}", "\\boxed{10^{-300}}"], ["\\boxed{0}", "\\boxed{2e-300}"]),
    "large": (
        [1e16, 10**16, "1e16", "1E+16", "10^{16}", "10,000,000,000,000,000"],
        ["\\boxed{10^{16}}", "\\boxed{1e16}", "\\boxed{10000000000000000}", "\\boxed{1 \\times 10^{16}}"],
        ["\\boxed{16e}", "\\boxed{10^{15}}", "\\boxed{1}"],
    ),
    "whole": ([2**64 + 1, str(2**64 + 1)], ["\\boxed{18446744073709551617}"], ["\\boxed{18446744073709551616}"]),
    "Avogadro": (
        [6.02e23, "6.02e23", "6.02 \\times 10^{23}"],
        ["\\boxed{6.02 \\times 10^{23}}", "$6.02e23$", "\\boxed{602000000000000000000000}"],
        ["\\boxed{6.03 \\times 10^{23}}", "\\boxed{6.02 \\times 10^{22}}"],
    ),
    "thousands": (
        ["1.5e3", 1500, 1500.0, "1,500", "1 500", "1\\,500", "1{,}500", "\\$1,500", "$1500", "€1500", "1500 dollars"],
        ["\\boxed{1500}", "\\boxed{1.5e3}", "\\boxed{1\\,500}", "It costs \\$1,500.", "\\boxed{1 500}", "$1500"],
        ["\\boxed{1.5}", "\\boxed{500}", "\\boxed{4.5e}", "\\boxed{15}", "\\boxed{501}"],
    ),
    "money": (
        ["\\$18", "$18", "18", "\\$18.00", 18, "18 dollars", "USD 18", "\\text{\\$}18", "a = <<9+9=18>>18\n#### 18"],
        ["\\boxed{\\$18}", "She makes \\$18 every day.", "#### 18", "$\\$18$", "\\boxed{\\text{18} eggs}"],
        ["\\boxed{8}", "\\boxed{1.8}", "#### 81", "\\boxed{19}"],
    ),
    "money of a country": (
        ["US\\$18", "US$18", "US $18.00", "A\\$18", "HK$ 18", "\\text{US\\$}18", "$US\\$18$", "18 US dollars"],
        ["\\boxed{US\\$18}", "It is US\\$18.", "It is CA$18", "\\boxed{18 US dollars}", "$\\$18$"],
        ["\\boxed{8}", "\\boxed{US\\$81}", "S$19$"],
    ),
    "numbers with a word": (
        [18000000, "18 million", "18,000 thousand", "\\$18 million", "$18$ million", "18\\text{ million}"],
        ["18 million", "It is 18 million people.", "\\boxed{18 \\text{ million dollars}}", "$\\$18$ million"],
        ["18", "\\boxed{18}", "18 thousand", "1.8 million", "\\boxed{18 billion}"],
    ),
    "numbers with a base": (
        ["1011_2", "1011_{2}", "23_4", "0B_{16}", "$1011_2$", "11"],
        ["\\boxed{1011_2}", "\\boxed{1011_{2}}", "$23_4$", "It is 1011_2.", "\\boxed{11}"],
        ["\\boxed{1011_3}", "\\boxed{1011}", "$1011_{10}$", "\\boxed{1011_4}"],
    ),
    "a list of one": (
        [["18"], [18], ("18",), np.array(["18"]), np.array([18.0]), np.array(["18"], object), [[18]]],
        ["\\boxed{18}"],
        ["\\boxed{8}"],
    ),
    "tags": (
        ["\\frac{1}{2}", 0.5],
        [
            "<answer>1/2</answer>",
            "<think>3</think><answer>0.5</answer>",
            "<answer>\n\\frac{1}{2}\n</answer>",
            "<answer>$\\frac{1}{2}$</answer>",
            "<answer>The answer is 0.5</answer>",
            "<answer>\\boxed{0.5}</answer>",
            "<answer>3</answer> no, <Answer>1/2</Answer> it is",
            "<reasoning>\\boxed{3}</reasoning>\n<answer>\n0.5\n</answer>",
        ],
        ["<answer>2</answer>", "<answer>0.5</answer> or <answer>1</answer>", "<answer></answer>2"],
    ),
    "an expression in tags": (["x+1"], ["<answer>x + 1</answer>", "<answer>1+x</answer>"], ["<answer>1</answer>"]),
    "a part of an expression in tags": (["1"], ["<answer>1</answer>"], ["<answer>x+1</answer>", "<answer>11</answer>"]),
    "matrix": (
        ["\\begin{pmatrix}1\\\\2\\end{pmatrix}", "$\\begin{bmatrix} 1 \\\\ 2 \\end{bmatrix}$"],
        ["\\boxed{\\begin{pmatrix}1\\\\2\\end{pmatrix}}", "$$\\begin{pmatrix}\n1 \\\\\n2\n\\end{pmatrix}$$"],
        ["\\boxed{\\begin{pmatrix}2\\\\1\\end{pmatrix}}", "\\boxed{\\begin{pmatrix}1&2\\end{pmatrix}}", "\\boxed{1}"],
    ),
    "small in a matrix": (
        ["\\begin{pmatrix}0.0000001\\\\1\\end{pmatrix}"],
        ["\\boxed{\\begin{pmatrix}10^{-7}\\\\1\\end{pmatrix}}"],
        ["\\boxed{\\begin{pmatrix}0.0000002\\\\1\\end{pmatrix}}"],
    ),
    "negative": (
        [-3, -3.0, "-3", "−3", "- 3", "$-3$"],
        ["\\boxed{-3}", "\\boxed{−3}", "So $x=-3$."],
        ["\\boxed{3}", "It is 3."],
    ),
    "mixed": (
        ["2\\frac{1}{2}", "2 1/2", "2½", "5/2", 2.5],
        ["\\boxed{2\\frac{1}{2}}", "\\boxed{2 1/2}", "It takes 2 1/2 hours", "\\boxed{2.5}"],
        ["\\boxed{1}", "\\boxed{21/2}", "\\boxed{2\\frac{1}{3}}", "\\boxed{\\frac{2}{5}}"],
    ),
    "third": (
        [1 / 3, "1/3", "0.333333", "0.\\overline{3}"],
        ["\\boxed{\\frac13}", "\\boxed{0.\\overline{3}}", "\\boxed{0.333333}"],
        ["\\boxed{0.33}", "\\boxed{3}"],
    ),
    "percent": (["50\\%", "50%", "50 percent"], ["\\boxed{50\\%}", "\\boxed{0.5}", "It is 50%."], ["\\boxed{5\\%}"]),
    "unit": (
        [5, "5 cm", "5 cm^2", "5 cm²", "5\\text{ cm}", "5 km/h", "5°C", "5 apples"],
        ["\\boxed{5 cm}", "\\boxed{5 \\text{ cm}^2}", "\\boxed{5 m/s}", "\\boxed{5°}"],
        ["\\boxed{6 cm}", "\\boxed{25}"],
    ),
    "no unit": (["3x/y"], ["\\boxed{\\frac{3x}{y}}"], ["\\boxed{3}"]),
    "function": (["5\\sin x"], ["\\boxed{5\\sin x}"], ["\\boxed{5}", "\\boxed{5\\cos x}"]),
    "Euler": (["$2e-1$", "2e - 1"], ["\\boxed{2e-1}", "$-1+2e$"], ["\\boxed{2}", "\\boxed{e}"]),
    "exponential": (["e^{-2}", "e^-2", "\\frac{1}{e^2}"], ["\\boxed{e^{-2}}"], ["\\boxed{e^2}", "\\boxed{-2}"]),
    "root": (["\\sqrt{2}", "√2"], ["\\boxed{√2}", "\\sqrt{2}", "$2^{1/2}$"], ["\\boxed{2}", "\\boxed{1.41}"]),
    "set": (["\\{1,2,3\\}", "$\\{3,2,1\\}$"], ["\\boxed{\\{3, 1, 2\\}}"], ["\\boxed{\\{1,2\\}}", "\\boxed{1}"]),
    "pair": (["(1,2)", "$\\left(1,2\\right)$"], ["\\boxed{(1, 2)}"], ["\\boxed{(2,1)}", "\\boxed{12}"]),
    "interval": (["[0,\\infty)", "[0,∞)"], ["\\boxed{[0,\\infty)}"], ["\\boxed{(0,\\infty)}", "\\boxed{0}"]),
    "infinity": (["-\\infty", "-∞", "-infinity"], ["\\boxed{-\\infty}", "\\boxed{-∞}"], ["\\boxed{∞}", "\\boxed{-1}"]),
    "line": (["y=2x+1", "y = 1 + 2x"], ["\\boxed{y=2x+1}"], ["\\boxed{y=2x}"]),
    "zero": ([0, 0.0, "0", "-0"], ["\\boxed{0}", "\\boxed{0.0}"], ["\\boxed{1e-9}", "\\boxed{}", "", "I do not know."]),
    "sum of floats": ([0.1 + 0.2, float(np.float32(0.3))], ["\\boxed{0.3}"], ["\\boxed{0.30001}"]),
    "several boxes": (
        [6],
        ["\\boxed{5}. Wait, the sum is wrong, so \\boxed{6}.", "\\boxed{\\boxed{6}}", "$\\boxed{5}$, no: $\\boxed{6}$"],
        ["\\boxed{6}. Wait, the sum is wrong, so \\boxed{5}.", "\\boxed{5} or \\boxed{6}"],
    ),
    "boxes of one answer": (["1,2"], ["\\boxed{1} and \\boxed{2}", "$\\boxed{2}$, $\\boxed{1}$"], ["\\boxed{1}"]),
    "thinking": (
        [4],
        ["<think>\\boxed{7}</think>\nThe answer is $4$.", "7, no </think> \\boxed{4}"],
        ["<think>\\boxed{4}", "<think>\\boxed{4}</think>7"],
    ),
    "text": (["\\text{Evelyn}"], ["\\boxed{\\text{Evelyn}}"], ["\\boxed{\\text{Bob}}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_an_answer_is_right_if_it_has_the_value_of_the_label(name: str) -> None:
    labels, right, wrong = TABLE[name]
    asked = [*itertools.product(labels, right), *itertools.product(labels, wrong)]
    rewards = verify([answer for _, answer in asked], [label for label, _ in asked])
    wanted = [1.0] * len(labels) * len(right) + [0.0] * len(labels) * len(wrong)
    assert [x for x in zip(asked, rewards, strict=True) if x not in zip(asked, wanted, strict=True)] == []


@pytest.mark.slow
def test_a_letter_with_an_index_is_no_number() -> None:
    """Such as Fibonacci's F_{20}, or a term of a sequence; it equals itself alone."""
    for letter, base in itertools.product("ABCDEF", (2, 10, 11, 12, 16, 20, 36)):
        for symbol in (f"{letter}_{{{base}}}", f"{letter}_{base}"):
            value, other = str(int(letter, 16)), "A" if letter == "F" else chr(ord(letter) + 1)
            answers = [f"\\boxed{{{symbol}}}", f"\\boxed{{{value}}}", f"\\boxed{{{other}_{{{base}}}}}"]
            assert verify(answers, [value] * 3) == [0.0, 1.0, 0.0], symbol
            if letter != "E":  # no symbol to math-verify, which finds no answer in such a label
                assert verify(answers, [symbol] * 3) == [1.0, 0.0, 0.0], symbol
    for digits, value in (("FF_{16}", 255), ("FF_16", 255), ("F0_{20}", 300), ("1A_{12}", 22), ("A0_{ 11 }", 110)):
        assert verify([f"\\boxed{{{digits}}}", f"\\boxed{{{value}}}"] * 2, [value, digits, digits, value]) == [1.0] * 4
    assert verify(["\\boxed{AB_{12}}", "\\boxed{AB_{12}}"], ["131", "AB_{12}"]) == [0.0, 1.0]


@pytest.mark.slow
def test_numbers_of_all_sizes_are_what_they_are_written_as() -> None:
    random = np.random.default_rng(0)
    for exponent in range(-14, 16, 3):
        mantissa = Decimal(int(random.integers(1001, 10_000))) / 1000
        for factor, reward in ((1, 1.0), (Decimal("1.01"), 0.0), (-1, 0.0), (10, 0.0)):
            number = mantissa.scaleb(exponent)
            answered = number * factor
            answers = [
                f"\\boxed{{{answered:f}}}",
                f"$ {mantissa * factor} \\times 10^{{{exponent}}} $",
                f"It is {answered:e}.",
            ]
            for label in (float(number), f"{number:e}", f"{number:f}", f"{mantissa} \\cdot 10^{{{exponent}}}"):
                assert verify(answers[:1], [label]) == [reward], (label, answers)
            assert verify(answers, [float(number)] * 3) == [reward] * 3, (number, answers)


@pytest.mark.parametrize(
    "label", ["", "  ", "nan", "None", "???", float("nan"), True, None, [], [1, 2], [None], {"a": 1}, Decimal("0.5")]
)
def test_a_label_that_is_no_answer_is_an_error(label: Any) -> None:
    with pytest.raises(ValueError, match=r"the label (is|'\?\?\?')|in the label"):
        verify(["\\boxed{1}"], [label])
