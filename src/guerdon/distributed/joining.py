"""How the processes of a launch find each other, also after a restart and on hosts with several networks."""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import struct
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed
from torch.distributed.distributed_c10d import _set_pg_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

JOIN_S = 300.0
"""How long the processes of a launch may take to come; they join before they load anything."""
FOREVER = timedelta(days=365)
"""Between two commands a rank waits as long as nobody asks; that others live, the pulse tells."""
LETS_GO_S = 0.3
"""How long the end of a process waits for gloo's threads to drop what they have sent. They do so after whoever waits
for it goes on, and need the interpreter's lock for it: a thread that asks for that while the interpreter ends is ended
by it, inside gloo, and the process by abort."""
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def join(backend: str) -> None:
    """Makes the default process group of all that torchrun has started; raises RuntimeError where they do not come."""
    _choose_interface()
    limit = timedelta(seconds=JOIN_S)
    store, rank, size = next(iter(distributed.rendezvous("env://", timeout=limit)))
    store.set_timeout(limit)
    own = distributed.PrefixStore(f"guerdon/{_agreed(store, rank, size)}", store)
    distributed.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
    _set_pg_timeout(FOREVER)
    atexit.register(time.sleep, LETS_GO_S)


def new_group() -> ProcessGroup:
    """A group of all ranks over the CPU, in which one waits for the others no longer than they may take to come."""
    group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=JOIN_S))
    assert isinstance(group, distributed.ProcessGroup)
    return group


def wait_forever(group: ProcessGroup) -> None:
    """From now on one waits for the others in that group without end."""
    _set_pg_timeout(FOREVER, group)


def machine() -> str:
    """What two processes have in common whose numbers mean the same processes; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return ""


def _agreed(store: Store, rank: int, size: int) -> str:
    """A name that only those have who are there now.

    torchrun keeps one store over all restarts, and in it the addresses of processes that are no more: a rank that
    comes early would take those for the others'. Each rank tells a token of its own, and a name made of all of them
    counts once it is every rank's.
    """
    token = uuid.uuid4().hex
    store.set(f"guerdon/start/{rank}", token)
    until = time.monotonic() + JOIN_S
    counted: set[str] = set()
    while time.monotonic() < until:
        tokens = [store.get(f"guerdon/start/{other}") for other in range(size)]
        name = hashlib.sha256(b" ".join(tokens)).hexdigest()
        if store.add(f"guerdon/start/{name}", int(name not in counted)) == size:
            return name
        counted.add(name)
        time.sleep(0.05)
    raise RuntimeError(f"not all of the {size} processes came within {JOIN_S:.0f} s")


def _choose_interface() -> None:
    """Has gloo listen where rank 0's host is reached from, unless the environment says where.

    Left alone it takes the address of the host's own name, which many hosts resolve to 127.0.1.1.
    """
    with suppress(OSError):
        leader = socket.gethostbyname(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        if "GLOO_SOCKET_IFNAME" in os.environ or leader.startswith("127."):
            return
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((leader, 9))  # sends nothing: it asks the kernel for the route
            own = probe.getsockname()[0]
        if (name := _interface(own)) is not None and name != "lo":
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface(address: str) -> str | None:
    """The name of the network interface that has the address."""
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                told = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(told[20:24]) == address:
                    return name
    return None
