"""This process as a rank of one model, and the collectives between ranks.

A launcher starts the processes, torchrun or `launcher.py`: W of them are W / T data-parallel parts of T tensor-parallel
ranks each. Ranks of one part are neighbours: rank r belongs to part r // T. Rank 0 leads.
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

from guerdon.errors import ConfigError, GuerdonError, RanksLost, ServerFault, StartError, describe, first_line, named
from guerdon.settings.config import ParallelConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("replica", "pp", "dp_replicate", "fsdp", "tp")
"""Dimensions of the mesh: replicas of whole models, then those that transformers shards over."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the launch; processes with the same non-empty `machine` share a PID namespace."""

    rank: int
    host: str
    pid: int
    machine: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass(slots=True)
class Doing:
    """This rank's current activity, for its heartbeats; shared by all copies of its Ranks.

    `ticks` counts progress, `num_waits` how many nested waits for others it is in. `failure` is the error with which it
    waits for the others, `failed` the number of the command that raised it, or IN_TALK. On rank 0 `num_gathered` is the
    number of the last command that all ranks have reported.
    """

    ticks: int = 0
    num_waits: int = 0
    failed: int = 0
    num_gathered: int = 0
    failure: BaseException | None = None


IN_TALK = -1
"""The value of `Doing.failed` if the failure is not in a command but in `agree` or `tell_all`."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that hold one model, seen from one of them; a single process is `ALONE`.

    `data_rank` of `data_size` is this rank's part of each batch, `tensor_rank` of `tensor_size` its part of the
    weights. With `fsdp` trained models are sharded over the data-parallel ranks, which must run their forwards in step.
    `device` is this rank's. `mesh` and `frozen_mesh`, for models that are not trained, have the dimensions DIMENSIONS.
    `control` is the group for objects, `heartbeat` the pulse's; both are CPU groups of all ranks.
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
        """Whether this rank serves, writes and logs."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Number of parts that a batch is split into."""
        return self.size // self.tensor_size

    @property
    def data_rank(self) -> int:
        """This rank's part of a batch."""
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        """This rank's part of the weights; ranks of one data_rank compute the same sequences."""
        return self.rank % self.tensor_size

    @property
    def is_sharded(self) -> bool:
        """Whether a trained model's weights are sharded over ranks."""
        return self.size > 1 and (self.tensor_size > 1 or self.fsdp)

    @property
    def in_step(self) -> bool:
        """Whether the data-parallel ranks must run equally many forwards because their weights are sharded."""
        return self.fsdp and self.data_size > 1

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks with the same part of the weights and different sequences."""
        assert self.mesh is not None
        return self.mesh.get_group("fsdp" if self.fsdp else "replica")

    @property
    def tensor_group(self) -> ProcessGroup:
        """The ranks with the same sequences and different parts of the weights."""
        assert self.mesh is not None
        return self.mesh.get_group("tp")

    def frozen(self) -> Ranks:
        """Returns the same ranks for a model that is not trained: sharded by tensor parallelism only."""
        return dataclasses.replace(self, fsdp=False, mesh=self.frozen_mesh) if self.fsdp else self

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Suspends the duty to tick: inside, this rank waits for another or does what cannot tick."""
        self.doing.num_waits += 1
        try:
            yield
        finally:
            self.doing.ticks += 1  # what follows has its full time
            self.doing.num_waits -= 1

    def most(self, number: int) -> int:
        """Returns the maximum over the data-parallel ranks. Collective."""
        return number if self.data_size == 1 else int(self._reduced(number, "MAX", "int64"))

    def total(self, numbers: Any) -> Any:
        """Returns the sums over the data-parallel ranks, numpy float64 `[N]` in and out. Collective."""
        return numbers if self.data_size == 1 else self._reduced(numbers, "SUM", "float64").numpy()

    def _reduced(self, numbers: Any, how: str, dtype: str) -> torch.Tensor:
        import torch
        from torch import distributed

        table = torch.tensor(numbers, dtype=getattr(torch, dtype))
        with self.waiting():
            distributed.all_reduce(table, getattr(distributed.ReduceOp, how), group=self.data_group)
        return table

    def agree(self, error: BaseException | None = None) -> None:
        """Collective; if any rank has an error, every rank raises: its own, or another's with the rank's name.

        All ranks must call it in the same place. An error that all ranks raise already is only re-raised.
        """
        if error is not None and (self.size == 1 or is_agreed(error)):
            raise error
        told = self._exchange(None if error is None else self.portable(error), "agree", error)
        if error is not None:
            raise agreed(error)
        for other in told:
            if other is not None:
                raise agreed(other)

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Collective; re-raises any rank's error on every rank at the end of the context, as `agree`.

        An error that all ranks raise already is only re-raised, even if it was wrapped on the way.
        """
        try:
            yield
        except RanksLost:
            raise
        except BaseException as e:
            if not is_agreed(e.__cause__):
                self.agree(e)
            raise
        self.agree()

    def tell_all(self, what: Any) -> list[Any]:
        """All-gathers objects: returns every rank's, by rank. Collective; raises RanksLost.

        If the ranks call it in different places, all raise the same: an error that one of them sends, else RanksLost.
        """
        return self._exchange(what, _place(), what if isinstance(what, BaseException) else None)

    def _exchange(self, what: Any, where: str, failure: BaseException | None) -> list[Any]:
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
            raise RanksLost(f"another rank was lost: {first_line(e)}") from e
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
        """Returns the error in a form for other processes, prefixed with this rank."""
        me = f"rank {self.rank} on {self.members[self.rank].host}"
        if isinstance(error, GuerdonError):
            return named(me, error)
        return ServerFault(f"{me}: {describe(error)}")


ALONE = Ranks()


_AGREED = "is_agreed"
"""Attribute that marks an error as raised on every rank."""
_OWN = (__file__, os.path.join("training", "collectives.py"), "contextlib.py")
"""Files that only pass a collective on, and so are not its place."""

E = TypeVar("E", bound=BaseException)


def agreed(error: E) -> E:
    """Marks an error as raised on every rank."""
    setattr(error, _AGREED, True)
    return error


def is_agreed(error: BaseException | None) -> bool:
    """Returns whether every rank raises this error."""
    return getattr(error, _AGREED, False)


def _place() -> str:
    """Returns the caller's file and line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_OWN):
        frame = frame.f_back
    assert frame is not None
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def start(config: ParallelConfig, device: str | None = "auto") -> Ranks:
    """Joins the processes of a launch, or the process group that the caller has made.

    `device` is `auto`, `cpu` or `cuda`, with one GPU per rank; None for models that the caller places himself: then
    there are neither `device` nor meshes. Raises ConfigError if the number of processes does not fit the settings,
    StartError if they do not find each other.
    """
    if num_started() == 1:
        if (num_wanted := config.tensor_parallel * (config.data_parallel or 1)) > 1 or config.fsdp:
            what = f"the settings ask for {num_wanted} ranks" if num_wanted > 1 else "fsdp is on"
            raise ConfigError(
                f"{what}, and this is one process",
                f"start it by torchrun --nproc-per-node {max(num_wanted, 2)}; the guerdon command does not need that",
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
        # Collective, so made here: later a rank that cannot load would leave the others waiting.
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
    """Raises ConfigError, the same on all ranks, if their settings differ or do not fit their number."""
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
    data_size, num_parts = layouts[0]["data_parallel"], len(members) // tensor_size
    if data_size not in (None, num_parts):
        raise ConfigError(
            f"data_parallel is {data_size}, and {len(members)} processes are {num_parts} data-parallel parts",
            f"leave it out, or start {data_size * tensor_size} processes",
        )


def num_started() -> int:
    """Returns how many processes a launcher, or the caller by torch.distributed, has started together."""
    if "torch" in sys.modules:  # whoever has joined a group has imported it
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_device(name: str) -> None:
    """Raises ConfigError if the setting `device` names one of several devices of a kind."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {name}, and every rank has its own", "give auto, cpu or cuda; ranks take turns")


def _device(name: str) -> torch.device:
    import torch

    check_device(name)
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
