"""Runs a service: its sockets, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from guerdon import memory
from guerdon.errors import RanksLost, StartError
from guerdon.server import logs, tracing
from guerdon.server.auth import Access, tls_context, warn_of_readers
from guerdon.server.front import http_app
from guerdon.server.front.admission import Admission
from guerdon.server.front.connections import HttpServer
from guerdon.server.service import Service
from guerdon.settings.config import ServerConfig
from guerdon.settings.fields import check_settings

log = logging.getLogger(__name__)

_MOST_FILES = 65_536
_SPARE_FILES = 256

_LAST_ANSWERS_S = 1.0
"""Time for pending answers to reach their clients at the end."""

_COLLECT_S, _COLLECT_LATEST_S, _FEW_REQUESTS = 1.0, 60.0, 2
_NEVER = 1_000_000

_FRAMES = logs.Frames()

OnStarted = Callable[[str, str | None], None]
"""Called with the HTTP URL and the gRPC URL (None without gRPC) once both accept connections."""


def check_addresses(config: ServerConfig) -> None:
    """Raises StartError if a port, a key or a certificate is not usable: before models are loaded.

    It binds the ports and releases them. It warns of a file of keys that others may read.
    """
    Access(config)
    tls_context(config)
    tracing.check_installed(config.traces)
    warn_of_readers(config)
    with contextlib.ExitStack() as taken:
        taken.enter_context(_listen(config.host, config.port, "HTTP"))
        if config.grpc_port is not None:
            taken.enter_context(_listen(config.host, config.grpc_port, "gRPC"))


def run(
    service: Service,
    config: ServerConfig,
    *,
    on_started: OnStarted | None = None,
    grace_s: float | None = None,
    takes_signals: bool = True,
) -> None:
    """Runs `serve` on an event loop of its own until SIGTERM or SIGINT."""
    _allow_many_connections()
    settle()
    with asyncio.Runner(loop_factory=_new_event_loop) as runner:
        collecting = runner.get_loop().create_task(_collect_garbage(service))
        try:
            runner.run(serve(service, config, on_started=on_started, grace_s=grace_s, takes_signals=takes_signals))
        finally:
            collecting.cancel()


async def _collect_garbage(service: Service) -> None:
    """Collects all garbage when few requests are in progress, rather than whenever Python would.

    A full collection holds up everything for as long as it looks at the objects of all requests: 0.1 s for each of
    65,536 messages with labels.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    waited_s = 0.0
    try:
        while True:
            await asyncio.sleep(_COLLECT_S)
            waited_s += _COLLECT_S
            if waited_s >= _COLLECT_LATEST_S or sum(map(sum, service.loops.requests().values())) <= _FEW_REQUESTS:
                gc.collect()
                waited_s = 0.0
    finally:
        gc.set_threshold(young, middle, old)


def settle() -> None:
    """Freezes loaded objects, so that the garbage collector skips them.

    A collection over the libraries' 200,000 objects delays every request by some 70 ms.
    """
    memory.resume_collections()
    gc.collect()
    gc.freeze()


async def serve(
    service: Service,
    config: ServerConfig,
    *,
    on_started: OnStarted | None = None,
    stop: asyncio.Event | None = None,
    grace_s: float | None = None,
    takes_signals: bool = True,
) -> None:
    """Starts the service and its transports; returns after `stop`, SIGTERM, SIGINT or `Service.end`.

    From then on the server is not ready: it refuses new requests with 503, and finishes accepted ones within `grace_s`
    seconds (None: the config's). The rest fail, and are not done after a restart. Without `takes_signals` the caller
    handles signals. Raises StartError if an address is not available, and the service's `loss` after its clients have
    seen it.
    """
    stop = stop or asyncio.Event()
    grace_s = config.shutdown_timeout_s if grace_s is None else grace_s
    check_settings(config)
    context = tls_context(config)
    admission = Admission(service, config)
    secure = "" if context is None else "s"
    listener = _listen(config.host, config.port, "HTTP")
    http_url = _url("http" + secure, config.host, listener.getsockname()[1])
    app, num_connections = http_app.app(service, config, admission), _num_connections(config)
    http_server = HttpServer(app, config, context, num_connections, service.access.names)
    try:
        grpc, grpc_url = None, None
        if config.grpc_port is not None:
            # Its core writes a line to stderr for every failed handshake.
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
            from guerdon.server.front import grpc_server  # only here: gRPC is optional

            grpc, grpc_port = grpc_server.server(service, config, admission)
            grpc_url = _url("grpc" + secure, config.host, grpc_port)
    except BaseException:
        listener.close()
        raise
    log_without_texts()
    service.start()
    ends = asyncio.get_running_loop().time() + grace_s
    late = shutdown_error(grace_s)
    with _stopping(stop) if takes_signals else contextlib.nullcontext():
        try:
            await http_server.start(listener)
            if grpc is not None:
                await grpc.start()
            if on_started is not None:
                on_started(http_url, grpc_url)
            stops = [asyncio.create_task(event.wait()) for event in (stop, service.ending)]
            await asyncio.wait(stops, return_when=asyncio.FIRST_COMPLETED)
            for waiting in stops:
                waiting.cancel()
            service.ready = False
            service.cohorts.end()
            log.info("stopping; %d accepted requests have %g s to finish", admission.num_requests, grace_s)
            ends = asyncio.get_running_loop().time() + grace_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ends):
                    while admission.num_requests:  # noqa: ASYNC110 - only at the end, and seldom long
                        await asyncio.sleep(0.01)
            if admission.num_requests and not isinstance(service.loss, RanksLost):
                crash = service.loss  # of one device, which has failed its own requests
                await asyncio.to_thread(service.end_after_loss, late)
                service.loss = crash or late
            ending = [http_server.stop(_LAST_ANSWERS_S)]
            if grpc is not None:
                ending.append(grpc.stop(grace=_LAST_ANSWERS_S))
            await asyncio.gather(*ending)
        finally:
            await asyncio.to_thread(service.stop, max(ends - asyncio.get_running_loop().time(), 1.0))
    if service.loss is not None and service.loss is not late:
        raise service.loss


def shutdown_error(grace_s: float) -> RanksLost:
    """Returns the error for requests unfinished at shutdown."""
    return RanksLost(f"unfinished after the grace period of {grace_s:g} s; it was withdrawn")


class RunningServer:
    """A server in a background thread, for tests and notebooks: ready when constructed, gone after `close`.

    `http_url` and `grpc_url` (None without gRPC) are its addresses. The constructor raises what `serve` raises.
    """

    http_url: str
    grpc_url: str | None
    _error: BaseException | None = None

    def __init__(self, service: Service, config: ServerConfig, *, grace_s: float | None = None) -> None:
        self._loop = _new_event_loop()
        self._stop = asyncio.Event()
        self._is_started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(service, replace(config), grace_s), name="guerdon-server", daemon=True
        )
        self._thread.start()
        self._is_started.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def close(self) -> None:
        """Stops as on SIGTERM; returns when the server has stopped."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just closed by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, service: Service, config: ServerConfig, grace_s: float | None) -> None:
        serving = serve(service, config, on_started=self._started, stop=self._stop, grace_s=grace_s)
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(serving)
        except BaseException as e:
            self._error = e
        finally:
            self._is_started.set()

    def _started(self, http_url: str, grpc_url: str | None) -> None:
        self.http_url, self.grpc_url = http_url, grpc_url
        self._is_started.set()


def _listen(host: str, port: int, protocol: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096)
    except OSError as e:
        flag = "--port" if protocol == "HTTP" else "--grpc-port"
        raise StartError(
            f"cannot listen for {protocol} on {host}:{port}: {e.strerror}",
            f"stop what uses the port (the gRPC port of a server is its HTTP port + 2), or choose another with {flag} "
            "(0: any free one) or --host",
        ) from e


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.contextmanager
def _stopping(stop: asyncio.Event) -> Iterator[None]:
    """Sets `stop` on SIGTERM and SIGINT within the context, if this is the main thread, which alone takes signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _num_connections(config: ServerConfig) -> int:
    """Returns the largest number of HTTP connections: it leaves files for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(files - _SPARE_FILES, files // 2))


def log_without_texts() -> None:
    """Keeps errors' texts out of what libraries log: they may quote a sample."""
    for name in ("asyncio", "uvicorn.error", "grpc._cython.cygrpc"):
        logging.getLogger(name).addFilter(_FRAMES)

    def unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            log.error("%s", context["message"])
        else:
            logs.failure(log, logging.ERROR, "%s", context["message"], error=error)

    asyncio.get_running_loop().set_exception_handler(unhandled)


def _allow_many_connections() -> None:
    """Raises the soft limit on open files, often 1,024: every connection takes a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # forbidden in some sandboxes; works without
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
