"""The rule by which vLLM tells the text of a single token, with transformers' tokenizer: the reference of tests."""

import itertools
from typing import Any

BROKEN = "\ufffd"


def alone(tokenizer: Any, token: int) -> str:
    """The token decoded by itself, with each space that its piece begins with."""
    text, piece = tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token) or ""
    spaces = len(list(itertools.takewhile("▁".__eq__, piece)))
    return text if text.startswith(" " * spaces) else " " * spaces + text.lstrip(" ")


def by_rule(tokenizer: Any, context: list[int], token: int) -> str:
    """vLLM's text of a token behind up to four others: the shortest context that makes it whole decides."""
    text = alone(tokenizer, token)
    if not text.endswith(BROKEN):
        return text
    for size in range(1, min(4, len(context)) + 1):
        used = context[-size:]
        whole = tokenizer.decode([*used, token])
        if whole.endswith(BROKEN):
            continue
        while used and tokenizer.decode([used[-1]]).endswith(BROKEN):
            used = used[:-1]
        clean = tokenizer.decode(used) if used else ""
        if whole.startswith(clean):
            return whole[len(clean) :]
        same = next((i for i, (x, y) in enumerate(zip(clean, whole, strict=False)) if x != y), len(clean))
        return whole[same:]
    return ""
