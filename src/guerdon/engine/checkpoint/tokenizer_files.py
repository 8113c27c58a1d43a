"""Loads a folder's tokenizer so that it gives the ids of its `tokenizer.json`, and proves that it does.

transformers 5 rebuilds some tokenizers from `tokenizer_class` and drops steps of the file, such as a Split or Digits
pre-tokenizer; which ones depends on its version. The model was trained with this file, so its pipeline replaces
transformers' own. Declarations of the folder's other files stay: special tokens, the chat template, and added tokens
that `tokenizer.json` lacks.
"""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from guerdon.engine.checkpoint.template_check import REMEDY, describe_dependence, find_dependence
from guerdon.errors import CheckpointError, first_line

log = logging.getLogger(__name__)

PIPELINE = "tokenizer.json"
TEKKEN = "tekken.json"
CONFIG = "tokenizer_config.json"
OTHERS = (CONFIG, "special_tokens_map.json", "added_tokens.json")
"""Files beside it that declare tokens."""
VOCABULARIES = (
    PIPELINE, "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "vocab.json", "vocab.txt",
)  # fmt: skip
TOKENIZER_FILES = (*VOCABULARIES, CONFIG, TEKKEN)
OBEYING = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
"""Classes whose config overrules what `tokenizer.json` puts around a text."""

PROBES = (
    "Hello, world!", "hello world", "HELLO WORLD", "The quick brown fox", " leading", "trailing ", "two  spaces",
    "a   b    c     d", "tab\tand\ttabs", "line\nfeed", "two\n\nparagraphs", "a\r\nb", "   ", "\n\n\n", " \n \n",
    "0", "42", "123", "1234567", "3.14159", "1,000,000", "2024-05-06", "12:34:56", "v1.2.3-rc4", "1e-07", "x2y3z4",
    "50% off", "$18.99", "#1 & #2", "camelCaseWords", "HTTPServerError", "snake_case_name", "don't I'll we've they're",
    "DON'T I'LL", "O'Neil's", "it’s “quoted”", "¿Qué tal?", "naïve café", "cafe\u0301", "Straße ÄÖÜ", "Привет, мир",
    "مرحبا بالعالم", "שלום", "नमस्ते", "日本語のテキスト", "中文字符。标点", "한국어", "😀", "👩‍👩‍👧 🇩🇪",
    "Ⅷ ½ ２", "a\u00a0b\u200bc",
    "def f(x):\n    return x**2  # twice\n", "if (a && b) { c[0] += 1; }", "<p class=\"x\">&amp;</p>", "https://a.b/c?d=1",
    "\\frac{1}{2} + \\sqrt{x}", "--- *** ===",
)  # fmt: skip
"""Texts whose ids show most differences between two tokenizers."""


class FolderTokenizer(NamedTuple):
    """Transformers' tokenizer of a folder, or None, with the proofs about it and its template."""

    tokenizer: Any
    proofs: tuple[str, ...]


def load_tokenizer(folder: Path, *, warns: bool = True, chat_template: str | None = None) -> FolderTokenizer:
    """Returns the folder's tokenizer, proved; raises CheckpointError if it is broken or gives other ids than its file.

    `chat_template` replaces its own. With `warns` it logs a warning if the chat template prints what changes, such as
    the date.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return FolderTokenizer(None, ())
    tokenizer, proof = _load(folder)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if isinstance(named := tokenizer.chat_template, dict) and "default" not in named:
        tokenizer.chat_template = None
        if warns:
            log.warning(
                "%s: of the chat templates %s none is the default; name one's file as chat_template", folder, [*named]
            )
    if not tokenizer.chat_template:
        return FolderTokenizer(tokenizer, (proof,))
    if (found := find_dependence(tokenizer)) and warns:
        log.warning("%s: the chat template %s; %s", folder, found, REMEDY)
    return FolderTokenizer(tokenizer, (proof, describe_dependence(found)))


def _load(folder: Path) -> tuple[Any, str]:
    has_tekken = (folder / TEKKEN).is_file() and not any((folder / name).is_file() for name in VOCABULARIES)
    try:
        if has_tekken:
            return read_tekken(folder), f"tokens are converted from {TEKKEN}"
        if (folder / PIPELINE).is_file():
            return _with_pipeline(folder)
        return _auto(folder), f"tokens are transformers'; there is no {PIPELINE}"
    except CheckpointError:
        raise
    # A broken file makes tokenizers (bare Exception), json, sentencepiece or transformers raise anything.
    except Exception as e:
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read: {first_line(e)}",
            "copy its files again, or remove them to work with token ids only",
        ) from e


def _auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _with_pipeline(folder: Path) -> tuple[Any, str]:
    """Returns transformers' tokenizer with the pipeline of the folder's `tokenizer.json`, and how far both agree."""
    pipeline, (tokenizer, note) = Tokenizer.from_file(str(folder / PIPELINE)), _rebuilt(folder)
    rebuilt = tokenizer.backend_tokenizer
    for backend in (pipeline, rebuilt):  # a file may ask for both
        backend.no_truncation()
        backend.no_padding()
    pipeline.encode_special_tokens = rebuilt.encode_special_tokens
    own = pipeline.get_added_tokens_decoder()
    probes = [*PROBES, *(f"a {token.content} b" for _, token in sorted(own.items())[:3])]
    want = _read(pipeline, probes)
    try:
        differing = sum(ids != other for (ids, _), (other, _) in zip(_read(rebuilt, probes), want, strict=True))
    except Exception:  # tokenizers raises no other class, such as for an unknown token that the vocabulary lacks
        differing = len(probes)
    if differing and not note:
        note = f"transformers rebuilds it as {type(tokenizer).__name__}, with other ids for {differing} of them"
    # Tokens that only the folder's other files declare get the ids that transformers gives them.
    declared = _declared(folder) - {token.content for token in own.values()}
    for _, token in sorted(rebuilt.get_added_tokens_decoder().items()):
        if token.content in declared:
            (pipeline.add_special_tokens if token.special else pipeline.add_tokens)([token])
    _check_ids(pipeline, own, folder)
    around = _surround(pipeline, tokenizer, folder)
    tokenizer._tokenizer = pipeline
    for name, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str) and pipeline.token_to_id(token) is None:  # one that only the class has
            setattr(tokenizer, name, None)
    added = pipeline.get_added_tokens_decoder().keys() - own.keys()
    same = [added.isdisjoint(got[0]) for got in _read(tokenizer.backend_tokenizer, probes)]
    if any(got != own for got, own, is_plain in zip(_read(pipeline, probes), want, same, strict=True) if is_plain):
        raise CheckpointError(
            f"the tokenizer in {folder} gives other ids than its {PIPELINE}", "report this with the folder's files"
        )
    more = "".join(f"; {text}" for text in (note, around) if text)
    return tokenizer, f"tokens are those of {PIPELINE} ({sum(same)} texts){more}"


def _rebuilt(folder: Path) -> tuple[Any, str]:
    """Returns the tokenizer that transformers builds, and why it is not of the class that the folder names."""
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = _auto(folder)
        if tokenizer.is_fast:
            return tokenizer, ""
        why = f"transformers loads it as {type(tokenizer).__name__}"
    except Exception as e:  # whatever a class finds missing in a file that is another's
        why = f"transformers cannot rebuild it ({first_line(e)[:80]})"
    return PreTrainedTokenizerFast.from_pretrained(folder), why


def _read(backend: Tokenizer, texts: list[str]) -> list[tuple[list[int], str]]:
    """Returns each text's ids, and the text that they decode to."""
    rows = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    return list(zip(rows, backend.decode_batch(rows, skip_special_tokens=False), strict=True))


def _declared(folder: Path) -> set[str]:
    """Returns every text in the folder's other files, of which some are tokens; a class has more of its own."""
    found: set[str] = set()
    rest = [_read_json(folder / name) for name in OTHERS]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, dict):
            rest += [*value, *value.values()]
        elif isinstance(value, list):
            rest += value
    return found


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _check_ids(pipeline: Tokenizer, own: dict[int, AddedToken], folder: Path) -> None:
    """Raises CheckpointError if a token that only other files declare has another id than they say."""
    stated = _read_json(folder / CONFIG).get("added_tokens_decoder") or {}
    listed = {str(token.get("content")): int(i) for i, token in stated.items()}
    ids = listed or _read_json(folder / OTHERS[-1])  # which is read where the config lists none
    known = {token.content for token in own.values()}
    for content, i in ids.items():
        if content not in known and (given := pipeline.token_to_id(content)) != i:
            raise CheckpointError(
                f"{folder} declares the token {content!r} as {i}, and after those of {PIPELINE} it is {given}",
                f"save the tokenizer again, so that {PIPELINE} has the token",
            )


def _surround(pipeline: Tokenizer, tokenizer: Any, folder: Path) -> str:
    """Makes the pipeline add BOS and EOS as the folder's config says, if its class has a say; returns what changes.

    transformers 4 lets `add_bos_token` and `add_eos_token` overrule the file for some classes.
    """
    stated = _read_json(folder / CONFIG)
    if (stated.get("tokenizer_class") or type(tokenizer).__name__).removesuffix("Fast") not in OBEYING:
        return ""
    (own,), (row,) = (pipeline.encode_batch(["a"], add_special_tokens=added) for added in (False, True))
    start = next((i for i in range(len(row.ids)) if row.ids[i : i + len(own.ids)] == own.ids), 0)
    wanted, changes = [], []
    for key, token, beside in (
        ("add_bos_token", tokenizer.bos_token, row.ids[:start][:1]),
        ("add_eos_token", tokenizer.eos_token, row.ids[start + len(own.ids) :][-1:]),
    ):
        token_id = None if token is None else pipeline.token_to_id(token)
        adds = beside == [token_id]
        says = adds if token_id is None or stated.get(key) is None else bool(stated[key])
        wanted.append([(token, token_id)] if says else [])
        changes += [f"{key} is {says} by {CONFIG} and {adds} by {PIPELINE}: the former counts"] * (says != adds)
    if changes:
        bos, eos = wanted
        first, second = (
            [*(f"{token}:{kind}" for token, _ in bos), f"${name}:{kind}", *(f"{token}:{kind}" for token, _ in eos)]
            for name, kind in (("A", 0), ("B", 1))
        )
        pipeline.post_processor = processors.TemplateProcessing(
            single=first, pair=[*first, *second], special_tokens=[*bos, *eos]
        )
    return ", ".join(changes)


_BEFORE_V7 = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The special tokens of files that list none."""
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(folder: Path) -> Any:
    """Returns transformers' tokenizer of Mistral's `tekken.json`, with the folder's chat template, if it has one.

    The file lists byte strings by rank, as tiktoken does, and a pattern that splits texts. Ids begin with the special
    tokens; after them come the ranks. The tokenizer is the same with every version of transformers.
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
