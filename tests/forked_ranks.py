"""Ranks without torchrun: imports a module once, forks a process for each rank and runs it there as `__main__`.

python -m forked_ranks NPROC MODULE|FILE.py [ARGUMENT ...]

For modules that take seconds to import. The ranks find each other as under torchrun, by a store of their parent's; it
ends with 1 if one of them fails, and ends the others then.
"""

import importlib
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from torch import distributed


def main() -> int:
    count, module = int(sys.argv[1]), sys.argv[2]
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        module = Path(module).stem
    importlib.import_module(module)
    pipes = [os.pipe() for _ in range(count)]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            for _, write in pipes:
                os.close(write)
            run(module, rank, count, os.read(pipes[rank][0], 16).decode())
        children.append(child)
    # After the forks, because it has a thread.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _, write in pipes:
        os.write(write, str(store.port).encode())
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def run(module: str, rank: int, count: int, port: str) -> None:
    """Does what the rank does, and ends this process."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    sys.argv = sys.argv[2:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as e:
        sys.exit(e.code)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
