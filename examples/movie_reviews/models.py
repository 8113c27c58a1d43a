"""Trains a small language model, and a reward model that starts as its first layer."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from demo.reward_model import make_tokenizer
from training import train

VOCAB_SIZE = 3000
NOISE = 0.2  # share of random tokens in the reward model's input, against memorising reviews


def make_language_model(rows: list[dict], folder: Path, seed: int) -> None:
    """Trains a Llama of two layers and its tokenizer to write reviews; ignores labels."""
    tokenizer = make_tokenizer([row["text"] for row in rows], VOCAB_SIZE)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=288, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)

    def loss(ids: torch.Tensor, mask: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss

    train(model, loss, tokenizer, rows, folder, epochs=8, learning_rate=4e-3, seed=seed)


def make_reward_model(rows: list[dict], language_model: Path, folder: Path, seed: int) -> None:
    """Trains a classifier with one logit, positive or not; every token is a target, so it can score beginnings."""
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification.from_pretrained(language_model, num_labels=1, num_hidden_layers=1)

    def loss(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        others = torch.randint(len(tokenizer), ids.shape)
        seen = torch.where(torch.rand(ids.shape) < NOISE, others, ids)
        logits = model.score(model.model(input_ids=seen, attention_mask=mask).last_hidden_state)[..., 0]
        return torch.nn.functional.binary_cross_entropy_with_logits(
            logits, labels[:, None].expand_as(logits), weight=mask.float()
        )

    train(model, loss, tokenizer, rows, folder, epochs=5, learning_rate=1e-3, seed=seed)
