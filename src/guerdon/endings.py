"""How a chat template writes an answer, found by rendering one; and texts that are completed accordingly.

Reward models were trained on whole turns (ChatML: `<|im_end|>` and a newline), while a policy stops at its EOS, which
many trainers strip. The score is read at the end, so that it depends on the ending.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from guerdon.core import Message
from guerdon.errors import InvalidRequest
from guerdon.messages import answered

_QUESTION, _ANSWER = "guerdon's question", "guerdon's answer"
_ANSWER_TO_STRIP = f" \n<think>\nso\n</think>\n\n{_ANSWER}\n "
"""An answer with everything that templates are known to strip."""
_PIECES = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s|[^\s<\[]+|.")
"""Matches the parts of an ending that a response may already have: special tokens, words, blanks."""


class Renderer(Protocol):
    """A tokenizer with a chat template, such as `TextEncoder`."""

    def render(self, conversation: list[Message]) -> str | InvalidRequest: ...

    def render_prompts(self, conversations: list[list[Message]]) -> list[str | InvalidRequest]: ...

    def encode(self, texts: list[str]) -> list[np.ndarray | InvalidRequest]: ...


@dataclass(frozen=True, slots=True)
class Ending:
    """A chat template's text around an answer: `text` after it, also as `tokens`, and `lead` before it.

    `opening` stands between the last message and an answer, and marks texts that the template has made; it is empty if
    the template writes only blanks there. `lead` comes between the rendered prompt and the answer, and is almost always
    empty. `start` is the BOS that the template writes. `differs` says why the same answer sent as messages may still be
    scored differently; empty if it cannot.
    """

    text: str
    tokens: tuple[int, ...]
    lead: str = ""
    opening: str = ""
    start: str = ""
    differs: str = ""

    def has_made(self, prompt: str) -> bool:
        """Whether the template has made a prompt, as far as its text shows."""
        return bool(self.opening) and self.opening in prompt

    def complete(self, text: str, prompt: str = "") -> str | None:
        """Returns a text that the template has made as it writes a whole conversation; None if it has not made it.

        The text begins with `prompt`, if that is given, and ends with an answer, with its ending, a part of it or none.
        """
        asked = prompt if prompt and text.startswith(prompt) else text.removesuffix(self.text)
        if not self.has_made(asked):
            return None
        place = asked.rfind(self.opening) + len(self.opening)
        answer, word = text[place:], self.lead.split()[:1]
        has_lead = answer.startswith(self.lead) or (bool(word) and answer.lstrip().startswith(word[0]))
        start = "" if text.startswith(self.start) else self.start
        return start + text[:place] + ("" if has_lead else self.lead) + ended(answer, self.text)

    def complete_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns the token ids of a prompt and its answer with the ending, of which they may have a part."""
        made, tokens = [*ids], [*self.tokens]
        if self.text[:1].isspace() and made[-1:] == tokens[-1:] and made[-len(tokens) :] != tokens:
            made.pop()  # an EOS without the blanks that the template writes before it
        known = next(n for n in range(len(tokens), -1, -1) if made[len(made) - n :] == tokens[:n])
        return made + tokens[known:]

    def __str__(self) -> str:
        return f"{self.text!r} (ids {list(self.tokens)})" if self.text else "nothing"

    def to_json(self) -> str:
        """Returns the ending as `ModelInfo` and a model's configuration state it."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    @functools.lru_cache(maxsize=64)
    def parse(cls, text: str) -> Ending | None:
        """Reads what `to_json` returns; None if it is anything else, such as an empty string."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "tokens": tuple(fields["tokens"])})
        except (KeyError, TypeError, ValueError):
            return None

    @classmethod
    def reported(cls, config: dict[str, Any]) -> Ending | None:
        """Reads the ending in a served model's configuration; None if that has none."""
        try:
            return cls.parse(config["parameters"]["ending"]["string_value"])
        except (KeyError, TypeError):
            return None


def ended(text: str, ending: str) -> str:
    """Appends the ending without doubling a part that the text already has, such as its EOS."""
    core = ending.strip()
    if core and (said := text.rstrip()).endswith(core):
        return ended(said.removesuffix(core), ending)
    pieces = _PIECES.findall(ending)
    known = next(n for n in range(len(pieces), -1, -1) if text.endswith("".join(pieces[:n])))
    return text + "".join(pieces[known:])


def find_ending(
    encoder: Renderer, tokenizer: Any, conversation: Sequence[Message] = ({"role": "user", "content": _QUESTION},)
) -> Ending | InvalidRequest:
    """Returns how the template of `encoder`, made of `tokenizer`, writes an answer to the conversation.

    Returns an error if the template refuses the conversation or an answer, or does not write the answer.
    """
    (prompt,) = encoder.render_prompts([[*conversation]])
    whole = encoder.render(answered(conversation, _ANSWER))
    if isinstance(prompt, InvalidRequest):
        return prompt
    if isinstance(whole, InvalidRequest):
        return whole
    start = whole.rfind(_ANSWER)
    if start < 0:
        return InvalidRequest("the chat template does not write the assistant's answer")
    behind = start + len(_ANSWER)
    encoded = encoder.encode([prompt, whole[:behind], whole, whole[behind:]])
    if wrong := [ids for ids in encoded if isinstance(ids, InvalidRequest)]:
        return wrong[0]
    asked, cut, ids, alone = (np.asarray(ids) for ids in encoded)
    # Tokenised in context: alone it may get a leading blank.
    is_prefix = np.array_equal(ids[: len(cut)], cut)
    tokens = ids[len(cut) :] if is_prefix else alone
    extends_prompt = whole[:start].startswith(prompt)
    lead = whole[len(prompt) : start] if extends_prompt else ""
    said = tokenizer.decode(cut[len(asked) :].tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if not extends_prompt or lead.strip():
        differs = f"it writes {whole[:start][-40:]!r} before an answer, and {prompt[-40:]!r} to ask for one"
    elif encoder.render(answered(conversation, _ANSWER_TO_STRIP)) != whole.replace(_ANSWER, _ANSWER_TO_STRIP):
        differs = "it strips blanks or reasoning of answers"
    elif not is_prefix or not np.array_equal(cut[: len(asked)], asked):
        differs = "an answer and its surroundings share tokens"
    elif said != _ANSWER:
        differs = f"it writes {lead!r} before an answer"
    else:
        differs = ""
    bos = tokenizer.bos_token or ""
    return Ending(
        whole[behind:],
        tuple(tokens.tolist()),
        lead,
        _find_opening(prompt, whole[:start], conversation[-1].get("content")),
        bos if whole.startswith(bos) else "",
        differs,
    )


def _find_opening(prompt: str, before_answer: str, asked: Any) -> str:
    """Returns the template's text between the question and an answer; "" if the question is not found."""
    if not isinstance(asked, str) or not asked or asked not in prompt or asked not in before_answer:
        return ""
    both = [text[text.rfind(asked) + len(asked) :] for text in (prompt, before_answer)]
    both = [text for text in both if text.strip()] or [""]
    return "".join(a for a, b in itertools.takewhile(lambda p: p[0] == p[1], zip(both[0], both[-1], strict=False)))
