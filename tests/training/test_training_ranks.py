"""Many processes train as one does, and write checkpoints that any number of them reads."""

from pathlib import Path
from typing import Any

import on_ranks
import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from guerdon.core import Sequence
from launched import forked

CLOSE = 1e-5
"""Largest difference of a weight: the norm of the difference over the norm."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A critic's and a policy's checkpoint, and the folder in which one process has trained both."""
    folder = tmp_path_factory.mktemp("ranks")
    # Qwen3 has norms within the heads, whose gradients tensor parallelism has in parts.
    critic, policy = zoo.checkpoint("qwen3", folder / "critic"), zoo.language_model("qwen3", folder / "policy")
    told = on_ranks.learn(critic, policy, folder / "one")
    del told["trainers"]
    torch.save(told, folder / "one" / "told.pt")
    return critic, policy, folder


def differences(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, float]:
    assert a.keys() == b.keys()
    return {n: ((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp(min=1e-30)).item() for n in a}


def check(told: dict[str, Any], one: dict[str, Any], name: str) -> None:
    for kind in ("critic", "policy"):
        worst = max(differences(told[kind]["weights"], one[kind]["weights"]).values())
        print(f"{name}: {kind}: {worst:.1e}")
        assert worst < CLOSE, (name, kind, worst)
    for key in ("old", "entropies", "reference"):
        torch.testing.assert_close(told[key], one[key], rtol=1e-4, atol=1e-5)
    for own, other in zip(told["estimates"], one["estimates"], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
    for key in ("validate", "trees", "report"):
        for field, value in one[key].items():
            # One token more or less at the edge of the clipping is no difference of the arithmetic.
            least = 0.01 if field == "clip_fraction" else 1e-6
            near = (
                value
                if value is None or isinstance(value, str)
                else pytest.approx(value, rel=1e-4, abs=least, nan_ok=True)
            )
            assert told[key][field] == near, (name, key, field)
    assert (told["version"], told["counts"]) == (one["version"], one["counts"])
    for own, other in zip(told["steps"], one["steps"], strict=True):
        assert own["stats"].keys() == other["stats"].keys()
        for field in ("grad_norm", "learning_rate", "skipped"):
            assert own[field] == pytest.approx(other[field], rel=1e-3), (name, field)
        assert own["stats"] == pytest.approx(other["stats"], rel=1e-3, abs=1e-4, nan_ok=True)


def check_more(told: dict[str, Any], one: dict[str, Any], exact: dict[str, torch.Tensor], name: str) -> None:
    """Checks the kinds that the layout supports.

    Rounding to few bits depends on the order of a processor's sums, so such a result must be close to float32's,
    within twice one process's own distance from it. Adapters, and what is not frozen, compute in float32 and must
    equal one process's.
    """
    has = {"data": {"bfloat16", "lora", "8bit"}, "fsdp": {"bfloat16", "lora"}}.get(name, {"bfloat16"}) | {"frozen"}
    for kind in one:
        if kind in has:
            right = one[kind] if kind in ("lora", "frozen") else exact
            worst = max(differences(told[kind], right).values())
            limit = 1e-4 if kind in ("lora", "frozen") else 2 * max(differences(one[kind], exact).values())
            print(f"{name}: {kind}: {worst:.1e} of {limit:.1e}")
            assert worst < limit, (name, kind, worst, limit)
        else:
            assert isinstance(told[kind], str) and "tensor_parallel" in told[kind], (name, kind)


def run(folders: tuple[Path, Path, Path], num_processes: int, names: list[str], kinds: tuple[str, ...]) -> None:
    critic, policy, out = folders
    more = on_ranks.more_settings(critic, kinds)
    exact = on_ranks.more_settings(critic, ("float32",))["float32"]
    out = out.parent / f"{out.name}-{num_processes}-{len(kinds)}"
    out.mkdir()
    (out / "one").symlink_to(folders[2] / "one")
    ended = forked(Path(on_ranks.__file__), num_processes, critic, policy, out, ",".join(kinds), *names, timeout_s=600)
    print(ended.output)
    assert ended.code == 0 and ended.output.count("done") == num_processes, ended.output
    one = torch.load(out / "one" / "told.pt", weights_only=False)
    own = {"critic": on_ranks.critic(critic), "policy": on_ranks.policy(policy)}
    for name in names:
        told = torch.load(out / name / "told.pt", weights_only=False)
        check(told, one, name)
        check_more(told["more"], more, exact, name)
        for kind, trainer in own.items():
            trainer.load(out / name / kind)
            assert on_ranks.same(on_ranks.state(trainer), told[kind]), (name, kind)
        # What was saved is a folder like any other's.
        plain = AutoModelForCausalLM.from_pretrained(out / name / "policy")
        assert all(torch.equal(t, plain.state_dict()[n]) for n, t in told["policy"]["weights"].items())
        fresh = on_ranks.critic(out / name / "critic")
        rows = [Sequence(row) for row in on_ranks.ROWS[:4]]
        assert [s.reward for s in fresh.score(rows)] == [s.reward for s in own["critic"].score(rows)]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_two_processes_train_as_one(folders: tuple[Path, Path, Path]) -> None:
    # Data parallel by itself trains in tests/actor/test_actor_ranks.py, and in the slow ones below.
    run(folders, 2, ["fsdp"], ("frozen",))


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_two_processes_train_as_one_with_adapters_and_small_states(folders: tuple[Path, Path, Path]) -> None:
    run(folders, 2, ["tensor", "data", "fsdp"], tuple(on_ranks.MORE))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_four_processes_train_as_one(folders: tuple[Path, Path, Path]) -> None:
    run(folders, 4, ["data", "fsdp", "tensor", "tensor-fsdp"], tuple(on_ranks.MORE))
