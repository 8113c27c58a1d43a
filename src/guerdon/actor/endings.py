"""How a chat template ends an answer, found by rendering one.

What a reward model learnt from has the whole turn (ChatML: `<|im_end|>` and a newline), while a policy stops at its
EOS. The score is read at the end, so that the difference decides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from guerdon.actor.rollouts import Ending, response_text
from guerdon.core import Message
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import InvalidRequest
from guerdon.messages import answered

_ANSWER = "guerdon's answer"
_DIRTY = f" \n<think>\nso\n</think>\n\n{_ANSWER}\n "
"""An answer with everything that templates are known to strip."""


def find_ending(
    encoder: TextEncoder, tokenizer: Any, conversation: Sequence[Message], prompt: str
) -> Ending | InvalidRequest:
    """Returns how the template ends an answer to the conversation, which it rendered as `prompt`.

    An error says why the template shows no answer: it refuses one, or writes nothing of it.
    """
    whole = encoder.render(answered(conversation, _ANSWER))
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
    # Tokenised in its place: by itself it may get a blank of its own.
    is_prefix = np.array_equal(ids[: len(cut)], cut)
    tokens = ids[len(cut) :] if is_prefix else alone
    is_asked = whole[:start].startswith(prompt)
    lead = whole[len(prompt) : start] if is_asked else ""
    if not is_asked or lead.strip():
        differs = f"it writes {whole[:start][-40:]!r} before an answer, and {prompt[-40:]!r} to ask for one"
    elif encoder.render(answered(conversation, _DIRTY)) != whole.replace(_ANSWER, _DIRTY):
        differs = "it strips blanks or reasoning of answers"
    elif not is_prefix or not np.array_equal(cut[: len(asked)], asked):
        differs = "an answer and what stands around it share tokens"
    elif response_text(tokenizer, cut[len(asked) :].tolist(), has_eos=False) != _ANSWER:
        differs = f"it writes {lead!r} before an answer"
    else:
        differs = ""
    return Ending(whole[behind:], tokens, lead, differs)
