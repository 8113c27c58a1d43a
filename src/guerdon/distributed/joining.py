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
"""Timeout for the processes of a launch to join; they join before they load anything."""
FOREVER = timedelta(days=365)
"""No timeout between commands; heartbeats check liveness."""
LETS_GO_S = 0.3
"""Wait at exit for gloo's threads to release sent buffers. They need the GIL for that, and a thread that asks for the
GIL during interpreter shutdown is killed inside gloo, which aborts the process.
"""
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


def join(backend: str) -> None:
    """Creates the default process group of all torchrun processes; raises RuntimeError if some do not join."""
    _choose_interface()
    limit = timedelta(seconds=JOIN_S)
    store, rank, size = next(iter(distributed.rendezvous("env://", timeout=limit)))
    store.set_timeout(limit)
    own = distributed.PrefixStore(f"guerdon/{_agreed(store, rank, size)}", store)
    distributed.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)
    _set_pg_timeout(FOREVER)
    atexit.register(time.sleep, LETS_GO_S)


def new_group() -> ProcessGroup:
    """Creates a CPU group of all ranks, with JOIN_S as its timeout."""
    group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=JOIN_S))
    assert isinstance(group, distributed.ProcessGroup)
    return group


def wait_forever(group: ProcessGroup) -> None:
    """Removes the group's timeout."""
    _set_pg_timeout(FOREVER, group)


def machine() -> str:
    """Returns an id of the PID namespace that this process lives in; "" if it is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return ""


def _agreed(store: Store, rank: int, size: int) -> str:
    """Returns a name that only the processes of this start know.

    torchrun keeps one store over all restarts, with stale addresses of dead processes, which a rank that joins early
    would use. So each rank writes a token; a name made of all tokens counts once every rank has computed it.
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
    """Makes gloo use the interface with the route to rank 0, unless GLOO_SOCKET_IFNAME is set.

    By default gloo resolves the host's own name, which is 127.0.1.1 on many hosts.
    """
    with suppress(OSError):
        leader = socket.gethostbyname(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        if "GLOO_SOCKET_IFNAME" in os.environ or leader.startswith("127."):
            return
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((leader, 9))  # sends nothing: it asks the kernel for the route
            own = probe.getsockname()[0]
        if (name := interface_of(own)) is not None and name != "lo":
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this address."""
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                reply = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None
