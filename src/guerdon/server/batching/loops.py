"""A loop for each device, and for each isolated function, so that models on different devices compute at the same time.

Loops share only what is thread-safe. The worker has each model for one loop alone. Metrics, traces and PyTorch's caches
of pinned memory and compiled kernels lock. Every batch wakes the asyncio loop by `call_soon_threadsafe`. Each loop has
queues, budgets and rechecks of its own. Nothing that is served draws random numbers. A forward's other inputs, such as
the batch for attention, are context variables, separate in every thread. Building a model excludes all loops at once
(`distributed/computing.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike

from guerdon.core import ModelInfo
from guerdon.errors import GuerdonError, RanksLost
from guerdon.server import tracing
from guerdon.server.batching.chat_loop import ChatLoop
from guerdon.server.batching.halving import Executor
from guerdon.server.batching.jobs import Job
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig
from guerdon.settings.config import LoadedModelConfig, ModelConfig, ServedModelConfig

_BREAKS_S = 2.0
"""How soon a command that waits for a lost rank fails by itself, unless the rank's host vanished silently."""
FUNCTIONS = "functions"
"""The place of users' functions, whose device is unknown."""

CHAT_JUDGES = "other servers"
"""The place of judges in words."""

Models = ListLike[tuple[ServedModelConfig, ModelInfo]]
Loaded = ListLike[tuple[LoadedModelConfig, ModelInfo]]


class Loops:
    """Every loop of a service: `of` has each model's, by its name, and `places` the models' names by loop."""

    def __init__(
        self,
        group: Executor,
        models: Models,
        schedulers: dict[str, Scheduler],
        deliver: Callable[[list[Job]], None],
        metrics: Metrics,
        *,
        on_crash: Callable[[], None],
        traces: tracing.Traces | None = None,
        is_alone: bool = True,
    ) -> None:
        """Arguments are those of `Loop`, and `schedulers` has every model's.

        Unless `is_alone`, all models share one loop: each rank has one device, and executes one command at a time.
        """
        loaded = [(model, info) for model, info in models if not isinstance(model, ChatJudgeConfig)]
        groups = by_device(loaded) if is_alone else {"ranks": loaded}
        self.places = {place: [info.name for _, info in some] for place, some in groups.items()}
        self._all: list[Loop] = []
        for some in groups.values():
            num_children = _num_children(some[0][0]) if is_alone else 0
            loop = Loop(
                group,
                {info.name: schedulers[info.name] for _, info in some},
                deliver,
                metrics,
                on_crash=on_crash,
                recheck={} if num_children else {info.name: model.recheck_share for model, info in some},
                dtypes={info.name: info.dtype for _, info in some},
                traces=traces,
                num_children=num_children,
            )
            self._all.append(loop)
        if judges := [model for model, _ in models if isinstance(model, ChatJudgeConfig)]:
            queues = {judge.name: schedulers[judge.name] for judge in judges}
            self._all.append(ChatLoop(judges, group, queues, deliver, metrics, on_crash=on_crash))
            self.places[CHAT_JUDGES] = [*queues]
        self._schedulers = schedulers
        self.of = {name: loop for loop, names in zip(self._all, self.places.values(), strict=True) for name in names}

    def price(self, name: str, job: Job) -> None:
        """Estimates the cost of a job of many sequences before it is submitted; thread-safe."""
        self._schedulers[name].price(job)

    def start(self) -> None:
        """Starts the threads."""
        for loop in self._all:
            loop.start()

    def depth(self) -> dict[str, tuple[int, int]]:
        """Returns the waiting sequences and tokens by model, orders included."""
        return {name: waiting for loop in self._all for name, waiting in loop.depth().items()}

    def requests(self) -> dict[str, tuple[int, int]]:
        """Returns the numbers of running (at least in part) and waiting requests and orders, by model."""
        return {name: counts for loop in self._all for name, counts in loop.requests().items()}

    @property
    def loss(self) -> GuerdonError | None:
        """The error that ended the first loop that crashed or lost a rank, if any."""
        return next((loop.loss for loop in self._all if loop.loss is not None), None)

    @property
    def is_running(self) -> bool:
        """Whether a thread is alive; it may be inside a command."""
        return any(loop.is_running for loop in self._all)

    def stop(self, timeout_s: float) -> bool:
        """Finishes what is queued, then ends all threads; returns whether they have ended within `timeout_s`."""
        ends = time.monotonic() + timeout_s
        for loop in self._all:
            loop.stop(0.0)  # tell all before waiting for any
        has_ended = all(loop.stop(max(0.0, ends - time.monotonic())) for loop in self._all)
        for loop in self._all:
            loop.close()
        return has_ended

    def fail_waiting(self, loss: GuerdonError) -> None:
        """Fails all that waits; accepts nothing more, and no command follows the running ones. Thread-safe."""
        for loop in self._all:
            loop.fail_waiting(loss)

    def fail(self, loss: RanksLost) -> None:
        """Fails waiting jobs at once, and running ones unless they end soon; called from another thread."""
        self.fail_waiting(loss)
        ends = time.monotonic() + _BREAKS_S
        for loop in self._all:
            loop.fail(loss, max(0.0, ends - time.monotonic()))


def by_device(models: Loaded) -> Mapping[str, Loaded]:
    """Returns the models by their device; `cuda` is `cuda:0`, and `cpu` is `cpu:0`.

    Functions are together in a place of their own. There they hold up no device, and one thread calls all of them: two
    functions of a user need not be thread-safe with each other. Isolated functions have a place each.
    """
    found: dict[str, list[tuple[LoadedModelConfig, ModelInfo]]] = {}
    for model, info in models:
        device = info.device if ":" in info.device else f"{info.device}:0"
        place = FUNCTIONS if info.kind == "function" else device
        found.setdefault(f"child processes of {info.name}" if _num_children(model) else place, []).append((model, info))
    return found


def _num_children(model: ServedModelConfig) -> int:
    """Returns the number of child processes of an isolated function, 0 for any other model."""
    return model.num_children if isinstance(model, ModelConfig) and model.isolate else 0
