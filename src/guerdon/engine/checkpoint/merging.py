"""Merges an adapter of peft's format into its base model when it is loaded: LoRA, and each kind that peft can merge.

peft does the arithmetic, in float32, on transformers' own model. Nothing of the adapter may be missing or left over,
and the merged model must compute what the unmerged one does: both are run on a few tokens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from guerdon.engine.checkpoint.decoders import find_head, load_trunk
from guerdon.engine.checkpoint.model_config import read_config
from guerdon.engine.checkpoint.stored import (
    StoredAdapter,
    StoredCheckpoint,
    StoredTensor,
    open_checkpoint,
    stored_tensor,
)
from guerdon.engine.checkpoint.tokenizer_files import load_tokenizer
from guerdon.engine.checkpoint.weights import build_model, list_names
from guerdon.engine.low_rank import ALONE
from guerdon.errors import CheckpointError, install_command

PREFIX = "base_model.model."
"""Prefix of peft's tensor names: its module, then the model."""
TOLERANCE = 1e-3
"""Largest accepted difference between the merged and the unmerged model, relative to the outputs' root mean square."""
CLASSIFIERS = ("score", "classifier")
"""Modules that peft saves whole for classification, whether asked to or not."""
_COPIES = ("modules_to_save", "original_module")
"""Names of what peft saves a second time, such as a head's biases where all biases are trained."""
LAST_LAYERS = ("score", "classifier", "classifier.out_proj")
"""Layers of transformers' classification heads whose rows are the labels."""

_KEEPING_THE_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Ways to initialise LoRA that leave the base model's weights as they are."""
_PLAIN_LORA = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_rslora",
}  # fmt: skip
"""Settings of peft's LoRA that leave it two factors and a scale, or show in the names of its tensors; any other,
such as repeated layers, makes it compute something else."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """The result of merging an adapter: a class of transformers, and whether it generates text."""

    what: str
    classes: Any
    for_text: bool = False


CRITIC = "CRITIC"
TASKS = {
    "SEQ_CLS": Task("a reward model (SEQ_CLS)", MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    "TOKEN_CLS": Task("a token classifier (TOKEN_CLS)", MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    "CAUSAL_LM": Task("a causal language model (CAUSAL_LM)", MODEL_FOR_CAUSAL_LM_MAPPING, for_text=True),
    CRITIC: Task("a critic that guerdon trained", MODEL_MAPPING),
}
"""By peft's names."""
_ENDS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
}


@dataclass(frozen=True)
class Merged:
    """A base model with its adapter merged, in float32, and the `config.json` of the two.

    `model` is one of transformers' models; of a critic it is the trunk. `head` has the tensors of another head.
    """

    settings: dict[str, Any]
    model: Any
    head: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors by their names in a checkpoint."""
        is_trunk = self.head and type(self.model) is MODEL_MAPPING[type(self.model.config)]
        prefix = f"{self.model.base_model_prefix}." if is_trunk and self.model.base_model_prefix else ""
        return {f"{prefix}{name}": tensor for name, tensor in self.model.state_dict().items()} | self.head


def merge_adapter(checkpoint: StoredCheckpoint, *, for_text: bool) -> StoredCheckpoint:
    """Returns an adapter's checkpoint as that of a whole model, its tensors in memory in float32; any other unchanged.

    `for_text` wants a language model, otherwise a reward model or a critic. Raises CheckpointError if the adapter is
    for another task, is of a kind that cannot be merged, does not fit its base model, or if peft is missing.
    """
    if checkpoint.adapter is None:
        return checkpoint
    task = find_task(checkpoint)
    has_head = task.for_text and bool(checkpoint.adapter.head)
    if task.for_text != for_text and not has_head:
        remedy = "serve it by serve-teacher or serve-judge" if task.for_text else "serve it by serve or serve-critic"
        raise CheckpointError(f"{checkpoint.folder} is the adapter of {task.what}", remedy)
    merged = merge(checkpoint, checkpoint.adapter)
    state = {name: stored_tensor(tensor) for name, tensor in merged.tensors().items()}
    return dataclasses.replace(checkpoint, settings=merged.settings, tensors=state)


def merge(checkpoint: StoredCheckpoint, adapter: StoredAdapter) -> Merged:
    """Merges an adapter; raises CheckpointError as `merge_adapter`."""
    task = find_task(checkpoint)
    config = _read_peft_config(checkpoint, adapter)
    base = merge_adapter(adapter.base, for_text=find_task(adapter.base).for_text)
    with torch.random.fork_rng([]):  # peft draws initial weights, which are then overwritten
        merged = _merge_critic(checkpoint, base, config) if adapter.facts else _merge(checkpoint, base, config, task)
    if not merged.head:
        merged = dataclasses.replace(merged, head={name: tensor[...] for name, tensor in adapter.head.items()})
    log.info("merged the adapter %s (%s) into %s", checkpoint.folder, adapter.kind, base.folder)
    return merged


# ------------------------------------------------------------------------------------------- what an adapter is


def find_task(checkpoint: StoredCheckpoint) -> Task:
    """Returns the task of a model or an adapter, by its settings, else by its head, else by its base model.

    Raises CheckpointError if peft knows the task and guerdon does not.
    """
    name = _find_task(checkpoint)
    if name not in TASKS:
        raise CheckpointError(
            f"{checkpoint.folder} is an adapter for {name}, which is not served", f"these are: {', '.join(TASKS)}"
        )
    return TASKS[name]


def _find_task(checkpoint: StoredCheckpoint) -> str:
    adapter = checkpoint.adapter
    if adapter is None:
        named = checkpoint.settings.get("architectures") or [""]
        return _task_of_class(named[0]) or "SEQ_CLS"
    if adapter.facts:
        return CRITIC
    if own := adapter.settings.get("task_type"):
        return str(own)
    if own := _task_of_class(str((adapter.settings.get("auto_mapping") or {}).get("base_model_class", ""))):
        return own
    has_head = any(name.startswith(f"{PREFIX}{head}.") for name in adapter.tensors for head in CLASSIFIERS)
    return "SEQ_CLS" if has_head else _find_task(adapter.base)


def _task_of_class(name: str) -> str:
    return next((task for end, task in _ENDS.items() if name.endswith(end)), "")


def _read_peft_config(checkpoint: StoredCheckpoint, adapter: StoredAdapter) -> Any:
    """Returns peft's config; raises CheckpointError for a kind that cannot be merged, and for unknown settings."""
    folder = checkpoint.folder
    try:
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    except ImportError as e:
        raise CheckpointError(
            f"{folder} is an adapter, and peft is not installed, which merges it", install_command("lora")
        ) from e
    settings = copy.deepcopy(adapter.settings)  # peft appends to its lists
    settings.pop("runtime_config", None)
    kind = settings.get("peft_type")
    config_class = {str(known.value): cls for known, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}.get(str(kind))
    if config_class is None:
        raise CheckpointError(f"{folder} is an adapter of a kind that peft does not know: {kind}", "upgrade peft")
    known = {field.name for field in dataclasses.fields(config_class)}
    # peft itself only warns, and computes something else.
    if unknown := sorted(name for name, value in settings.items() if value and name not in known):
        raise CheckpointError(
            f"{folder} has a setting that the installed peft does not know: {unknown[0]}", "upgrade peft"
        )
    try:
        config = config_class(**{name: value for name, value in settings.items() if name in known})
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"{folder}/adapter_config.json is malformed: {e}", "copy it again") from e
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise CheckpointError(
            f"{folder} is an adapter of the kind {kind}, which adds to the input and cannot be merged into weights",
            "train one that changes weights, such as LoRA, or wrap the model in module:function",
        )
    if str(getattr(config, "init_lora_weights", "")).startswith("pissa_niter"):
        raise CheckpointError(
            f"{folder} belongs to a base model that peft changes at random ({config.init_lora_weights})",
            "save it as plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )
    config.inference_mode = True
    return config


# ------------------------------------------------------------------------------------------- beside others


@dataclass(frozen=True)
class Apart:
    """A LoRA adapter that is not merged: `model` has the base model's tensors and the head that the adapter brings.

    `layers` are its two factors by the name of the layer in the trunk that they change, `[r,in]` and, multiplied by
    the adapter's scale, `[out,r]`.
    """

    model: StoredCheckpoint
    layers: dict[str, tuple[Tensor, Tensor]]


def read_apart(checkpoint: StoredCheckpoint, base: StoredCheckpoint) -> Apart:
    """Reads a LoRA adapter that shares `base` with others, without making a model of the base's size.

    Raises CheckpointError as `merge_adapter`, and if the adapter changes more than linear layers of the trunk.
    """
    adapter = checkpoint.adapter
    assert adapter is not None
    named = Path(str(adapter.settings.get("base_model_name_or_path") or base.folder)).expanduser()
    named = next((path for path in (checkpoint.folder / named, named) if path.is_dir()), base.folder)
    if named.resolve() != base.folder.resolve() and open_checkpoint(str(named)).sample != base.sample:
        raise CheckpointError(
            f"the adapter {checkpoint.folder} was trained on {named}, whose weights are not those of {base.folder}",
            "list it under its own base model",
        )
    task, config = find_task(checkpoint), _read_peft_config(checkpoint, adapter)
    kind, start = config.peft_type.value, getattr(config, "init_lora_weights", True)
    usual = type(config)() if kind == "LORA" else config
    names = {field.name for field in dataclasses.fields(config)} - _PLAIN_LORA
    more = sorted(name for name in names if getattr(config, name) != getattr(usual, name))
    if kind != "LORA" or more or start not in _KEEPING_THE_BASE:
        what = ", ".join([kind, *more, *([] if start in _KEEPING_THE_BASE else [str(start)])])
        raise CheckpointError(f"{checkpoint.folder} is {what}, which is more than plain LoRA", ALONE)
    if adapter.facts:
        owns = find_head(base, read_config(base)).owns
        settings, model_class = _critic_settings(base, adapter), MODEL_MAPPING[type(read_config(base))]
        tensors, head = {name: tensor for name, tensor in base.tensors.items() if not owns(name)}, set[str]()
    else:
        settings, tensors, head = _with_head(checkpoint, base, config, task)
        model_class = _class_of(checkpoint, base, task)
    made = dataclasses.replace(checkpoint, settings=settings, tensors=tensors | adapter.head)
    layers, own = {}, _own_tensors(adapter)
    for name in own:
        if name not in head and not name.endswith((".lora_A.weight", ".lora_B.weight")):
            raise CheckpointError(f"the adapter {checkpoint.folder} also changes {name}", ALONE)
    with torch.random.fork_rng([]), _fitting(checkpoint, config):
        with torch.device("meta"):
            model = model_class(read_config(made))
        wrapped = _wrap(checkpoint, model, config, low_cpu_mem_usage=True)
    in_trunk = "" if model_class is MODEL_MAPPING[type(read_config(base))] else f"{model_class.base_model_prefix}."
    for name, layer in wrapped.named_modules():
        if len(getattr(layer, "lora_A", ())):
            path = name.removeprefix(PREFIX)
            down, up = (own[f"{path}.lora_{factor}.weight"][...].float() for factor in "AB")
            layers[path.removeprefix(in_trunk)] = down, up * layer.scaling["default"]
    return Apart(made, layers)


# ------------------------------------------------------------------------------------------------ merging


def _own_tensors(adapter: StoredAdapter) -> dict[str, StoredTensor]:
    """Returns an adapter's tensors by their names in the model, without copies."""
    return {
        name.removeprefix(PREFIX): tensor
        for name, tensor in adapter.tensors.items()
        if not any(f".{copy}." in name for copy in _COPIES)
    }


def _class_of(checkpoint: StoredCheckpoint, base: StoredCheckpoint, task: Task) -> Any:
    """Returns transformers' class of the adapted model; raises CheckpointError if there is none."""
    model_class = task.classes.get(type(read_config(base)), None)
    if model_class is None:
        raise CheckpointError(
            f"{checkpoint.folder} is the adapter of {task.what}, and transformers has no such class for its base model "
            f"{base.folder} ({base.settings['model_type']})",
            "give the base model that it was trained on, by --base",
        )
    return model_class


def _with_head(
    checkpoint: StoredCheckpoint, base: StoredCheckpoint, config: Any, task: Task
) -> tuple[dict[str, Any], dict[str, StoredTensor], set[str]]:
    """Returns the base model's settings and tensors with the head that an adapter brings, and that head's names."""
    assert checkpoint.adapter is not None
    own, model_class, head = _own_tensors(checkpoint.adapter), _class_of(checkpoint, base, task), {}
    settings, tensors = dict(base.settings), dict(base.tensors)
    if not task.for_text:
        saved = {*(CLASSIFIERS if config.task_type else ()), *(getattr(config, "modules_to_save", None) or ())}
        trunk = f"{model_class.base_model_prefix}."
        head = {n: t for n, t in own.items() if not n.startswith(trunk) and saved & set(n.split(".")[:-1])}
        tensors |= head
        labels = [head[f"{layer}.weight"].shape[0] for layer in LAST_LAYERS if f"{layer}.weight" in head]
        if labels:
            settings = {name: value for name, value in settings.items() if name not in ("id2label", "label2id")}
            settings |= {"architectures": [model_class.__name__], "num_labels": labels[-1]}
        tokenizer, _ = load_tokenizer(checkpoint.folder, warns=False)
        if tokenizer is not None and tokenizer.pad_token_id is not None:
            # TRL gives its model the tokenizer's padding token, and saves that of an adapter only with the tokenizer.
            settings["pad_token_id"] = tokenizer.pad_token_id
    return settings, tensors, {*head}


def _merge(checkpoint: StoredCheckpoint, base: StoredCheckpoint, config: Any, task: Task) -> Merged:
    """Merges the adapter of one of transformers' classes, with a head or embeddings of its own."""
    assert checkpoint.adapter is not None
    settings, tensors, _ = _with_head(checkpoint, base, config, task)
    model_class, made = _class_of(checkpoint, base, task), dataclasses.replace(base, settings=settings, tensors=tensors)
    try:
        model = build_model(model_class, read_config(made), tensors, torch.float32)
    except CheckpointError as e:
        what = f"the adapter {checkpoint.folder} does not fit its base model {base.folder}: {e}"
        raise CheckpointError(what, f"{e.help}; or give another base model by --base") from e
    own = _own_tensors(checkpoint.adapter)
    is_resized = _resize_embeddings(model, {name: tensor.shape for name, tensor in own.items()})
    model = _merge_by_peft(checkpoint, model, config, is_resized=is_resized)
    text_config = model.config.get_text_config()
    changed = {name: getattr(text_config, name) for name in ("vocab_size", "tie_word_embeddings")}
    for part in (settings, settings.get("text_config")):
        if isinstance(part, dict):
            part |= changed
    return Merged(settings, model)


def _merge_critic(checkpoint: StoredCheckpoint, base: StoredCheckpoint, config: Any) -> Merged:
    """Merges the adapter of a critic whose trunk and head guerdon has trained."""
    adapter = checkpoint.adapter
    assert adapter is not None
    base_config = read_config(base)
    trunk = load_trunk(base, base_config, find_head(base, base_config), torch.float32)
    head = {name: tensor[...] for name, tensor in adapter.head.items()}
    return Merged(_critic_settings(base, adapter), _merge_by_peft(checkpoint, trunk, config), head)


def _critic_settings(base: StoredCheckpoint, adapter: StoredAdapter) -> dict[str, Any]:
    settings = {name: value for name, value in base.settings.items() if name not in ("id2label", "label2id")}
    settings |= {"architectures": ["CriticModel"], "value_head_prefix": "score", "num_labels": 1}
    return settings | {"normalize_reward": True, "mean": adapter.facts["mean"], "std": adapter.facts["std"]}


def _resize_embeddings(model: Any, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Gives the model as many tokens as the adapter has, with new rows of NaN; returns False if it has as many."""
    embedding = model.get_input_embeddings()
    path = next(name for name, module in model.named_modules() if module is embedding)
    rows = [shape[0] for name, shape in shapes.items() if name.startswith(f"{path}.") and name.endswith(".weight")]
    rows += [shapes[name][-1] for name in shapes if name == f"{path}.lora_embedding_A"]
    before = embedding.num_embeddings
    if not rows or rows[0] == before:
        return False
    model.resize_token_embeddings(rows[0], mean_resizing=False)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not None:
                layer.weight[before:] = torch.nan
    return True


def _merge_by_peft(checkpoint: StoredCheckpoint, model: Any, config: Any, *, is_resized: bool = False) -> Any:
    """Returns the model with the adapter merged; no weight may be NaN if `is_resized`."""
    folder, base_folder = checkpoint.folder, checkpoint.model_folder
    model.config.use_cache = False
    probe = torch.arange(8)[None] % model.get_input_embeddings().num_embeddings
    remedy = "; or merge it yourself and save the whole model"
    with _fitting(checkpoint, config, remedy):
        wrapped = _wrap(checkpoint, model, config)
        unmerged = _run(wrapped, probe)
        model = wrapped.merge_and_unload(safe_merge=True).eval()
        if left := [name for name, part in model.named_modules() if type(part).__module__.startswith("peft.")]:
            raise NotImplementedError(f"it leaves {left[0]} unmerged")
        state = model.state_dict() if is_resized else {}
        if nan := [name for name, x in state.items() if x.is_floating_point() and x.isnan().any()]:
            raise CheckpointError(
                f"the adapter {folder} has more tokens than its base model, and lacks the weights of the new "
                f"ones: {list_names(nan)}",
                "save it with its embeddings (save_embedding_layers=True), or give the resized base model by --base",
            )
        merged = _run(model, probe)
    difference = (merged - unmerged).square().mean().sqrt() / unmerged.square().mean().sqrt()
    if not difference <= TOLERANCE:
        raise CheckpointError(
            f"merged into {base_folder}, the adapter {folder} ({config.peft_type.value}) computes something else: its "
            f"outputs differ by {difference:.1e}",
            "wrap the unmerged model in module:function",
        )
    return model


@contextlib.contextmanager
def _fitting(checkpoint: StoredCheckpoint, config: Any, remedy: str = "") -> Iterator[None]:
    """Makes CheckpointError of whatever peft raises inside the context, and silences its warnings."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointError:
        raise
    # peft raises anything, by the kind of adapter, if it does not fit or cannot be merged.
    except Exception as e:
        reason = (
            f"it lacks {e.args[0]}"
            if isinstance(e, KeyError)
            else " ".join((str(e).split("\n") or [type(e).__name__])[:2]).replace("\t", "")[:300]
        )
        raise CheckpointError(
            f"peft cannot {'merge' if remedy else 'put'} the adapter {checkpoint.folder} ({config.peft_type.value}) "
            f"into {checkpoint.model_folder}: {reason}",
            f"give the base model that it was trained on, by --base{remedy}",
        ) from e


def _wrap(checkpoint: StoredCheckpoint, model: Any, config: Any, **how: Any) -> Any:
    """Returns peft's model with the adapter's weights; raises CheckpointError if one is missing or left over."""
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

    assert checkpoint.adapter is not None
    state = {name: tensor[...] for name, tensor in checkpoint.adapter.tensors.items()}
    own = {id(parameter) for parameter in model.parameters()}
    peft_class = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
    wrapped = peft_class(model, config, autocast_adapter_dtype=False, **how).eval()
    report = set_peft_model_state_dict(wrapped, state, **how)
    saved = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    learnt = {
        name
        for name, parameter in wrapped.named_parameters()
        if id(parameter) not in own and name.replace(".default", "") in saved
    }
    copies = {name for name in state if ".modules_to_save." in name}  # beside embeddings that were resized
    missing, strange = learnt & set(report.missing_keys), set(report.unexpected_keys) - copies
    if missing or strange:
        raise CheckpointError(
            f"the adapter {checkpoint.folder} does not fit {checkpoint.model_folder}: it "
            f"{'lacks' if missing else 'holds'} {list_names(name.removeprefix(PREFIX) for name in missing or strange)}",
            "give the base model that it was trained on, by --base; or save the adapter again",
        )
    return wrapped


@torch.no_grad()
def _run(model: Any, tokens: Tensor) -> Tensor:
    output = model(input_ids=tokens)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
