"""A critic on several ranks under torchrun, whose ranks are killed, stopped and hung in turn; and what must hold then.

    python tests/chaos_ranks.py                    50 rounds, a summary line, exit status 0 where all of it held
    python tests/chaos_ranks.py --rounds 4 --seed 3 --layouts fsdp2

In each round one rank gets SIGKILL or SIGSTOP, or hangs, at one phase of a client's work: idle, amid a forward, a
train or a save, and others. Throughout, one client trains and keeps its own account, and witnesses ask for values with
a single try each. After each round the critic must be where a critic of one process is that was given what was
answered, once, in that order; and nobody may have waited beyond the limit. The launches of a run share one folder, so
that every layout goes on with what another one left.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from tqdm import tqdm

import killed_ranks
import zoo
from chaos_account import GBS, LEARNING_RATE, START_S, TOLERANCE, Found, Reference, Witnesses, Work, note, weights_of
from guerdon import CriticClient, RetryPolicy, TrainReport
from guerdon.errors import GuerdonError, Unavailable
from launched import Launch, launching
from ports import free_port

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "data2": (2, ()),
    "fsdp2": (2, ("--fsdp",)),
    "alone": (1, ()),
    "tensor2": (2, ("--tensor-parallel", "2")),
    "data3": (3, ()),
}
"""Processes, and the server's flags."""
HOWS = {"kill": int(signal.SIGKILL), "stop": int(signal.SIGSTOP), "hang": killed_ranks.HANG}
RESTART_S, SLACK_S = 120.0, 5.0
"""What a restart, and the reaction to a lost rank beyond the time-out, may take on a busy machine."""


@dataclass(frozen=True)
class Blow:
    """What befalls a rank: `phase` is `idle`, or one of `killed_ranks.PHASES`."""

    how: str
    rank: int
    phase: str
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.how} rank {self.rank}, {self.phase} {self.nth}"


class Chaos:
    """One run: a folder, a model, a client's account and the reference, through launches of several layouts."""

    def __init__(self, folder: Path, seed: int, rank_timeout_s: float = 5.0) -> None:
        torch.set_num_threads(1)
        self.found = Found()
        self.folder, self.timeout_s = folder, rank_timeout_s
        self.kills = folder / "kills"
        self.kills.mkdir(parents=True)
        self.model = zoo.checkpoint("llama", folder / "model")
        self.work = Work(seed)
        self.reference = Reference(self.model, self.work)
        self.random = random.Random(seed)
        self.step = 0
        self._values = self.reference.values()
        self._numbers = itertools.count()

    @property
    def try_limit_s(self) -> float:
        """The longest that one try may take: until the loss is seen, and it is told."""
        return self.timeout_s + SLACK_S

    @property
    def call_limit_s(self) -> float:
        """The longest that a call with retries may take: until the ranks are back, too."""
        return self.try_limit_s + RESTART_S

    @contextlib.contextmanager
    def launch(self, layout: str, max_restarts: int = 60) -> Iterator[Served]:
        """The critic served by that layout, from the run's folder; in the end it must have left nothing behind."""
        nproc, flags = LAYOUTS[layout]
        port = free_port()
        arguments = (
            "serve-critic", self.model, "--checkpoint-dir", self.folder / "critic", "--port", port, "--no-grpc",
            "--rank-timeout-s", self.timeout_s, "--global-batch-size", GBS, "--learning-rate", LEARNING_RATE,
            "--max-batch-tokens", 96, "--log-level", "warning", "--device", "cpu", *flags,
        )  # fmt: skip
        options = ("--standalone", "--max-restarts", str(max_restarts))
        env = {killed_ranks.FOLDER: str(self.kills)}
        with launching("killed_ranks", nproc, *arguments, options=options, env=env) as launch:
            served = Served(self, launch, nproc, port)
            try:
                served.wait_ready()
                with served:
                    yield served
                if not served.is_killed:
                    served.end()
            except BaseException:
                print(launch.output()[-8000:], file=sys.stderr)
                raise
            launch.wait_ended()
        with socket.create_server(("127.0.0.1", port)):
            pass  # nobody listens there


class Served:
    """One launch of a run, and what its clients ask of it."""

    def __init__(self, chaos: Chaos, launch: Launch, nproc: int, port: int) -> None:
        self.chaos, self.launched, self.nproc = chaos, launch, nproc
        self.is_killed = False
        self.url = f"http://127.0.0.1:{port}"
        patient = RetryPolicy(timeout_s=chaos.call_limit_s, tries=100_000, backoff_s=0.05, max_backoff_s=0.2)
        self.client = CriticClient(self.url, policy=patient)
        self.once = CriticClient(self.url, policy=RetryPolicy(timeout_s=START_S, tries=1))
        self.witnesses = Witnesses(self.url, chaos.work, chaos.found, chaos.try_limit_s)

    def __enter__(self) -> Served:
        self.witnesses.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.witnesses.__exit__()
        self.client.close()
        self.once.close()

    def wait_ready(self) -> None:
        """Waits for the first start; AssertionError where torchrun has given up."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.launched.torchrun.poll() is None, f"torchrun ended with {self.launched.torchrun.returncode}"
            with contextlib.suppress(GuerdonError):
                self.client.wait_ready(timeout_s=1.0)
                return
        raise AssertionError("the server was not ready in time")

    def round(self, blow: Blow, *, patient: bool = True) -> None:
        """One blow amid a client's work, and all that must hold after it."""
        chaos, found = self.chaos, self.chaos.found
        if blow.rank:
            blow = replace(blow, rank=chaos.random.randrange(1, self.nproc))
        if blow.phase == "load":
            self.timed(self.client.save)  # that there is one to load
        pids = self._ranks()
        met = None
        if blow.phase != "idle":
            path = killed_ranks.order(chaos.kills, blow.rank, blow.phase, HOWS[blow.how], blow.nth)
            met = path.with_name(f"met-{path.name}")
        if blow.phase in ("idle", "load"):
            with self.witnesses.paused():
                if blow.phase == "idle":
                    self.launched.rank(blow.rank).send_signal(HOWS[blow.how])
                else:
                    self.launched.rank(0).kill()
                time.sleep(chaos.random.choice((0.0, 1.0)))
        struck = time.monotonic()
        if met is not None and blow.phase == "load":
            self._wait_until(met.exists, f"{blow} was not met")
            pids |= self._ranks()
        self.train(patient)
        self.timed(lambda: self.client.infer(tokens=chaos.work.probe).raise_for_failed())
        if blow.phase in ("save", "commit") or chaos.random.random() < 0.25:
            self.timed(self.client.save)
        self.train(patient)
        if met is not None:
            self._wait_until(met.exists, f"{blow} was not met")
        # That the answers came does not tell that the ranks are new: what is stopped may not be missed yet.
        self._wait_until(lambda: len(self._ranks() - pids) == self.nproc, f"the ranks did not come back after {blow}")
        self.timed(lambda: self.client.wait_ready(timeout_s=chaos.call_limit_s))
        found.back_s = max(found.back_s, time.monotonic() - struck)
        if met is not None:
            met.unlink(missing_ok=True)
        self.check()
        assert not self.witnesses.slow, f"{blow}: {self.witnesses.slow}"
        found.num_rounds += 1
        found.blows[f"{blow.how} of {'rank 0' if blow.rank == 0 else 'a follower'}"] += 1

    def train(self, patient: bool) -> None:
        """One more request, until it is acknowledged: by the client's own retries, or by a single try after another."""
        chaos = self.chaos
        number = next(chaos._numbers)
        rows, name = chaos.work.rows(number), f"request-{number}"
        if patient:
            report = self.timed(lambda: self.client.train(*rows).result(chaos.call_limit_s))
        else:
            report = self.timed(lambda: self._train_by_single_tries(rows, name))
        want = chaos.reference.train(number)
        chaos.found.num_acknowledged += 1
        chaos.step += want.num_steps
        assert report.step == chaos.step, f"request {number} made step {report.step}, not {chaos.step}"
        assert abs(report.loss - want.loss) <= TOLERANCE * max(1.0, abs(want.loss)), (number, report.loss, want.loss)
        values = chaos.reference.values()
        chaos.found.least_of_a_step = min(chaos.found.least_of_a_step, float(np.abs(values - chaos._values).max()))
        chaos._values = values

    def _train_by_single_tries(self, rows: tuple[np.ndarray, ...], name: str) -> TrainReport:
        chaos = self.chaos
        end = time.monotonic() + chaos.call_limit_s
        while True:
            started = time.monotonic()
            try:
                return self.once.train(*rows, train_id=name).result(chaos.call_limit_s)
            except Unavailable as e:
                note(chaos.found, e)
                error = e
            took = time.monotonic() - started
            chaos.found.try_s = max(chaos.found.try_s, took)
            assert took <= chaos.try_limit_s, f"a train waited {took:.1f} s for {type(error).__name__}: {error}"
            assert time.monotonic() < end, f"{name} is not acknowledged: {error}"
            time.sleep(0.1)

    def check(self) -> None:
        """The critic is where the reference is."""
        chaos = self.chaos
        state = self.timed(self.client.state)
        assert state.step == chaos.step, f"the critic is at step {state.step}, its client at {chaos.step}"
        values = np.concatenate(self.client.infer(tokens=chaos.work.probe).raise_for_failed().values)
        difference = float(np.abs(values - chaos.reference.values()).max())
        chaos.found.difference = max(chaos.found.difference, difference)
        assert difference <= TOLERANCE, f"values differ by {difference:.1e}"

    def timed(self, call: Any) -> Any:
        """What the call returns; it must not take longer than the limit of a call with retries."""
        started = time.monotonic()
        result = call()
        took = time.monotonic() - started
        self.chaos.found.call_s = max(self.chaos.found.call_s, took)
        assert took <= self.chaos.call_limit_s, f"a call took {took:.1f} s"
        return result

    def kill(self) -> None:
        """Ends all processes of the launch at once: what the next one finds is what was on the disk."""
        self.is_killed = True
        self.launched.kill()

    def end(self) -> None:
        """A last checkpoint equals the reference; SIGTERM drains, and every rank ends with status 0."""
        chaos = self.chaos
        with CriticClient(self.url) as client:
            name = client.save().name
        weights = weights_of(chaos.folder / "critic" / name)
        with tempfile.TemporaryDirectory() as folder:
            want = chaos.reference.weights(Path(folder) / "reference")
        assert weights.keys() == want.keys()
        for key, tensor in want.items():
            difference = float((weights[key] - tensor).norm() / tensor.norm())
            assert difference <= TOLERANCE, f"{key} differs by {difference:.1e} of its norm"
        self.launched.rank(chaos.random.randrange(self.nproc)).terminate()
        code = self.launched.torchrun.wait(chaos.timeout_s + 60)
        assert code == 0, f"after SIGTERM to a rank torchrun ended with {code}"

    def _ranks(self) -> set[int]:
        found = set()
        for number in range(self.nproc):
            with contextlib.suppress(LookupError, psutil.NoSuchProcess):
                found.add(self.launched.rank(number).pid)
        return found

    def _wait_until(self, holds: Any, otherwise: str) -> None:
        end = time.monotonic() + self.chaos.call_limit_s
        while not holds():
            assert self.launched.torchrun.poll() is None, f"torchrun ended with {self.launched.torchrun.returncode}"
            assert time.monotonic() < end, otherwise
            time.sleep(0.05)


def blows(seed: int, count: int) -> list[Blow]:
    """So many blows: of every 22 each of SIGKILL and SIGSTOP, rank 0 and follower, and phase, once, in random order.

    A follower is rank 1 here; which of several it is, the round draws.
    """
    numbers = random.Random(seed)
    made: list[Blow] = []
    while len(made) < count:
        every = [
            Blow(how, rank, phase, numbers.choice((0, 1, 3, killed_ranks.AT_THE_END)))
            for how in ("kill", "stop") for rank in (0, 1) for phase in ("idle", "forward", "train", "save")
        ]  # fmt: skip
        every += [Blow("kill", 0, "journal"), Blow("stop", 0, "journal"), Blow("kill", 0, "commit")]
        every += [Blow("hang", 1, phase, 1) for phase in ("forward", "train")]
        every += [Blow("kill", 1, "load")]
        numbers.shuffle(every)
        made += every
    return made[:count]


def parts(layouts: list[str], all_blows: list[Blow]) -> list[tuple[str, list[Blow]]]:
    """The blows over the layouts, in turn; of a process alone only those that somebody sees."""
    alone = [b for b in all_blows if b.rank == 0 and b.how == "kill" and b.phase != "idle"][:2]
    others = [layout for layout in layouts if layout != "alone"]
    rest = list(all_blows)
    if "alone" in layouts and others:
        for blow in alone:
            rest.remove(blow)
    size = -(-len(rest) // max(1, len(others)))
    made = []
    for layout in layouts:
        mine = alone if layout == "alone" else rest[:size]
        if layout != "alone":
            rest = rest[size:]
        made.append((layout, mine))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="blows in all (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the blows and of the requests (default: 0)")
    parser.add_argument("--rank-timeout-s", type=float, default=5.0, help="the servers' (default: 5)")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"in turn, of {', '.join(LAYOUTS)} (default: all)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=args.rounds, unit="round", file=sys.stderr) as bar:
        chaos = Chaos(Path(folder), args.seed, args.rank_timeout_s)
        holds = False
        try:
            for layout, some in parts(args.layouts.split(","), blows(args.seed, args.rounds)):
                with chaos.launch(layout) as served:
                    for number, blow in enumerate(some):
                        bar.set_postfix_str(f"{layout}: {blow}")
                        served.round(blow, patient=number % 2 == 0)
                        bar.update()
            holds = True
        finally:
            for kind, text in chaos.found.told.items():
                print(f"{kind}: {text}")
            print(chaos.found if holds else f"NOT ALL HELD, before that: {chaos.found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
