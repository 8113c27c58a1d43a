"""Served models for TRL's trainers, which would load them: a teacher as `teacher_model`, a reference as `ref_model`.

Trainers call both as the torch models that they expect. A trainer that asks a server itself needs neither: see the
page about TRL.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from guerdon.adapters.judge import TIMEOUT_S, read_config, refuse_other_tokenizer
from guerdon.client import RetryPolicy, TeacherClient
from guerdon.errors import InvalidRequest

log = logging.getLogger(__name__)


class ServedTeacher(torch.nn.Module):
    """A frozen teacher for DistillationTrainer and GKDTrainer.

    Only its output head is in the trainer's memory; the server sends hidden states.
    """

    def __init__(self, url: str | Sequence[str], model: str = "teacher", *, timeout_s: float = TIMEOUT_S) -> None:
        """Fetches the head, waiting for the server if need be. A call fails after `timeout_s`."""
        super().__init__()
        self._client = _client(url, model, timeout_s)
        self._set_head()
        head = self._head
        # TRL applies the scale and the cap itself, as it does for a model that it has loaded.
        self.config = PreTrainedConfig(
            vocab_size=head.weight.shape[0], logit_scale=head.logit_scale, final_logit_softcapping=head.soft_cap
        )

    def _set_head(self) -> None:
        self._head = head = self._client.head()
        weight, bias = (_tensor(head.weight), None if head.bias is None else _tensor(head.bias))
        self.lm_head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        self.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.lm_head

    def base_model(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int = 0, **more: Any
    ) -> BaseModelOutput:
        """Returns the states `[B,T,H]` before the head, zeros for pads and for the last token, which predicts nothing.

        Only those of the last `logits_to_keep` tokens are fetched, all if it is 0. Raises InvalidRequest for images.
        """
        _refuse_inputs(more)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        rows = _Rows(input_ids, attention_mask, (columns > len(columns) - logits_to_keep) | (logits_to_keep == 0))
        weight = self.lm_head.weight
        states = torch.zeros(*input_ids.shape, weight.shape[1], dtype=weight.dtype)
        if rows.tokens:
            states = rows.scatter([_tensor(state) for state in self._states(rows)], states)
        return BaseModelOutput(last_hidden_state=states.to(input_ids.device))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> CausalLMOutput:
        """Returns the logits `[B,T,V]`; raises InvalidRequest for images."""
        _refuse_inputs(more)
        states = self.base_model(input_ids, attention_mask).last_hidden_state
        logits = self.lm_head(states) * self._head.logit_scale
        cap = self._head.soft_cap
        return CausalLMOutput(logits=logits if cap is None else cap * torch.tanh(logits / cap))

    def _states(self, rows: _Rows) -> list[np.ndarray]:
        while True:
            answers = self._client.hidden(tokens=rows.tokens, prompt_lengths=rows.prompt_lengths).raise_for_failed()
            if answers.weights_version == self._head.weights_version:
                assert answers.hidden is not None
                return answers.hidden
            log.warning("the teacher's weights changed to %s: fetching its head again", answers.weights_version)
            device = self.lm_head.weight.device
            self._set_head()
            self.lm_head.to(device)


@dataclass
class LabelLogprobs:
    """A reference's answer to TRL: the log-probs `[B,T-1]` of all labels but the first, 0 where one is -100."""

    log_probs: torch.Tensor


class ServedReference(torch.nn.Module):
    """A frozen reference for DPOTrainer, KTOTrainer and `use_reference`; nothing of it is in the trainer's memory."""

    def __init__(
        self,
        url: str | Sequence[str],
        model: str = "teacher",
        *,
        temperature: float = 1.0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Asks the server once, waiting for it if need be. A call fails after `timeout_s`."""
        super().__init__()
        self.temperature = temperature
        self.config = PreTrainedConfig()
        self._client = _client(url, model, timeout_s)
        self._weights_version = self._client.logprobs(tokens=[[0, 0]]).weights_version
        # TRL keeps precomputed log-probs in a file whose name is a hash of the reference's tensors.
        origin = f"{model} {self._weights_version}".encode()
        self.register_buffer("origin", torch.frombuffer(bytearray(origin), dtype=torch.uint8))

    def __call__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, **more: Any
    ) -> LabelLogprobs:
        """Returns the log-probs of the labels that are not -100, which are the tokens themselves.

        It is not `forward`, because TRL replaces that by its own, which would need the model's layers and head. Raises
        InvalidRequest for images.
        """
        _refuse_inputs(more)
        rows = _Rows(input_ids, attention_mask, labels != -100)
        logprobs = torch.zeros(input_ids.shape[0], input_ids.shape[1] - 1)
        if rows.tokens:
            answers = self._client.logprobs(
                tokens=rows.tokens, prompt_lengths=rows.prompt_lengths, temperature=self.temperature
            ).raise_for_failed()
            if answers.weights_version != self._weights_version:
                log.warning(
                    "the reference's weights changed to %s from %s: the KL before and after is not comparable",
                    answers.weights_version, self._weights_version,
                )  # fmt: skip
                self._weights_version = answers.weights_version
            assert answers.logprobs is not None
            logprobs = rows.scatter([torch.from_numpy(row) for row in answers.logprobs], logprobs)
        return LabelLogprobs(logprobs.to(input_ids.device))


def use_reference(trainer: Any, reference: ServedReference, beta: float) -> None:
    """Gives a GRPOTrainer or RLOOTrainer a KL penalty of weight `beta` to a served reference.

    They take no `ref_model`, and load one unless their config's beta is 0: so make the trainer with beta=0, and call
    this before `train`. The log-probs are taken at the trainer's temperature, as TRL's own reference takes them.
    Raises InvalidRequest if the trainer has a reference already, ConfigError if this one has another tokenizer.
    """
    if trainer.beta != 0 or trainer.ref_model is not None:
        raise InvalidRequest(
            f"the trainer was made with beta={trainer.beta} and has loaded a reference: make it with beta=0, and give "
            "beta to use_reference"
        )
    refuse_other_tokenizer(
        trainer.processing_class,
        read_config(reference._client),
        "the reference",
        "serve the policy's own first weights",
    )
    reference.temperature = trainer.temperature
    trainer.ref_model, trainer.beta = reference, beta


class _Rows:
    """The rows of a padded batch without their pads, and where the answers about their asked tokens belong."""

    def __init__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, is_asked: torch.Tensor) -> None:
        """Leaves out rows without asked tokens; `is_asked` is bool `[B,T]` or `[T]`."""
        kept = attention_mask.bool()
        places = kept.cumsum(1) - 1  # of each token in its row without pads
        asked = is_asked & kept & (places > 0)  # nothing predicts a row's first token
        self.tokens: list[np.ndarray] = []
        self.prompt_lengths: list[int] = []
        self._targets: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for row in asked.any(1).nonzero()[:, 0].tolist():
            columns = asked[row].nonzero()[:, 0]
            found = places[row, columns]
            self.tokens.append(input_ids[row, kept[row]].cpu().numpy())
            self.prompt_lengths.append(int(found[0]))
            self._targets.append((row, columns.cpu() - 1, (found - found[0]).cpu()))

    def scatter(self, answers: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Writes each row's answers into `out`, that about the token of a column into the column before."""
        for (row, columns, places), answer in zip(self._targets, answers, strict=True):
            out[row, columns] = answer[places].to(out.dtype)
        return out


def _refuse_inputs(more: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for tensors that the server would not get; zeros, such as token types, say nothing."""
    for name, value in more.items():
        if (isinstance(value, list) and value) or (isinstance(value, torch.Tensor) and value.any()):
            raise InvalidRequest(
                f"the trainer gives {name}, and a served model takes token ids only: load the model into the trainer, "
                "or leave images out of the data set"
            )


def _client(url: str | Sequence[str], model: str, timeout_s: float) -> TeacherClient:
    return TeacherClient(url, model, policy=RetryPolicy.patient(timeout_s, wait_for_start=True))


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Returns the array as a tensor; uint16 are the bits of bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
