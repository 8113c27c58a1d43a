"""Hot swap: loads another checkpoint under a model's name while the server runs; unloads models, or lets them sleep.

The new checkpoint is loaded beside the one that serves or, for live weights, while that one sleeps. Once it is
complete, has passed the self-checks and has the same signature, the two change places between two batches: requests
accepted before are scored by the old weights, later ones by the new, and no reply mixes both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import orjson

from guerdon.core import Command, Executor, ModelInfo, Signal
from guerdon.errors import (
    Forbidden,
    GuerdonError,
    InvalidRequest,
    Overloaded,
    RanksLost,
    ServerFault,
    StartError,
    TooLarge,
    Unsupported,
    describe,
)
from guerdon.kinds import all_kinds
from guerdon.kinds.kind import Served
from guerdon.server.batching.jobs import Limits
from guerdon.server.batching.loops import Loops
from guerdon.server.batching.orders import Order
from guerdon.server.catalog import Catalog, Entry, Sleep, file_time_ns
from guerdon.server.logs import failure
from guerdon.settings.config import ServedModelConfig, ServerConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_S = 5.0
"""When to ask again about a model that is being changed."""

_KEPT = (
    "outputs",
    "attribute_names",
    "vocab_size",
    "hidden_size",
    "vocabulary",
    "eos_token_id",
    "takes_text",
    "takes_messages",
    "takes_tokens",
    "step_rule",
)
"""Fields that clients rely on: a model loaded under the same name must have the same."""


class Repository:
    """The models that can be loaded and unloaded while a server runs. Belongs to one asyncio loop."""

    def __init__(
        self,
        catalog: Catalog,
        loops: Loops,
        group: Executor,
        config: ServerConfig,
        limits: Callable[[ServedModelConfig, Served], Limits],
        *,
        is_alone: bool,
    ) -> None:
        """`config` may name the folder of the checkpoints that may be loaded; else each model only from where it came.

        `limits` returns the limits of a model's batch. Unless `is_alone`, all ranks load between two batches, and
        nothing is scored meanwhile; a single process loads on a thread of its own.
        """
        self._catalog, self._loops, self._group = catalog, loops, group
        self._root = None if config.model_repository is None else Path(config.model_repository)
        self._limits = limits
        self._is_alone = is_alone
        self._requests_wait = config.while_asleep == "wait"
        self._changing: set[str] = set()
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, name: str, source: str | None, client: str = "") -> str:
        """Loads the checkpoint `source`, None for the current one again; returns the new weights' version.

        If it fails, the current model keeps serving. Raises UnknownModel; Unsupported for a function; Forbidden, and
        InvalidRequest if `source` does not exist, cannot be served or has another signature; Overloaded while the model
        is being changed; ServerFault, also for lack of memory. Cancelling does not stop it; the log says how it went
        and that `client` asked.
        """
        entry = self._entry(name, "loaded")
        folder = entry.config.model if source is None else self._folder(source, entry.config)

        async def work() -> str:
            version = await self._load(name, folder)
            entry.wake()
            return version

        return await self._run_alone(name, client, work)

    def folder_of(self, name: str) -> Path:
        """Returns the folder from which the model is loaded; raises as `load`, and InvalidRequest if it is none.

        Raises Unavailable for a model that sleeps; one that is paused, level 0, does not.
        """
        entry = self._entry(name, "given live weights")
        folder = Path(entry.config.model).expanduser()
        entry.loaded()
        if entry.sleep is not None and entry.sleep.level:
            raise entry.asleep()
        if not folder.is_dir() or (folder / "adapter_config.json").exists():
            raise InvalidRequest(
                f"live weights need a whole checkpoint's folder; {name} was loaded from {str(folder)!r}"
            )
        return folder

    def check_unchanged(self, name: str, folder: Path) -> None:
        """Raises InvalidRequest if the weights in `folder`, from which the model was loaded, were written to since."""
        since_ns, files = self._catalog.entries[name].since_ns, folder.glob("*.safetensors")
        if changed := next((path for path in files if path.stat().st_ctime_ns > since_ns), None):
            raise InvalidRequest(
                f"{changed} was written to since {name} was loaded from it: it is not what serves, and cannot be "
                "averaged with; load the model again first"
            )

    async def load_folder(self, name: str, folder: str, client: str, *, beside: bool) -> str:
        """As `load`, of a folder that the server itself has made; requests wait meanwhile, unless `beside`."""
        return await self._run_alone(name, client, lambda: (self._load if beside else self._replace)(name, folder))

    async def unload(self, name: str, client: str = "") -> None:
        """Takes the model off the device after its accepted requests; idempotent.

        Raises InvalidRequest if a sum needs it, else as `load`.
        """
        self._entry(name, "unloaded")
        if sums := self._catalog.sums_of(name):
            names = ", ".join(made.info.name for made in sums)
            raise InvalidRequest(f"{name} is a component of {names}, which cannot do without it; load another into it")
        await self._run_alone(name, client, lambda: self._unload(name))

    async def sleep(self, name: str, level: int, mode: str, client: str = "") -> dict[str, int]:
        """Puts the model, without a name every checkpoint, to sleep as vLLM does; returns the freed bytes on rank 0.

        Level 0 pauses, 1 puts the weights away, 2 drops them and will load them again. With the mode `abort` queued
        requests fail, else they are answered first; after `keep` those that follow wait. A deeper sleep may follow;
        anything else that a sleeping model already does is a no-op. Raises as `load`, and StorageFailed.
        """
        waits = level == 0 or mode == "keep" or self._requests_wait
        return await self._for_each(name, client, lambda one: self._sleep(one, Sleep(level, waits), mode == "abort"))

    async def wake_up(self, name: str, client: str = "") -> list[str]:
        """Wakes the model, or all, and returns their names; idempotent. If it raises, one may still be asleep."""
        return [*await self._for_each(name, client, self._wake_up)]

    # -------------------------------------------------------------------------------------------- permission

    def _entry(self, name: str, what: str) -> Entry:
        info: Any = self._catalog.model(name)
        if name in self._catalog.operations:
            raise Unsupported(f"{name} is an operation of a critic, and cannot be {what}; use the critic's own")
        if why := all_kinds.of(info).why_fixed(info, what):
            raise Unsupported(why)
        if any(name == f"{operation.critic}_infer" for operation in self._catalog.operations.values()):
            raise Unsupported(f"{name} is a critic, and cannot be {what}; use its own operations load and offload")
        return self._catalog.entries[name]

    def _folder(self, source: str, config: Any) -> str:
        """Returns the folder of that name under the root, with links resolved; raises InvalidRequest, Forbidden."""
        if self._root is None:
            raise Forbidden(
                "this server loads no other checkpoints: start it with --model-repository FOLDER, or leave the name "
                "out, to load the same one again"
            )
        if ":" in source:
            raise InvalidRequest(f"{source!r} is not the name of a folder in the model repository")
        root = self._root.expanduser().resolve()
        missing = InvalidRequest(f"there is no folder {source!r} in the model repository")
        try:
            folder = (root / source).resolve(strict=True)
            files = [folder, *(file.resolve() for file in folder.rglob("*"))]
            is_there = folder.is_dir() and all(file.is_relative_to(root) for file in files)
        except (OSError, ValueError, RuntimeError):  # missing; an invalid name; a circle of links
            raise missing from None
        if not is_there:
            raise missing
        if (folder / "adapter_config.json").exists() and config.base is None and not _has_base_in(root, folder):
            raise Forbidden(
                f"{source!r} is an adapter whose base model is not in the model repository: start the server with "
                "--base, which is then the base model of every adapter"
            )
        return str(folder)

    # ------------------------------------------------------------------------------------------------- work

    async def _run_alone(self, name: str, client: str, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work` after all other changes, and to its end even if the caller leaves."""
        if name in self._changing:
            raise Overloaded(f"{name} is being loaded or unloaded; ask again when that is done", _AGAIN_S)
        self._changing.add(name)

        async def do() -> T:
            try:
                async with self._one:  # memory is counted for one model at a time
                    log.info("%s: being changed on request of %r", name, client)
                    return await work()
            except GuerdonError as e:
                log.warning("%s", e)
                raise
            finally:
                self._changing.discard(name)

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the log has it

    async def _load(self, name: str, folder: str) -> str:
        started = time.monotonic()
        try:
            problem = await self._change(name, folder)
        finally:
            # Only here does nothing in this call hold the failed or replaced model.
            await self._release(name)
        if problem is not None:
            raise problem
        info = self._catalog.entries[name].info
        log.info(
            "%s: now serves %r, version %s, after %.1f s",
            name,
            folder,
            info.weights_version,
            time.monotonic() - started,
        )
        return info.weights_version

    async def _change(self, name: str, folder: str) -> GuerdonError | None:
        """Loads and swaps in the model; on failure returns the error, and the current one keeps serving."""
        entry = self._catalog.entries[name]
        still = f"{name} was not loaded and " + ("stays unloaded" if entry.served is None else "serves on as before")
        since_ns = file_time_ns()
        try:
            made = await self._lead(name, Command(Signal.LOAD, name, folder=folder))
        except RanksLost:
            raise
        except TooLarge as e:
            return ServerFault(f"{still}: {e}; unload a model first, or {e.help}")
        except StartError as e:
            return InvalidRequest(f"{still}: {e}; {e.help}")
        except GuerdonError as e:
            return type(e)(f"{still}: {e}") if type(e) is ServerFault else e
        # Errors of files, libraries and memory leave the old model intact.
        except Exception as e:
            failure(log, logging.ERROR, "%s: loading %r failed", name, folder, error=e)
            return ServerFault(f"{still}: {describe(e)}")
        if differences := _differences(entry.info, made.info):
            return InvalidRequest(f"{still}: clients would find another model, whose {'; '.join(differences)}")
        made.info = dataclasses.replace(made.info, source=entry.info.source)  # clients may use it as a name
        await self._switch(name, Signal.SWITCH, dataclasses.replace(entry.config, model=folder), made, since_ns)
        return None

    async def _replace(self, name: str, folder: str) -> str:
        """As `_load`, while the current weights are put away; they come back if the new ones are refused."""
        entry = self._catalog.entries[name]
        own = None if entry.sleep else Sleep(1, requests_wait=True)
        entry.sleep = entry.sleep or own  # a pause goes on after it
        try:
            try:
                await self._in_turn(name, Command(Signal.OFFLOAD, name))
            except RanksLost:
                raise
            except Exception as e:  # no room on the disk, or in a host's memory
                log.warning("%s: its weights cannot be put away, so the new ones are loaded beside them: %s", name, e)
            return await self._load(name, folder)
        finally:
            await self._in_turn(name, Command(Signal.ONLOAD, name))  # on all ranks; does nothing to new weights
            if entry.sleep is own:
                entry.wake()

    async def _for_each(self, name: str, client: str, work: Callable[[str], Awaitable[T]]) -> dict[str, T]:
        names = [name] if name else [one for one in self._catalog.entries if self._has_weights(one)]
        if not names:
            why = "functions have no weights, adapters share theirs, and a critic has its own offload"
            raise Unsupported(f"no model here can sleep: {why}")
        done: dict[str, T] = {}
        for one in names:
            self._entry(one, "put to sleep")
            done[one] = await self._run_alone(one, client, functools.partial(work, one))
        return done

    def _has_weights(self, name: str) -> bool:
        with contextlib.suppress(Unsupported):
            return bool(self._entry(name, ""))
        return False

    async def _sleep(self, name: str, sleep: Sleep, aborts: bool) -> int:
        entry = self._catalog.entries[name]
        before = entry.sleep
        if entry.served is None or (before is not None and before.level >= sleep.level):
            return 0
        entry.sleep, num_bytes = sleep, 0
        if before is not None:
            before.over.set()  # those who wait for it look at the new one
        if aborts:
            self._loops.of[name].abort(name, entry.asleep())
        try:
            if sleep.level == 1:
                num_bytes = await self._in_turn(name, Command(Signal.OFFLOAD, name))
            elif sleep.level == 2:
                num_bytes = await self._switch(name, Signal.UNLOAD, entry.config)
        except BaseException:
            if sleep.level == 1:
                await self._in_turn(name, Command(Signal.ONLOAD, name))  # other ranks may be asleep
            entry.wake()
            raise
        if sleep.level == 2:
            await self._release(name)
        log.info("%s: asleep, level %d, %.1f MiB of weights given back", name, sleep.level, num_bytes / (1 << 20))
        return num_bytes

    async def _wake_up(self, name: str) -> str:
        entry = self._catalog.entries[name]
        if entry.sleep is not None:
            if entry.sleep.level == 1:
                await self._in_turn(name, Command(Signal.ONLOAD, name))
            elif entry.sleep.level == 2:
                await self._load(name, entry.config.model)
            entry.wake()
            log.info("%s: awake", name)
        return name

    async def _unload(self, name: str) -> str:
        entry = self._catalog.entries[name]
        entry.wake()
        if entry.served is not None:
            try:
                await self._switch(name, Signal.UNLOAD, entry.config)
            finally:
                await self._release(name)
            log.info("%s: unloaded", name)
        return entry.info.weights_version

    async def _switch(self, name: str, signal: Signal, config: Any, served: Any = None, since_ns: int = 0) -> Any:
        """Puts another model, or none, in place for requests from now on, after those accepted before."""
        entry = self._catalog.entries[name]
        before = entry.config, entry.served, entry.since_ns

        def switch(group: Executor) -> Any:
            result = group.execute(Command(signal, name))
            if served is not None:
                self._loops.of[name].change(name, self._limits(config, served))
            return result

        order = Order(switch)
        self._loops.of[name].order(name, order, finds_room=True)
        # No await between: the next request queues behind the order.
        self._catalog.put(name, config, served, since_ns)
        try:
            return await asyncio.wrap_future(order.outcome)
        except BaseException:
            self._catalog.put(name, *before)
            raise

    async def _release(self, name: str) -> None:
        try:
            await self._lead(name, Command(Signal.RELEASE, name))
        except GuerdonError as e:
            log.info("%s: %s", name, e)  # the server is ending, and its memory with it

    async def _lead(self, name: str, command: Command) -> Any:
        """Runs a command on all ranks, without disturbing a batch."""
        if self._is_alone:
            return await _on_a_thread(lambda: self._group.execute(command))
        return await self._in_turn(name, command)

    async def _in_turn(self, name: str, command: Command) -> Any:
        """Runs a command on all ranks between two batches, after the requests so far."""
        order = Order(lambda group: group.execute(command))
        self._loops.of[name].order(name, order, finds_room=True)
        return await asyncio.wrap_future(order.outcome)


def _has_base_in(root: Path, folder: Path) -> bool:
    """Whether an adapter's own file names a folder under the root as its base model, and so does an adapter there."""
    try:
        named = orjson.loads((folder / "adapter_config.json").read_bytes())["base_model_name_or_path"]
        bases = [path.resolve() for path in (Path(named), folder / named) if path.is_dir()]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(bases) and all(
        base.is_relative_to(root) and (not (base / "adapter_config.json").exists() or _has_base_in(root, base))
        for base in bases
    )


async def _on_a_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` on a daemon thread: it may take minutes, and the process must not wait for it at exit."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as e:
            outcome.set_exception(e)
        except BaseException as e:  # SystemExit, for instance, would end the server
            outcome.set_exception(ServerFault(describe(e)))

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=run, name="guerdon-load", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _differences(old: ModelInfo, new: ModelInfo) -> list[str]:
    """Returns the differences that would surprise clients of the old model."""
    found = [
        f"{field} is {getattr(new, field)} and not {getattr(old, field)}"
        for field in _KEPT
        if getattr(old, field) != getattr(new, field)
    ]
    if new.max_length is not None and (old.max_length is None or new.max_length < old.max_length):
        found.append(f"max_length is {new.max_length} and not {old.max_length or 'unbounded'}, or more")
    return found
