"""Small tokenizers with the chat templates of many families, among them ChatML, Llama 2 and 3, Gemma and Mistral.

The templates are written anew in the families' shapes; the tokenizers treat blanks and special tokens as theirs do.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 420


@dataclass(frozen=True)
class Family:
    """A template, the tokens that it needs, the one that ends an answer, and how the tokenizer treats blanks."""

    template: str
    specials: tuple[str, ...]
    eos: str
    blanks: str
    ending: str


def _turns(turn: str, prompt: str, before: str = "") -> str:
    body = "{% for m in messages %}{{ " + turn + " }}{% endfor %}"
    return before + body + ("{% if add_generation_prompt %}{{ " + prompt + " }}{% endif %}" if prompt else "")


_BOS = "{{ bos_token }}"
_CHATML = r"'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n'"
FAMILIES = {
    "chatml": Family(
        _turns(_CHATML, r"'<|im_start|>assistant\n'"),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "bytes",
        "<|im_end|>\n",
    ),
    "llama3": Family(
        _turns(
            r"'<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>'",
            r"'<|start_header_id|>assistant<|end_header_id|>\n\n'",
            _BOS,
        ),
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "bytes",
        "<|eot_id|>",
    ),
    "gemma": Family(
        _turns(
            r"'<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim"
            r" + '<end_of_turn>\n'",
            r"'<start_of_turn>model\n'",
            _BOS,
        ),
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "marked",
        "<end_of_turn>\n",
    ),
    "mistral": Family(
        _turns("'[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + eos_token", "", _BOS),
        (),
        "</s>",
        "prefixed",
        "</s>",
    ),
    "zephyr": Family(
        _turns(r"'<|' + m.role + '|>\n' + m.content + eos_token + '\n'", r"'<|assistant|>\n'"),
        (),
        "</s>",
        "prefixed",
        "</s>\n",
    ),
    "qwen": Family(  # with a system's message of its own
        _turns(
            _CHATML,
            r"'<|im_start|>assistant\n'",
            r"{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}",
        ),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "bytes",
        "<|im_end|>\n",
    ),
    "qwen3": Family(  # which writes an empty thought before the last answer
        _turns(
            r"'<|im_start|>' + m.role + '\n' + ('<think>\n\n</think>\n\n' if loop.last and m.role != 'user' else '')"
            r" + m.content + '<|im_end|>' + '\n'",
            r"'<|im_start|>assistant\n'",
        ),
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
        "bytes",
        "<|im_end|>\n",
    ),
    "deepseek": Family(
        _turns(
            "('<｜User｜>' + m.content) if m.role == 'user' else ('<｜Assistant｜>' + m.content + eos_token)",
            "'<｜Assistant｜>'",
            _BOS,
        ),
        ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
        "<｜end▁of▁sentence｜>",
        "bytes",
        "<｜end▁of▁sentence｜>",
    ),
    "llama2": Family(
        _turns(
            "bos_token + '[INST] ' + m.content | trim + ' [/INST]' if m.role == 'user' else "
            "' ' + m.content | trim + ' ' + eos_token",
            "",
        ),
        (),
        "</s>",
        "prefixed",
        " </s>",
    ),
    "phi3": Family(
        _turns(r"'<|' + m.role + '|>\n' + m.content + '<|end|>\n'", r"'<|assistant|>\n'", ""),
        ("<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        "bytes",
        "<|end|>\n",
    ),
    "words": Family(  # without special tokens
        _turns(r"m.role | upper + ': ' + m.content + '\n'", r"'ASSISTANT:'", ""), (), "</s>", "bytes", "\n"
    ),
}

ODD = ("qwen3", "llama2", "words")
"""Families that do not end an answer with what a policy draws last, or that write something before an answer."""


def save(name: str, folder: Path, *, words: tuple[str, ...] = ("th", "the", "in", "an", "er")) -> Path:
    """Saves the family's tokenizer into the folder; `words` are merged into one token each, a letter at a time."""
    family = FAMILIES[name]
    specials = ["<pad>", "<s>", "</s>", "<unk>", *family.specials]
    is_bytes = family.blanks == "bytes"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if is_bytes else [chr(i) for i in range(33, 127)]
    blank = "Ġ" if is_bytes else "▁"
    vocab = [*specials, *letters]
    if not is_bytes:
        vocab += [blank, *(f"<0x{i:02X}>" for i in range(256))]
    merges: list[tuple[str, str]] = []
    for word in [*words, *(blank + word for word in words)]:
        known = word[0]
        for letter in word[1:]:
            if (known, letter) not in merges:
                merges.append((known, letter))
            known += letter
    vocab += dict.fromkeys("".join(pair) for pair in merges)
    assert len(vocab) <= VOCAB_SIZE
    made = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(vocab)},
            merges=merges,
            unk_token=None if is_bytes else "<unk>",
            byte_fallback=not is_bytes,
        )
    )
    if is_bytes:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        replace = normalizers.Replace(" ", blank)
        prefixed = family.blanks == "prefixed"
        made.normalizer = normalizers.Sequence([normalizers.Prepend(blank), replace]) if prefixed else replace
        stripped = [decoders.Strip(" ", 1, 0)] if prefixed else []
        made.decoder = decoders.Sequence(
            [decoders.Replace(blank, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
        )
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=family.eos,
        unk_token="<unk>",
        chat_template=family.template,
    ).save_pretrained(folder)
    return folder
