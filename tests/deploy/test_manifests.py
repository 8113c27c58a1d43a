"""The manifests in deploy/ fit the command, the server and each other; test_schemas.py has the published schemas."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import served
from deploy.manifests import (
    DEPLOY,
    MOUNTED_BY_KSERVE,
    OTHERS,
    ROOT,
    SERVERS,
    documents,
    of_kind,
    read,
    server,
    settings,
)
from guerdon.settings.access import KEYS_VARIABLE
from guerdon.settings.config import ServerConfig
from guerdon.settings.fields import from_mapping
from server.echo_service import EchoService

EXIT_S = 5
"""Seconds that a server may need to exit after its grace period."""

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = DEPLOY / "kubernetes/base"
JOB = "guerdon"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that the manifests give the server."""
    monkeypatch.setenv(KEYS_VARIABLE, "train trainer key-of-the-trainer-0123456789")


def status(path: str) -> int:
    with served.running(build=EchoService) as running:
        key = {"Authorization": "Bearer key-of-the-trainer-0123456789"}
        return httpx.get(running.http_url + path, headers=key).status_code


@pytest.mark.parametrize("name", SERVERS)
def test_a_servers_flags_ports_and_mounts_fit(name: str) -> None:
    pod = server(name)
    config = pod.config
    assert [config.port] == [port["containerPort"] for port in pod.container["ports"]]
    assert (config.host, config.grpc_port) == ("0.0.0.0", None)
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.container.get("volumeMounts", [])}
    claims = [claim["metadata"] for claim in pod.manifest["spec"].get("volumeClaimTemplates", [])]
    assert mounts.keys() == {volume["name"] for volume in [*pod.spec.get("volumes", []), *claims]}
    if "STORAGE_URI" in pod.environment:
        mounts["STORAGE_URI"] = MOUNTED_BY_KSERVE
    critic = config.critic
    paths = [m.model for m in config.models] if critic is None else [critic.model, critic.checkpoint_dir]
    assert all(any(str(path).startswith(mount) for mount in mounts.values()) for path in paths)
    num_gpus = pod.container["resources"]["limits"].get("nvidia.com/gpu", "1")
    assert str(config.tensor_parallel) == num_gpus
    assert "command" not in pod.container  # the image's entry point is guerdon


@pytest.mark.parametrize("name", SERVERS)
def test_a_servers_variables_are_read(name: str) -> None:
    variables = server(name).environment
    assert variables.keys() <= {KEYS_VARIABLE, "OMP_NUM_THREADS", "STORAGE_URI"}
    assert variables[KEYS_VARIABLE]["valueFrom"] == {"secretKeyRef": {"name": "guerdon-keys", "key": "keys"}}


@pytest.mark.parametrize("name", SERVERS)
def test_probes_ask_what_is_answered(name: str) -> None:
    pod = server(name)
    probes = [pod.container[kind]["httpGet"] for kind in pod.container if kind.endswith("Probe")]
    assert len(probes) >= 2
    for probe in probes:
        assert pod.port(probe["port"]) == pod.config.port
        assert status(probe["path"]) == 200


@pytest.mark.parametrize("name", SERVERS)
def test_a_pod_lives_until_its_server_has_drained(name: str) -> None:
    pod = server(name)
    if pod.manifest["metadata"].get("annotations", {}).get("serving.kserve.io/deploymentMode") == "Knative":
        assert pod.spec["timeout"] >= pod.config.request_timeout_s  # Knative grants it at the end, too
        return
    sleep = pod.container.get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})["exec"]["command"]
    drain_s = float(sleep[1]) + pod.config.shutdown_timeout_s + EXIT_S
    assert pod.spec["terminationGracePeriodSeconds"] >= drain_s


@pytest.mark.parametrize("name", SERVERS)
def test_a_pod_is_restricted_as_its_image_allows(name: str) -> None:
    """Of the Pod Security Standard `restricted`; a claim that the server writes belongs to its group."""
    pod = server(name)
    both = pod.spec.get("securityContext", {}) | pod.container["securityContext"]
    assert both["runAsNonRoot"] is True
    assert both["allowPrivilegeEscalation"] is False
    assert both["capabilities"] == {"drop": ["ALL"]}
    assert both["seccompProfile"] == {"type": "RuntimeDefault"}
    assert both.get("runAsUser", image_user()) == image_user()
    if pod.config.critic is not None:
        assert both["fsGroup"] == image_user()


@pytest.mark.parametrize("name", [name for name in SERVERS if name.endswith("critic.yaml")])
def test_a_critic_is_one(name: str) -> None:
    pod = server(name)
    spec = pod.manifest["spec"]
    if pod.manifest["kind"] == "InferenceService":
        assert spec["predictor"]["deploymentStrategy"] == {"type": "Recreate"}
        assert spec["predictor"]["minReplicas"] == spec["predictor"]["maxReplicas"] == 1
        claim = of_kind(name, "PersistentVolumeClaim")["spec"]
    else:
        assert (pod.manifest["kind"], spec["replicas"]) == ("StatefulSet", 1)
        claim = spec["volumeClaimTemplates"][0]["spec"]
    assert claim["accessModes"] == ["ReadWriteOncePod"]


def shared_labels() -> dict[str, str]:
    """The labels that the base's kustomization adds to everything."""
    (labels,) = read("kubernetes/base/kustomization.yaml")["labels"]
    return labels["pairs"]


@pytest.mark.parametrize("name", SERVERS[:2])
def test_a_service_finds_its_pods(name: str) -> None:
    pod, service = server(name), of_kind(name, "Service")
    template = pod.manifest["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], pod.manifest["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= template.items()
    (port,) = service["spec"]["ports"]
    assert port["port"] == pod.port(port["targetPort"]) == pod.config.port
    assert pod.manifest["spec"].get("serviceName", service["metadata"]["name"]) == service["metadata"]["name"]
    (other,) = {*SERVERS[:2]} - {name}
    foreign = server(other).manifest["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= foreign.items()


def test_the_service_monitor_finds_the_services_under_the_alerts_job() -> None:
    monitor = of_kind("kubernetes/servicemonitor.yaml", "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= shared_labels().items()
    assert shared_labels()[monitor["jobLabel"]] == JOB
    assert f'job="{JOB}"' in (DEPLOY / "prometheus/guerdon.rules.yml").read_text()
    (endpoint,) = monitor["endpoints"]
    for name in SERVERS[:2]:
        assert [endpoint["port"]] == [port["name"] for port in of_kind(name, "Service")["spec"]["ports"]]
    assert status(endpoint["path"]) == 200


def test_kustomizations_name_files_that_exist() -> None:
    resources = read("kubernetes/base/kustomization.yaml")["resources"]
    assert {path.name for path in BASE.iterdir()} == {"kustomization.yaml", *resources}
    for folder in read("kubernetes/gpu/kustomization.yaml")["resources"]:
        assert (DEPLOY / "kubernetes/gpu" / folder / "kustomization.yaml").exists()


needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds it")


def kustomized(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@needs_kubectl
def test_the_gpu_overlay_gives_each_server_a_gpu() -> None:
    built = kustomized(DEPLOY / "kubernetes/gpu")
    pods = [document["spec"]["template"]["spec"] for document in built if "template" in document["spec"]]
    assert len(pods) == 2
    for pod in pods:
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert pod["tolerations"]
    assert all(document["metadata"]["labels"].items() >= shared_labels().items() for document in built)


def test_every_image_is_this_release() -> None:
    texts = [path.read_text() for path in [*DEPLOY.rglob("*"), *(ROOT / "docs/deploy").iterdir()] if path.is_file()]
    tags = [tag for text in texts for tag in re.findall(r"registry\.example\.com/guerdon(?:-ray)?:([\w.-]+)", text)]
    assert len(tags) > 4 and set(tags) == {PROJECT["version"]}
    (image,) = read("kubernetes/base/kustomization.yaml")["images"]
    assert image["newTag"] == PROJECT["version"]
    assert all(server(name).container["image"] == image["name"] for name in SERVERS[:2])


def dockerfile(instruction: str) -> list[str]:
    """The arguments of each such line of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text()
    return re.findall(rf"^{instruction} (.+)$", text, re.MULTILINE)


def image_user() -> int:
    (user,) = dockerfile("USER")
    return int(user.partition(":")[0])


def test_the_image_is_made_of_files_and_extras_that_exist() -> None:
    for line in dockerfile("COPY"):
        assert all((ROOT / path).exists() for path in line.split()[:-1]), line
    text = (DEPLOY / "Dockerfile").read_text()
    extras = re.findall(r"EXTRA=(\w+)", text)
    assert extras and not {*extras} - {*PROJECT["optional-dependencies"]}
    assert "pip install --no-cache-dir -c constraints.txt " in text
    assert dockerfile("ENTRYPOINT") == ['["guerdon"]']


def test_the_images_user_has_a_number_and_a_folder_for_the_hubs_models() -> None:
    (made,) = (line for line in dockerfile("RUN") if "useradd" in line)
    assert f"--uid {image_user()} " in made
    (home,) = (line.partition("=")[2] for line in dockerfile("ENV") if line.startswith("HF_HOME"))
    assert home in made


def ray_applications() -> list[dict[str, Any]]:
    manifest = of_kind("ray/rayservice.yaml", "RayService")
    both = read("ray/serve.yaml"), yaml.safe_load(manifest["spec"]["serveConfigV2"])
    return [application for file in both for application in file["applications"]]


@pytest.mark.parametrize("application", ray_applications(), ids=["serve.yaml", "rayservice.yaml"])
def test_rays_files_have_a_servers_settings_and_the_deployments_name(application: dict[str, Any]) -> None:
    assert from_mapping(ServerConfig, application["args"]).models
    source = (ROOT / "src/guerdon/deploy/ray.py").read_text()
    assert application["import_path"] == "guerdon.deploy.ray:build"
    assert "def build(args" in source
    assert f'NAME = "{application["deployments"][0]["name"]}"' in source


def test_kuberays_workers_have_what_a_replica_needs() -> None:
    spec = of_kind("ray/rayservice.yaml", "RayService")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (worker,) = pod["containers"]
    (options,) = application["deployments"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(options["ray_actor_options"]["num_gpus"])
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (group["minReplicas"], group["maxReplicas"])
    assert [variable["name"] for variable in worker["env"]] == [KEYS_VARIABLE]
    (mount,) = worker["volumeMounts"]
    assert application["args"]["models"][0]["model"].startswith(mount["mountPath"])
    assert [mount["name"]] == [volume["name"] for volume in pod["volumes"]]
    head = spec["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    assert head["securityContext"] == pod["securityContext"]
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == image_user()
    assert head["containers"][0]["image"] == worker["image"]
    assert pod["terminationGracePeriodSeconds"] >= ServerConfig.shutdown_timeout_s + EXIT_S


def test_what_compose_mounts_exists_and_its_ports_fit() -> None:
    services = read("compose.yaml")["services"]
    guerdon = services["guerdon"]
    config = settings(guerdon["command"])
    ports = {int(port.rpartition(":")[2]) for port in guerdon["ports"]}
    assert ports == {config.port, config.grpc_port}
    assert config.models[0].model == guerdon["volumes"][0].split(":")[-2]
    assert (DEPLOY / guerdon["build"]["context"] / guerdon["build"]["dockerfile"]).exists()
    assert float(guerdon["stop_grace_period"].removesuffix("s")) >= config.shutdown_timeout_s + EXIT_S
    probe = httpx.URL(guerdon["healthcheck"]["test"][-1])
    assert (probe.port, status(probe.path)) == (config.port, 200)
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            assert (DEPLOY / volume.split(":")[0]).is_file(), volume
    assert read("compose.gpu.yaml")["services"].keys() <= services.keys()


def test_composes_prometheus_scrapes_its_server_and_grafana_shows_it() -> None:
    compose = read("compose.yaml")
    services = [compose["services"][name] for name in ("prometheus", "grafana")]
    volumes = [volume.split(":") for service in services for volume in service["volumes"]]
    mounts = {path: Path(target) for path, target, _ in volumes}
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    assert job["job_name"] == JOB
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert (host in compose["services"], int(port)) == (True, ServerConfig.port)
    secret = Path(job["authorization"]["credentials_file"])
    assert secret.parent == Path("/run/secrets") and secret.name in compose["secrets"]
    assert compose["services"]["prometheus"]["secrets"] == [secret.name]
    (rules,) = read("prometheus/prometheus.yml")["rule_files"]
    assert mounts["./prometheus/prometheus.yml"].with_name(rules) == mounts[f"./prometheus/{rules}"]
    (source,) = read("grafana/datasource.yaml")["datasources"]
    url = httpx.URL(source["url"])
    assert url.host in compose["services"]
    assert compose["services"][url.host]["ports"][0].endswith(f":{url.port}")
    (provider,) = read("grafana/provider.yaml")["providers"]
    assert mounts["./grafana/guerdon.json"].parent == Path(provider["options"]["path"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool checks it")
@pytest.mark.parametrize(
    "words",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "guerdon.rules.yml"],
        ["test", "rules", "guerdon.test.yml"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_promtool_takes_the_configuration_and_the_alerts(words: list[str]) -> None:
    done = subprocess.run(["promtool", *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_manifest_is_tested() -> None:
    found = {path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*.yaml")}
    has_kind = {name for name in found if any("kind" in document for document in documents(name))}
    assert has_kind == {*SERVERS, *OTHERS, "kubernetes/base/kustomization.yaml", "kubernetes/gpu/kustomization.yaml"}


KUBERNETES = (ROOT / "docs/deploy/kubernetes.md").read_text()


def test_the_pages_pipe_makes_a_rule_of_the_alerts() -> None:
    (command,) = re.findall(r"^(\(printf .*?) \| kubectl apply -f -$", KUBERNETES, re.MULTILINE | re.DOTALL)
    made = yaml.safe_load(subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True).stdout)
    assert (made["kind"], made["metadata"]) == ("PrometheusRule", {"name": JOB})
    assert made["spec"] == yaml.safe_load((DEPLOY / "prometheus/guerdon.rules.yml").read_text())


@needs_kubectl
def test_the_pages_overlay_changes_what_it_names(tmp_path: Path) -> None:
    (overlay,) = re.findall(r"^```yaml\n(# kustomization.yaml\n.*?)^```", KUBERNETES, re.MULTILINE | re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(overlay)
    (tmp_path / "guerdon").symlink_to(ROOT)
    built = kustomized(tmp_path)
    assert {document["metadata"]["namespace"] for document in built} == {"rewards"}
    (deployment,) = (document["spec"] for document in built if document["kind"] == "Deployment")
    (container,) = deployment["template"]["spec"]["containers"]
    assert (deployment["replicas"], container["image"]) == (4, f"ghcr.io/me/guerdon:{PROJECT['version']}")
    config = settings(container["args"])
    assert (config.models[0].model, config.models[0].max_length) == ("/models/other-model", 4096)
