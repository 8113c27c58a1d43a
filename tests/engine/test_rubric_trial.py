"""A rubric is tried at the start: what the model says instead of a label is named, spellings and thinking are found.

The model is a small random one whose head prefers the tokens that a test chooses. The reference is transformers, one
question at a time: the sum over all tokens that its tokenizer decodes to a label, but for case and blanks.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import chats
import judged
import zoo
from guerdon.core import ModelInfo
from guerdon.errors import ConfigError
from guerdon.local import LocalJudge

RUBRIC = """\
template: "Q: {prompt}\\nA: {response}\\n{criterion} Say yes or no."
labels: {yes: 1, no: 0}
criteria:
  - {name: right, text: "Is it right?", weight: 2}
  - {name: brief, text: "Is it brief?"}
"""
COMPARING = """\
template: "Q: {prompt}\\nA: {response_a}\\nB: {response_b}\\nIs A better?"
labels: {yes: 1, no: 0}
criteria: [{name: right}]
compare: {}
"""
THINKS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ 'reply: ' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
WORDS = ("yes", "Yes", "YES", "no", "No", "<think>", "Well")


def model(folder: Path, says: dict[str, float], family: str = "chatml", template: str | None = None) -> Path:
    """Writes a judge's model whose head adds these logits to tokens, by the texts of single tokens."""
    chats.save(family, zoo.language_model("phi", folder, vocab_size=chats.VOCAB_SIZE), words=WORDS)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if template is not None:
        (folder / "chat_template.jinja").unlink()
        tokenizer.chat_template = template or None
        tokenizer.save_pretrained(folder)
    made: Any = AutoModelForCausalLM.from_pretrained(folder)
    texts = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    with torch.no_grad():
        for text, logit in says.items():
            made.lm_head.bias[texts.index(text)] += logit
    made.save_pretrained(folder)
    return folder


def wanted(folder: Path, rubric: str, prompt: str, response: str, **variables: Any) -> tuple[np.ndarray, np.ndarray]:
    """The criteria's values and the mass of no label, float64 `[K]` each, if any spelling counts."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    spelled = [tokenizer.decode([i]).strip().casefold() for i in range(len(tokenizer))]
    values, others = [], []
    for text in ("Is it right?", "Is it brief?"):
        said = f"Q: {prompt}\nA: {response}\n{text} Say yes or no."
        shown = tokenizer.apply_chat_template(
            [{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True, **variables
        )
        ids = tokenizer(shown, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            shares = torch.softmax(network(ids).logits[0, -1].double(), -1).numpy()
        yes, no = (sum(shares[i] for i, word in enumerate(spelled) if word == label) for label in ("yes", "no"))
        values.append(yes / (yes + no))
        others.append(1 - yes - no)
    return np.array(values), np.array(others)


def load(folder: Path, rubric: str = RUBRIC, **settings: Any) -> LocalJudge:
    return LocalJudge(folder, judged.write(folder, rubric), **settings)


def info(judge: LocalJudge) -> ModelInfo:
    return judge._info()


def test_labels_that_the_model_spells_otherwise_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, where the judge is shown, and in each sample's error."""
    says = {"No": 8.0, "Yes": 7.0, "Well": 4.0}
    with caplog.at_level(logging.WARNING), load(model(tmp_path, says)) as judge:
        (line,) = [record.getMessage() for record in caplog.records if record.name == "guerdon.engine.judging"]
        scores = judge.score(texts=["What? That."], prompts=["What? "])
        why = info(judge).proofs[-1]
    (error,) = scores.errors
    assert np.isnan(scores.rewards[0]) and error is not None
    for told in (line, why, error):
        assert "the likeliest tokens are 'No' 0." in told and "'Yes' 0." in told and "'Well' 0." in told
        assert "the model spells labels otherwise, 'No' for 'no', 'Yes' for 'yes'" in told
        assert "`spellings: any`" in told
    assert "on a sample, labels have 0.0" in line
    assert "of the probability is on tokens that are no labels" in error


@pytest.mark.parametrize(
    ("family", "says"), [("chatml", ("No", "Yes", "ĠYes", "YES")), ("gemma", ("No", "Yes", "▁Yes"))]
)
def test_any_spelling_counts_if_the_rubric_says_so(
    family: str, says: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model(tmp_path, {text: 8.0 - i for i, text in enumerate(says)}, family)
    values, other = wanted(folder, RUBRIC, "What? ", "That.")
    with caplog.at_level(logging.WARNING), load(folder, RUBRIC + "spellings: any\n") as judge:
        scores = judge.score(texts=["What? That."], prompts=["What? "])
        told = info(judge)
    assert not [record for record in caplog.records if record.name == "guerdon.engine.judging"]
    assert scores.attributes is not None and values.min() > 0.05 and other.max() < 0.4, "they are the model's words"
    np.testing.assert_allclose(scores.attributes[0, :-1], [*values, other.max()], atol=1e-5)
    np.testing.assert_allclose(scores.rewards, [2 * values[0] + values[1]], atol=1e-5)
    assert (
        "spellings of 'yes': 'yes', " in told.proofs[-1]
        and "'YES'" in told.proofs[-1]
        and "of 'no': 'no', " in told.proofs[-1]
    )
    with load(folder, max_other_mass=1.0) as exact:
        assert info(exact).weights_version != told.weights_version
        assert exact.score(texts=["What? That."], prompts=["What? "]).rewards[0] != scores.rewards[0]


def test_labels_that_differ_in_case_are_no_two_labels(tmp_path: Path) -> None:
    rubric = RUBRIC.replace("{yes: 1, no: 0}", "{yes: 1, Yes: 0.5, no: 0}")
    folder = model(tmp_path, {"yes": 8.0})
    load(folder, rubric).close()
    with pytest.raises(ConfigError, match="'yes' and another differ only in case or blanks"):
        load(folder, rubric + "spellings: any\n")


def test_thinking_is_named_and_turned_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The template has a switch; with it off, what is asked is what transformers renders with it off."""
    folder = model(tmp_path, {"<think>": 9.0}, template=THINKS)
    with caplog.at_level(logging.WARNING), load(folder):
        pass
    assert "the model thinks before it answers: set `chat_template_kwargs: {enable_thinking: false}`" in caplog.text
    values, other = wanted(folder, RUBRIC, "What? ", "That.", enable_thinking=False)
    plain, _ = wanted(folder, RUBRIC, "What? ", "That.")
    rubric = RUBRIC + "spellings: any\nchat_template_kwargs: {enable_thinking: false}\n"
    with load(folder, rubric, max_other_mass=1.0) as judge:
        scores = judge.score(texts=["What? That."], prompts=["What? "])
        assert scores.attributes is not None
        np.testing.assert_allclose(scores.attributes[0, :-1], [*values, other.max()], atol=1e-5)
    assert np.abs(values - plain).max() > 1e-3, "the switch matters"


def test_a_prompt_that_opens_the_thinking_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = THINKS[: THINKS.index("{% if enable_thinking")] + "{{ '<think>\n' }}{% endif %}"
    with caplog.at_level(logging.WARNING), load(model(tmp_path, {"Well": 9.0}, template=template)):
        pass
    assert "the model thinks before it answers: set `chat_template_kwargs: {enable_thinking: false}`" in caplog.text
    assert "if its template has it" in caplog.text


@pytest.mark.parametrize(
    ("says", "advice"),
    [({"Ġ": 9.0}, "the model begins with a blank"), ({"Well": 9.0}, "let the template ask for a label alone")],
)
def test_other_answers_are_named(
    says: dict[str, float], advice: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), load(model(tmp_path, says)):
        pass
    assert advice in caplog.text


def test_a_rubric_that_compares_is_tried_in_both_orders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = model(tmp_path, {"Yes": 9.0})
    with caplog.at_level(logging.WARNING), load(folder, COMPARING) as judge:
        scores = judge.score(texts=["What? One.", "What? Two."], prompts=["What? "] * 2)
    assert "on a sample, labels have 0.0" in caplog.text and "'Yes' for 'yes'" in caplog.text
    assert all("'Yes' for 'yes'" in str(error) for error in scores.errors)
    with load(folder, COMPARING + "spellings: any\n") as judge:
        assert judge.score(texts=["What? One.", "What? Two."], prompts=["What? "] * 2).errors == [None, None]


def test_a_rubric_that_suits_the_model_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), load(model(tmp_path, {"yes": 9.0, "no": 8.0})) as judge:
        assert "on a sample, labels have 0.9" in info(judge).proofs[-1]
    assert not [record for record in caplog.records if record.name == "guerdon.engine.judging"]


@pytest.mark.parametrize(
    ("template", "more", "message"),
    [
        (THINKS, "{enable_thinkng: false}", "chat_template_kwargs has enable_thinkng, and the chat template has no"),
        ("", "{enable_thinking: false}", "and the checkpoint has no chat template"),
        (THINKS, "{add_generation_prompt: false}", "chat_template_kwargs has 'add_generation_prompt'"),
        (THINKS, "{1: false}", "chat_template_kwargs has '1'"),
        (THINKS, "false", "line 6: chat_template_kwargs must be a mapping, not bool"),
    ],
)
def test_a_variable_that_the_template_lacks_is_refused(template: str, more: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(model(tmp_path, {}, template=template), f"{RUBRIC}chat_template_kwargs: {more}\n")


def test_a_rubric_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a question about a short sample has \d+ tokens, and the model takes 40"):
        load(model(tmp_path, {}), max_length=40)
