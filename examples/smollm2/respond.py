"""Samples responses to prompts from a policy, and measures its KL divergence from the model that it started as."""

from pathlib import Path

import torch
from command import run
from pairs import read_rows, write_rows
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, RESPONSES = 16, 2
"""Prompts in a batch, and responses to each."""


@torch.inference_mode()
def respond(policy: Path, start: Path, prompts: Path, out: Path, tokens: int, temperature: float, seed: int) -> None:
    """Writes a row for each response: prompt, response, its tokens, whether EOS ended it, and the KL in nats."""
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    model, reference = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in (policy, start))
    torch.manual_seed(seed)
    asked = [row["prompt"] for row in read_rows(prompts)]
    rows = []
    for i in tqdm(range(0, len(asked), PROMPTS), desc=f"  {out.stem}", unit="batch"):
        chats = [[{"role": "user", "content": prompt}] for prompt in asked[i : i + PROMPTS]]
        encoded = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, padding=True, return_dict=True, return_tensors="pt"
        )
        made = model.generate(
            **encoded, max_new_tokens=tokens, do_sample=True, temperature=temperature, top_k=0, top_p=1.0,
            num_return_sequences=RESPONSES, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        responses = made.sequences[:, encoded["input_ids"].shape[1] :]
        is_eos = responses == tokenizer.eos_token_id
        mask = is_eos.cumsum(1) - is_eos.long() == 0  # up to the first EOS
        seen = torch.cat([encoded["attention_mask"].repeat_interleave(RESPONSES, 0), mask], 1)
        logits = reference(input_ids=made.sequences, attention_mask=seen, logits_to_keep=len(made.scores) + 1).logits
        log_p, log_q = torch.stack(made.scores, 1).log_softmax(-1), (logits[:, :-1] / temperature).log_softmax(-1)
        kl = ((log_p.exp() * (log_p - log_q)).sum(-1) * mask).sum(1)
        for j, response in enumerate(responses):
            text = tokenizer.decode(response[mask[j]], skip_special_tokens=True)
            figures = {"tokens": mask[j].sum().item(), "ended": is_eos[j].any().item(), "kl": kl[j].item()}
            rows.append({"prompt": asked[i + j // RESPONSES], "response": text, **figures})
    write_rows(rows, out)


if __name__ == "__main__":
    run(respond)
