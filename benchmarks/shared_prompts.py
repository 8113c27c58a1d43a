"""Measures prompts shared by copies of transformers' cache (the path `shared`), beside one sequence at a time.

  python benchmarks/shared_prompts.py            prints a table: medians over alternating rounds, and the differences

Small random models of architectures whose layers keep a state, so that they cannot run packed: 8 responses of 150
tokens to each prompt of 1,000. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.settings.config import TeacherConfig
from report import machine

PROMPT, RESPONSE, PER_PROMPT, VOCAB_SIZE = 1000, 150, 8, 8192
COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0,
}  # fmt: skip
DELTA = {
    **COMMON, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 176,
    "shared_expert_intermediate_size": 176, "layer_types": [*["linear_attention"] * 3, "full_attention"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "nemotron_h": {
        **COMMON, "layers_block_type": ["mamba", "mlp", "mamba", "attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 2, "use_mamba_kernels": False,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds over both paths (default: 3)")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens of the prompt (default: {PROMPT})")
    parser.add_argument("--response", type=int, default=RESPONSE, help=f"tokens of a response (default: {RESPONSE})")
    parser.add_argument("--responses", type=int, default=PER_PROMPT, help=f"responses (default: {PER_PROMPT})")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    about = machine()
    print(f"{about['date']}, commit {about['commit']}, {about['hardware']}, {torch.get_num_threads()} threads.\n")
    titles = ("model", "states, s: `single`", "`shared`", "times as fast", "log-probs, s: `single`", "`shared`")
    print(f"| {' | '.join((*titles, 'times as fast', 'largest difference'))} |\n|{' --- |' * 8}")
    random = np.random.default_rng(0)
    ids = [random.integers(1, VOCAB_SIZE, n) for n in (args.prompt, *[args.response] * args.responses)]
    sequences = [Sequence(np.concatenate([ids[0], one]), prompt_length=args.prompt) for one in ids[1:]]
    for name, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).save_pretrained(folder)
            engine: Any = build_scorer(TeacherConfig(model=folder))
        assert engine.path == "shared", engine.info.why
        print(f"| {name} {row(engine, sequences, args.rounds)} |", flush=True)


def row(engine: Any, sequences: list[Sequence], rounds: int) -> str:
    """Returns the cells of one model: hidden states, which a reward is read from, and log-probs of the responses."""
    seconds: dict[tuple[str, str], list[float]] = {}
    found: dict[str, np.ndarray] = {}
    for number in range(rounds + 1):
        for path in ("single", "shared"):
            started = time.perf_counter()
            with engine.no_gradients():
                for _ in engine.run(engine.plan([one.tokens for one in sequences], path=path)):
                    pass
            between = time.perf_counter()
            results = engine.score(sequences, path=path)
            ended = time.perf_counter()
            found[path] = np.concatenate([one.answer.logprobs for one in results if isinstance(one, Score)])
            if number:  # the first is to warm up
                seconds.setdefault(("states", path), []).append(between - started)
                seconds.setdefault(("log-probs", path), []).append(ended - between)
    cells = []
    for what in ("states", "log-probs"):
        single, shared = (statistics.median(seconds[what, path]) for path in ("single", "shared"))
        cells += [f"{single:.2f}", f"{shared:.2f}", f"{single / shared:.1f}"]
    return "| " + " | ".join([*cells, f"{np.abs(found['single'] - found['shared']).max():.0e}"])


if __name__ == "__main__":
    main()
