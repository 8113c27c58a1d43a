"""A server process of the arithmetic critic, which tests kill and start again."""

from __future__ import annotations

from client.echo_server import EchoProcess


class CriticProcess(EchoProcess):
    """The process, ready when constructed; its checkpoints and journal are in `folder`."""

    def __init__(self, folder: str, http_port: int = 0, grpc_port: int = 0) -> None:
        self._folder = folder
        super().__init__(http_port, grpc_port, folder=folder)

    def again(self, slow_s: float = 1.0) -> CriticProcess:
        return CriticProcess(self._folder, *self.ports())
