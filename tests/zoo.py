"""Small random checkpoints of every architecture and format that is served, and what plain transformers makes of them.

The reference never touches guerdon: one sequence at a time, unpadded, float32, eager attention.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VOCAB_SIZE, HIDDEN, LAYERS, MAX_LENGTH = 300, 32, 2, 256
PAD, BOS, EOS = 0, 1, 2
FIRST_TOKEN = 4
"""Ids below this one are special: padding, BOS, EOS and the step token."""

_IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_HEADS = {"num_hidden_layers": LAYERS, "num_attention_heads": 4}
_LENGTH = {"max_position_embeddings": MAX_LENGTH}
_COMMON = {**_IDS, **_HEADS, **_LENGTH, "hidden_size": HIDDEN, "intermediate_size": 64}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_GPT = {**_IDS, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": MAX_LENGTH}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_BERT = {**_COMMON, "max_position_embeddings": MAX_LENGTH}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GROUPED),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": None}),
    "mistral-sliding": ("mistral", {**_GROUPED, "sliding_window": 16}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 8}),
    "gemma2": (
        "gemma2",
        {**_GROUPED, "head_dim": 8, "sliding_window": 16, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GROUPED,
            "head_dim": 8,
            "sliding_window": 16,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": ("phi3", {**_GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt2": ("gpt2", _GPT),
    "gpt-neox": ("gpt_neox", _COMMON),
    "opt": ("opt", {**_IDS, **_HEADS, **_LENGTH, "hidden_size": HIDDEN, "ffn_dim": 64, "word_embed_proj_dim": HIDDEN}),
    "bert": ("bert", _BERT),
    "roberta": ("roberta", {**_BERT, "pad_token_id": 1, "bos_token_id": 0, "max_position_embeddings": MAX_LENGTH + 2}),
    "electra": ("electra", {**_BERT, "embedding_size": HIDDEN}),
    "distilbert": (
        "distilbert",
        {**_IDS, **_LENGTH, "dim": HIDDEN, "hidden_dim": 64, "n_layers": LAYERS, "n_heads": 4},
    ),
    "modernbert": (
        "modernbert",
        {**_BERT, "local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": BOS, "sep_token_id": EOS},
    ),
    "deberta-v2": (
        "deberta-v2",
        {
            **_BERT,
            "relative_attention": True,
            "position_buckets": 32,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "type_vocab_size": 0,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "falcon": ("falcon", {**_IDS, **_HEADS, "hidden_size": HIDDEN, "alibi": False}),
    "mamba": ("mamba", {**_IDS, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "state_size": 4}),
    "jamba": (
        "jamba",
        {
            **_GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False,
        },
    ),
    "mixtral": ("mixtral", {**_GROUPED, **_EXPERTS, "sliding_window": None}),
    "stablelm": ("stablelm", _GROUPED),
    "gpt-oss": (
        "gpt_oss",
        {
            **_GROUPED,
            **_EXPERTS,
            "head_dim": 8,
            "sliding_window": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **_GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
            "attention_chunk_size": 16, "interleave_moe_layer_step": 2,
        },
    ),
}  # fmt: skip
LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {**_GROUPED, "logit_scale": 0.25}),
    "granite": ("granite", {**_GROUPED, "logits_scaling": 4.0}),
    "phi": ("phi", _GROUPED),
    "opt-projected": (
        "opt",
        {**_IDS, **_HEADS, **_LENGTH, "hidden_size": HIDDEN, "ffn_dim": 64, "word_embed_proj_dim": 16},
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **_GROUPED,
            "mamba_d_ssm": HIDDEN,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "lm_head_multiplier": 0.5,
        },
    ),
}
"""More decoders, for what is peculiar to their way from hidden states to logits."""
_HYBRID = {**_GROUPED, "num_hidden_layers": 4, "head_dim": 8}
_DELTA = {
    **_HYBRID, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": [*["linear_attention"] * 3, "full_attention"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, _DELTA) for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")},
    "nemotron_h": (
        "nemotron_h",
        {
            **_HYBRID,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
            "use_mamba_kernels": False,
        },
    ),
    "falcon_h1": LANGUAGE_MODELS["falcon-h1"],
    "minimax": ("minimax", {**_HYBRID, **_EXPERTS, "block_size": 16}),
    "lfm2": ("lfm2", {**_HYBRID, "layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}),
}
"""Decoders with layers that keep a state, whose responses continue from copies of the prompt's cache."""
PECULIAR: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-with-images": (
        "gemma3",
        {
            "text_config": {"model_type": "gemma3_text", **ARCHITECTURES["gemma3"][1]},
            "vision_config": {
                "model_type": "siglip_vision_model",
                **_HEADS,
                "hidden_size": HIDDEN,
                "intermediate_size": 64,
                "image_size": 16,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "deepseek-v4": (
        "deepseek_v4",
        {
            **_COMMON,
            "head_dim": 16,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "partial_rotary_factor": 0.5,
            "sliding_window": 16,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "hc_mult": 2,
            "layer_types": ["heavily_compressed_attention", "sliding_attention"],
            "mlp_layer_types": ["moe", "moe"],
        },
    ),
    "cohere-compass": (
        "cohere_compass_text",
        {**_GROUPED, "head_dim": 8, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ),
    "ernie": ("ernie", _BERT),
    "megatron-bert": ("megatron-bert", _BERT),
}
"""For a test or two of what each of them alone does."""
ENCODERS = ("bert", "roberta", "electra", "distilbert", "modernbert", "deberta-v2")
DECODERS = tuple(name for name in ARCHITECTURES if name not in ENCODERS)
PATHS = {
    **dict.fromkeys((*DECODERS, *LANGUAGE_MODELS), "packed+shared"),
    **dict.fromkeys(ENCODERS, "packed"),
    **dict.fromkeys((*HYBRIDS, "falcon-h1", "gptj", "falcon"), "shared"),
    **dict.fromkeys(("deberta-v2", "mamba", "jamba"), "single"),
}
"""How each architecture is expected to run; those of the last lines keep a state or are outside the registry."""
KINDS = ("seqcls", "tokcls", "trlx", "trlx-critic", "trl", "openrlhf", "openrlhf-critic")
"""Formats. `tokcls` with `num_labels=2` is a process reward model; a seqcls that transformers has no class for is
written as OpenRLHF would."""


def checkpoint(name: str, folder: Path, kind: str = "seqcls", *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random checkpoint of that name, `overrides` into its config, and returns its folder."""
    return _write(folder, _checkpoint, name, kind, seed=seed, **overrides)


def language_model(name: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random causal language model of that name, `overrides` into its config, and returns its folder."""
    return _write(folder, _language_model, name, seed=seed, **overrides)


_written: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}
_MOST_BYTES = 1 << 20
"""Of a checkpoint that is kept in memory."""


def _write(folder: Path, make: Callable[..., None], *args: Any, **settings: Any) -> Path:
    """Calls `make` to write a model's files; if the same call was made before, writes the same files without a model.

    torch's random numbers go on as after the first call.
    """
    key = repr((make.__name__, args, settings))
    folder.mkdir(parents=True, exist_ok=True)
    if key in _written:
        files, state = _written[key]
        torch.set_rng_state(state)
    else:
        with tempfile.TemporaryDirectory() as place:
            make(Path(place), *args, **settings)
            files = {path.name: path.read_bytes() for path in Path(place).iterdir()}
        if sum(map(len, files.values())) < _MOST_BYTES:
            _written[key] = files, torch.get_rng_state()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _checkpoint(folder: Path, name: str, kind: str, *, seed: int, **overrides: Any) -> None:
    model_type, settings = {**ARCHITECTURES, **HYBRIDS, **PECULIAR}[name]
    config = AutoConfig.for_model(model_type, **{"num_labels": 1, **settings, **overrides})
    if kind == "seqcls" and type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        kind = "openrlhf"
    torch.manual_seed(seed)
    if kind == "seqcls":
        _randomise(AutoModelForSequenceClassification.from_config(config)).save_pretrained(folder)
    elif kind == "tokcls":
        _randomise(AutoModelForTokenClassification.from_config(config)).save_pretrained(folder)
    elif kind in ("openrlhf", "openrlhf-critic"):
        _openrlhf(config, "CriticModel" if kind.endswith("critic") else "RewardModel").save_pretrained(folder)
    else:
        _value_head(config, kind, folder)
    (folder / "zoo.json").write_text(json.dumps({"kind": kind}))


def _language_model(folder: Path, name: str, *, seed: int, **overrides: Any) -> None:
    model_type, settings = {**ARCHITECTURES, **HYBRIDS, **LANGUAGE_MODELS}[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**settings, **overrides})
    model = _randomise(AutoModelForCausalLM.from_config(config))
    model.generation_config.do_sample = True  # some classes' own settings contradict each other otherwise
    model.save_pretrained(folder)


def _randomise(model: Any) -> Any:
    """Weights that make every part matter: also norms' gains, biases, and heads that start at zero."""
    # An encoder's first token is the same in most sequences: what sets them apart must come by attention.
    scale = 0.35 if model.config.model_type in ENCODERS else 0.15
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.5 if "embed" in name or "wte" in name else scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def _openrlhf(config: Any, class_name: str) -> Any:
    """The class that OpenRLHF makes: the base model under its usual name, and a linear head beside it."""
    base_class = transformers.MODEL_MAPPING[type(config)]
    prefix = getattr(config, "value_head_prefix", "score")

    class Model(base_class.__base__):  # type: ignore[misc]
        base_model_prefix = base_class.base_model_prefix

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            setattr(self, self.base_model_prefix, base_class(config))
            setattr(self, prefix, torch.nn.Linear(config.hidden_size, 1, bias=False))
            self.post_init()

    Model.__name__ = class_name
    return _randomise(Model(config))


def _value_head(config: Any, kind: str, folder: Path) -> None:
    model = _randomise(AutoModelForCausalLM.from_config(config))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    width = config.hidden_size
    if kind == "trlx":
        trunk = model.base_model.state_dict()
        state = {f"transformer.{name}": tensor.clone() for name, tensor in trunk.items()}
        state["v_head.weight"] = torch.randn(1, width) * 0.2
    elif kind == "trlx-critic":
        state = {f"base_model.{name}": tensor for name, tensor in state.items()}
        state |= {"v_head.0.weight": torch.randn(2 * width, width) * 0.2, "v_head.0.bias": torch.randn(2 * width)}
        state |= {"v_head.2.weight": torch.randn(1, 2 * width) * 0.2, "v_head.2.bias": torch.randn(1)}
    elif kind == "trl":
        state |= {"v_head.summary.weight": torch.randn(1, width) * 0.2, "v_head.summary.bias": torch.randn(1)}
    else:
        raise ValueError(f"no such kind: {kind}")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if kind == "trl":
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(state, folder / "pytorch_model.bin")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the checkpoint's files."""
    if (folder / "pytorch_model.bin").is_file():
        return torch.load(folder / "pytorch_model.bin", weights_only=True)
    return load_file(folder / "model.safetensors")


def rows(
    seed: int = 0, groups: tuple[tuple[int, int], ...] = ((40, 4), (20, 2), (60, 1)), least: int = 1
) -> list[np.ndarray]:
    """Ragged sequences int64 `[T]` in groups of (prompt length, responses), the responses of `least` to 29 tokens.

    None has a special token. Behind them come a row that is another's prefix, and one that is another's twin.
    """
    random = np.random.default_rng(seed)
    made = []
    for prompt_length, responses in groups:
        prompt = random.integers(FIRST_TOKEN, VOCAB_SIZE, prompt_length)
        lengths = random.integers(least, 30, responses)
        made += [np.concatenate([prompt, random.integers(FIRST_TOKEN, VOCAB_SIZE, n)]) for n in lengths]
    return [*made, made[0][: len(made[0]) // 2].copy(), made[0].copy()]


@torch.no_grad()
def reference(folder: Path, sequences: list[np.ndarray], dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Rewards float32 `[B]`: the single output, or the plain mean of several, of each sequence by itself."""
    return reference_outputs(folder, sequences, dtype).mean(axis=1)


@torch.no_grad()
def reference_outputs(folder: Path, sequences: list[np.ndarray], dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Raw outputs float32 `[B, A]` of each sequence by itself; of a per-token model those at the last token."""
    if json.loads((folder / "zoo.json").read_text())["kind"] != "seqcls":
        return np.stack([outputs[-1] for outputs in reference_tokens(folder, sequences, dtype)])
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return np.stack([model(input_ids=torch.from_numpy(s)[None]).logits[0].float().numpy() for s in sequences])


@torch.no_grad()
def reference_tokens(folder: Path, sequences: list[np.ndarray], dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    """Raw outputs of every token, `B x float32 [T, A]`, each sequence by itself."""
    kind = json.loads((folder / "zoo.json").read_text())["kind"]
    if kind == "tokcls":
        model = AutoModelForTokenClassification.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        return [model(input_ids=torch.from_numpy(s)[None]).logits[0].float().numpy() for s in sequences]
    trunk, state = _trunk(folder, kind, dtype), tensors(folder)
    made = []
    for sequence in sequences:
        hidden = trunk(input_ids=torch.from_numpy(sequence)[None], use_cache=False).last_hidden_state[0].float()
        made.append(_apply(kind, state, hidden, trunk.config).numpy())
    return made


def assert_values(made: list[np.ndarray], folder: Path, sequences: list[np.ndarray]) -> None:
    """Fails if values float32 `B x [T]` stand four times farther from float64's than plain float32 itself does."""
    both = (reference_tokens(folder, sequences, dtype) for dtype in (torch.float64, torch.float32))
    exact, plain = (np.concatenate(values)[:, 0] for values in both)
    _assert_within_rounding(np.concatenate(made), exact, plain)


def assert_rewards(made: list[float], folder: Path, sequences: list[np.ndarray]) -> None:
    """The same of rewards `[B]`."""
    _assert_within_rounding(made, *(reference(folder, sequences, dtype) for dtype in (torch.float64, torch.float32)))


def _assert_within_rounding(made: Any, exact: np.ndarray, plain: np.ndarray) -> None:
    np.testing.assert_allclose(made, exact, atol=4 * np.abs(plain - exact).max() + 1e-6, rtol=0)


def _trunk(folder: Path, kind: str, dtype: torch.dtype) -> Any:
    if kind in ("openrlhf", "openrlhf-critic"):
        return AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    config = AutoConfig.from_pretrained(folder)
    state = tensors(folder)
    if kind == "trlx":
        model = AutoModel.from_config(config, attn_implementation="eager")
        model.load_state_dict({n.removeprefix("transformer."): t for n, t in state.items() if "v_head" not in n})
        return model.to(dtype).eval()
    causal = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    causal.load_state_dict({n.removeprefix("base_model."): t for n, t in state.items() if "v_head" not in n})
    return causal.base_model.to(dtype).eval()


def _apply(kind: str, state: dict[str, torch.Tensor], hidden: torch.Tensor, config: Any) -> torch.Tensor:
    if kind == "trlx":
        return hidden @ state["v_head.weight"].T
    if kind == "trl":
        return hidden @ state["v_head.summary.weight"].T + state["v_head.summary.bias"]
    if kind == "trlx-critic":
        inner = torch.relu(hidden @ state["v_head.0.weight"].T + state["v_head.0.bias"])
        return inner @ state["v_head.2.weight"].T + state["v_head.2.bias"]
    return hidden @ state[f"{getattr(config, 'value_head_prefix', 'score')}.weight"].T


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
)


def tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Saves a byte-level tokenizer: `<pad>`, `<s>`, `</s>` and `<extra_0>`, the bytes, a few merges.

    Asked for special tokens it writes a BOS, as Llama's does; so does its template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<pad>", "<s>", "</s>", "<extra_0>"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("in", "g"), ("e", "r"), ("Ġ", "a"), ("o", "n")]
    words = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<extra_0>"],
        chat_template=chat_template,
    )
    fast.save_pretrained(folder)
    return folder


def configure(folder: Path, file: str = "config.json", **settings: Any) -> Path:
    """Changes the folder's config.json, or another JSON file."""
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder
