"""Samples responses to prompts from a policy, and measures its KL divergence from the model that it started as."""

import json
from pathlib import Path

import torch
from command import run
from pairs import read_rows, write_rows

from guerdon import ReinforceActor
from guerdon.settings.actors import PolicyConfig, RolloutConfig

RESPONSES = 2
"""Responses to each prompt."""


def load(policy: Path, rollouts: RolloutConfig, seed: int) -> ReinforceActor:
    """Loads a model, or an adapter that a run has saved and the model that it belongs to."""
    if not (file := policy / "adapter_config.json").exists():
        return ReinforceActor(str(policy), rollouts, seed=seed)
    adapter = json.loads(file.read_text(encoding="utf-8"))
    model, scale = adapter["base_model_name_or_path"], adapter["lora_alpha"]
    actor = ReinforceActor(PolicyConfig(model=model, lora=adapter["r"], lora_alpha=scale), rollouts, seed=seed)
    actor.load(policy)
    return actor


def respond(policy: Path, prompts: Path, out: Path, tokens: int, temperature: float, seed: int) -> None:
    """Writes a row for each response: prompt, response, its tokens, whether EOS ended it, and the KL in nats."""
    actor = load(policy, RolloutConfig(max_new_tokens=tokens, temperature=temperature), seed)
    asked = [row["prompt"] for row in read_rows(prompts)]
    chats = [[{"role": "user", "content": prompt}] for prompt in asked]
    rendered = actor.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    ids = [torch.tensor(actor.tokenizer.text_to_ids(text)) for text in rendered]
    lengths = torch.tensor([len(row) for row in ids])
    actor.prepare_for_inference()
    made = actor.infer({"text": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True), "length": lengths}, RESPONSES)
    rows = made["response_tokens"], made["response_lengths"], made["prompt_lengths"]
    kl = (actor.get_inference_log_probs(*rows) - actor.get_init_policy_logprobs(*rows)).sum(-1)
    answers = []
    for i, (row, end, start) in enumerate(zip(*rows, strict=True)):
        text = actor.tokenizer.ids_to_text(row[start:end])
        figures = {"tokens": (end - start).item(), "ended": made["is_end"][i].item(), "kl": kl[i].item()}
        answers.append({"prompt": asked[i // RESPONSES], "response": text, **figures})
    write_rows(answers, out)


if __name__ == "__main__":
    run(respond)
