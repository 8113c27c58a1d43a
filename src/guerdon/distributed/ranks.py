"""Where this process stands among those that hold one model, and what they say to each other.

torchrun starts the processes; W of them are W / T data-parallel parts of T tensor-parallel ranks each. Ranks of one
part lie side by side: rank r is of part r // T. Rank 0 leads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from guerdon.errors import ConfigError, GuerdonError, RanksLost, ServerFault, StartError, named
from guerdon.settings.config import ParallelConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("replica", "pp", "dp_replicate", "fsdp", "tp")
"""Of the mesh: replicas of whole models before the dimensions that transformers shards over."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the launch; equal `machine`s share their process numbers, unless it is empty."""

    rank: int
    host: str
    pid: int
    machine: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(slots=True)
class Doing:
    """What this rank does now, as its pulse tells rank 0; one for all that go by the same Ranks.

    `ticks` says that it gets on, `num_waits` within how many waits for others it is. `failure` is the error with which
    it waits for the others, `failed` the number of the command that ended so, or IN_TALK. On rank 0 `num_gathered` is
    the number of the last command of which it has heard from all.
    """

    ticks: int = 0
    num_waits: int = 0
    failed: int = 0
    num_gathered: int = 0
    failure: BaseException | None = None


IN_TALK = -1
"""Where what failed is no command but what the ranks were to agree about."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that hold one model, as one of them sees them; a process by itself is `ALONE`.

    `data_rank` of `data_size` is the part of each batch that is this rank's, `tensor_rank` of `tensor_size` its part
    of the weights. With `fsdp` what is trained is sharded over the data-parallel ranks, and all of them must run their
    forwards at the same time. `device` is this rank's; `mesh` has the dimensions DIMENSIONS, and so has `frozen_mesh`,
    that of models that are not trained. `control` is the group over which objects go, `heartbeat` the pulse's, both
    over the CPU and with all ranks.
    """

    rank: int = 0
    size: int = 1
    tensor_size: int = 1
    fsdp: bool = False
    timeout_s: float = 30.0
    members: tuple[Member, ...] = ()
    device: torch.device | None = None
    mesh: DeviceMesh | None = None
    frozen_mesh: DeviceMesh | None = None
    control: ProcessGroup | None = None
    heartbeat: ProcessGroup | None = None
    doing: Doing = field(default_factory=Doing)

    @property
    def is_leader(self) -> bool:
        """Whether this rank serves, writes and logs; the others follow it."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Parts into which a batch is split."""
        return self.size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """Which of these parts is this rank's."""
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        """Which part of the weights; all ranks of one data_rank compute the same sequences."""
        return self.rank % self.tensor_size

    @property
    def is_sharded(self) -> bool:
        """Whether a trained model's weights lie in parts on several ranks."""
        return self.size > 1 and (self.tensor_size > 1 or self.fsdp)

    @property
    def in_step(self) -> bool:
        """Whether the data-parallel ranks must make the same number of forwards, as their weights are sharded."""
        return self.fsdp and self.data_size > 1

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks that hold the same part of the weights, and compute different sequences."""
        assert self.mesh is not None
        return self.mesh.get_group("fsdp" if self.fsdp else "replica")

    @property
    def tensor_group(self) -> ProcessGroup:
        """The ranks that compute the same sequences, each with its part of the weights."""
        assert self.mesh is not None
        return self.mesh.get_group("tp")

    def frozen(self) -> Ranks:
        """The same ranks for a model that is not trained: of that nothing is sharded but by tensor parallelism."""
        return dataclasses.replace(self, fsdp=False, mesh=self.frozen_mesh) if self.fsdp else self

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While within it this rank need not tick: it waits for another, or does what has nothing to tick in."""
        self.doing.num_waits += 1
        try:
            yield
        finally:
            self.doing.ticks += 1  # what comes after it has its whole time
            self.doing.num_waits -= 1

    def most(self, number: int) -> int:
        """The largest of the data-parallel ranks' numbers."""
        if self.data_size == 1:
            return number
        import torch
        from torch import distributed

        found = torch.tensor(number)
        with self.waiting():
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self.data_group)
        return int(found)

    def total(self, numbers: Any) -> Any:
        """The sums of the data-parallel ranks' numbers, float64 `[N]` in and out, by numpy."""
        if self.data_size == 1:
            return numbers
        import torch
        from torch import distributed

        sums = torch.tensor(numbers, dtype=torch.float64)
        with self.waiting():
            distributed.all_reduce(sums, group=self.data_group)
        return sums.numpy()

    def agree(self, error: BaseException | None = None) -> None:
        """Returns where no rank has an error; else each raises: its own, or what befell another, named by its rank.

        All ranks must call it, in the same place. An error that they have agreed upon already is only raised.
        """
        if error is not None and (self.size == 1 or getattr(error, _AGREED, False)):
            raise error
        told = self._told(None if error is None else self.portable(error), "agree", error)
        if error is not None:
            raise agreed(error)
        for other in told:
            if other is not None:
                raise agreed(other)

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """What raises within it on one rank raises on all, as by `agree`; all ranks must come to it.

        An error that they have agreed upon is only raised, also where it was given another name on the way.
        """
        try:
            yield
        except RanksLost:
            raise
        except BaseException as e:
            if not getattr(e.__cause__, _AGREED, False):
                self.agree(e)
            raise
        self.agree()

    def tell_all(self, what: Any) -> list[Any]:
        """What every rank tells, by rank; all must call it, in the same place. Raises RanksLost.

        Where they do not, each raises the same: what an error one of them tells, else that they are out of step.
        """
        return self._told(what, _place(), what if isinstance(what, BaseException) else None)

    def _told(self, what: Any, where: str, failure: BaseException | None) -> list[Any]:
        if self.size == 1:
            return [what]
        from guerdon.distributed import frames

        doing = self.doing
        before = doing.failed, doing.failure
        if failure is not None:
            doing.failure = failure
            doing.failed = IN_TALK
        try:
            with self.waiting():
                told = frames.exchange((where, what), self.control)
        except RuntimeError as e:
            raise RanksLost(f"another rank was lost: {_first_line(e)}") from e
        doing.failed, doing.failure = before
        places, words = zip(*told, strict=True)
        if len(set(places)) == 1:
            return list(words)
        for word in words:
            if isinstance(word, BaseException):
                raise agreed(word)
        text = ", ".join(f"rank {rank} is at {place}" for rank, place in enumerate(places))
        raise RanksLost(f"the ranks are out of step: {text}")

    def portable(self, error: BaseException) -> GuerdonError:
        """The error as another process is told of it."""
        me = f"rank {self.rank} on {self.members[self.rank].host}"
        if isinstance(error, GuerdonError):
            return named(me, error)
        return ServerFault(f"{me}: {type(error).__name__}: {error}")


ALONE = Ranks()


_AGREED = "is_agreed"
"""The attribute of an error that every rank raises."""
_OWN = (__file__, os.path.join("training", "collectives.py"), "contextlib.py")
"""Files that are not the place where ranks talk, but pass on what others say."""

E = TypeVar("E", bound=BaseException)


def agreed(error: E) -> E:
    """The error as one that every rank raises."""
    setattr(error, _AGREED, True)
    return error


def _place() -> str:
    """Where ranks talk, as file and line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_OWN):
        frame = frame.f_back
    assert frame is not None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def start(config: ParallelConfig, device: str | None = "auto") -> Ranks:
    """Joins the processes that torchrun has started, or those that the caller has joined to a process group already.

    `device` is `auto`, `cpu` or `cuda`; each rank has a GPU of its own. None for models that are the caller's own, on
    devices of their own: then there are neither `device` nor meshes. Raises ConfigError where the number of processes
    does not fit the settings, StartError where they do not find each other.
    """
    if num_started() == 1:
        if config.tensor_parallel > 1 or config.fsdp:
            what = f"tensor_parallel is {config.tensor_parallel}" if config.tensor_parallel > 1 else "fsdp is on"
            raise ConfigError(
                f"{what}, and this is one process", "start it by torchrun --nproc-per-node N -m guerdon ..."
            )
        return ALONE
    from torch import distributed

    from guerdon.distributed import frames, joining

    place = None if device is None else _device(device)
    try:
        if not distributed.is_initialized():
            joining.join("cpu:gloo,cuda:nccl" if place is not None and place.type == "cuda" else "gloo")
        rank, size = distributed.get_rank(), distributed.get_world_size()
        control, heartbeat = joining.new_group(), joining.new_group()
        layout = {field.name: getattr(config, field.name) for field in dataclasses.fields(ParallelConfig)}
        own = Member(rank, socket.gethostname(), os.getpid(), joining.machine())
        members, layouts = zip(*frames.exchange((own, layout), control), strict=True)
        _check_layout(members, layouts)
        # All make them here: later a rank that cannot load would leave the others waiting for it in this.
        mesh = frozen_mesh = None
        if place is not None:
            mesh = frozen_mesh = _mesh(place.type, size, config.tensor_parallel, False)
            if config.fsdp:
                mesh = _mesh(place.type, size, config.tensor_parallel, True)
        joining.wait_forever(control)
    except (RuntimeError, ValueError) as e:
        raise StartError(
            f"the ranks do not find each other: {e}",
            "check MASTER_ADDR and MASTER_PORT, the firewall, and GLOO_SOCKET_IFNAME on hosts with several networks",
        ) from e
    return Ranks(
        rank=rank,
        size=size,
        tensor_size=config.tensor_parallel,
        fsdp=config.fsdp,
        timeout_s=config.rank_timeout_s,
        members=members,
        device=place,
        mesh=mesh,
        frozen_mesh=frozen_mesh,
        control=control,
        heartbeat=heartbeat,
    )


def _check_layout(members: ListLike[Member], layouts: ListLike[dict[str, Any]]) -> None:
    """Raises ConfigError, the same on all ranks, where their settings differ or do not fit their number."""
    for member, layout in zip(members, layouts, strict=True):
        for name, first in layouts[0].items():
            if layout[name] != first:
                raise ConfigError(
                    f"{name} is {first} for {members[0]}, and {layout[name]} for {member}",
                    "start all ranks with the same settings",
                )
    tensor_size = layouts[0]["tensor_parallel"]
    if len(members) % tensor_size:
        raise ConfigError(
            f"{len(members)} processes cannot be parts of {tensor_size} tensor-parallel ranks",
            "start a multiple of tensor_parallel processes",
        )


def num_started() -> int:
    """How many processes torchrun, or the caller by torch.distributed, has started to be one."""
    if "torch" in sys.modules:  # whoever has joined a group has imported it
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _device(name: str) -> torch.device:
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"device is {name}, and every rank of torchrun has its own", "give auto, cpu or cuda; ranks take turns"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if wanted > count:
        raise ConfigError(
            f"{wanted} processes of this host need a GPU each, and there are {count}",
            f"give --nproc-per-node {count}, or less",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _mesh(device_type: str, size: int, tensor_size: int, fsdp: bool) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    data_size = size // tensor_size
    shape = (1 if fsdp else data_size, 1, 1, data_size if fsdp else 1, tensor_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
