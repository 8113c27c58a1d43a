"""Small tokenizers of the kinds in use, trained on a few texts: byte-level and other BPE, unigram, WordPiece."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the thing in the other room is that we sing and they bring another string",
    "def add(x, y):\n    return x + y\n\nfor i in range(10):\n    print(add(i, 2 * i))\n",
    "the answer is 12345 and not 67890, because 3.14 is near; she said: 'never again!'",
    "日本語のテキストと中文字符在这里，这是一个测试。",
    "naïve café e\u0301te\u0301 😀👩‍👩‍👧 Straße привет мир",
] * 4
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<pad>", "<unk>", "</s>"]
KINDS = ("bytes-small", "bytes-large", "bytes-digits", "pieces", "pieces-large", "unigram", "words")
_LLAMA3 = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"


def save(kind: str, folder: Path) -> int:
    """Writes a tokenizer of that kind into the folder; returns the number of its ids."""
    made = {"bytes": _byte_level, "pieces": _pieces, "unigram": _unigram, "words": _words}[kind.partition("-")[0]](kind)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", chat_template=TEMPLATE
    )
    if kind == "pieces":
        fast.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    fast.save_pretrained(folder)
    return len(fast)


def _byte_level(kind: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "bytes-digits":
        split = pre_tokenizers.Split(Regex(_LLAMA3), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    made.decoder = decoders.ByteLevel()
    size = {"bytes-small": 290, "bytes-large": 420, "bytes-digits": 360}[kind]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def _pieces(kind: str) -> Tokenizer:
    """As sentencepiece's BPE with byte fallback, such as Llama 2's: characters it has not seen are bytes."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    corpus = CORPUS if kind == "pieces-large" else CORPUS[:2]
    size = 400 if kind == "pieces-large" else 120
    trained.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIALS, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    words = [
        *SPECIALS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(word for word in model["vocab"] if word not in SPECIALS),
    ]
    merges = [tuple(pair) for pair in model["merges"]]
    vocab = {word: i for i, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = trained.normalizer
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _unigram(kind: str) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    made.train_from_iterator(CORPUS, trainer)
    return made


def _words(kind: str) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=260, special_tokens=SPECIALS, show_progress=False)
    )
    return made
