"""Rollouts by vLLM, an optional extra, on the GPU that trains; its weights are a copy, updated after each step."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from guerdon.actor.rollouts import MAX_BATCH_ROLLOUTS, Draw, Prompt, Rollout, max_response_length
from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.errors import ConfigError, install_command
from guerdon.settings.actors import RolloutConfig

GPU_MEMORY = 0.3
"""The fraction of the GPU's memory for vLLM's weights and caches; the rest is the trainer's."""

LAYER = re.compile(r".*?\.\d+\.")
"""Matches the prefix of the names of a layer's weights."""


class VllmGenerator:
    """Generates with vLLM's engine in this process, whose weights are a copy of the policy's.

    With `min_new_tokens` stop texts end no response before so many tokens either, because vLLM defines it so.
    """

    def __init__(self, policy: LoadedPolicy, config: RolloutConfig) -> None:
        """Raises ConfigError if vLLM is not installed, or cannot report the required log-probs."""
        cuts = config.top_k > 0 or config.top_p < 1.0 or config.repetition_penalty != 1.0
        if config.temperature != 1.0 and cuts:
            raise ConfigError(
                "rollouts.engine is vllm, which at a temperature other than 1 reports log-probs only after "
                "top_k, top_p and repetition_penalty",
                "set rollouts.temperature to 1, or remove these, or set rollouts.engine to transformers",
            )
        if policy.origin.adapter:
            raise ConfigError(
                f"{policy.origin.folder} is an adapter, and vLLM loads whole models only",
                "merge it first: `guerdon convert ADAPTER FOLDER`, or set rollouts.engine to transformers",
            )
        # Runs the engine in this process, so that weights are loaded without a copy through another.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            from vllm import LLM
        except ImportError as e:
            raise ConfigError(
                "rollouts.engine is vllm, which is not installed",
                f"{install_command('vllm')}, on a machine with a GPU, or set rollouts.engine to transformers",
            ) from e
        self._policy = policy
        self._engine = LLM(
            model=str(policy.origin.folder),
            dtype=dtype_name(policy.model.dtype),
            max_model_len=policy.max_length,
            max_num_seqs=config.max_batch_rollouts or MAX_BATCH_ROLLOUTS,
            gpu_memory_utilization=GPU_MEMORY,
            logprobs_mode="raw_logprobs" if config.temperature == 1.0 else "processed_logprobs",
        ).llm_engine
        self.sync()

    def generate(self, prompts: Sequence[Prompt], **draw: Unpack[Draw]) -> Iterator[list[Rollout]]:
        """As `Generator`; the last bits of a rollout's logits may depend on its batch.

        Raises ConfigError if a prompt leaves no room.
        """
        from vllm import SamplingParams, TokensPrompt

        num, config = draw["num"], draw["config"]
        rooms = [max_response_length(prompt, config, self._policy.max_length) for prompt in prompts]
        names = {f"{group}-{index}": (group, index) for group in range(len(prompts)) for index in range(num)}
        groups: dict[int, list[Rollout]] = {}
        try:
            for name, (group, index) in names.items():
                drawn = int(np.random.SeedSequence([*draw["seed"], group, index]).generate_state(1)[0])
                prompt = TokensPrompt(prompt_token_ids=prompts[group].tokens.tolist())
                sampling = SamplingParams(
                    temperature=0.0 if draw.get("greedy") else config.temperature,
                    top_k=config.top_k,
                    top_p=config.top_p,
                    repetition_penalty=config.repetition_penalty,
                    seed=drawn,
                    max_tokens=rooms[group],
                    min_tokens=min(config.min_new_tokens, rooms[group]),
                    stop=config.stop,
                    include_stop_str_in_output=True,
                    stop_token_ids=list(self._policy.eos_token_ids),
                    logprobs=0,
                )
                self._engine.add_request(name, prompt, sampling)
            while names:
                for request in self._engine.step():
                    if not request.finished:
                        continue
                    group, index = names.pop(request.request_id)
                    members = groups.setdefault(group, [])
                    output = request.outputs[0]
                    tokens, is_end = list(output.token_ids), output.finish_reason == "stop"
                    logprobs = [of[token].logprob for token, of in zip(tokens, output.logprobs, strict=True)]
                    made = (prompts[group], group, index, tokens, logprobs, is_end)
                    members.append(Rollout.of(*made, self._policy.tokenizer, self._policy.eos_token_ids))
                    if len(members) == num:
                        yield sorted(groups.pop(group), key=lambda rollout: rollout.index)
        finally:
            self._engine.abort_request(list(names))

    def sync(self) -> None:
        """Copies the policy's weights, with adapters merged, and drops the prefix cache."""
        model = self._engine.model_executor.driver_worker.model_runner.model
        model.load_weights(merged_weights(self._policy.model))
        self._engine.reset_prefix_cache()


def merged_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the model's weights by their names in its checkpoint, with adapters merged.

    transformers keeps some in another form than checkpoints do, such as all experts of a layer in one tensor. They are
    converted back a layer at a time, so that no more than one layer is in memory twice.
    """
    for _, layer in itertools.groupby(_merge_adapters(model), lambda named: LAYER.findall(named[0])[:1]):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _merge_adapters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the same by their names in memory."""
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in model.named_parameters():
        owner, _, rest = name.partition(".base_layer.")
        if rest == "weight" and owner in adapted:
            module: Any = adapted[owner]
            weight = parameter.detach()
            for adapter in module.active_adapters:
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
            yield f"{owner}.weight", weight
        elif rest:
            yield f"{owner}.{rest}", parameter.detach()
        elif not any(name.startswith(f"{adapted_name}.") for adapted_name in adapted):
            yield name, parameter.detach()
