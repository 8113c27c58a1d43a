"""Makes what the run starts from: a random policy and a random critic with a token for each character, and prompts."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

CHARACTERS = ["<pad>", "<end>", "<unknown>", *"0123456789*?="]


def make(folder: Path, seed: int) -> None:
    """Writes `policy`, `critic`, and the 100 products: 80 in `prompts.jsonl`, the others in `held_out.jsonl`."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(CHARACTERS)}, unk_token="<unknown>"))
    words.pre_tokenizer = Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(seed)
    for name, kind in (("policy", LlamaForCausalLM), ("critic", LlamaForSequenceClassification)):
        config = LlamaConfig(
            vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, initializer_range=0.1, num_labels=1,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    products = [f"{left}*{right}?" for left in range(10) for right in range(10)]
    random.Random(seed).shuffle(products)
    for name, rows in (("prompts", products[20:]), ("held_out", products[:20])):
        lines = (json.dumps({"prompt": row}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
