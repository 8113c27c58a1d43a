"""Trains a small reward model in seconds: a tiny Llama with the Bradley-Terry loss, on the preferences of story.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.story import NUM_ANSWERS, Story

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
CHAT_TEMPLATE += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@dataclass(frozen=True)
class RewardModelRecipe:
    """Everything that determines the weights, on the same machine."""

    seed: int = 7
    vocab_size: int = 2000
    hidden_size: int = 80
    num_heads: int = 4
    num_steps: int = 150
    prompts_per_step: int = 5
    learning_rate: float = 1.5e-3


def make_tokenizer(sentences: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer; it can encode any UTF-8 text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def bradley_terry_loss(rewards: torch.Tensor) -> torch.Tensor:
    """Returns the mean of -log sigmoid(chosen - rejected) over all pairs; `rewards` `[N, NUM_ANSWERS]` as drawn."""
    import torch.nn.functional as F

    chosen, rejected = zip(*[(c, r) for c in (0, 1) for r in range(c + 1, NUM_ANSWERS)], strict=True)
    return -F.logsigmoid(rewards[:, list(chosen)] - rewards[:, list(rejected)]).mean()


def start_near_topics(
    model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, groups: list[list[str]]
) -> None:
    """Initialises the three layers to compare topics, so that training takes seconds and not hours.

    The first columns of the embedding hold the groups of sentences in which a token occurs, as in latent semantic
    analysis. The first layer averages those of all earlier tokens into the next columns (at <|assistant|> these are the
    prompt's), and marks repeated words. In the second, every token attends to <|assistant|> and multiplies its own
    topics with the prompt's. The third averages the products. All of it is trained.
    """
    import torch

    width, num_groups = model.config.hidden_size, len(groups)
    topics, context = slice(0, num_groups), slice(num_groups, 2 * num_groups)
    names = slice(2 * num_groups, width - 4)  # random, to distinguish tokens
    agrees, repeats, assistant, always = range(width - 4, width)
    eye = torch.eye(width)
    embedding = model.get_input_embeddings().weight
    averaging, comparing, collecting = model.model.layers
    with torch.no_grad():
        embedding *= 5.0
        embedding[:, topics], embedding[:, context], embedding[:, always] = (
            6.0 * topics_of_tokens(tokenizer, groups),
            0.0,
            2.0,
        )
        embedding[tokenizer.convert_tokens_to_ids("<|assistant|>"), assistant] = 6.0
        for layer in (averaging, comparing, collecting):
            layer.self_attn.q_proj.weight.zero_()  # attention starts as a plain average
            layer.self_attn.v_proj.weight.copy_(eye)
            layer.self_attn.o_proj.weight.copy_(eye)
            layer.mlp.down_proj.weight *= 0.2
        averaging.self_attn.o_proj.weight[topics] = 0.0
        averaging.self_attn.o_proj.weight[context, topics] = torch.eye(num_groups)
        averaging.mlp.gate_proj.weight[names] = averaging.mlp.up_proj.weight[names] = eye[names]
        averaging.mlp.down_proj.weight[repeats, names] = 0.1
        head_size = width // model.config.num_attention_heads
        for head in range(0, width, head_size):
            slowest = head + head_size // 2 - 1  # the dimension with the slowest rotary frequency
            comparing.self_attn.q_proj.weight[slowest, always] = 2.0
            comparing.self_attn.k_proj.weight[slowest, assistant] = 1.0
        comparing.self_attn.o_proj.weight[context] *= 3.0
        comparing.mlp.gate_proj.weight[topics] = eye[topics]
        comparing.mlp.up_proj.weight[topics] = eye[context]
        comparing.mlp.down_proj.weight[agrees, topics] = 1.5


def topics_of_tokens(tokenizer: PreTrainedTokenizerFast, groups: list[list[str]]) -> torch.Tensor:
    """Returns how often each token occurs in each group of sentences, as shares `[V, len(groups)]`.

    Tokens of many groups have smaller ones.
    """
    import torch

    counts = torch.zeros(len(tokenizer), len(groups))
    for column, sentences in enumerate(groups):
        for sentence in sentences:
            for variant in (sentence, " " + sentence, " " + sentence.lower()):
                counts[tokenizer.encode(variant, add_special_tokens=False), column] += 1
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    return share * (1 - (counts > 0).float().mean(1, keepdim=True)) ** 2


def make(
    folder: Path,
    recipe: RewardModelRecipe = RewardModelRecipe(),
    on_step: Callable[[int, float], Any] = lambda *_: None,
) -> None:
    """Trains the model and saves it in `folder`; calls `on_step(step, loss)` after each step."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    story = Story(random.Random(recipe.seed))
    by_topic = story.by_topic()
    sentences = [s for group in [*by_topic, *story.phrases.values(), story.common] for s in group]
    torch.manual_seed(recipe.seed)
    tokenizer = make_tokenizer(sentences, recipe.vocab_size)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=3 * recipe.hidden_size,
            num_hidden_layers=3,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_heads,
            max_position_embeddings=8192,
            num_labels=1,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    start_near_topics(model, tokenizer, [*by_topic, story.phrases["rude"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.num_steps, pct_start=0.1
    )
    for step in range(recipe.num_steps):
        drawn = [story.draw() for _ in range(recipe.prompts_per_step)]
        chats = [chat for prompt, answers in drawn for chat in _chats(tokenizer, prompt, answers)]
        batch = tokenizer(chats, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        rewards = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        loss = bradley_terry_loss(rewards.view(recipe.prompts_per_step, NUM_ANSWERS))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, loss.item())
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _chats(tokenizer: PreTrainedTokenizerFast, prompt: str, answers: list[str]) -> list[str]:
    """Applies the chat template to each answer; cuts the end token of the last, which is unfinished."""
    conversations = [[{"role": "user", "content": prompt}, {"role": "assistant", "content": a}] for a in answers]
    *ended, endless = tokenizer.apply_chat_template(conversations, tokenize=False)
    return [*ended, endless.removesuffix("<|end|>")]
