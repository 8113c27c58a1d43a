"""The two faces of a client: for threads, whose event loop runs in a thread of its own, and for asyncio."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypedDict, TypeVar

from guerdon.client.addresses import Credentials, addresses
from guerdon.client.calls import Call, ModelSignature
from guerdon.client.driver import Session
from guerdon.client.retry import RetryingCaller, RetryPolicy, Step, Steps
from guerdon.errors import Cancelled

T = TypeVar("T")
S = TypeVar("S", bound=Session)
MakeTask = Callable[[Callable[[], bool]], asyncio.Task[T]]
"""Makes a call's task, given the function that marks its future as running; that returns False if it is cancelled."""


class ClientArgs(TypedDict, total=False):
    """The keyword arguments of every client, as `RewardClient` describes them."""

    policy: RetryPolicy
    max_in_flight: int
    credentials: Credentials | None


DEFAULTS: ClientArgs = {"policy": RetryPolicy(), "max_in_flight": 128, "credentials": None}

_CALLBACKS_S = 5.0
_STOP_S = 2.0
"""Closing a client waits this long for its thread."""


class CallFuture(Future[T]):
    """The future of a call: cancelling it cancels the call, and its callbacks may make blocking calls.

    Callbacks run in a thread of their own, in order: in the loop's thread they would hold up all calls.
    """

    def __init__(self, thread: LoopThread[Any]) -> None:
        super().__init__()
        self._thread = thread
        self._caller_back: threading.Thread | None = None
        self._has_called_back = threading.Event()

    def cancel(self) -> bool:
        """Cancels the call unless it has ended; returns whether it is cancelled."""
        is_cancelled = super().cancel()
        if is_cancelled:
            self._thread.abandon(self)
        return is_cancelled

    def wait_for_callbacks(self) -> None:
        """Blocks until the callbacks have run, at most 5 s; never within a callback."""
        if threading.current_thread() is not self._caller_back:
            self._has_called_back.wait(_CALLBACKS_S)

    def _invoke_callbacks(self) -> None:
        if self._done_callbacks and self._thread.is_current:  # type: ignore[attr-defined]
            self._caller_back = threading.Thread(target=self._call_back, name="guerdon-callback", daemon=True)
            self._caller_back.start()
        else:
            self._call_back()

    def _call_back(self) -> None:
        try:
            super()._invoke_callbacks()  # type: ignore[misc]
        finally:
            self._has_called_back.set()


class LoopThread(Generic[S]):
    """Runs a session's event loop in a daemon thread, which starts at the first call; thread-safe.

    A daemon thread does not keep the interpreter from ending; `close` runs before that by the client's finalizer.
    """

    def __init__(self, session: S) -> None:
        self.pid = os.getpid()
        self.session = session
        self._lock = threading.RLock()  # a finalizer may close it at any moment, also in this thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._tasks: dict[Future[Any], tuple[asyncio.Task[Any], object]] = {}
        self._notified: set[Future[Any]] = set()

    def start(self, make_task: MakeTask[T], future: Future[T], owner: object) -> None:
        """Has the loop start the task, and gives its outcome to `future`; keeps `owner` alive until then.

        Cancelling the future cancels the task. Raises Cancelled after `close`.
        """
        with self._lock:  # so that no task begins after those that `close` cancels
            if self._is_closed:
                raise Cancelled("the client is closed")
            if self._loop is None:
                loop = _new_event_loop()
                thread = threading.Thread(target=self._run, args=(loop,), name="guerdon-client", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads; the next call may find one
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            self._loop.call_soon_threadsafe(self._begin, make_task, future, owner)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def abandon(self, future: Future[Any]) -> None:
        """Cancels the future's task, if it has not ended."""
        with self._lock:
            if self._loop is not None and not self._is_closed:
                self._loop.call_soon_threadsafe(self._cancel, future)

    def close(self) -> None:
        """Ends all calls with Cancelled, and the thread; does nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if self._loop is None or self._thread is None:
                return
            if not was_closed:
                self._loop.call_soon_threadsafe(self._shut_down)
        if not self.is_current:
            self._thread.join(_STOP_S)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            loop.close()

    def _begin(self, make_task: MakeTask[T], future: Future[T], owner: object) -> None:
        task = make_task(functools.partial(self._mark_running, future))
        self._tasks[future] = task, owner
        task.add_done_callback(functools.partial(self._finish, future))

    def _cancel(self, future: Future[Any]) -> None:
        if future in self._tasks:
            self._tasks[future][0].cancel()

    def _mark_running(self, future: Future[Any]) -> bool:
        is_running = future.set_running_or_notify_cancel()
        if not is_running:
            self._notified.add(future)
        return is_running

    def _finish(self, future: Future[T], task: asyncio.Task[T]) -> None:
        del self._tasks[future]
        error = None if task.cancelled() else task.exception()  # asyncio logs errors that nobody looks at
        if future.cancelled():
            if future not in self._notified:
                future.set_running_or_notify_cancel()  # wakes those who wait for it
            self._notified.discard(future)
        elif task.cancelled():
            _end(future, error=Cancelled("the client was closed before the answer"))
        elif error is not None:
            _clear_frames(error)
            _end(future, error=error)
        else:
            _end(future, task.result())

    def _shut_down(self) -> None:
        assert self._loop is not None
        self._closing = self._loop.create_task(self._close_session())

    async def _close_session(self) -> None:
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.session.close()
            await loop.shutdown_asyncgens()
        finally:
            loop.call_soon(loop.stop)  # after the tasks' callbacks


class Client(Generic[S]):
    """The base of both faces: a client's arguments, and the models that it asks."""

    _session_class: ClassVar[Any] = Session
    _asks: ClassVar[str]
    """Added to the error of a server that has no such model."""

    def __init__(self, url: Any, model: Any, options: ClientArgs) -> None:
        # Without credentials a copy reads the environment where it arrives, so that no pickle holds a key from there.
        self._arguments = (url, model, options)
        self._model = model
        self._addresses = addresses(url, options["credentials"])

    def __reduce__(self) -> Any:
        url, model, options = self._arguments
        cls: Callable[..., Any] = type(self)
        return functools.partial(cls, **options), (url, model)

    def __repr__(self) -> str:
        urls = [address.url for address in self._addresses]
        return f"{type(self).__name__}({(urls[0] if len(urls) == 1 else urls)!r}, {self._model!r})"

    def _new_session(self) -> S:
        _, _, options = self._arguments
        made: S = self._session_class(self._addresses, options["policy"], options["max_in_flight"], self._asks)
        return made

    def _main_model(self) -> str:
        return self._model

    def _models_to_await(self) -> list[str]:
        return [self._main_model()]


class BlockingClient(Client[S]):
    """A blocking client: thread-safe, usable after a fork; closes itself when garbage-collected.

    Over gRPC, fork while no call is under way; else the child's calls raise GuerdonError.
    """

    def __init__(self, url: Any, model: Any, options: ClientArgs) -> None:
        super().__init__(url, model, options)
        self._open()

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Blocks until a server has the model ready; raises DeadlineExceeded with the answer of each server."""
        for model in self._models_to_await():
            self._call(self._caller.wait_ready(model, timeout_s))

    def info(self) -> ModelSignature:
        """Returns the inputs and outputs of the model; of a critic, those of the model that gives the values."""
        return self._call(self._caller.describe(self._main_model()))

    def config(self) -> dict[str, Any]:
        """Returns the configuration, in Triton's terms, of the model that `info` describes."""
        return self._call(self._caller.configuration(self._main_model()))

    def close(self) -> None:
        """Ends at once: futures without a result end with Cancelled."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _session(self) -> S:
        return self._here().session

    @property
    def _caller(self) -> RetryingCaller:
        return self._session.caller

    def _open(self) -> None:
        self._thread = LoopThread(self._new_session())
        self._finalizer = weakref.finalize(self, self._thread.close)

    def _here(self) -> LoopThread[S]:
        if self._thread.pid != os.getpid():  # threads and connections do not survive a fork
            self._open()
        return self._thread

    def _submit(self, steps: Steps[T], priority: int = 0, step: Step | None = None) -> Future[T]:
        thread = self._here()
        future = CallFuture[T](thread)
        run = thread.session.run
        thread.start(lambda is_wanted: asyncio.create_task(run(steps, priority, is_wanted, step)), future, self)
        return future

    def _ask(self, call: Call[T]) -> T:
        return self._call(self._caller.ask(call), call.priority)

    def _call(self, steps: Steps[T], priority: int = 0) -> T:
        is_done, outcome = self._here().session.run_here(steps)
        return outcome if is_done else self._wait(self._submit(steps, priority, outcome))

    def _wait(self, future: Future[T]) -> T:
        try:
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C
                self._thread.abandon(future)
            raise


class AsyncClient(Client[S]):
    """A client for one event loop; close it with `aclose` or `async with`."""

    def __init__(self, url: Any, model: Any, options: ClientArgs) -> None:
        super().__init__(url, model, options)
        self._session = self._new_session()

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Returns when a server has the model ready; raises DeadlineExceeded with the answer of each server."""
        for model in self._models_to_await():
            await self._session.run(self._caller.wait_ready(model, timeout_s))

    async def info(self) -> ModelSignature:
        """Returns the inputs and outputs of the model; of a critic, those of the model that gives the values."""
        return await self._session.run(self._caller.describe(self._main_model()))

    async def config(self) -> dict[str, Any]:
        """Returns the configuration, in Triton's terms, of the model that `info` describes."""
        return await self._session.run(self._caller.configuration(self._main_model()))

    async def aclose(self) -> None:
        """Closes the connections; further calls raise Cancelled."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def _caller(self) -> RetryingCaller:
        return self._session.caller

    async def _ask(self, call: Call[T]) -> T:
        return await self._session.run(self._caller.ask(call), call.priority)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _end(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    try:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
    except InvalidStateError:  # cancelled in the meantime
        future.set_running_or_notify_cancel()


def _clear_frames(error: BaseException) -> None:
    """Frees the variables of an error's frames, such as the request: a failed future may be kept for long."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
