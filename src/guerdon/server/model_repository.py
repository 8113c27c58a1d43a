"""Loading another checkpoint into a model's place while the server runs, and unloading one.

What is loaded comes beside the model that serves, which goes on; only once it is there whole, has passed the
self-checks and answers as clients know it, the two change places, between two batches: whatever was accepted before is
scored by the old weights, what comes after by the new, and no reply by both.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from guerdon.core import Command, ModelInfo, OperationInfo, Signal
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
)
from guerdon.server.batching.halving import Group
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.orders import Order
from guerdon.server.batching.scheduler import Limits
from guerdon.server.catalog import Catalog, Entry, Served
from guerdon.server.logs import failure
from guerdon.settings.config import ModelConfig

log = logging.getLogger(__name__)

_AGAIN_S = 5.0
"""When whoever finds a model amid a change may ask again."""

_KEPT = (
    "outputs",
    "attribute_names",
    "vocab_size",
    "vocabulary",
    "eos_token_id",
    "takes_text",
    "takes_messages",
    "takes_tokens",
    "step_rule",
)
"""What clients rely on: of these another model in the same place must have the same."""


class Repository:
    """The models that can be loaded and unloaded while a server runs. Belongs to one asyncio loop."""

    def __init__(
        self,
        catalog: Catalog,
        loop: Loop,
        group: Group,
        root: str | None,
        limits: Callable[[ModelConfig, Served], Limits],
        *,
        is_alone: bool,
    ) -> None:
        """`root` is the folder of the checkpoints that may be loaded; None: only those that serve, again. `limits` are
        what a batch of a model may hold.

        Where this process is one of several, so not `is_alone`, all ranks load between two batches, for whose time
        nothing is scored; alone it loads on a thread of its own.
        """
        self._catalog, self._loop, self._group = catalog, loop, group
        self._root = None if root is None else Path(root)
        self._limits = limits
        self._is_alone = is_alone
        self._changing: set[str] = set()
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[str]] = set()

    async def load(self, name: str, source: str | None, client: str = "") -> str:
        """Loads the checkpoint `source`, or again the one that serves, and returns the weights' version from then on.

        Where anything fails, what serves goes on unharmed. Raises UnknownModel; Unsupported for what is no checkpoint;
        Forbidden, InvalidRequest where `source` is not to be had, cannot be served, or would answer otherwise;
        Overloaded while the model is being changed; ServerFault, also for lack of memory. It is done to its end,
        whether the caller waits for that or not, and the log tells how it went, and that `client` asked.
        """
        entry = self._entry(name, "loaded")
        folder = entry.config.model if source is None else self._folder(source)
        return await self._alone(name, client, lambda: self._load(name, folder))

    async def unload(self, name: str, client: str = "") -> None:
        """Takes the model off the device once what was accepted for it is done; InvalidRequest where a sum needs it.

        Otherwise raises as `load` does.
        """
        self._entry(name, "unloaded")
        if sums := self._catalog.sums_of(name):
            names = ", ".join(made.info.name for made in sums)
            raise InvalidRequest(f"{name} is a component of {names}, which cannot do without it; load another into it")
        await self._alone(name, client, lambda: self._unload(name))

    # ---------------------------------------------------------------------------------------- what may be asked

    def _entry(self, name: str, what: str) -> Entry:
        info = self._catalog.model(name)
        if isinstance(info, OperationInfo):
            raise Unsupported(f"{name} is an operation of a critic, and cannot be {what}; use the critic's own")
        if info.kind == "sum":
            raise Unsupported(f"{name} is a sum, and cannot be {what}; load its components: {info.why}")
        if info.kind == "function":
            raise Unsupported(f"{name} is a function, and cannot be {what}: it is code; restart the server for another")
        if any(name == f"{operation.critic}_infer" for operation in self._catalog.operations.values()):
            raise Unsupported(f"{name} is a critic, and cannot be {what}; use its own operations load and offload")
        return self._catalog.entries[name]

    def _folder(self, source: str) -> str:
        """The folder of that name under the root, with its links followed."""
        if self._root is None:
            raise Forbidden(
                "this server loads no other checkpoints: start it with --model-repository FOLDER, or leave the name "
                "out, to load the same one again"
            )
        if ":" in source:
            raise InvalidRequest(f"{source!r} is not the name of a folder in the model repository")
        root = self._root.expanduser().resolve()
        try:
            folder = (root / source).resolve(strict=True)
            files = [folder, *(file.resolve() for file in folder.rglob("*"))]
            is_there = folder.is_dir() and all(file.is_relative_to(root) for file in files)
        except (OSError, ValueError, RuntimeError):  # not there; no name at all; links that go round
            is_there = False
        if not is_there:
            raise InvalidRequest(f"there is no folder {source!r} in the model repository")
        return str(folder)

    # ---------------------------------------------------------------------------------------- doing it

    async def _alone(self, name: str, client: str, work: Callable[[], Awaitable[str]]) -> str:
        """Does it after all other changes, and to its end."""
        if name in self._changing:
            raise Overloaded(f"{name} is being loaded or unloaded; ask again when that is done", _AGAIN_S)
        self._changing.add(name)

        async def do() -> str:
            try:
                async with self._one:  # memory is counted for one model at a time
                    log.info("%s: is being changed, as %r has asked", name, client)
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

    def _over(self, task: asyncio.Task[str]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the log has it, where nobody waits for it any more

    async def _load(self, name: str, folder: str) -> str:
        started = time.monotonic()
        try:
            problem = await self._change(name, folder)
        finally:
            # Only here nothing of this call holds what has failed, or served before.
            await self._release(name)
        if problem is not None:
            raise problem
        info = self._catalog.entries[name].info
        log.info(
            "%s: %r serves, version %s, after %.1f s", name, folder, info.weights_version, time.monotonic() - started
        )
        return info.weights_version

    async def _change(self, name: str, folder: str) -> GuerdonError | None:
        """Loads the model and has it serve; where it cannot, what serves goes on, and this is why."""
        entry = self._catalog.entries[name]
        still = f"{name} was not loaded and " + ("stays unloaded" if entry.served is None else "serves on as before")
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
        # Whatever comes of files, libraries and memory: nothing of it is the old model's.
        except Exception as e:
            failure(log, logging.ERROR, "%s: loading %r failed", name, folder, error=e)
            return ServerFault(f"{still}: {type(e).__name__}: {e}")
        if differences := _differences(entry.info, made.info):
            return InvalidRequest(f"{still}: clients would find another model, whose {'; '.join(differences)}")
        made.info = dataclasses.replace(made.info, source=entry.info.source)  # by which clients may ask for it
        await self._switch(name, Signal.SWITCH, dataclasses.replace(entry.config, model=folder), made)
        return None

    async def _unload(self, name: str) -> str:
        entry = self._catalog.entries[name]
        if entry.served is not None:
            try:
                await self._switch(name, Signal.UNLOAD, entry.config, None)
            finally:
                await self._release(name)
            log.info("%s: unloaded", name)
        return entry.info.weights_version

    async def _switch(self, name: str, signal: Signal, config: Any, served: Any) -> None:
        """Has another model serve what is asked from now on, or none, once what was asked before is done."""
        entry = self._catalog.entries[name]
        before = entry.config, entry.served

        def switch(group: Group) -> None:
            group.lead(Command(signal, name))
            if served is not None:
                self._loop.change(name, self._limits(config, served))

        order = Order(switch)
        self._loop.order(name, order, finds_room=True)
        # No await between: whoever asks next is behind the order.
        self._catalog.put(name, config, served)
        try:
            await asyncio.wrap_future(order.outcome)
        except BaseException:
            self._catalog.put(name, *before)
            raise

    async def _release(self, name: str) -> None:
        try:
            await self._lead(name, Command(Signal.RELEASE, name))
        except GuerdonError as e:
            log.info("%s: %s", name, e)  # the server ends, and its memory with it

    async def _lead(self, name: str, command: Command) -> Any:
        """What all ranks make of a command that disturbs no batch."""
        if self._is_alone:
            return await _on_a_thread(lambda: self._group.lead(command))
        order = Order(lambda group: group.lead(command))
        self._loop.order(name, order, finds_room=True)
        return await asyncio.wrap_future(order.outcome)


async def _on_a_thread(work: Callable[[], Any]) -> Any:
    """What it returns, from a thread that the process's end does not wait for: it may take minutes."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as e:
            outcome.set_exception(e)
        except BaseException as e:  # such as SystemExit, which would end the server
            outcome.set_exception(ServerFault(f"{type(e).__name__}: {e}"))

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=run, name="guerdon-load", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _differences(old: ModelInfo, new: ModelInfo) -> list[str]:
    """In what the new model would surprise those who know the old one."""
    found = [
        f"{field} is {getattr(new, field)} and not {getattr(old, field)}"
        for field in _KEPT
        if getattr(old, field) != getattr(new, field)
    ]
    if new.max_length is not None and (old.max_length is None or new.max_length < old.max_length):
        found.append(f"max_length is {new.max_length} and not {old.max_length or 'unbounded'}, or more")
    return found
