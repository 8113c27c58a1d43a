"""Runs a soak: mixed load and random faults; checks every answer, and the clients' ledgers by the server's counts.

  python benchmarks/soak.py --minutes 60     writes results, logs and a plot under --out; exit status 1 if a check fails

One server process serves two reward models, a function that raises and fails some samples, a sum, and a critic with
checkpoints, to keys of three roles. Two client processes send requests over HTTP (binary, JSON, the forms of OpenRLHF,
slime and TEI) and gRPC, one trains; they are killed with SIGKILL at random, cut their connections, stall, read slowly,
vanish silently, and send malformed bytes. An admin switches the reward model between two checkpoints, and tries to load
invalid ones. The load's rate is a share of what one client reaches without pauses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from tqdm import tqdm

import soak_ledger
import soak_models
import soak_report
from guerdon.server.reading import NUM_THREADS
from report import machine
from soak_admin import Admin
from soak_trainer import GLOBAL_BATCH_SIZE

HERE = Path(__file__).parent
ROLES = {"clients": "score", "trainer": "train", "admin": "admin"}
NUM_CLIENTS = 2
READY_S, DRAIN_S, QUIET_S = 300.0, 180.0, 60.0
"""Time limits of a start, of the clients' last requests, and of connections they left half open."""


class Soak:
    """A run: its processes, its samples, and the faults found."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.out: Path = args.out
        self.samples: list[dict[str, float]] = []
        self.events: list[tuple[float, str]] = []
        self.wrong: list[str] = []
        self.results: dict[str, Any] = {
            "about": machine(),
            "minutes": args.minutes,
            "share": args.share,
            "passed": False,
        }
        self.keys = {name: secrets.token_hex(16) for name in ROLES}
        self.ports = _free_ports(2)
        self._numbers = itertools.count()
        self._clients: dict[str, subprocess.Popen[bytes]] = {}
        self._random = random.Random(args.seed)
        self._rate = 0.0
        self._answered = 0.0

    def prepare(self) -> None:
        """Writes the checkpoints, the keys and the settings."""
        shutil.rmtree(self.out, ignore_errors=True)
        (self.out / "ledgers").mkdir(parents=True)
        soak_models.make(self.out)
        lines = [f"{role} {name} {self.keys[name]}" for name, role in ROLES.items()]
        (self.out / "keys").write_text("\n".join(lines) + "\n")
        (self.out / "keys").chmod(0o600)
        repository = (self.out / "repository").resolve()
        models: list[dict[str, Any]] = [
            {"name": "helpful", "model": str(repository / "a"), "recheck_share": 0.02},
            {"name": "length", "model": "soak_functions:length"},
            {"name": "flaky", "model": "soak_functions:flaky"},
            {"name": "spare", "model": str(repository / "a")},
        ]
        critic = {
            "model": str(repository / "b"), "checkpoint_dir": str((self.out / "critic").resolve()), "save_every": 50,
            "global_batch_size": GLOBAL_BATCH_SIZE, "learning_rate": 1e-5,
        }  # fmt: skip
        settings = {
            "port": self.ports[0], "grpc_port": self.ports[1], "api_keys_file": str((self.out / "keys").resolve()),
            "model_repository": str(repository), "log_level": "warning", "max_body_mb": 16, "header_timeout_s": 5,
            "read_timeout_s": 5, "write_timeout_s": 5, "idle_timeout_s": 20, "request_timeout_s": 60, "models": models,
            "rewards": [{"name": "total", "components": [{"model": "helpful"}, {"model": "length"}]}],
            "critic": critic,
        }  # fmt: skip
        (self.out / "server.yaml").write_text(yaml.safe_dump(settings))

    def run(self) -> None:
        """Serves, soaks, and prints what was found; the results are written to disk in any case."""
        command = [sys.executable, "-m", "guerdon", "serve", "--config", str(self.out / "server.yaml")]
        with (self.out / "server.log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
        self.server = psutil.Process(server.pid)
        try:
            self._wait_ready(server)
            asyncio.run(self._soak(server))
        except BaseException as e:
            self.wrong.append(f"the soak broke off: {e!r}")
            raise
        finally:
            for process in self._clients.values():
                process.kill()
                process.wait()
            if server.poll() is None:
                server.kill()
                server.wait()
            self.write()

    def write(self) -> None:
        """Writes the results so far as JSON, and the plot."""
        wrong, done = list(dict.fromkeys(self.wrong)), self.results.get("finished", False)
        self.results |= {"wrong": wrong[:200], "num_wrong": len(wrong), "passed": bool(done and not wrong)}
        results = self.results | {"samples": list(self.samples), "events": list(self.events)}
        (self.out / "soak.json").write_text(json.dumps(results, indent=1))
        if results["samples"]:
            soak_report.plot(results, self.out / "soak.png")

    async def _soak(self, server: subprocess.Popen[bytes]) -> None:
        # No connection of its own is left open: the server's files are counted.
        limits = httpx.Limits(max_keepalive_connections=0)
        url = f"http://127.0.0.1:{self.ports[0]}"
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            self.http = client
            ledger = soak_ledger.Ledger(self._path("admin"))
            admin = Admin(self.keys["admin"], self.ports[0], ledger, self.out, self.event)
            await self._measure()
            seconds = self.args.minutes * 60
            warm_s = min(300.0, seconds * 0.2)
            begun = time.monotonic()
            self.results |= {"warm_up_s": warm_s}
            sampling = asyncio.create_task(self._sample(begun))
            progress = tqdm(total=round(seconds), unit="s", disable=None)
            try:
                await self._load(admin, server, begun + warm_s, progress)
                await self._stop_clients()
                rest = self.results["rest"] = await self._at_rest()
                measured_from = time.monotonic() - begun
                await self._load(admin, server, time.monotonic() + seconds - warm_s, progress)
                self.results |= {"measured_from_s": measured_from, "measured_to_s": time.monotonic() - begun}
                await self._stop_clients()
                await admin.close()
                end = self.results["end"] = await self._at_rest(rest)
            finally:
                sampling.cancel()
                progress.close()
            await self._judge(rest, end)
        server.terminate()
        self.results["exit_code"] = code = await asyncio.to_thread(server.wait, DRAIN_S)
        if code != 0:
            self.wrong.append(f"after SIGTERM the server ended with {code}")
        self.results["finished"] = True

    async def _measure(self) -> None:
        """Measures the requests per second of one client without faults; the load's rate is a share of it."""
        name = self._start_client(rate=10_000, sound=True)
        await asyncio.sleep(4.0)  # it imports
        before, started = await self._counted(), time.monotonic()
        await asyncio.sleep(self.args.measure_s)
        peak = (await self._counted() - before) / (time.monotonic() - started)
        await self._stop_clients()
        self._answered = await self._counted()
        self._rate = max(2.0, peak * self.args.share)
        self.results |= {"peak_per_s": peak, "rate_per_s": self._rate}
        assert not self._clients, name

    async def _load(self, admin: Admin, server: subprocess.Popen[bytes], until: float, progress: Any) -> None:
        """Runs load and faults until then."""
        for _ in range(NUM_CLIENTS):
            self._start_client(self._rate / NUM_CLIENTS)
        self._start_trainer()
        faults = asyncio.create_task(self._faults(admin))
        written = time.monotonic()
        try:
            while time.monotonic() < until:
                if server.poll() is not None:
                    raise RuntimeError(f"the server has ended with {server.returncode}")
                await asyncio.sleep(1.0)
                progress.update(1)
                if time.monotonic() - written > 60:
                    self.write()
                    written = time.monotonic()
        finally:
            faults.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await faults

    async def _faults(self, admin: Admin) -> None:
        """Kills and restarts processes and switches models, each once and then at random."""
        kinds = {"kill": 3, "kill trainer": 1.5, "swap": 4, "bad swap": 1, "spare": 1}
        first = list(kinds)
        while True:
            await asyncio.sleep(self._random.uniform(0.4, 1.6) * self.args.every_s)
            what = first.pop() if first else self._random.choices(list(kinds), list(kinds.values()))[0]
            if what.startswith("kill"):
                self._kill("trainer" if what == "kill trainer" else "client")
                continue
            acting = asyncio.ensure_future(admin.act(what))
            try:
                await asyncio.shield(acting)
            except asyncio.CancelledError:
                await acting  # what was begun is done: the ledger has it
                raise

    def _kill(self, kind: str) -> None:
        name = self._random.choice([name for name in self._clients if name.startswith(kind)])
        process = self._clients.pop(name)
        code = process.poll()
        if code is not None:
            self.wrong.append(f"{name} had ended by itself with {code}")
        process.kill()
        process.wait()
        self.event(f"{kind} killed")
        if kind == "client":
            self._start_client(self._rate / NUM_CLIENTS)
        else:
            self._start_trainer()

    def event(self, what: str) -> None:
        """Notes that it has just happened."""
        self.events.append((time.time(), what))

    def _start_client(self, rate: float, *, sound: bool = False) -> str:
        name = f"client-{next(self._numbers)}"
        wrong_key = secrets.token_hex(16)
        flags = ["--folder", self.out, "--grpc-port", self.ports[1], "--keys", f"{self.keys['clients']},{wrong_key}"]
        flags += ["--rate", rate] + ["--sound"] * sound
        self._start("soak_client.py", name, flags)
        return name

    def _start_trainer(self) -> None:
        flags = ["--key", self.keys["trainer"], "--rest-s", self.args.train_rest_s]
        self._start("soak_trainer.py", f"trainer-{next(self._numbers)}", flags)

    def _start(self, script: str, name: str, flags: list[Any]) -> None:
        command = [sys.executable, HERE / script, "--ledger", self._path(name), "--port", self.ports[0], *flags]
        with (self.out / "clients.log").open("ab") as log:
            self._clients[name] = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=_environment())

    def _path(self, name: str) -> Path:
        return self.out / "ledgers" / f"{name}.ledger"

    async def _stop_clients(self) -> None:
        """Ends the clients, each after its requests in flight."""
        for process in self._clients.values():
            process.terminate()
        for name, process in self._clients.items():
            try:
                code = await asyncio.to_thread(process.wait, DRAIN_S)
            except subprocess.TimeoutExpired:
                self.wrong.append(f"{name} did not come to its end within {DRAIN_S:g} s")
                process.kill()
                process.wait()
                continue
            if code not in (0, -15):  # -15: it was still importing
                self.wrong.append(f"{name} ended with {code}; see clients.log")
        self._clients.clear()

    async def _at_rest(self, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the idle server's files and threads, once they are as `wanted` or no longer change."""
        end, before = time.monotonic() + QUIET_S, {}
        while True:
            await asyncio.sleep(6.0)
            found = {"fds": self.server.num_fds(), "threads": self.server.num_threads(), "names": self._threads()}
            rss_mb = self.server.memory_info().rss / 2**20
            is_there = found == before if wanted is None else not _left(found, wanted)
            if (is_there and time.monotonic() > end - QUIET_S / 2) or time.monotonic() > end:
                return found | {"rss_mb": rss_mb}
            before = found

    def _threads(self) -> dict[str, int]:
        names: dict[str, int] = {}
        for task in Path(f"/proc/{self.server.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                name = (task / "comm").read_text().strip()
                names[name] = names.get(name, 0) + 1
        return names

    async def _sample(self, begun: float) -> None:
        """Samples memory, files, threads, CPU and answers every second."""
        self.results["begun"] = time.time()
        while True:
            self.samples.append({
                "s": time.monotonic() - begun, "rss_mb": self.server.memory_info().rss / 2**20,
                "fds": self.server.num_fds(), "threads": self.server.num_threads(),
                "cpu_s": sum(self.server.cpu_times()[:2]), "answered": self._answered,
            })  # fmt: skip
            if len(self.samples) % 5 == 0:
                with contextlib.suppress(httpx.HTTPError):
                    self._answered = await self._counted()
            await asyncio.sleep(1.0)

    async def metrics(self) -> str:
        """Returns the server's metrics as text."""
        answer = await self.http.get("/metrics", headers={"Authorization": f"Bearer {self.keys['admin']}"})
        return answer.raise_for_status().text

    async def _counted(self) -> float:
        return float(sum(soak_ledger.counters(await self.metrics(), "guerdon_requests_total", "model").values()))

    def _wait_ready(self, server: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end and server.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.ports[0]}/v2/health/ready").status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the server did not start; see {self.out / 'server.log'}")

    async def _judge(self, rest: dict[str, Any], end: dict[str, Any]) -> None:
        """Checks everything that must hold at the end."""
        metrics = await self.metrics()
        (self.out / "metrics.txt").write_text(metrics)
        key = {"Authorization": f"Bearer {self.keys['trainer']}"}
        answer = await self.http.post("/v2/models/critic_state/infer", json={"inputs": []}, headers=key)
        state = json.loads(answer.raise_for_status().json()["outputs"][0]["data"][0])
        lines = (line for path in sorted((self.out / "ledgers").iterdir()) for line in path.open(encoding="utf-8"))
        made = soak_ledger.account(lines)
        self.results["ledger"] = soak_report.summary(made, metrics)
        self.wrong += soak_ledger.compare(made, metrics)
        self.wrong += soak_ledger.compare_trains(made, metrics, state["step"])
        self.wrong += soak_report.check(self.results, list(self.samples), list(self.events), made, metrics)
        if left := _left(end, rest):
            self.wrong.append(f"at the end there are more than at rest before: {left}")


def _left(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Returns which of files, threads and memory have grown; pools may start their second thread late."""
    most = {"fds": before["fds"], "threads": before["threads"] + NUM_THREADS}
    most |= {"rss_mb": (1 + soak_report.RSS_SHARE) * before["rss_mb"]} if "rss_mb" in now else {}
    more = {key: (before[key], now[key]) for key, limit in most.items() if now[key] > limit}
    return more | ({"names": (before["names"], now["names"])} if "threads" in more else {})


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


def _environment() -> dict[str, str]:
    """Returns an environment with one thread per process and this folder's modules."""
    path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    hidden = ("GUERDON_API_KEYS", "GUERDON_API_KEY")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load, the first fifth to warm up (default: 60)")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder of all output")
    parser.add_argument("--share", type=float, default=0.5, help="share of the measured peak to send (default: 0.5)")
    parser.add_argument("--measure-s", type=float, default=8.0, help="seconds of the measurement (default: 8)")
    parser.add_argument("--every-s", type=float, default=6.0, help="seconds between kills and swaps (default: 6)")
    parser.add_argument("--train-rest-s", type=float, default=0.8, help="seconds between train requests (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0)
    soak = Soak(parser.parse_args())
    soak.prepare()
    soak.run()
    text = soak_report.report(soak.results | {"events": soak.events})
    (soak.out / "soak.md").write_text(text)
    print(text)
    return 0 if soak.results["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
