"""Offers the calls of NeMo-Aligner's REINFORCE actor as `ReinforceActor`, for your own training loop.

Shapes: B rows, S tokens of the longest (prompt and response), padded on the right. Entry t of `[B, S-1]` belongs to
token t + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.actor.generation import make_generator
from guerdon.actor.remote_teacher import RemoteTeacher
from guerdon.actor.rollouts import Prompt
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.errors import ConfigError
from guerdon.padded_rows import read_rows
from guerdon.settings.actors import PolicyConfig, RolloutConfig, TeacherServer
from guerdon.settings.fields import check_settings
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, PolicyLossStats, reinforce_loss
from guerdon.training.optimiser import moment_bytes
from guerdon.training.policy_trainer import PolicyTrainer, StepReport


class NemoTokenizer:
    """Adds the names of NeMo's tokenizers to one of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_id(self) -> int | None:
        """The id of EOS, None if the tokenizer has none."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    def ids_to_text(self, ids: Sequence[int]) -> str:
        """Decodes the ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def text_to_ids(self, text: str) -> list[int]:
        """Encodes the text, without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # not set yet, as while it is unpickled
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


class ReinforceActor:
    """Generates responses, computes their log-probs and those of the reference, and trains by REINFORCE.

        actor = ReinforceActor(PolicyConfig(model="..."), RolloutConfig(max_new_tokens=64))
        actor.prepare_for_inference()
        rollouts = actor.infer({"text": prompts, "length": lengths})
        ...                                    # rewards, log-probs, a baseline
        actor.prepare_for_training()
        loss, metrics = actor.get_loss_and_metrics(batch)
        report = actor.finish_training_step()  # clips the gradient and makes the optimiser step

    All tensors are on the CPU. `tokenizer` has transformers' names and NeMo's, such as `eos_id`. What `infer` samples
    depends on `seed`, the number of optimiser steps (skipped ones do not count), and how often it was called since the
    last step or `load`: a loop that resumes from a checkpoint saved right after a step samples the same responses.
    """

    def __init__(
        self,
        policy: PolicyConfig | str,
        rollouts: RolloutConfig | None = None,
        *,
        seed: int = 0,
        reference: TeacherServer | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        """Loads the policy from its settings, folder or hub id; raises ConfigError and CheckpointError.

        `micro_batch_size` is NeMo-Aligner's `model.micro_batch_size`, on which its loss depends: see
        `get_loss_and_metrics`.

        A teacher's server may be the reference, which then takes no memory here; waits for it, and raises StartError if
        it does not come.
        """
        if not isinstance(policy, PolicyConfig | str):
            raise ConfigError(
                f"ReinforceActor got {type(policy).__name__} for its policy; NeMo-Aligner's (cfg, trainer) names no "
                "checkpoint that transformers loads",
                "give PolicyConfig and RolloutConfig; docs/coming_from/nemo_aligner.md has the settings that these are",
            )
        self.policy_config = PolicyConfig(model=policy) if isinstance(policy, str) else policy
        self.rollout_config = rollouts or RolloutConfig()
        self.micro_batch_size = micro_batch_size
        check_settings(self.policy_config)
        check_settings(self.rollout_config, "rollouts.")
        if self.rollout_config.environment is not None:
            raise ConfigError(
                "rollouts.environment is set, and what `infer` returns does not say which tokens the environment wrote",
                "leave it out, since a loop would learn them as the policy's; `guerdon reinforce` has environments",
            )
        loaded = load_policy(self.policy_config, moment_bytes=moment_bytes(self.policy_config))
        self._reference: RemoteTeacher | None = None
        if reference is not None and reference.url is not None:
            self._reference = RemoteTeacher(reference, self.rollout_config.temperature, "reference")
            self._reference.wait_ready()
            if loaded.tokenizer is not None:
                self._reference.check_tokenizer(loaded.tokenizer)
        self.trainer = PolicyTrainer(loaded, self.policy_config, seed=seed, keeps_reference=self._reference is None)
        self.generator = make_generator(self.trainer, self.rollout_config)
        self.tokenizer = None if loaded.tokenizer is None else NemoTokenizer(loaded.tokenizer)
        self.pad_id = loaded.eos_token_ids[0] if loaded.eos_token_ids else loaded.pad_token_id
        self._seed = seed
        self._num_inferred, self._inferred_at = 0, 0

    # ---------------------------------------------------------------------------------------- generation

    def prepare_for_inference(self) -> None:
        """Gives the generator the newest weights; offloads the optimiser if `offload_optimizer` is set."""
        self.generator.sync()
        if self.policy_config.offload_optimizer:
            self.trainer.offload_optimizer()

    def infer(self, inference_batch: Mapping[str, Tensor], num_rollouts: int = 1) -> dict[str, Tensor]:
        """Samples `num_rollouts` responses to each of the prompts `text` int64 `[b, T]` of `length` `[b]`.

        The responses to one prompt follow each other: `response_tokens` int64 `[B, S]`, prompt and response, padded
        with EOS; `response_lengths` (with the prompt) and `prompt_lengths`, int64 `[B]`; `is_end` bool `[B]`, False
        where a response was cut.
        """
        padded, lengths = read_rows(inference_batch["text"], inference_batch["length"])
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        texts = ["" if self.tokenizer is None else self.tokenizer.decode(row) for row in rows]
        prompts = [Prompt(i, row, text) for i, (row, text) in enumerate(zip(rows, texts, strict=True))]
        step = self.trainer.step_count
        self._num_inferred = self._num_inferred + 1 if self._inferred_at == step else 1
        self._inferred_at = step
        seed = (self._seed, step, self._num_inferred)
        groups = list(self.generator.generate(prompts, num=num_rollouts, config=self.rollout_config, seed=seed))
        made = sorted((rollout for group in groups for rollout in group), key=lambda r: (r.group, r.index))
        tokens = torch.full((len(made), max(len(rollout.tokens) for rollout in made)), self.pad_id)
        for out, rollout in zip(tokens, made, strict=True):
            out[: len(rollout.tokens)] = torch.from_numpy(rollout.tokens)
        return {
            "response_tokens": tokens,
            "response_lengths": torch.tensor([len(rollout.tokens) for rollout in made]),
            "prompt_lengths": torch.tensor([rollout.prompt_length for rollout in made]),
            "is_end": torch.tensor([rollout.is_end for rollout in made]),
        }

    def get_inference_log_probs(
        self, response_tokens: Tensor, response_lengths: Tensor | None = None, prompt_lengths: Tensor | None = None
    ) -> Tensor:
        """Returns the log-probs float32 `[B, S-1]` of the tokens `[B, S]` at the sampling temperature.

        With `response_lengths` the log-probs of the padding are 0 and are not computed; with `prompt_lengths` those of
        the prompts, too. `infer` returns both.
        """
        return self._logprobs(response_tokens, response_lengths, prompt_lengths, of_reference=False)

    def get_init_policy_logprobs(
        self, response_tokens: Tensor, response_lengths: Tensor | None = None, prompt_lengths: Tensor | None = None
    ) -> Tensor:
        """Returns the reference's log-probs: the served one's, or the first policy's, before any step or checkpoint."""
        return self._logprobs(response_tokens, response_lengths, prompt_lengths, of_reference=True)

    def finish_inference(self) -> None:
        """No-op: `prepare_for_training` moves the training state back."""

    # ---------------------------------------------------------------------------------------- training

    def prepare_for_training(self) -> None:
        """Moves the optimiser's state back to the device if `offload_optimizer` is set."""
        if self.policy_config.offload_optimizer:
            self.trainer.onload_optimizer()

    def prepare_for_training_step(self) -> None:
        """Does nothing: gradients are 0 after each `finish_training_step`."""

    def get_loss_and_metrics(
        self, batch: Mapping[str, Tensor], forward_only: bool = False
    ) -> tuple[float, dict[str, float]]:
        """Returns the loss of one global batch and its metrics; accumulates the gradients unless `forward_only`.

        The loss is the mean over the micro-batches, by default one, of

            sum_i sum_t mask_it * -logp_it * (rewards_with_kl_i - baseline_i) / sum mask

        and 0 of a micro-batch without any response that has ended. So a truncated response counts beside one that has
        ended, and alone, as with a `micro_batch_size` of 1, it does not.

        `response_tokens` int64 `[B, S]`; `mask` `[B, S-1]`, not 0 at the response's actions, without gaps;
        `rewards_with_kl` and `baseline` float32 `[B]`; `is_end` `[B]`, if given, is False for truncated responses.
        Raises ValueError if a tensor has another shape, or B is no multiple of `micro_batch_size`.
        """
        batch = {name: tensor.detach().cpu() for name, tensor in batch.items()}
        _check_shapes(batch)
        weights = self._token_weights(batch)
        taken = (weights > 0).any(-1)
        mask, tokens = weights[taken], batch["response_tokens"][taken]
        advantages = (batch["rewards_with_kl"] - batch["baseline"]).float()
        # A row's actions begin where its prompt ends; nothing after the last action is computed.
        starts = (mask > 0).int().argmax(-1) + 1
        ends = mask.shape[1] - (mask > 0).flip(-1).int().argmax(-1) + 1
        loss = _Loss(_from_first(mask, starts, ends), advantages[taken])
        rows = [row[:end].numpy() for row, end in zip(tokens, ends.tolist(), strict=True)]
        temperature = self.rollout_config.temperature
        if not rows:
            stats = PolicyLossStats()
        elif forward_only:
            made = self.trainer.logprobs(rows, starts.numpy(), temperature)
            _, stats = loss(made.logprobs, None, np.arange(len(rows)))
        else:
            stats = self.trainer.accumulate(rows, starts.numpy(), loss, temperature=temperature)
        return stats.loss, {"loss": stats.loss}

    def finish_training_step(self) -> StepReport:
        """Clips the gradients by gradient_clip_val, and makes a step of the optimiser and of the schedule."""
        return self.trainer.apply()

    def finish_training(self) -> None:
        """Does nothing: no gradients are kept."""

    # ---------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path | str) -> None:
        """Saves policy, optimiser and schedule in an existing, empty folder, which transformers can load, too."""
        self.trainer.save(Path(folder))

    def load(self, folder: Path | str) -> None:
        """Restores a `save`, bit for bit; the reference remains the policy as first loaded."""
        self.trainer.load(Path(folder))
        self._num_inferred = 0

    # ---------------------------------------------------------------------------------------- internals

    def _token_weights(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Returns each token's share of the loss `[B, S-1]`; those of a micro-batch that counts have the same."""
        mask = (batch["mask"] != 0).float()
        size = self.micro_batch_size or len(mask)
        if len(mask) % size:
            raise ValueError(f"a batch of {len(mask)} rows cannot be split into micro-batches of {size}")
        is_end = batch.get("is_end", torch.ones(len(mask))) != 0
        num_tokens = mask.sum(-1).view(-1, size)
        has_ended = (num_tokens * is_end.view(-1, size)).sum(-1) > 0
        shares = has_ended / (num_tokens.sum(-1).clamp(min=1) * len(has_ended))
        return mask * shares.repeat_interleave(size)[:, None]

    def _logprobs(
        self, tokens: Tensor, lengths: Tensor | None, prompt_lengths: Tensor | None, *, of_reference: bool
    ) -> Tensor:
        count, width = tokens.shape
        padded, ends = read_rows(tokens, np.full(count, width) if lengths is None else lengths)
        starts = torch.ones(count, dtype=torch.int64) if prompt_lengths is None else prompt_lengths.reshape(-1).cpu()
        rows = [row[:end] for row, end in zip(padded, ends, strict=True)]
        temperature = self.rollout_config.temperature
        made: Sequence[Tensor] | Tensor
        if of_reference and self._reference is not None:
            made = [torch.from_numpy(row) for row in self._reference.logprobs(rows, starts.numpy())]
        elif of_reference:
            made = self.trainer.reference_logprobs(rows, starts.numpy(), temperature)
        else:
            made = self.trainer.logprobs(rows, starts.numpy(), temperature).logprobs
        placed = torch.zeros(count, width - 1)
        for out, row, start, end in zip(placed, made, starts.tolist(), ends.tolist(), strict=True):
            out[start - 1 : end - 1] = row[: end - start]
        return placed


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Loss:
    """Computes REINFORCE's loss for `PolicyTrainer.accumulate`.

    `mask` `[B, R]` begins at the response, and has each token's share of the loss.
    """

    mask: Tensor
    advantages: Tensor

    def __call__(self, logprobs: Tensor, _: Tensor | None, members: np.ndarray) -> tuple[Tensor, PolicyLossStats]:
        at, width = torch.from_numpy(members), logprobs.shape[1]
        mask = self.mask[at, :width].to(logprobs.device)
        advantages = self.advantages[at].to(logprobs.device)[:, None].expand_as(mask)
        return reinforce_loss(logprobs, advantages, mask, Aggregation("token-mean", GlobalCounts(1.0)))


def _check_shapes(batch: Mapping[str, Tensor]) -> None:
    count, width = batch["response_tokens"].shape
    wanted = {"mask": (count, width - 1), "rewards_with_kl": (count,), "baseline": (count,), "is_end": (count,)}
    for name, shape in wanted.items():
        if name in batch and batch[name].shape != shape:
            raise ValueError(
                f"{name} has shape {list(batch[name].shape)} beside response_tokens of shape {[count, width]}: give "
                f"{list(shape)}, rewards [B, 1] by squeeze(1)"
            )


def _from_first(mask: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Returns each row of a mask `[B, S-1]` from its first action on, `[B, R]`."""
    made = torch.zeros(len(mask), int((ends - starts).max()) if len(mask) else 0)
    for out, row, start, end in zip(made, mask, starts.tolist(), ends.tolist(), strict=True):
        out[: end - start] = row[start - 1 : end - 1]
    return made
