"""What every rank of `test_training_ranks.py` does, in one layout after another; one process does the same."""

import dataclasses
import functools
import hashlib
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain import request, tree
from policies import rollouts
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import zoo
from guerdon.core import Sequence
from guerdon.critic_core import Gae
from guerdon.distributed.ranks import ALONE, Ranks, start
from guerdon.distributed.shards import shards
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.reward_models import load_critic, load_reward_model
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError, ConfigError, ServerFault, StorageFailed, TrainFailed
from guerdon.settings.actors import PolicyConfig
from guerdon.settings.config import CriticConfig, EngineConfig, ModelConfig, ParallelConfig
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, PolicyLossStats, ppo_loss, reinforce_loss
from guerdon.training.combined import CriticWithReward
from guerdon.training.critic_trainer import CriticTrainer
from guerdon.training.policy_trainer import PolicyTrainer

LAYOUTS = {
    "data": ParallelConfig(),
    "tensor": ParallelConfig(tensor_parallel=2),
    "fsdp": ParallelConfig(fsdp=True),
    "tensor-fsdp": ParallelConfig(tensor_parallel=2, fsdp=True),
}
MORE: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "lora": {"lora": 4},
    "8bit": {"optimizer": "adamw_8bit"},
    "frozen": {"frozen": r".*\.self_attn\..*"},
}
ROWS = zoo.rows(0, ((40, 4), (20, 3), (30, 3)))
NUM_STEPS = 2
REQUEST = request(ROWS)
REWARDED = dataclasses.replace(
    REQUEST, rewards=np.arange(12, dtype=np.float32)[:, None], gae=Gae(0.9, 1.0, lam_alpha=0.5)
)
TREES = tree()
TOKENS, PROMPTS, _ = rollouts()
LENGTHS = torch.tensor([len(row) for row in TOKENS]) - torch.from_numpy(PROMPTS)
MASK = (torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]).float()
ADVANTAGES = torch.linspace(-1, 1, len(TOKENS))[:, None].expand_as(MASK)


def critic(folder: Path, ranks: Ranks = ALONE, **settings: Any) -> CriticTrainer:
    """A critic of which one step is seen, in global batches of 5 that micro-batches cut."""
    config = CriticConfig(
        **{"model": str(folder), "learning_rate": 1e-3, "global_batch_size": 5, "max_batch_tokens": 50, **settings}
    )
    engine = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
    model = ModelConfig(**engine, model=config.model, name=f"{config.name}_infer")
    return CriticTrainer(load_critic(model, ranks=ranks), config, ranks)


def policy(folder: Path, ranks: Ranks = ALONE, **settings: Any) -> PolicyTrainer:
    """A policy of which one step is seen, with a reference."""
    config = PolicyConfig(**{"model": str(folder), "learning_rate": 1e-3, "max_batch_tokens": 100, **settings})
    return PolicyTrainer(load_policy(config, moment_bytes=8, ranks=ranks), config, ranks=ranks)


def whole(tensor: Tensor) -> Tensor:
    """A copy with the parts of all ranks, which must all call it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def state(trainer: CriticTrainer | PolicyTrainer) -> dict[str, dict[str, Tensor]]:
    """Weights and the optimiser's state."""
    weights = {name: whole(t) for tensors in trainer._stored_weights().values() for name, t in tensors.items()}
    return {"weights": weights, "optimiser": {n: whole(t) for n, t in trainer._optimiser.tensors().items()}}


def same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> bool:
    """Whether all is bitwise equal."""
    return a.keys() == b.keys() and all(
        a[kind].keys() == b[kind].keys() and all(torch.equal(a[kind][n], b[kind][n]) for n in a[kind]) for kind in a
    )


def digest(state: dict[str, dict[str, Tensor]]) -> str:
    """Returns a digest of every bit."""
    made = hashlib.sha256()
    for tensors in state.values():
        for tensor in tensors.values():
            made.update(tensor.numpy().tobytes())
    return made.hexdigest()


def reinforce(logprobs: Tensor, _: Tensor | None, at: np.ndarray) -> tuple[Tensor, PolicyLossStats]:
    """Asked with the rows' numbers among all rows."""
    return reinforce_loss(logprobs, ADVANTAGES[at], MASK[at], Aggregation("token-mean", GlobalCounts.of(MASK)))


def ppo(old: Tensor) -> Callable[..., tuple[Tensor, PolicyLossStats]]:
    """With the log-probs before the first step."""

    def loss(logprobs: Tensor, entropies: Tensor | None, at: np.ndarray) -> tuple[Tensor, PolicyLossStats]:
        return ppo_loss(
            logprobs,
            old[at],
            ADVANTAGES[at],
            MASK[at],
            Aggregation("token-mean", GlobalCounts.of(MASK)),
            entropies=entropies,
            entropy_coefficient=0.01,
        )

    return loss


# ------------------------------------------------------------------------------------------- what is done


def learn(critic_folder: Path, policy_folder: Path, out: Path, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Trains a critic and a policy, saves both below `out`, and tells what came of it; trainers are returned, too."""
    made = critic(critic_folder, ranks)
    estimated = made.estimate(REWARDED)
    before = dataclasses.asdict(made.validate(REQUEST))
    trees = dataclasses.asdict(made.validate(TREES))
    report = dataclasses.asdict(made.train(REQUEST))
    learner = policy(policy_folder, ranks)
    own = learner.logprobs(TOKENS, PROMPTS, 0.7, with_entropies=True)
    steps = [learner.step(TOKENS, PROMPTS, reinforce) for _ in range(NUM_STEPS)]
    clipped = ppo(own.logprobs)
    steps += [learner.step(TOKENS, PROMPTS, clipped, temperature=0.7, with_entropies=True) for _ in range(NUM_STEPS)]
    told: dict[str, Any] = {
        "validate": before,
        "trees": trees,
        "report": report,
        "version": made.weights_version,
        "counts": {k: v for k, v in made.state().items() if k.startswith("num_")},
        "steps": [dataclasses.asdict(step) for step in steps],
    }
    for other in ranks.tell_all(told):
        assert repr(other) == repr(told), (other, told)
    told |= {
        "estimates": [torch.from_numpy(x) for x in (estimated.returns, estimated.advantages, estimated.prev_values)],
        "old": own.logprobs.clone(),
        "entropies": own.entropies.clone(),
        "reference": learner.reference_logprobs(TOKENS, PROMPTS, 0.7).clone(),
        "critic": state(made),
        "policy": state(learner),
    }
    for kind, trainer in (("critic", made), ("policy", learner)):
        own = digest(told[kind])
        assert set(ranks.tell_all(own)) == {own}, kind  # bitwise the same on all ranks
        if ranks.is_leader:
            (out / kind).mkdir(parents=True)
        ranks.agree()
        trainer.save(out / kind)
    return told | {"trainers": {"critic": made, "policy": learner}}


def leave_together(made: CriticTrainer, ranks: Ranks) -> None:
    """The packed path fails on one rank alone: all leave it, and the request is done whole."""
    before, values = made._optimiser.step, made.engine.values

    def breaks(rows: list[np.ndarray]) -> Any:
        if made.engine.path != "single" and ranks.rank == 1:
            raise RuntimeError("view size is not compatible")
        return values(rows)

    made.engine.values = breaks  # type: ignore[method-assign]
    report = made.train(REQUEST)
    made.engine.values = values  # type: ignore[method-assign]
    told = ranks.tell_all((made.engine.path, made.engine.info.why, made.weights_version, digest(state(made))))
    assert all(other == told[0] for other in told) and told[0][0] == "single", told
    assert "rank 1 on" in told[0][1] and "view size is not compatible" in told[0][1], told
    assert made._optimiser.step == before + report.num_steps > before


def fail_alone(made: CriticTrainer, ranks: Ranks) -> None:
    """A rank of data parallelism fails in the second global batch: all say the same, and the next request works."""
    before, values, calls = made._optimiser.step, made.engine.values, []

    def breaks(rows: list[np.ndarray]) -> Any:
        calls.append(1)
        if len(calls) > 1 and ranks.rank == 1:  # by the plain path as well, and so it is not left
            raise RuntimeError("boom")
        return values(rows)

    made.engine.values = breaks  # type: ignore[method-assign]
    try:
        made.train(REQUEST)
        raise AssertionError("it did not fail")
    except TrainFailed as e:
        failed = e
    made.engine.values = values  # type: ignore[method-assign]
    assert (failed.num_steps, made._optimiser.step) == (1, before + 1), failed
    assert made.engine.path == "packed+shared" and len(calls) == 3
    assert "boom" in str(failed) and "rank 1 on" in str(failed) and "the 1 before it are kept" in str(failed), failed
    told = ranks.tell_all((str(failed), failed.num_steps, made.weights_version, made.engine.score([Sequence(ROWS[0])])))
    assert all(repr(other) == repr(told[0]) for other in told), told
    assert made.train(REQUEST, 1).num_steps == 1


def more_settings(critic_folder: Path, kinds: tuple[str, ...], ranks: Ranks = ALONE) -> dict[str, Any]:
    """Returns each kind's weights (the masters of half precision) after some steps, or why the layout refuses it."""
    told: dict[str, Any] = {}
    for kind in kinds:
        try:
            made = critic(critic_folder, ranks, **MORE.get(kind, {}))
        except ConfigError as e:
            told[kind] = f"{e} {e.help}"
            continue
        made.train(REQUEST, 1)
        if kind == "bfloat16":
            moved(made.engine)
        made.train(REQUEST, 1)
        groups = [g for m in fsdp_modules(made.engine) for g in m._get_fsdp_state()._fsdp_param_groups]
        assert kind != "bfloat16" or all(group._reduce_dtype == torch.float32 for group in groups)
        kept = state(made)
        masters = {n.removesuffix("/master"): t for n, t in kept["optimiser"].items() if n.endswith("/master")}
        told[kind] = kept["weights"] | {n.replace("trunk.", "model.", 1): t for n, t in masters.items()}
    return told


def moved(engine: Engine) -> None:
    """Moves the trunk as to another device and back; on a CPU that makes other tensors only by another dtype."""
    dtype = engine.dtype
    engine.offload()
    engine.trunk.to(torch.float64)
    engine.trunk.to(dtype)


def fsdp_modules(engine: Engine) -> list[Any]:
    return [module for module in engine.trunk.modules() if isinstance(module, FSDPModule)]


def swap(made: CriticTrainer, critic_folder: Path, ranks: Ranks) -> None:
    """If one rank cannot swap a model in, or has no rows for it, all ranks do the same."""
    load_reward = functools.partial(load_reward_model, ModelConfig(model=str(critic_folder)), ranks=ranks)
    both = CriticWithReward(made, lambda: Engine(load_reward()), "swap", ranks)
    engines = {"critic": both._critic.engine, "reward model": both._reward}

    def there() -> str:
        name = next((name for name, engine in engines.items() if engine is both._on_device), "")
        assert set(ranks.tell_all(name)) == {name}
        return name

    def score(count: int) -> set[str]:
        # The last part has none where there is but one row.
        own = shards(ROWS[:count], ranks.data_size)[ranks.data_rank]
        made = both.score([Sequence(ROWS[i]) for i in own]) if own or ranks.in_step else []
        return {str(one) if isinstance(one, ServerFault) else "" for one in made}

    assert there() == "reward model"
    for name in ("critic", "reward model"):
        onload = engines[name].onload

        def fails() -> None:
            raise torch.OutOfMemoryError("no room")

        if ranks.rank % 2:
            engines[name].onload = fails  # type: ignore[method-assign]
        (told,) = score(len(ROWS))
        assert f"the {name} cannot be moved to the device (OutOfMemoryError: no room)" in told, told
        assert there() == "", name
        engines[name].onload = onload  # type: ignore[method-assign]
        assert score(len(ROWS)) == {""}
        assert there() == "reward model"
        both.train(REQUEST, 1)
        assert there() == "critic"
    assert score(1) <= {""}
    # Other parts of tensor parallelism alone share nothing with it.
    assert (ranks.data_size > 1 and not ranks.in_step) or there() == "reward model"


def refuse(trainer: Any, folder: Path, ranks: Ranks) -> None:
    """If one rank cannot read or write a checkpoint, every rank raises, and nothing changes."""
    before = state(trainer)
    place = folder if ranks.rank else folder / "absent"
    for attempt, wanted in ((trainer.load, CheckpointError), (trainer.save, StorageFailed)):
        caught: Exception | None = None
        try:
            attempt(place)
        except Exception as e:
            caught = e
        assert isinstance(caught, wanted) and "rank 0 on" in str(caught), (ranks.rank, caught)
    assert same(state(trainer), before)


def fill_disk(trainer: Any, folder: Path, ranks: Ranks) -> None:
    """One rank's disk takes no more: no rank has saved, and all say so; later it works."""
    rank = 1 if ranks.is_sharded else 0  # of whole weights only the first writes any
    if ranks.is_leader:
        folder.mkdir()
    ranks.agree()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    caught: Exception | None = None
    try:
        trainer.save(folder)
    except Exception as e:
        caught = e
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = ranks.tell_all(repr(caught))
    assert isinstance(caught, StorageFailed) and set(told) == {repr(caught)}, told


def main(critic_folder: Path, policy_folder: Path, out: Path, kinds: tuple[str, ...], names: list[str]) -> None:
    """Learns in every layout; then every layout loads what each of the others, and one process, has saved."""
    torch.set_num_threads(1)
    learnt: dict[str, tuple[Ranks, Any]] = {}
    for name in names:
        ranks = start(LAYOUTS[name], "cpu")
        told = learn(critic_folder, policy_folder, out / name, ranks)
        trainers = told.pop("trainers")
        told["more"] = more_settings(critic_folder, kinds, ranks)
        learnt[name] = (ranks, trainers)
        if ranks.is_leader:
            torch.save(told, out / name / "told.pt")
            print(f"{name} has learnt", flush=True)
        ranks.agree()
    for name, (ranks, trainers) in learnt.items():
        for source in ("one", *names):
            told = torch.load(out / source / "told.pt", weights_only=False)
            for kind, trainer in trainers.items():
                if source == "one" or source != name:
                    trainer.load(out / source / kind)
                    assert same(state(trainer), told[kind]), (name, source, kind)
        refuse(trainers["critic"], out / "one" / "critic", ranks)
        fill_disk(trainers["critic"], out / f"full-{name}", ranks)
        if name == "data":
            fail_alone(trainers["critic"], ranks)
            leave_together(trainers["critic"], ranks)
        else:
            swap(trainers["critic"], critic_folder, ranks)
    print("done", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), tuple(sys.argv[4].split(",")), sys.argv[5:])
