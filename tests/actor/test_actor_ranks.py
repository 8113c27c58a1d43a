"""Actors on several processes: what one process does, by parts."""

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zoo
from actor.rank_runs import Done, Job, alone, together
from actor.rollouts import serving
from actor.runs import metrics_of, parts, tiny_policy, weights_of
from guerdon.errors import ConfigError, GuerdonError
from guerdon.settings.actors import (
    CriticServer,
    DistillConfig,
    DistillRunConfig,
    PPOConfig,
    PPORunConfig,
    ReinforceConfig,
    ReinforceRunConfig,
    RemoteCriticConfig,
    RemoteRewardConfig,
    RewardServer,
    TeacherServer,
)
from guerdon.settings.config import CriticConfig, ModelConfig, ParallelConfig, TeacherConfig
from launched import launched

EVEN = ModelConfig(model="actor.reward_functions:even", name="even")
TP2 = ParallelConfig(tensor_parallel=2)
FSDP2 = ParallelConfig(fsdp=True)
DP2 = ParallelConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    zoo.tokenizer(zoo.checkpoint("llama", folder / "critic", seed=1))
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server of the reward model, and of a reference that is not the policy's beginning."""
    other = zoo.tokenizer(zoo.language_model("llama", folder / "reference", seed=1))
    with serving(EVEN, TeacherConfig(model=str(other), name="reference", deterministic=True)) as server:
        yield server.http_url


def config_of(
    folder: Path,
    url: str,
    out: Path,
    *,
    steps: int = 3,
    parallel: ParallelConfig = DP2,
    algorithm: dict[str, Any] | None = None,
    reference: TeacherServer | None = None,
    **more: Any,
) -> ReinforceRunConfig:
    return ReinforceRunConfig(
        # Prompts of one step that no number of ranks divides; and several global batches.
        **parts(folder, out, steps=steps, **{"rollouts": {"prompts_per_step": 5}, **more}),
        parallel=parallel,
        reinforce=ReinforceConfig(**{"epochs": 2, "global_batch_size": 12, **(algorithm or {})}),
        remote_rm=RemoteRewardConfig(RewardServer(name="even", urls=[url]), timeout_s=30.0),
        reference=reference or TeacherServer(),
    )


def assert_same(ranks: list[Done], out: Path, one: Done, out_of_one: Path, step: int = 3) -> None:
    """Rollouts and rewards are equal; weights, and what was logged of them, but for rounding."""
    first, *others = ranks
    assert first.error is None and (first.status, [other.status for other in others]) == (0, [0] * len(others))
    assert first.tokens() == one.tokens() and first.rewards() == one.rewards()
    assert_same_weights(out, out_of_one, step)
    for row, row_of_one in zip(metrics_of(out), metrics_of(out_of_one), strict=True):
        for name in ("reward", "kl", "entropy", "loss", "grad_norm", "learning_rate", "clip_fraction"):
            assert row[name] == pytest.approx(row_of_one[name], rel=1e-4, abs=1e-6), name


def assert_same_weights(out: Path, out_of_one: Path, step: int = 3) -> None:
    weights, expected = weights_of(out, step), weights_of(out_of_one, step)
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_do_what_one_does(folder: Path, url: str, tmp_path: Path) -> None:
    nowhere, bad = config_of(folder, url, tmp_path / "nowhere"), config_of(folder, url, tmp_path / "bad")
    nowhere.rollouts.engine = "vllm"
    bad.reinforce.clip_low = 0.0
    # The KL to another model than the policy's beginning, which a server holds, is in the loss.
    served: dict[str, Any] = {
        "reference": TeacherServer(url, "reference", timeout_s=30.0),
        "algorithm": {"kl_placement": "loss", "kl_estimator": "k3", "kl_coefficient": 0.5},
    }
    made, of_served, not_loaded, no_trainer, of_vllm, of_bad = together(
        2,
        [
            Job(config_of(folder, url, tmp_path / "two")),
            Job(config_of(folder, url, tmp_path / "two-served", **served)),
            Job(config_of(folder, url, tmp_path / "none"), broken="load_policy"),
            Job(config_of(folder, url, tmp_path / "none"), broken="PolicyTrainer"),
            Job(nowhere),
            Job(bad),
        ],
        tmp_path / "ranks",
    )
    assert_same(made, tmp_path / "two", alone(config_of(folder, url, tmp_path / "one")), tmp_path / "one")

    assert_same(
        of_served,
        tmp_path / "two-served",
        alone(config_of(folder, url, tmp_path / "one-served", **served)),
        tmp_path / "one-served",
    )
    assert metrics_of(tmp_path / "two-served")[0]["kl"] > 0.01

    # What cannot start ends all ranks, and rank 0 says why.
    for ranks, kind, text in (
        (not_loaded, GuerdonError, "rank 1 on .*no room for it"),
        (no_trainer, GuerdonError, "rank 1 on .*no room for it"),
        (of_vllm, ConfigError, "rollouts.engine is vllm, and the policy is on 2 ranks"),
        (of_bad, ConfigError, "reinforce.clip_low is 0"),
    ):
        with pytest.raises(kind, match=text):
            raise ranks[0].error or AssertionError("no error")
        assert (ranks[1].status, ranks[1].error) == (0, None)


@pytest.mark.slow
def test_a_rank_that_cannot_start_while_others_wait_in_its_layers_ends_all(
    folder: Path, url: str, tmp_path: Path
) -> None:
    """FSDP gathers weights when it runs a layer, so that the other ranks wait there and learn of no error."""
    layout = ParallelConfig(fsdp=True, rank_timeout_s=5.0)
    (tmp_path / "jobs").write_bytes(
        pickle.dumps([Job(config_of(folder, url, tmp_path / "none", parallel=layout), broken="PolicyTrainer")])
    )
    ended = launched("actor.rank_runs", 2, tmp_path / "jobs", tmp_path, timeout_s=60.0)
    assert ended.code == 1 and re.search(r"exitcode *: 70 ", ended.output), ended.output
    assert "no room for it" in ended.output, ended.output
    assert re.search(r"rank 1 \(.*\) failed alone", ended.output), ended.output


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("num_processes", [2, 4])
def test_any_layout_does_what_one_process_does(num_processes: int, folder: Path, url: str, tmp_path: Path) -> None:
    layouts: dict[str, ParallelConfig] = {"tp": TP2, "fsdp": FSDP2}
    more: dict[str, Any] = {
        "activation_checkpointing": True,
        "offload_optimizer": True,
        "rollouts": {"prompts_per_step": 5, "max_batch_rollouts": 8},
        "algorithm": {"kl_placement": "loss", "kl_estimator": "k3", "entropy_coefficient": 0.01},
    }
    if num_processes == 4:
        layouts, more = {"dp": DP2, "tp": TP2, "both": ParallelConfig(tensor_parallel=2, fsdp=True)}, {}
    jobs = [Job(config_of(folder, url, tmp_path / name, parallel=p, **more)) for name, p in layouts.items()]
    made = together(num_processes, jobs, tmp_path / "ranks", timeout_s=350.0)
    one = alone(config_of(folder, url, tmp_path / "one", **more))
    for ranks, name in zip(made, layouts, strict=True):
        assert_same(ranks, tmp_path / name, one, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ppo_on_two_processes_does_what_it_does_on_one(folder: Path, tmp_path: Path) -> None:
    def config(out: str, url: str, parallel: ParallelConfig) -> PPORunConfig:
        return PPORunConfig(
            **parts(folder, tmp_path / out, steps=3),
            parallel=parallel,
            ppo=PPOConfig(epochs=2, global_batch_size=8),
            remote_critic_rm=RemoteCriticConfig(critic=CriticServer(url=url), timeout_s=30.0),
        )

    def done(out: str, nproc: int, parallel: ParallelConfig) -> list[Done]:
        critic = CriticConfig(
            model=str(folder / "critic"),
            reward_model=str(folder / "critic"),
            checkpoint_dir=str(tmp_path / f"critic-{out}"),
            learning_rate=1e-3,
        )
        with serving(critic=critic) as server:
            made = config(out, server.http_url, parallel)
            return [alone(made)] if nproc == 1 else together(nproc, [Job(made)], tmp_path / f"ranks-{out}")[0]

    (one,) = done("one", 1, DP2)
    for out, parallel in (("dp", DP2), ("fsdp", FSDP2)):
        ranks = done(out, 2, parallel)
        assert ranks[0].error is None and [r.status for r in ranks] == [0, 0]
        assert ranks[0].tokens() == one.tokens()
        assert ranks[0].rewards() == pytest.approx(one.rewards(), rel=1e-5)
        assert_same_weights(tmp_path / out, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_distillation_on_two_processes_does_what_it_does_on_one(folder: Path, tmp_path: Path) -> None:
    teacher = zoo.tokenizer(zoo.language_model("llama", folder / "teacher", seed=1))
    with serving(TeacherConfig(model=str(teacher), deterministic=True)) as server:

        def config(out: str, parallel: ParallelConfig) -> DistillRunConfig:
            return DistillRunConfig(
                **parts(folder, tmp_path / out, steps=3, rollouts={"prompts_per_step": 5}),
                parallel=parallel,
                distill=DistillConfig(epochs=2, global_batch_size=12),
                teacher=TeacherServer(server.http_url, timeout_s=30.0),
            )

        layouts = {"dp": DP2, "fsdp": FSDP2, "tp": TP2}
        made = together(2, [Job(config(*layout)) for layout in layouts.items()], tmp_path / "ranks", timeout_s=350.0)
        one = alone(config("one", DP2))
    for (first, *others), out in zip(made, layouts, strict=True):
        assert first.error is None and [first.status, *(other.status for other in others)] == [0, 0]
        assert first.tokens() == one.tokens()
        assert first.rewards() == pytest.approx(one.rewards(), rel=1e-3, abs=1e-3)
        assert_same_weights(tmp_path / out, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_resumes_with_another_number_of_ranks(folder: Path, url: str, tmp_path: Path) -> None:
    total = {"total_steps": 100}  # of a schedule that is no longer where the run is
    assert alone(config_of(folder, url, tmp_path / "whole", steps=6, **total)).status == 0

    def in_parts(*layouts: ParallelConfig | None) -> Path:
        """Two steps by each, None being one process."""
        out = tmp_path / "-".join("one" if p is None else f"{p.tensor_parallel}{p.fsdp}" for p in layouts)
        for i, parallel in enumerate(layouts):
            made = config_of(folder, url, out, steps=2 * i + 2, parallel=parallel or DP2, **total)
            if parallel is None:
                done = [alone(made)]
            else:
                (done,) = together(2, [Job(made)], tmp_path / f"ranks-{out.name}-{i}")
            assert done[0].error is None and [d.status for d in done] == [0] * len(done)
            assert sorted(done[0].steps) == [2 * i + 1, 2 * i + 2]
        return out

    for out in (in_parts(None, FSDP2, DP2), in_parts(FSDP2, None, TP2), in_parts(TP2, FSDP2, None)):
        assert_same_weights(out, tmp_path / "whole", 6)
