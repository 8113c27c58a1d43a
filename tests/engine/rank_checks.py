"""What a rank of `test_engine_ranks` does: compares a sharded model with what one process computes; prints how.

Arguments: the folder that `test_engine_ranks` has prepared, the models, with commas between them, and layouts, each
`<tensor_parallel>[f]`, f for FSDP.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from guerdon.core import Score, Sequence
from guerdon.distributed.ranks import ALONE, Ranks, start
from guerdon.engine import logprobs as logprobs_module
from guerdon.engine.checkpoint.language_models import LoadedPolicy, load_policy
from guerdon.engine.checkpoint.reward_models import LoadedModel, load_critic, load_reward_model
from guerdon.engine.engine import Engine
from guerdon.engine.generating import DecoderChoice
from guerdon.engine.layers import recompute_activations
from guerdon.engine.logprobs import LanguageEngine
from guerdon.engine.teacher import TeacherEngine
from guerdon.settings.config import LanguageModelConfig, ModelConfig, ParallelConfig, TeacherConfig
from guerdon.teacher_core import LogprobQuery

BUDGET = 80
"""Tokens of a micro-batch: the rows need several of them."""
NEW_TOKENS = 6


def rewards(folder: Path, rows: list[np.ndarray], ranks: Ranks = ALONE) -> np.ndarray:
    engine = Engine(load_reward_model(ModelConfig(model=str(folder), max_batch_tokens=BUDGET), ranks=ranks))
    return np.array([s.reward for s in engine.score([Sequence(r) for r in rows])])


def critic(folder: Path, ranks: Ranks = ALONE) -> tuple[LoadedModel, Engine]:
    loaded = load_critic(ModelConfig(model=str(folder), max_batch_tokens=BUDGET), ranks=ranks)
    return loaded, Engine(loaded)


def values(loaded: LoadedModel, engine: Engine, rows: list[np.ndarray]) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The values of a critic, and the gradients of their squares' sum; then the values once more."""
    made = [s.values for s in engine.score([Sequence(r) for r in rows])]
    loaded.trunk.zero_grad()
    fillers = 0
    for numbers, tables in engine.values(rows):
        loss = sum(v.double().square().sum() for v in tables)
        fillers += not numbers
        (loss if numbers else loss * 0).backward()
    found = gradients(dict(loaded.trunk.named_parameters()), loaded.ranks, loaded.summed_over_tensor_ranks)
    again = [s.values for s in engine.score([Sequence(r) for r in rows])]
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))
    engine.offload()
    engine.onload()
    again = [s.values for s in engine.score([Sequence(r) for r in rows])]
    assert all(np.array_equal(a, b) for a, b in zip(made, again, strict=True))
    return made, found


@contextmanager
def logits_at_once(count: int) -> Iterator[None]:
    """Within it so many logits are computed at a time; some tests call this in a process that has others to run."""
    before, logprobs_module.TABLE = logprobs_module.TABLE, count
    try:
        yield
    finally:
        logprobs_module.TABLE = before


def policy(folder: Path, ranks: Ranks = ALONE, *, frugal: bool = False) -> tuple[LoadedPolicy, LanguageEngine]:
    """A language model that learns; a `frugal` one computes layers twice."""
    loaded = load_policy(LanguageModelConfig(model=str(folder), max_batch_tokens=BUDGET), ranks=ranks)
    loaded.trains = True
    if frugal:
        recompute_activations(loaded.trunk)
    return loaded, LanguageEngine(loaded)


def logprobs(
    loaded: LoadedPolicy, engine: LanguageEngine, rows: list[np.ndarray], *, frugal: bool = False
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The log-probs of the rows' last halves, and the gradients of their squares' sum; few logits if `frugal`."""
    with logits_at_once((7 if frugal else 1000) * loaded.vocab_size):
        return _logprobs(loaded, engine, rows)


def _logprobs(
    loaded: LoadedPolicy, engine: LanguageEngine, rows: list[np.ndarray]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    starts = np.array([len(row) // 2 for row in rows], dtype=np.int64)
    made: list[Any] = [None] * len(rows)
    for members, table, _ in engine.logprobs(rows, starts, 0.7):
        (table.double().square().sum()).backward()
        for member, row in zip(members, table.detach(), strict=True):
            made[member] = row[: len(rows[member]) - starts[member]].numpy()
    prefix = next(name for name, child in loaded.model.named_children() if child is loaded.trunk) + "."
    summed = {prefix + name for name in loaded.summed_over_tensor_ranks}
    found = gradients(dict(loaded.model.named_parameters()), loaded.ranks, summed)
    again: list[Any] = [None] * len(rows)
    with engine.no_gradients():
        for members, table, _ in engine.logprobs(rows, starts, 0.7):
            for member, row in zip(members, table, strict=True):
                again[member] = row[: len(rows[member]) - starts[member]].numpy()
    # Tensor-parallel layers multiply by other code with gradients than without.
    assert all(np.abs(a - b).max() < 1e-6 * max(1, np.abs(a).max()) for a, b in zip(made, again, strict=True))
    return made, found


def taught(folder: Path, rows: list[np.ndarray], ranks: Ranks = ALONE) -> list[np.ndarray]:
    """What a teacher says of each row's second half: log-probs, the likeliest three, and what the head reads."""
    config = TeacherConfig(model=str(folder), max_batch_tokens=BUDGET)
    engine = TeacherEngine(load_policy(config, ranks=ranks.frozen()))
    asked = LogprobQuery(top_k=3, with_hidden=True)
    scores = engine.score([Sequence(row, prompt_length=len(row) // 2, ask=asked) for row in rows])
    said = [score.answer for score in scores if isinstance(score, Score) and score.answer is not None]
    assert len(said) == len(rows)
    return [
        np.concatenate([np.ravel(part) for part in (one.logprobs, one.top_logprobs, one.hidden) if part is not None])
        for one in said
    ]


def generated(loaded: LoadedPolicy, engine: LanguageEngine, prompts: list[np.ndarray]) -> list[list[int]]:
    """Returns the likeliest tokens after each prompt, one prompt after another."""
    choice = DecoderChoice(loaded, engine)
    assert choice.kind == "packed", choice.why
    made = []
    with engine.gathered():
        for prompt in prompts:
            decoder, row = choice.make(), []
            with engine.no_gradients(), decoder.running():
                best = decoder.begin([prompt], [1]).argmax(-1)
                for _ in range(NEW_TOKENS):
                    row.append(int(best))
                    best = decoder.step(best).argmax(-1)
            made.append(row)
    return made


def gradients(parameters: dict[str, Any], ranks: Ranks, partial: Any) -> dict[str, torch.Tensor]:
    """Each parameter's whole gradient, summed over what sees a part of it."""
    found = {}
    for name, parameter in parameters.items():
        # A rank without rows has none, where nothing makes it run in step.
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name in partial:
            own = grad.to_local() if isinstance(grad, DTensor) else grad
            distributed.all_reduce(own, group=ranks.tensor_group)
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if ranks.data_size > 1 and not ranks.fsdp:
            distributed.all_reduce(found[name], group=ranks.data_group)
    return found


def own(ranks: Ranks, count: int, least: int) -> list[int]:
    """This rank's rows: the last data-parallel rank has `least`, the others share the rest."""
    last = ranks.data_size - 1
    if last == 0:
        return list(range(count))
    if ranks.data_rank == last:
        return list(range(count - least, count))
    return list(range(count - least))[ranks.data_rank :: last]


def farthest(got: Any, want: Any) -> float:
    """The largest difference, relative to the largest number that is wanted."""
    pairs = [(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)) for a, b in zip(got, want, strict=True)]
    return max((np.abs(a - b).max() / np.abs(b).max() for a, b in pairs), default=0.0)


def compare(folder: Path, ranks: Ranks, model: str) -> dict[str, float]:
    """What differs from one process, by how much at most."""
    want = torch.load(folder / f"{model}.want", weights_only=False)
    rows, report = want["rows"], {}
    numbers = own(ranks, len(rows), least=1)
    mine = [rows[i] for i in numbers]
    report["rewards"] = farthest([rewards(folder / model, mine, ranks)], [want["rewards"][numbers]])
    judge = critic(folder / model, ranks)
    got, grads = values(*judge, mine)
    report["values"] = farthest(got, [want["values"][i] for i in numbers])
    report["value gradients"] = _norms(grads, want["value gradients"])
    got, grads = values(*judge, rows if ranks.data_rank == 0 else [])
    report["values of one rank alone"] = farthest(got, want["values"] if got else [])
    report["value gradients of one rank alone"] = _norms(grads, want["value gradients"])
    for kind in ("untied", "tied"):
        numbers = own(ranks, len(rows), least=0)
        mine = [rows[i] for i in numbers]
        report[f"taught {kind}"] = farthest(
            taught(folder / f"{model}-{kind}", mine, ranks), [want[f"taught {kind}"][i] for i in numbers]
        )
        learner = policy(folder / f"{model}-{kind}", ranks, frugal=kind == "tied")
        got, grads = logprobs(*learner, mine, frugal=kind == "tied")
        report[f"logprobs {kind}"] = farthest(got, [want[f"logprobs {kind}"][i] for i in numbers])
        report[f"logprob gradients {kind}"] = _norms(grads, want[f"logprob gradients {kind}"])
        tokens = generated(*learner, mine)
        assert tokens == [want[f"generated {kind}"][i] for i in numbers]
    return report


def _norms(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)


def prepare(folder: Path, model: str, rows: list[np.ndarray]) -> None:
    """Writes what one process makes of the rows."""
    want: dict[str, Any] = {"rows": rows, "rewards": rewards(folder / model, rows)}
    want["values"], want["value gradients"] = values(*critic(folder / model), rows)
    for kind in ("untied", "tied"):
        learner = policy(folder / f"{model}-{kind}", frugal=kind == "tied")
        made, grads = logprobs(*learner, rows, frugal=kind == "tied")
        want[f"taught {kind}"] = taught(folder / f"{model}-{kind}", rows)
        want |= {f"logprobs {kind}": made, f"logprob gradients {kind}": grads}
        want[f"generated {kind}"] = generated(*learner, rows)
    torch.save(want, folder / f"{model}.want")


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for layout in sys.argv[3:]:
        ranks = start(ParallelConfig(tensor_parallel=int(layout.rstrip("f")), fsdp=layout.endswith("f")), "cpu")
        for model in sys.argv[2].split(","):
            began = time.monotonic()
            told = ranks.tell_all(compare(folder, ranks, model))
            if ranks.is_leader:
                worst = {what: max(report[what] for report in told) for what in told[0]}
                print("REPORT", json.dumps([layout, model, worst, time.monotonic() - began]), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
