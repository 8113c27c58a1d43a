"""Measures tokens/s of generating several responses per prompt: transformers' ways and guerdon's, alternating.

  python benchmarks/generation.py                          prints a table, and writes it with its figures under --out

A random Llama, random prompts of log-normal lengths, and responses of exactly --tokens tokens, sampled at temperature 1
from the full distribution. The forms: `generate` with each prompt repeated per response, as TRL calls it; with
`num_return_sequences`; with a static cache; `generate_batch`, which is transformers' continuous batching; and guerdon.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from guerdon.actor.generation import TransformersGenerator
from guerdon.actor.rollouts import Prompt
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.logprobs import LanguageEngine
from guerdon.settings.actors import RolloutConfig
from guerdon.settings.config import LanguageModelConfig
from report import machine

VOCAB_SIZE, PAD, FIRST_TOKEN = 8192, 0, 3
SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 688}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-generation"), help="folder of model and results")
    parser.add_argument("--prompts", type=int, default=8, help="prompts (default: 8)")
    parser.add_argument("--rollouts", type=int, default=8, help="responses per prompt (default: 8)")
    parser.add_argument("--tokens", type=int, default=150, help="tokens per response (default: 150)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all forms; medians are shown (default: 3)")
    parser.add_argument("--without", nargs="*", default=[], help="forms to skip")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder, prompts = make_model(args.out), make_prompts(args.prompts)
    made = {name: make(folder, prompts, args) for name, make in FORMS.items() if name not in args.without}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for round_number in tqdm(range(args.rounds + 1), leave=False):
        for name, generate in made.items():
            started = time.perf_counter()
            generate(round_number)
            if round_number:  # the first is to warm up
                seconds[name].append(time.perf_counter() - started)
    results = {
        "about": machine() | {"threads": torch.get_num_threads()},
        "prompts": [len(prompt) for prompt in prompts],
        "rollouts": args.rollouts,
        "tokens": args.tokens,
        "seconds": seconds,
    }
    (args.out / "generation.json").write_text(json.dumps(results, indent=1))
    text = report(results)
    (args.out / "generation.md").write_text(text)
    print(text)


def make_model(out: Path) -> Path:
    """Writes the random model, unless it exists."""
    folder = out / "model"
    if not folder.exists():
        torch.manual_seed(0)
        shape = {"vocab_size": VOCAB_SIZE, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2, **SHAPE}
        LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=2048)).save_pretrained(folder)
    return folder


def make_prompts(count: int) -> list[np.ndarray]:
    """Returns random ids of log-normal lengths with median 180."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(180), 0.4, count), 16, 768).astype(int)
    return [random.integers(FIRST_TOKEN, VOCAB_SIZE, length) for length in lengths]


def padded(prompts: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Returns the prompts left-padded into one table."""
    width = max(map(len, prompts))
    tokens, mask = np.full((len(prompts), width), PAD), np.zeros((len(prompts), width), dtype=np.int64)
    for i, prompt in enumerate(prompts):
        tokens[i, width - len(prompt) :], mask[i, width - len(prompt) :] = prompt, 1
    return {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)}


def settings(args: argparse.Namespace) -> dict[str, object]:
    return {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "do_sample": True, "top_k": 0, "top_p": 1.0}


def generate_repeated(folder: Path, prompts: list[np.ndarray], args: argparse.Namespace) -> Callable[[int], object]:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    inputs = padded([prompt for prompt in prompts for _ in range(args.rollouts)])
    return lambda _: model.generate(**inputs, **settings(args))


def generate_returning(folder: Path, prompts: list[np.ndarray], args: argparse.Namespace) -> Callable[[int], object]:
    model, inputs = LlamaForCausalLM.from_pretrained(folder).eval(), padded(prompts)
    return lambda _: model.generate(**inputs, **settings(args), num_return_sequences=args.rollouts)


def generate_static(folder: Path, prompts: list[np.ndarray], args: argparse.Namespace) -> Callable[[int], object]:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    inputs = padded([prompt for prompt in prompts for _ in range(args.rollouts)])
    more = {"cache_implementation": "static", "disable_compile": True}
    return lambda _: model.generate(**inputs, **settings(args), **more)


def generate_batch(folder: Path, prompts: list[np.ndarray], args: argparse.Namespace) -> Callable[[int], object]:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    rows = [prompt.tolist() for prompt in prompts for _ in range(args.rollouts)]
    # It knows no shortest response: without an EOS none ends early.
    own = {name: value for name, value in settings(args).items() if name != "min_new_tokens"}
    config = GenerationConfig(**own, pad_token_id=PAD, eos_token_id=-1)

    def generate(_: int) -> None:
        results = model.generate_batch(rows, generation_config=config, progress_bar=False)
        lengths = [len(result.generated_tokens) for result in results.values()]
        assert lengths == [args.tokens] * len(rows), lengths

    return generate


def guerdon(folder: Path, prompts: list[np.ndarray], args: argparse.Namespace) -> Callable[[int], object]:
    policy = load_policy(LanguageModelConfig(model=str(folder)))
    generator = TransformersGenerator(policy, LanguageEngine(policy))
    config = RolloutConfig(max_new_tokens=args.tokens, min_new_tokens=args.tokens)
    asked = [Prompt(i, prompt, "") for i, prompt in enumerate(prompts)]
    return lambda number: list(generator.generate(asked, num=args.rollouts, config=config, seed=(number,)))


FORMS = {
    "generate, prompts repeated": generate_repeated,
    "generate, num_return_sequences": generate_returning,
    "generate, static cache": generate_static,
    "generate_batch": generate_batch,
    "guerdon": guerdon,
}


def report(results: dict) -> str:
    """Formats the results as Markdown: medians over the rounds."""
    about, lengths, median = results["about"], results["prompts"], statistics.median
    count = len(lengths) * results["rollouts"] * results["tokens"]
    lines = [
        f"{about['date']}, commit {about['commit']}, {about['hardware']}, {about['threads']} threads, float32. "
        f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens (median {median(lengths):.0f}), "
        f"{results['rollouts']} responses of {results['tokens']} tokens to each. Medians of {{}} rounds.",
        "",
        "| generation | seconds | range | tokens/s | times the first |",
        "| --- | --- | --- | --- | --- |",
    ]
    base = median(next(iter(results["seconds"].values())))
    for name, seconds in results["seconds"].items():
        s, spread = median(seconds), f"{min(seconds):.2f}–{max(seconds):.2f}"
        lines.append(f"| {name} | {s:.2f} | {spread} | {count / s:.0f} | {base / s:.2f} |")
    return "\n".join(lines).format(len(seconds)) + "\n"


if __name__ == "__main__":
    main()
