"""Ranks that are killed, stopped and hung: nothing acknowledged is lost or done twice, and nobody waits beyond a limit.

`python tests/chaos_ranks.py` makes as many rounds as wanted.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from chaos_ranks import LAYOUTS, Blow, Chaos, blows, parts

TIMEOUT_S = 900


def test_a_run_strikes_every_rank_at_every_phase() -> None:
    counts = Counter((blow.how, blow.rank, blow.phase) for blow in blows(0, 50))
    for how in ("kill", "stop"):
        for rank in (0, 1):
            for phase in ("idle", "forward", "train", "save"):
                assert counts[how, rank, phase] >= 2
    planned = parts(list(LAYOUTS), blows(0, 50))
    assert sum(len(some) for _, some in planned) == 50
    assert all(b.rank == 0 and b.how == "kill" for layout, some in planned for b in some if layout == "alone")


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("layout", [name for name, (nproc, _) in LAYOUTS.items() if nproc > 1])
def test_a_critic_of_ranks_comes_back_with_all_that_was_acknowledged(layout: str, tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", seed=1)
    with chaos.launch(layout) as served:
        served.round(Blow("kill", 1, "train", 1))
        served.round(Blow("stop", 0, "save", 1), patient=False)
        served.round(Blow("hang", 1, "forward", 1))
    print(chaos.found)
    assert chaos.found.errors["RanksLost naming the rank"]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_it_comes_back_with_another_number_of_ranks(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", seed=2)
    for layout in ("data2", "alone", "fsdp2", "data3"):
        with chaos.launch(layout) as served:
            served.check()
            served.train(patient=True)
            served.kill()  # of all ranks, torchrun's too: the next layout has the journal to go by
    with chaos.launch("tensor2") as served:
        served.check()


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_with_the_default_time_out_a_stopped_follower_is_told_of_within_it(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "run", seed=3, rank_timeout_s=30.0)
    with chaos.launch("data2") as served:
        served.round(Blow("stop", 1, "train", 1), patient=False)
    print(chaos.found)
    assert 20 < chaos.found.try_s <= chaos.try_limit_s
