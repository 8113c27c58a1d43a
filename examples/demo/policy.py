"""Trains a small policy in seconds: a tiny causal Llama on good and bad answers.

About every second answer is to the point, so REINFORCE has something to improve.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.reward_model import topics_of_tokens
from demo.story import PlainStory

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

_SORTED_TOGETHER = 6
"""Batches that are drawn together and grouped by length, which saves padding."""


@dataclass(frozen=True)
class PolicyRecipe:
    """Everything that determines the weights, on the same machine."""

    seed: int = 7
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_steps: int = 800
    batch_size: int = 12
    learning_rate: float = 5e-3


def make(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    recipe: PolicyRecipe = PolicyRecipe(),
    on_step: Callable[[int, float], Any] = lambda *_: None,
) -> None:
    """Trains the policy on the likelihood of answers and saves it in `folder`; calls `on_step(step, loss)` each step.

    `tokenizer` is the reward model's, so that the reward model can score the policy's token ids.
    """
    import torch
    import torch.nn.functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    story = PlainStory(random.Random(recipe.seed))
    torch.manual_seed(recipe.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=2 * recipe.hidden_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_heads,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    start_from_topics(model, topics_of_tokens(tokenizer, story.by_topic()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.num_steps, pct_start=0.1
    )
    batches = _batches(story, tokenizer, recipe.batch_size)
    for step in range(recipe.num_steps):
        tokens, targets = next(batches)
        hidden = model.model(input_ids=tokens).last_hidden_state
        # Logits of the answers only: the loss ignores those of prompts and padding.
        loss = F.cross_entropy(model.lm_head(hidden[targets >= 0]), targets[targets >= 0])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, loss.item())
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def start_from_topics(model: LlamaForCausalLM, topics: torch.Tensor) -> None:
    """Initialises the policy to continue with the topic of the preceding tokens.

    The first columns of the embedding, tied to the output, become `topics` `[V, K]`; the first head of the first layer
    averages them over all earlier tokens. K is at most the size of a head.
    """
    import torch

    num_topics = topics.shape[1]
    attention = model.model.layers[0].self_attn
    assert num_topics <= attention.head_dim
    with torch.no_grad():
        model.get_input_embeddings().weight[:, :num_topics] = 0.3 * topics
        attention.q_proj.weight[: attention.head_dim] = 0.0  # a plain average
        attention.v_proj.weight[:num_topics] = 0.0
        attention.v_proj.weight[:num_topics, :num_topics] = torch.eye(num_topics)
        attention.o_proj.weight[:, :num_topics] = 0.0
        attention.o_proj.weight[:num_topics, :num_topics] = torch.eye(num_topics)


def _batches(
    story: PlainStory, tokenizer: PreTrainedTokenizerFast, size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields tokens and their next tokens, int64 `[size, T]` each; the latter are -1 outside answers."""
    import torch

    while True:
        rows = [_encoded(tokenizer, *story.say()) for _ in range(size * _SORTED_TOGETHER)]
        rows.sort(key=lambda row: len(row[0]))
        groups = [rows[i : i + size] for i in range(0, len(rows), size)]
        story.rng.shuffle(groups)
        for group in groups:
            longest = max(len(ids) for ids, _ in group)
            tokens = torch.full((size, longest), tokenizer.pad_token_id)
            targets = torch.full((size, longest), -1)
            for i, (ids, prompt_length) in enumerate(group):
                tokens[i, : len(ids)] = torch.tensor(ids)
                targets[i, prompt_length - 1 : len(ids) - 1] = torch.tensor(ids[prompt_length:])
            yield tokens, targets


def _encoded(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> tuple[list[int], int]:
    """Returns the tokens of both, and the number of prompt tokens."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    return prompt + tokenizer.encode(answer + "<|end|>", add_special_tokens=False), len(prompt)
