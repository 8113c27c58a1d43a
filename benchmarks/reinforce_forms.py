"""Takes REINFORCE steps in this process, and prints a JSON line for each: `trl` (RLOOTrainer) or `guerdon`.

A line has the step's seconds by part, the responses' tokens, and the peak resident memory of the whole process.

A step samples eight responses to each prompt, has them scored by the server, computes log-probs of the policy and of
the reference, and makes one optimiser step by RLOO's loss with the KL in the reward.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BETA, LEARNING_RATE = 0.05, 1e-6
PARTS = ("generation", "reward", "logprobs", "reference", "update")


def trl(args: argparse.Namespace) -> list[dict[str, float]]:
    """Runs TRL's trainer as its users run it on this hardware: padded batches, one after another."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import RLOOConfig, RLOOTrainer

    from guerdon import RewardClient

    seconds: dict[str, float] = {}
    steps: list[dict[str, float]] = []

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - started

    class Timed(RLOOTrainer):
        def _generate_single_turn(self, *given: Any, **named: Any) -> Any:
            with timed("generation"):
                return super()._generate_single_turn(*given, **named)

        def _calculate_rewards(self, *given: Any, **named: Any) -> Any:
            with timed("reward"):
                return super()._calculate_rewards(*given, **named)

        def _get_per_token_logps_and_entropies(self, model: Any, *given: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():  # part of the update
                return super()._get_per_token_logps_and_entropies(model, *given, **named)
            with timed("reference" if model is self.ref_model else "logprobs"):
                return super()._get_per_token_logps_and_entropies(model, *given, **named)

        def _prepare_inputs(self, *given: Any, **named: Any) -> Any:
            with timed("before the update"):
                return super()._prepare_inputs(*given, **named)

    class Steps(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.clear()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = time.perf_counter() - self.started
            steps.append(seconds | {"step": step, "update": step - seconds["before the update"]})

    tokenizer = AutoTokenizer.from_pretrained(args.policy)
    client = RewardClient(f"http://127.0.0.1:{args.port}")

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        asked = [*tokenizer(prompts)["input_ids"]]
        rows = [prompt + response for prompt, response in zip(asked, completion_ids, strict=True)]
        groups = [prompts.index(prompt) for prompt in prompts]
        scores = client.score(tokens=rows, groups=groups, prompt_lengths=[len(prompt) for prompt in asked])
        return list(scores.raise_for_failed())

    texts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    rollouts = len(texts) * args.rollouts
    config = RLOOConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        num_generations=args.rollouts,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=rollouts // args.micro_batch,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens} if args.fixed else None,
        cache_implementation=args.cache,
        use_transformers_continuous_batching=args.continuous,
        beta=BETA,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(args.policy, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "completions/mean_length" in log]
    return [step | {"tokens": mean * rollouts} for step, mean in zip(steps, lengths, strict=True)]


def guerdon(args: argparse.Namespace) -> list[dict[str, float]]:
    """Runs `guerdon reinforce`, with all that a run does."""
    from guerdon.actor import reinforce
    from guerdon.settings.actors import ReinforceRunConfig

    config = ReinforceRunConfig()
    config.policy.model, config.policy.learning_rate = str(args.policy), LEARNING_RATE
    config.policy.betas, config.policy.weight_decay = [0.9, 0.999], 0.0  # TRL's
    config.data.prompts, config.data.num_validation = str(args.prompts), 0
    num_prompts = len(args.prompts.read_text().splitlines())
    config.rollouts.prompts_per_step, config.rollouts.rollouts_per_prompt = num_prompts, args.rollouts
    config.rollouts.max_new_tokens = args.new_tokens
    config.rollouts.min_new_tokens = args.new_tokens if args.fixed else 0
    config.reinforce.kl_coefficient, config.reinforce.global_batch_size = BETA, num_prompts * args.rollouts
    config.remote_rm.reward_model.urls = [f"http://127.0.0.1:{args.port}"]
    config.run.steps, config.run.output_dir = args.steps, str(args.out)
    config.run.save_every, config.run.progress = args.steps + 1, False
    reinforce.train(config)
    lines = [json.loads(line) for line in (args.out / "metrics.jsonl").read_text().splitlines()]
    names = {"generation": "generation", "reward_wait": "reward", "logprobs": "logprobs", "reference": "reference"}
    names |= {"update": "update", "step": "step"}
    return [
        {part: line[f"seconds_{name}"] for name, part in names.items()}
        | {"tokens": line["response_length"] * num_prompts * args.rollouts}
        for line in lines
        if "seconds_step" in line
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=["trl", "guerdon"])
    parser.add_argument("policy", type=Path, help="folder of the policy")
    parser.add_argument("prompts", type=Path, help='JSONL of {"prompt"}; all of them are one step')
    parser.add_argument("out", type=Path, help="an empty folder")
    parser.add_argument("--port", type=int, required=True, help="the reward model's server")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=8, help="responses per prompt")
    parser.add_argument("--new-tokens", type=int, default=150)
    parser.add_argument("--fixed", action="store_true", help="let no response end before --new-tokens")
    parser.add_argument("--micro-batch", type=int, default=16, help="TRL's per_device_train_batch_size")
    parser.add_argument("--cache", help="TRL's cache_implementation")
    parser.add_argument("--continuous", action="store_true", help="TRL's use_transformers_continuous_batching")
    args = parser.parse_args()
    steps = {"trl": trl, "guerdon": guerdon}[args.form](args)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for step in steps:
        print(json.dumps(step | {"peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main()
