"""Running a service: its sockets, its signals, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from guerdon.errors import RanksLost, StartError
from guerdon.server import logs, tracing
from guerdon.server.auth import Access, warn_of_readers
from guerdon.server.front import http_app, tls
from guerdon.server.front.admission import Admission
from guerdon.server.front.connections import HttpServer
from guerdon.server.service import Service
from guerdon.settings.config import ServerConfig, check_settings

log = logging.getLogger(__name__)

_MOST_FILES = 65_536
_SPARE_FILES = 256

_LAST_ANSWERS_S = 1.0
"""Time in which answers that are due when the server ends reach those who wait for them."""

_FRAMES = logs.Frames()

OnStarted = Callable[[str, str | None], None]
"""Called with the HTTP URL and the gRPC URL (None without gRPC) once both accept connections."""


def check_addresses(config: ServerConfig) -> None:
    """Raises StartError where a port, a key or a certificate cannot be had: before models are loaded.

    The ports are taken and given back. A file of keys that others may read is told of on the log.
    """
    Access(config)
    tls.context(config)
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
        runner.run(serve(service, config, on_started=on_started, grace_s=grace_s, takes_signals=takes_signals))


def settle() -> None:
    """Leaves what is loaded out of the garbage collector's rounds: it stays.

    To walk through the libraries' 200,000 objects holds every request up by some 70 ms.
    """
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
    """Starts the service and its transports; returns when `stop` is set, SIGTERM or SIGINT has come, or it is ended.

    From then on the server is not ready: it refuses new work with 503, and finishes what it has accepted within
    `grace_s` seconds (None: as many as the config has). The rest is taken back, and whoever asked is told that: it is
    not done where the server comes back. Without `takes_signals` somebody else ends the service on signals. Raises
    StartError where an address cannot be had, and the service's `loss`, once its clients were told.
    """
    stop = stop or asyncio.Event()
    grace_s = config.shutdown_timeout_s if grace_s is None else grace_s
    check_settings(config)
    context = tls.context(config)
    admission = Admission(service, config)
    secure = "" if context is None else "s"
    listener = _listen(config.host, config.port, "HTTP")
    http_url = _url("http" + secure, config.host, listener.getsockname()[1])
    app, num_connections = http_app.app(service, config, admission), _num_connections(config)
    http_server = HttpServer(app, config, context, num_connections, service.access.names)
    try:
        grpc, grpc_url = None, None
        if config.grpc_port is not None:
            # Its core writes a line to stderr for everybody who connects and does not come to terms with it.
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
    late = taken_back(grace_s)
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
            log.info("told to stop; %d accepted requests have %g s to be done", admission.num_requests, grace_s)
            ends = asyncio.get_running_loop().time() + grace_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(ends):
                    while admission.num_requests:  # noqa: ASYNC110 - only at the end, and seldom long
                        await asyncio.sleep(0.01)
            if admission.num_requests and service.loss is None:
                await asyncio.to_thread(service.lost, late)
            ending = [http_server.stop(_LAST_ANSWERS_S)]
            if grpc is not None:
                ending.append(grpc.stop(grace=_LAST_ANSWERS_S))
            await asyncio.gather(*ending)
        finally:
            await asyncio.to_thread(service.stop, max(ends - asyncio.get_running_loop().time(), 1.0))
    if service.loss is not None and service.loss is not late:
        raise service.loss


def taken_back(grace_s: float) -> RanksLost:
    """What those are told who asked for what a server that is to stop has no time for."""
    return RanksLost(
        f"not done within the {grace_s:g} s that this server had left when it was told to stop; it was taken back"
    )


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
        """Stops as on SIGTERM, and returns when the server has stopped."""
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
            f"stop what uses the port, or choose another with {flag} (0: any free one) or --host",
        ) from e


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@contextlib.contextmanager
def _stopping(stop: asyncio.Event) -> Iterator[None]:
    """Sets `stop` on SIGTERM and SIGINT, where this is the main thread, which alone can take signals.

    They would end the process again when it is left: all that others wait for is to be done within.
    """
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
    """How many HTTP connections there may be: never so many that no file is left for the rest."""
    try:
        import resource
    except ImportError:  # not on Windows
        return config.max_connections
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return config.max_connections
    return min(config.max_connections, max(files - _SPARE_FILES, files // 2))


def log_without_texts() -> None:
    """Keeps what errors say, which may be a sample's text, out of what libraries log."""
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
    """Raises the soft limit on open files, often 1,024, as far as is useful: every connection takes a file."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # forbidden in some sandboxes; the server works without
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
