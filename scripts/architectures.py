"""Tries every architecture of the installed transformers that answers with text or a score, and writes the table.

python scripts/architectures.py               all; writes docs/architectures.md; a few minutes
python scripts/architectures.py lfm2 bert     prints these as JSON, and writes nothing

Each is a small random model: the default configuration of its class with the sizes of `SMALL`. Its log-probs or
rewards are compared with plain transformers, one sequence at a time, in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.settings.config import ModelConfig, TeacherConfig

PAGE = Path(__file__).resolve().parents[1] / "docs/architectures.md"
VOCAB_SIZE, LONGEST, FIRST = 300, 256, 8
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("pad_token_id", "pad_index"), 0),
    **dict.fromkeys(("bos_token_id", "bos_index", "cls_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "eos_index", "sep_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "seq_length"), LONGEST),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("dim", "lru_width", "xpath_unit_hidden_size", "mamba_d_ssm", "input_embedding_size"), 32),
    **dict.fromkeys(("output_embedding_size", "shared_intermediate_size", "hidden_size_per_layer_input"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "hidden_dim", "d_ff", "d_inner", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "ffn_hidden_size", "intermediate_size_mlp", "n_inner"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads", "linear_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "n_mamba_heads", "n_groups"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_kv", "d_head", "kv_channels", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "linear_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "mamba_head_dim", "rotary_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("attention_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "index_topk", "block_multiple_of"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "index_n_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "index_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "local_attention", "attention_window_size"), 48),
    **dict.fromkeys(("attention_chunk_size", "window_size"), 48),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 16),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group", "n_shared_experts", "num_dense_layers"), 1),
    **dict.fromkeys(("first_k_dense_replace", "mamba_n_groups", "num_kv_shared_layers"), 1),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period", "layer_group_size", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "max_window_layers"), 0),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    "use_mamba_kernels": False,
}  # fmt: skip
"""Sizes by the names that configurations have for them."""
ATTEMPTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "qk_head_dim": 16},
    {"head_dim": None},
    {"num_hidden_layers": 6, "num_key_value_heads": 4},
    {"hidden_size": 64, "embedding_size": 64, "intermediate_size": 128},
    {"num_hidden_layers": 8},
    {"hidden_size": 128, "num_key_value_heads": 4, "head_dim": 32},
)
"""What is tried in turn until a model can be built and run."""
OWN: dict[str, dict[str, Any]] = {
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 16},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
}
"""What released models have and the default configuration of their class has not, and sizes that belong together."""
TOGETHER = 40
"""Architectures that are tried in one process."""
KINDS = {"causal": "log-probs", "classifier": "rewards"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types, such as lfm2 (default: all)")
    args = parser.parse_args()
    if args.names:
        for found in (tried(name, kind) for name in args.names for kind in KINDS if name in model_types(kind)):
            sys.stdout.write(json.dumps(dataclasses.asdict(found)) + "\n")
            sys.stdout.flush()
        return
    names = sorted({*model_types("causal"), *model_types("classifier")})
    every: list[Tried] = []
    for start in range(0, len(names), TOGETHER):
        every += in_a_process(names[start : start + TOGETHER])
    PAGE.write_text(page(every))


@dataclasses.dataclass(frozen=True)
class Tried:
    """What came of one architecture: the path, the largest difference relative to the RMS, and why no better path.

    Without a path it was not tried, and `why` says the reason.
    """

    name: str
    kind: str
    path: str
    difference: float
    why: str


def model_types(kind: str) -> list[str]:
    """Returns the model types that transformers has a class of this kind for."""
    auto = transformers.models.auto.modeling_auto
    own = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "classifier": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    return list(own[kind])


def in_a_process(names: list[str]) -> list[Tried]:
    """Returns what came of the architectures as each kind; those behind one that ends the process fail with it."""
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1200, check=False, env=threads)
    found = [Tried(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    have, error = {(one.name, one.kind) for one in found}, f"its process ended with {done.returncode}"
    missing = ((name, kind) for kind in KINDS for name in names if name in model_types(kind))
    return found + [Tried(*one, "", 0.0, error) for one in missing if one not in have]


# ---------------------------------------------------------------------------------------------------- one model


def tried(name: str, kind: str) -> Tried:
    """Builds, saves, serves and compares one architecture."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = built(name, kind)
    except Unbuilt as e:
        return Tried(name, kind, "", 0.0, str(e))
    random = np.random.default_rng(0)
    prompt, *ends = (random.integers(FIRST, VOCAB_SIZE, n) for n in (50, 20, 1, 30))
    rows = [*(np.concatenate([prompt, end]) for end in ends), random.integers(FIRST, VOCAB_SIZE, 90)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            config: Any = TeacherConfig(model=folder) if kind == "causal" else ModelConfig(model=folder)
            engine: Any = build_scorer(config)
            results = engine.score([Sequence(row) for row in rows])
            model = type(model).from_pretrained(folder, attn_implementation="eager").eval()
            want = np.concatenate([reference(model, row, kind) for row in rows])
        except Exception as e:  # a model may raise anything
            return Tried(name, kind, "", 0.0, f"not served: {first_line(e)}")
    if not all(isinstance(result, Score) for result in results):
        return Tried(name, kind, "", 0.0, f"not served: {results[0]}")
    pairs = zip(results, rows, strict=True)
    got = [r.answer.logprobs[1 - len(row) :] if kind == "causal" else [r.reward] for r, row in pairs]
    difference = np.abs(np.concatenate(got) - want).max() / np.sqrt(np.square(want).mean())
    return Tried(name, kind, engine.path, float(difference), engine.info.why)


class Unbuilt(Exception):
    """No small model of the architecture could be built."""


def built(name: str, kind: str) -> Any:
    """Returns a small random model that runs; raises Unbuilt."""
    errors = []
    for more in ATTEMPTS:
        try:
            torch.manual_seed(0)
            auto = AutoModelForCausalLM if kind == "causal" else AutoModelForSequenceClassification
            config = AutoConfig.for_model(name, **settings(name, kind, more))
            with torch.device("meta"):
                if sum(p.numel() for p in auto.from_config(config).parameters()) > 2e7:
                    raise ValueError("its sizes have other names")
            model: Any = auto.from_config(config).eval()
            randomise(model)
            with torch.no_grad():
                reference(model, np.arange(FIRST, FIRST + 40), kind)
            if kind == "causal":
                model.generation_config.do_sample = True  # some classes' own settings contradict each other otherwise
            return model
        except Unbuilt:
            raise
        except Exception as e:  # a configuration or a model may raise anything
            errors.append(first_line(e))
    raise Unbuilt(f"not built: {errors[0]}")


def settings(name: str, kind: str, more: dict[str, Any]) -> dict[str, Any]:
    """Returns the small sizes that the architecture's configuration has, with each of its types of layers."""
    default = AutoConfig.for_model(name)
    if getattr(default, "is_encoder_decoder", False) and kind == "causal":
        raise Unbuilt("a decoder of an encoder-decoder")
    if "text_config" in getattr(default, "sub_configs", {}):
        raise Unbuilt("more than text: its text model is tried by its own name")
    known = {*inspect.signature(type(default).__init__).parameters, *(f.name for f in dataclasses.fields(default))}
    found = {key: value for key, value in {**SMALL, **OWN.get(name, {}), **more}.items() if key in known}
    layers = next((found[key] for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in found), 4)
    for key in ("layer_types", "layers_block_type", "block_types"):
        if (
            key in known
            and key not in OWN.get(name, {})
            and (types := list(dict.fromkeys(getattr(default, key, None) or [])))
        ):
            found[key] = (types * layers)[:layers]
    if kind == "classifier":
        found["num_labels"] = 1
    return found


def randomise(model: Any) -> None:
    """Sets weights that make every part matter, also what starts at zero or one."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)


@torch.no_grad()
def reference(model: Any, row: np.ndarray, kind: str) -> np.ndarray:
    """Returns what transformers makes of the row alone: the log-prob of each token but the first, or the reward."""
    ids = torch.from_numpy(row)
    logits = model(input_ids=ids[None], **({"use_cache": False} if kind == "causal" else {})).logits[0].float()
    if kind == "classifier":
        return logits.numpy()
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()


def first_line(error: Exception) -> str:
    """Returns the beginning of the error's message."""
    return re.sub(r"\s+", " ", str(error) or type(error).__name__)[:200]


# ----------------------------------------------------------------------------------------------------- the page

TITLES = {
    "packed+shared": "Packed, a shared prompt computed once",
    "packed": "Packed",
    "shared": "Not packed, a shared prompt computed once",
    "single": "One sequence at a time",
    "": "Not served, or not tried",
}


def page(every: list[Tried]) -> str:
    """Returns the page."""
    lines = [
        "# Every architecture of transformers",
        "",
        f"`make architectures` tried all {len({one.name for one in every})} model types for which transformers"
        f" {transformers.__version__} has a causal language model or a classifier of sequences: small random models"
        " against plain transformers, one sequence at a time, in float32 on a CPU. The difference is the largest of a"
        " log-prob or reward, relative to their root mean square. [Supported models](models.md) explains the paths.",
    ]
    for path, title in TITLES.items():
        for kind, what in KINDS.items():
            own = [one for one in every if (one.path, one.kind) == (path, kind)]
            if own:
                heading = f"{title}: {len(own)} as {'language models' if kind == 'causal' else 'reward models'}"
                lines += ["", f"## {heading}", "", *section(own, what)]
    return "\n".join(lines) + "\n"


def section(own: list[Tried], what: str) -> Iterator[str]:
    """Yields the lines about architectures of one path and kind, together if they have nothing to explain."""
    path = own[0].path
    if path.startswith("packed"):
        largest = max(own, key=lambda one: one.difference)
        yield ", ".join(f"`{one.name}`" for one in own) + "."
        yield f"The largest difference of {what} is {largest.difference:.0e} (`{largest.name}`)."
        return
    reasons: dict[str, list[Tried]] = {}
    for one in own:
        reasons.setdefault(reason(one), []).append(one)
    yield "| reason | architectures, difference |\n| --- | --- |"
    for why, alike in sorted(reasons.items(), key=lambda item: -len(item[1])):
        names = ", ".join(f"`{x.name}`" + (f" {x.difference:.0e}" if path else "") for x in alike)
        yield f"| {why} | {names} |"


def reason(one: Tried) -> str:
    """Returns why the architecture has no better path, without names and numbers of its own."""
    if not one.path:
        if "which is neither" in one.why or "which generates no text" in one.why:
            return "no decoder, nor an encoder that is served"
        return re.sub(r"/tmp/[^\s,]+", "it", one.why)[:90].replace("|", "/")
    parts = [part for part in one.why.split("; ") if ": " in part and not part.startswith("attention without")]
    text = re.sub(r" by \d\S*", "", parts[-1].partition(": ")[2] if parts else one.why)
    return re.sub(r"\d+", "N", text).replace("|", "/").strip()


if __name__ == "__main__":
    main()
