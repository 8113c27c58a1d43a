"""The manifests fit the published schemas of Kubernetes, and of the operators' resources that GUERDON_CRDS has.

Skipped without kubernetes-validate, which `make manifests` installs.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.manifests import DEPLOY, OTHERS, SERVERS, documents

kubernetes_validate = pytest.importorskip("kubernetes_validate")
import jsonschema  # noqa: E402 - comes with it

CRDS = os.environ.get("GUERDON_CRDS")
"""A folder with the operators' CustomResourceDefinitions, and compose-spec.json."""

VERSION = "1.37"


def is_built_in(document: dict[str, Any]) -> bool:
    return "." not in document["apiVersion"].partition("/")[0]


def check(document: dict[str, Any], schema: dict[str, Any]) -> None:
    """Raises ValidationError; the schema itself is not checked, because its patterns are Go's."""
    jsonschema.Draft202012Validator(schema).validate(document)


@pytest.mark.parametrize("name", [*SERVERS, *OTHERS])
def test_kubernetes_own_kinds_fit_their_schemas(name: str) -> None:
    for document in filter(is_built_in, documents(name)):
        kubernetes_validate.validate(document, VERSION, strict=True)


def closed(schema: Any) -> Any:
    """Returns the schema without room for unknown fields, which a cluster would drop."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def definition(folder: Path, api_version: str, kind: str) -> dict[str, Any]:
    """Returns the closed schema of a kind; raises StopIteration if the folder lacks it."""
    group, _, version = api_version.partition("/")
    crds = (yaml.load(path.read_bytes(), yaml.CSafeLoader) for path in sorted(folder.glob("*.yaml")))
    spec = next(c["spec"] for c in crds if (c["spec"]["group"], c["spec"]["names"]["kind"]) == (group, kind))
    schema = next(v["schema"]["openAPIV3Schema"] for v in spec["versions"] if v["name"] == version)
    schema["properties"]["metadata"] = {"type": "object"}
    return closed(schema)


@pytest.mark.skipif(CRDS is None, reason="GUERDON_CRDS names no folder")
@pytest.mark.parametrize("name", [*SERVERS[2:], *OTHERS])
def test_operators_kinds_fit_their_definitions(name: str) -> None:
    assert CRDS is not None
    for document in documents(name):
        if not is_built_in(document):
            check(document, definition(Path(CRDS), document["apiVersion"], document["kind"]))


@pytest.mark.skipif(CRDS is None, reason="GUERDON_CRDS names no folder")
def test_the_alerts_are_a_prometheus_rule() -> None:
    assert CRDS is not None
    rules = yaml.safe_load((DEPLOY / "prometheus/guerdon.rules.yml").read_text())
    manifest = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {}, "spec": rules}
    check(manifest, definition(Path(CRDS), manifest["apiVersion"], manifest["kind"]))


@pytest.mark.skipif(CRDS is None, reason="GUERDON_CRDS names no folder")
@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_fit_the_compose_specification(name: str) -> None:
    assert CRDS is not None
    schema = yaml.safe_load((Path(CRDS) / "compose-spec.json").read_text())
    check(yaml.safe_load((DEPLOY / name).read_text()), schema)
