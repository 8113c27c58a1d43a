"""A server process of the arithmetic critic, which tests kill and start again: `critic_server.py HTTP GRPC FOLDER`."""

from __future__ import annotations

import sys

from client.echo_server import EchoProcess


class CriticProcess(EchoProcess):
    """The process, ready when constructed; its checkpoints and journal are in `folder`."""

    def __init__(self, folder: str, http_port: int = 0, grpc_port: int = 0) -> None:
        self._folder = folder
        super().__init__(http_port, grpc_port, script=__file__, arguments=(folder,))

    def again(self, slow_s: float = 1.0) -> CriticProcess:
        return CriticProcess(self._folder, *self.ports())


if __name__ == "__main__":
    from guerdon.server import runtime
    from guerdon.settings.config import ServerConfig
    from server.arithmetic_critic import ArithmeticService

    run_config = ServerConfig(port=int(sys.argv[1]), grpc_port=int(sys.argv[2]))
    runtime.run(ArithmeticService(sys.argv[3]), run_config, on_started=lambda http, grpc: print(http, grpc, flush=True))
