"""Two network namespaces of this machine as two hosts: own addresses and names, and a cable that can be cut."""

import ctypes
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launched import Launch, started
from processes import environment

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Why there can be no namespaces here; empty where there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"guerdon-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


@dataclass(frozen=True)
class Host:
    """One of the two; `hosts_file` is its /etc/hosts, by which its own name has an address."""

    name: str
    address: str
    namespace: str
    device: str
    hosts_file: Path

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, with the threads and the processes that it starts within, uses this host's network."""
        with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{self.namespace}") as other:
            _enter(other.fileno())
            try:
                yield
            finally:
                _enter(own.fileno())

    def command(self, *command: object) -> list[str]:
        """The command as one of this host, with its name and its /etc/hosts."""
        script = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'
        words = ["unshare", "--uts", "sh", "-c", script, "sh", str(self.hosts_file), self.name, *map(str, command)]
        return ["ip", "netns", "exec", self.namespace, *words]

    @contextmanager
    def launching(self, *command: object, env: dict[str, str] | None = None) -> Iterator[Launch]:
        """Starts the command on this host; ends it and all that it started on leaving."""
        with started(self.command(*command), env, environment()["PYTHONPATH"]) as launch:
            yield launch


@dataclass(frozen=True)
class Cable:
    """What connects the two hosts."""

    first: Host
    second: Host

    def cut(self) -> None:
        """Packets are lost from now on, both ways, and neither host is told: as with a broken switch between."""
        for host, other in ((self.first, self.second), (self.second, self.first)):
            wrong = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
            _ip("-n", host.namespace, "neigh", "replace", other.address, "dev", host.device, *wrong)

    def mend(self) -> None:
        """They come through again."""
        for host, other in ((self.first, self.second), (self.second, self.first)):
            _ip("-n", host.namespace, "neigh", "del", other.address, "dev", host.device)

    def unplug(self) -> None:
        """Takes the second host's end down, and it sees that."""
        _ip("-n", self.second.namespace, "link", "set", self.second.device, "down")

    def plug_in(self) -> None:
        """Takes it up again."""
        _ip("-n", self.second.namespace, "link", "set", self.second.device, "up")


@contextmanager
def two_hosts(*, names_are_loopback: bool = False) -> Iterator[Cable]:
    """Makes them, and takes them away on leaving.

    `names_are_loopback`: each host's own name means 127.0.1.1 there, as Debian's installer writes it.
    """
    tag = uuid.uuid4().hex[:5]
    net = f"10.{77 + os.getpid() % 100}.{int(tag[:2], 16)}"
    with tempfile.TemporaryDirectory() as folder:
        hosts = []
        for number in (1, 2):
            name, address = f"host{number}", f"{net}.{number}"
            file = Path(folder) / name
            lines = ["127.0.0.1 localhost", f"{'127.0.1.1' if names_are_loopback else address} {name}"]
            file.write_text("\n".join(lines) + "\n")
            hosts.append(Host(name, address, f"guerdon-{tag}-{number}", f"g{tag}{number}", file))
        try:
            for host in hosts:
                _ip("netns", "add", host.namespace)
            _ip("link", "add", hosts[0].device, "type", "veth", "peer", "name", hosts[1].device)
            for host in hosts:
                _ip("link", "set", host.device, "netns", host.namespace)
                _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
                for device in ("lo", host.device):
                    _ip("-n", host.namespace, "link", "set", device, "up")
            yield Cable(*hosts)
        finally:
            for host in hosts:  # the devices go with them
                subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
