import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import served
from guerdon.errors import StartError
from guerdon.server.runtime import RunningServer, check_addresses
from guerdon.settings.config import ServerConfig
from ports import free_port
from server.echo_service import SLOW_TOKEN, EchoService
from server.helpers import INFER, body_of, echo_process, wait_until
from tiers import slow_but


def test_free_ports_are_reported_and_used():
    with served.running(build=EchoService) as server:
        assert server.grpc_url is None
        assert httpx.get(server.http_url + "/v2/health/ready").status_code == 200
        url = server.http_url
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/v2/health/live")


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_a_port_in_use_says_what_to_do(transport):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServerConfig(port=port, grpc_port=0) if transport == "http" else ServerConfig(port=0, grpc_port=port)
        with pytest.raises(StartError, match=f"127.0.0.1:{port}") as caught:
            RunningServer(EchoService(), config)
        with pytest.raises(StartError, match=f"127.0.0.1:{port}") as early:
            check_addresses(config)
    flag = " --port" if transport == "http" else " --grpc-port"
    assert flag in caught.value.help
    assert flag in early.value.help


def test_addresses_are_checked_and_given_back():
    port = free_port()
    for _ in range(2):
        check_addresses(ServerConfig(port=port, grpc_port=0))
    with pytest.raises(StartError, match=f"gRPC on 127.0.0.1:{port}"):
        check_addresses(ServerConfig(port=port, grpc_port=port))


@pytest.mark.parametrize("ports", [{"port": 70_000}, {"grpc_port": 70_000}])
def test_ports_that_do_not_exist_are_refused(ports):
    with pytest.raises(StartError, match="is 70000") as caught:
        RunningServer(EchoService(), ServerConfig(**{"port": 0, "grpc_port": None} | ports))
    assert caught.value.help == "give at most 65535"


@pytest.mark.parametrize("hard", slow_but((300,), [300, None]))
def test_a_server_may_open_as_many_files_as_allowed_and_useful(hard):
    program = f"""
        import resource
        from guerdon.server import runtime
        hard = {hard} or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        runtime._allow_many_connections()
        print(*resource.getrlimit(resource.RLIMIT_NOFILE), hard)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    out = subprocess.check_output([sys.executable, "-c", textwrap.dedent(program)], env=environment, text=True)
    soft, after, before = map(int, out.split())
    assert after == before
    assert soft == (65_536 if before == -1 else min(before, 65_536))


def test_two_servers_cannot_share_a_grpc_port():
    with served.running(grpc_port=0, build=EchoService) as server:
        port = int((server.grpc_url or "").rsplit(":", 1)[1])
        with pytest.raises(StartError, match="gRPC"):
            RunningServer(EchoService(), ServerConfig(port=0, grpc_port=port))


def test_a_host_that_is_not_here_is_refused():
    with pytest.raises(StartError, match=r"203\.0\.113\.7"):
        RunningServer(EchoService(), ServerConfig(host="203.0.113.7", port=0, grpc_port=None))


def test_close_finishes_accepted_work_and_refuses_new():
    service = EchoService()
    server = RunningServer(service, ServerConfig(port=0, grpc_port=0))
    with (
        httpx.Client(base_url=server.http_url, timeout=120) as client,
        service.scorer.held() as go,
        ThreadPoolExecutor(1) as pool,
    ):
        accepted = pool.submit(client.post, INFER, content=body_of([[SLOW_TOKEN]]))
        wait_until(lambda: bool(service.requests))
        closing = threading.Thread(target=server.close)
        closing.start()
        wait_until(lambda: not service.ready)
        assert client.post(INFER, content=body_of([[5]])).status_code == 503
        assert closing.is_alive()
        go.set()
        assert accepted.result().status_code == 200
        closing.join(120)
    assert not closing.is_alive()


def test_close_gives_up_on_work_beyond_the_grace_time():
    service = EchoService()
    server = RunningServer(service, ServerConfig(port=0, grpc_port=None), grace_s=0.05)
    is_reached = threading.Event()

    async def endless(*_, **__):
        is_reached.set()
        try:
            await asyncio.sleep(600)
        finally:
            service.cancelled += 1

    service.score = endless
    with httpx.Client(base_url=server.http_url, timeout=120) as client, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(client.post, INFER, content=body_of([[5]]))
        assert is_reached.wait(120)
        server.close()
        response = accepted.result(timeout=120)
    assert response.status_code == 503
    assert response.json() == {"error": "the server is stopping"}
    assert response.headers["guerdon-error"] == "Unavailable"
    assert service.cancelled == 1


@pytest.mark.parametrize("number", slow_but((signal.SIGTERM,), [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_ends_the_process_in_order(number):
    is_computing = re.compile(r'^guerdon_num_requests_running\{model="reward_model"\} 1\.0$', re.MULTILINE)
    with echo_process() as (process, url, _):
        with httpx.Client(base_url=url, timeout=120) as client, ThreadPoolExecutor(1) as pool:
            assert client.post(INFER, content=body_of([[5]])).status_code == 200
            accepted = pool.submit(client.post, INFER, content=body_of([[SLOW_TOKEN]]))
            wait_until(lambda: accepted.done() or is_computing.search(client.get("/metrics").text) is not None)
            process.send_signal(number)
            assert accepted.result().status_code == 200
        assert process.stdout.readline() == "ended\n"
        assert process.wait(120) == 0
