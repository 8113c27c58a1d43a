"""Converts Mistral's `tekken.json` to a `tokenizers.Tokenizer`, the same with every version of transformers.

The file lists byte strings by rank, as tiktoken does, and a pattern that splits texts. Ids begin with the special
tokens; after them come the ranks.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

TEKKEN = "tekken.json"

_BEFORE_V7 = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of files that list none."""
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(folder: Path) -> Any:
    """Returns transformers' tokenizer of the folder's `tekken.json`, with the folder's chat template, if it has one.

    Special tokens in a text are parsed as such. Asked for special tokens, it writes a BOS.
    """
    from transformers import PreTrainedTokenizerFast

    stored = json.loads((folder / TEKKEN).read_text(encoding="utf-8"))
    # By id; ids without a token of their own get a filler.
    listed = stored.get("special_tokens") or [{"rank": i, "token_str": token} for i, token in enumerate(_BEFORE_V7)]
    by_id = {token["rank"]: token["token_str"] for token in listed}
    count = stored["config"].get("default_num_special_tokens") or len(listed)
    specials = [by_id.get(i, f"<SPECIAL_{i}>") for i in range(count)]
    named = {name: token for name, token in _NAMES.items() if token in specials}
    return PreTrainedTokenizerFast(
        tokenizer_object=_convert(stored, specials), chat_template=_template(folder), **named
    )


def _convert(stored: dict[str, Any], specials: list[str]) -> Tokenizer:
    size = stored["config"].get("default_vocab_size") or len(specials) + len(stored["vocab"])
    ranks = {base64.b64decode(x["token_bytes"]): x["rank"] for x in stored["vocab"][: size - len(specials)]}
    # The letter that stands for each byte in a byte-level vocabulary, as GPT-2 chose them.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    written = {piece: "".join(letters[byte] for byte in piece) for piece in ranks}
    merges = []
    for piece in sorted(ranks, key=ranks.__getitem__):
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        made_of = [(a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(written[a], written[b]) for a, b in sorted(made_of, key=lambda two: (ranks[two[0]], ranks[two[1]]))]
    vocabulary = {token: i for i, token in enumerate(specials)}
    vocabulary |= {written[piece]: len(specials) + rank for piece, rank in ranks.items()}
    # A piece of a text that is a token itself stays whole, even if no merges lead to it.
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(stored["config"]["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    bos = _NAMES["bos_token"]
    if bos in specials:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, specials.index(bos))]
        )
    return made


def _template(folder: Path) -> str | None:
    """Returns the chat template of a folder whose tokenizer transformers does not load."""
    if (path := folder / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (path := folder / name).is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(found, str):
                return found
    return None
