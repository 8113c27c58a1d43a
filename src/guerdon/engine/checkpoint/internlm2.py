"""InternLM2's checkpoints, whose own code is never run, in the layout of Llama, which computes the same.

`wqkv` holds, for each key-value head, its query heads, its key head and its value head (`InternLM2Attention` in the
public `modeling_internlm2.py`); all other tensors only have other names. InternLM2-reward and POLAR read `v_head` at a
token that ends every sample, so that their converted template writes it. POLAR compares an answer with a reference, by
the text of `RewardModelClient` in XTuner's `rm_utils.py`; the label is the reference.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from torch import Tensor
from transformers.convert_slow_tokenizer import generate_merges

from guerdon.engine.checkpoint.stored import StoredCheckpoint
from guerdon.errors import CheckpointError, StartError

MODEL_TYPE = "internlm2"
_NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
_HEADS = {"v_head": "score", "output": "lm_head"}
_TENSOR = re.compile(rf"(model\.(?:layers\.\d+\.)?)({'|'.join(map(re.escape, _NAMES))})(\.\w+)")
_KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "vocab_size", "hidden_act", "initializer_range", "tie_word_embeddings",
    "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
_BETWEEN = "<|reward|>"
"""The token between POLAR's two halves, which only its tokenizer has."""
_POLAR = (
    "{% set asked = messages[:-1] | map(attribute='content') | join('\n') + '\n' %}"
    "{{ asked + messages[-1]['reference'] + '<|reward|>' + asked + messages[-1]['content'] }}"
)
_TOKEN = ("lstrip", "normalized", "rstrip", "single_word", "special")


def to_llama(checkpoint: StoredCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the `config.json` and the tensors of the same model in Llama's layout.

    Raises CheckpointError for a tensor or a rotary embedding that is not InternLM2's.
    """
    own = checkpoint.settings
    heads, groups = own["num_attention_heads"], own.get("num_key_value_heads") or own["num_attention_heads"]
    tensors: dict[str, Tensor] = {}
    for name, stored in checkpoint.tensors.items():
        prefix, _, part = name.rpartition(".")
        if prefix.endswith(".attention.wqkv"):
            # For each key-value head: its query heads, its key head, its value head.
            parts = stored[...].unflatten(0, (groups, heads // groups + 2, -1))
            queries = parts[:, :-2].flatten(0, 2)
            for kind, tensor in (("q", queries), ("k", parts[:, -2].flatten(0, 1)), ("v", parts[:, -1].flatten(0, 1))):
                made = f"{prefix.removesuffix('.attention.wqkv')}.self_attn.{kind}_proj.{part}"
                tensors[made] = tensor.contiguous()
        elif found := _TENSOR.fullmatch(name):
            tensors[f"{found[1]}{_NAMES[found[2]]}{found[3]}"] = stored[...]
        elif prefix in _HEADS or name == "model.norm.weight":
            tensors[f"{_HEADS.get(prefix, prefix)}.{part}"] = stored[...]
        elif not name.endswith("inv_freq"):
            raise CheckpointError(f"{checkpoint.folder} has {name}, which is none of InternLM2's", "copy it again")
    settings = {name: own[name] for name in _KEPT if name in own}
    scaling = own.get("rope_scaling") or {}
    kind = scaling.get("type", scaling.get("rope_type", "default"))
    if kind not in ("default", "linear", "dynamic"):
        raise CheckpointError(
            f"{checkpoint.folder} has the rotary embedding {kind}", "InternLM2 has linear and dynamic"
        )
    rope = {"rope_type": kind, "rope_theta": own.get("rope_theta", 10000)}
    rope |= {"factor": float(scaling["factor"])} if kind != "default" else {}
    named = "LlamaForSequenceClassification" if "score.weight" in tensors else "LlamaForCausalLM"
    settings |= {"model_type": "llama", "architectures": [named], "num_labels": 1, "rope_parameters": rope}
    return settings | {"attention_bias": bool(own.get("bias", False)), "mlp_bias": False}, tensors


def to_tokenizer(checkpoint: StoredCheckpoint) -> dict[str, str]:
    """Returns the texts of `tokenizer.json` and `tokenizer_config.json`, empty if there is no `tokenizer.model`.

    Converts the sentencepiece model as InternLM2's own fast tokenizer does. Raises StartError if a package is missing.
    """
    folder = checkpoint.folder
    path, config = folder / "tokenizer.model", folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    stated = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as e:
        raise StartError(f"{path} needs sentencepiece", "pip install sentencepiece") from e
    read: Any = SentencePieceProcessor(model_file=str(path))
    declared = {int(i): token for i, token in (stated.get("added_tokens_decoder") or {}).items()}
    reward = checkpoint.settings.get("reward_token_id")
    pieces = [(read.id_to_piece(i), read.get_score(i)) for i in range(read.get_piece_size())]
    pieces[:3] = [(name, 0.0) for name in ("<unk>", "<s>", "</s>")]
    pieces = [(declared[i]["content"] if i in declared else piece, score) for i, (piece, score) in enumerate(pieces)]
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    made = Tokenizer(BPE(ids, generate_merges(ids, pieces), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    before = [normalizers.Prepend("▁")] if read.encode("a", out_type=str)[0].startswith("▁") else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(after)
    special = [AddedToken(t["content"], **{k: t[k] for k in _TOKEN if k in t}) for _, t in sorted(declared.items())]
    special += [AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")]
    made.add_special_tokens(special)
    ending = "" if reward is None else made.id_to_token(reward) or ""
    made.add_special_tokens([AddedToken(ending, special=True, normalized=False)] if ending else [])
    if wrong := [t["content"] for i, t in declared.items() if made.token_to_id(t["content"]) != i]:
        raise CheckpointError(f"{config} declares {wrong[0]!r} with an id that {path} has for another", "copy it again")
    adds_bos = stated.get("add_bos_token", True)
    if adds_bos:
        bos = [("<s>", 1)]
        made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special_tokens=bos)
    template = _POLAR if _BETWEEN in ids else stated.get("chat_template")
    if template and ending:
        # Their own code renders a conversation, then has the tokenizer add its BOS, then adds the token.
        template = f"{'{{ bos_token }}' * adds_bos}{template}{{% if not add_generation_prompt %}}{ending}{{% endif %}}"
    facts: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    facts |= {"eos_token": "</s>", "pad_token": stated.get("pad_token") or "</s>", "chat_template": template}
    return {
        "tokenizer.json": made.to_str(),
        "tokenizer_config.json": json.dumps({k: v for k, v in facts.items() if v}, indent=2, ensure_ascii=False),
    }
