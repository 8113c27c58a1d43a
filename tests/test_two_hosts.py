"""One critic over two hosts with addresses of their own: it trains, the cable is cut, and it comes back by itself."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import namespaces
import zoo
from chaos_account import GBS, LEARNING_RATE, TOLERANCE, Reference, Work
from guerdon import CriticClient, RetryPolicy
from guerdon.errors import RanksLost, Unavailable
from launched import Launch
from namespaces import Cable, Host

WHY = namespaces.missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY), reason=WHY or "they are there")]

PORT, STORE_PORT = 5556, 29400
RANK_TIMEOUT_S = 5.0
SLACK_S = 5.0
ENDED = "torchrun has ended with"
BACK_S = 240.0
"""What a start and a way back may take on a busy machine."""


class TwoHosts:
    """A critic with a rank on each host, its client on the first, and the critic of one process that it must equal."""

    def __init__(self, cable: Cable, folder: Path, flags: tuple[str, ...] = (), **conf: object) -> None:
        torch.set_num_threads(1)
        self.cable, self.folder, self.flags, self.conf = cable, folder, flags, conf
        self.model = zoo.checkpoint("llama", folder / "model")
        self.work = Work(0)
        self.reference = Reference(self.model, self.work)
        self.num_requests = self.step = 0

    @property
    def url(self) -> str:
        return f"http://{self.cable.first.address}:{PORT}"

    @contextlib.contextmanager
    def launch(self, host: Host, *, forever: bool = False) -> Iterator[Launch]:
        """torchrun on one of them; `forever` is an operator's loop, which starts it again whenever it fails."""
        is_first = host is self.cable.first
        conf = {"is_host": int(is_first), **self.conf}
        options = [
            *("--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 9, "--rdzv-backend", "c10d", "--rdzv-id", "it"),
            *("--rdzv-endpoint", f"{self.cable.first.address}:{STORE_PORT}", "--local-addr", host.address),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in conf.items())),
        ]  # fmt: skip
        server = [
            *("serve-critic", self.model, "--checkpoint-dir", self.folder / "critic", "--host", host.address),
            *("--port", PORT, "--no-grpc", "--allow-anonymous", "--device", "cpu", "--rank-timeout-s", RANK_TIMEOUT_S),
            *("--global-batch-size", GBS, "--learning-rate", LEARNING_RATE, *self.flags),
        ]  # fmt: skip
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "guerdon", *server]
        if forever:
            command = ["sh", "-c", f'until "$@"; do echo {ENDED} $?; sleep 1; done', "sh", *command]
        # Left alone torchrun 2.13 tells a new host's agent nothing of a store that it made before that one came.
        with host.launching(*command, env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}) as launch:
            try:
                yield launch
            except BaseException:
                print(f"{host.name}:\n{launch.output()[-6000:]}")
                raise

    @contextlib.contextmanager
    def client(self, **policy: object) -> Iterator[CriticClient]:
        """A client on the first host; without a policy one that tries until it is answered."""
        patient = {"timeout_s": BACK_S, "tries": 100_000, "max_backoff_s": 0.5, "wait_for_start": True}
        with self.cable.first.entered(), CriticClient(self.url, policy=RetryPolicy(**(policy or patient))) as client:
            yield client

    def train(self, client: CriticClient, count: int = 1) -> None:
        """So many requests; each makes the step, and has the loss, that it has in one process."""
        for _ in range(count):
            report = client.train(*self.work.rows(self.num_requests)).result(BACK_S)
            want = self.reference.train(self.num_requests)
            self.num_requests += 1
            self.step += want.num_steps
            assert report.step == self.step
            assert report.loss == pytest.approx(want.loss, rel=TOLERANCE)

    def check(self, client: CriticClient) -> None:
        """The critic is where the reference is."""
        assert client.state().step == self.step
        values = np.concatenate(client.infer(tokens=self.work.probe).raise_for_failed().values)
        np.testing.assert_allclose(values, self.reference.values(), atol=TOLERANCE)

    def error_of_a_cut(self) -> tuple[float, Unavailable]:
        """Cuts the cable: what the first request that fails is told in its one try, and after how many seconds."""
        with self.client(tries=1, timeout_s=BACK_S) as client:
            client.infer(tokens=self.work.probe)  # it is known, and its connection is there
            self.cable_cut()
            started = time.monotonic()
            while True:
                try:
                    client.infer(tokens=self.work.probe)
                except Unavailable as e:
                    return time.monotonic() - started, e

    cut_by = "cut"

    def cable_cut(self) -> None:
        getattr(self.cable, self.cut_by)()

    def cable_back(self) -> None:
        getattr(self.cable, {"cut": "mend", "unplug": "plug_in"}[self.cut_by])()


@pytest.mark.parametrize(
    ("cut_by", "loopback", "flags"),
    [("cut", True, ()), ("unplug", False, ("--fsdp",)), ("cut", False, ("--tensor-parallel", "2"))],
    ids=["silent-data-parallel", "unplugged-fsdp", "silent-tensor-parallel"],
)
def test_a_cut_cable_is_told_of_and_mended_it_goes_on(
    cut_by: str, loopback: bool, flags: tuple[str, ...], tmp_path: Path
) -> None:
    with namespaces.two_hosts(names_are_loopback=loopback) as cable:
        hosts = TwoHosts(cable, tmp_path, flags, read_timeout=900)
        hosts.cut_by = cut_by
        with hosts.launch(cable.first) as first, hosts.launch(cable.second) as second:
            with hosts.client() as client:
                client.wait_ready(BACK_S)
                hosts.train(client, 2)
                hosts.check(client)
            waited_s, error = hosts.error_of_a_cut()
            assert isinstance(error, RanksLost), error
            assert "rank 1 (host2" in str(error)
            assert waited_s < RANK_TIMEOUT_S + SLACK_S
            time.sleep(10)
            hosts.cable_back()
            mended = time.monotonic()
            with hosts.client() as client:
                hosts.train(client)
                back_s = time.monotonic() - mended
                hosts.train(client)
                hosts.check(client)
            print(f"told after {waited_s:.1f} s: {error}; trained again {back_s:.1f} s after the cable was whole")
            first.rank(0).terminate()
            assert first.torchrun.wait(120) == 0
            assert second.torchrun.wait(120) == 0
        assert not first.processes() and not second.processes()


def test_after_a_cut_beyond_the_stores_patience_an_operators_loop_brings_it_back(tmp_path: Path) -> None:
    with namespaces.two_hosts() as cable:
        hosts = TwoHosts(cable, tmp_path, read_timeout=10)
        with hosts.launch(cable.first, forever=True), hosts.launch(cable.second, forever=True) as second:
            with hosts.client() as client:
                client.wait_ready(BACK_S)
                hosts.train(client)
            hosts.error_of_a_cut()
            time.sleep(25)
            hosts.cable_back()
            with hosts.client() as client:
                hosts.train(client)
                hosts.check(client)
            assert ENDED in second.output()


@pytest.mark.parametrize("lost", ["first", "second"])
def test_a_host_that_is_lost_comes_back_empty(lost: str, tmp_path: Path) -> None:
    with namespaces.two_hosts() as cable:
        hosts = TwoHosts(cable, tmp_path, read_timeout=900)
        falls, stays = (cable.first, cable.second) if lost == "first" else (cable.second, cable.first)
        with hosts.launch(stays, forever=True) as launch:
            with hosts.launch(falls), hosts.client() as client:
                client.wait_ready(BACK_S)
                hosts.train(client)
            # Leaving has killed all that ran on the one host, its torchrun, too.
            with hosts.launch(falls), hosts.client() as client:
                hosts.train(client)
                hosts.check(client)
            # The first host's torchrun has the store, without which the other's does not go on.
            assert (ENDED in launch.output()) == (lost == "first")
