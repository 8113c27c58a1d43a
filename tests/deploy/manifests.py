"""Reads what lies in deploy/."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from guerdon import cli
from guerdon.settings.config import ServerConfig
from guerdon.settings.sources import read_critic_settings, read_server_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVERS = ["kubernetes/base/reward-model.yaml", "kubernetes/base/critic.yaml", "kserve/reward-model.yaml"]
SERVERS += ["kserve/critic.yaml"]
"""The manifests that start `guerdon serve` or `serve-critic`."""

OTHERS = ["kubernetes/servicemonitor.yaml", "ray/rayservice.yaml"]
MOUNTED_BY_KSERVE = "/mnt/models"
"""Where KServe puts what STORAGE_URI names."""


def read(name: str) -> Any:
    """Returns the only document of a file in deploy/."""
    return yaml.safe_load((DEPLOY / name).read_text())


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def of_kind(name: str, *kinds: str) -> dict[str, Any]:
    """Returns the file's only document of these kinds."""
    (found,) = (document for document in documents(name) if document["kind"] in kinds)
    return found


def settings(words: list[str]) -> ServerConfig:
    """Returns the settings of a `guerdon` command line; exits if a flag does not exist."""
    args = cli.make_parser().parse_args(words)
    return read_server_settings(args) if words[0] == "serve" else read_critic_settings(args)


@dataclass
class Server:
    """The pod of a manifest that starts a server, and the settings that its arguments make."""

    manifest: dict[str, Any]
    spec: dict[str, Any]

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.spec["containers"]
        return container

    @property
    def config(self) -> ServerConfig:
        return settings(self.container["args"])

    @property
    def environment(self) -> dict[str, dict[str, Any]]:
        return {variable["name"]: variable for variable in self.container["env"]}

    def port(self, port: int | str) -> int:
        """Returns a port's number, given that or its name."""
        names = {p["name"]: p["containerPort"] for p in self.container["ports"] if "name" in p}
        return port if isinstance(port, int) else names[port]


def server(name: str) -> Server:
    manifest = of_kind(name, "Deployment", "StatefulSet", "InferenceService")
    spec = manifest["spec"]
    return Server(manifest, spec["predictor"] if "predictor" in spec else spec["template"]["spec"])
