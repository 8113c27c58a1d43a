"""`guerdon doctor`: examines servers, models, the installation, this machine and its devices; says what to do."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.specifiers import SpecifierSet

from guerdon.cli.console import describe_ending
from guerdon.cli.doctor_model import examine_model, is_model
from guerdon.cli.findings import Finding, note, ok, problem, report
from guerdon.cli.installed import (
    Requirement,
    describe_versions,
    find_lacking,
    of_extra,
    read_metadata,
    requirements_of,
    version_of,
)
from guerdon.client import Credentials
from guerdon.client.addresses import Address, addresses
from guerdon.client.http_transport import fetch, fetch_json
from guerdon.endings import Ending
from guerdon.errors import ConfigError, Exit, Forbidden, GuerdonError, Unauthenticated, install_command
from guerdon.settings.access import (
    KEYS_VARIABLE,
    AccessConfig,
    has_keys,
    is_entry,
    split_keys_variable,
    strip_credentials,
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `guerdon doctor`."""
    parser.add_argument(
        "TARGET",
        nargs="*",
        metavar="URL|MODEL",
        help="Servers (http:// or grpc:// URLs) and models (folders or hub ids) to check as well.",
    )
    parser.add_argument("--json", action="store_true", help="Write the findings as JSON.")


def run(args: argparse.Namespace) -> int:
    """Prints every finding as it comes, and the number of problems; returns 1 if there is one."""
    return Exit.FAILED if report(_examine(args.TARGET), as_json=args.json) else Exit.DONE


def _examine(targets: list[str]) -> Iterator[Finding]:
    for target in targets:
        if is_model(target):
            yield from examine_model(target)
        else:
            yield from examine_server(target)
    yield from examine_installation()
    yield from examine_machine()
    yield from examine_devices()


_TIMEOUT_S = 5.0
_READY = "wait until its models are loaded; its log shows the progress"
_KEY = "set GUERDON_API_KEY to a key that the server knows"
_INFO = re.compile(r"guerdon_model_info\{(.*)\} 1(?:\.0)?")
_COUNT = re.compile(r"(guerdon_(?:requests|sequences)_total)\{(.*)\} (\d\S*)")
_COUNTED = ("guerdon_requests_total", "guerdon_sequences_total")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def examine_server(url: str) -> Iterator[Finding]:
    """Checks that the server is reachable and ready; reports its version and models."""
    try:
        (address,) = addresses(url, None)
    except ConfigError as e:
        yield problem(strip_credentials(url), str(e), e.help)
        return
    except GuerdonError as e:
        yield problem(strip_credentials(url), str(e), "give it as the server printed it")
        return
    subject = address.url
    try:
        yield from (_examine_grpc if address.is_grpc else _examine_http)(address)
    except (Unauthenticated, Forbidden) as e:
        yield problem(subject, str(e), _KEY)
    except ConfigError as e:
        yield problem(subject, str(e), e.help)
    except GuerdonError as e:
        yield problem(subject, str(e), "check that the server runs, and its host, port and scheme")


def _examine_http(address: Address) -> Iterator[Finding]:
    subject = address.url
    fetch(address, "/v2/health/live", timeout_s=_TIMEOUT_S)
    started = time.perf_counter()
    fetch(address, "/v2/health/live", timeout_s=_TIMEOUT_S)
    yield ok(subject, f"live; answers within {1e3 * (time.perf_counter() - started):.1f} ms, including the connection")
    try:
        fetch(address, "/v2/health/ready", timeout_s=_TIMEOUT_S)
    except GuerdonError:
        yield problem(subject, "not ready", _READY)
    about = fetch_json(address, "/v2", dict)
    yield _version(subject, str(about.get("name", "?")), str(about.get("version", "?")))
    index = fetch_json(address, "/v2/repository/index", list, method="POST")
    text = _metrics(address)
    more = _infos(text)
    for model in (entry for entry in index if isinstance(entry, dict)):
        name, state, reason = (str(model.get(key, "")) for key in ("name", "state", "reason"))
        yield _model(subject, name, state, reason, more.get(name, ""))
        yield from _failures(subject, name, text)
        if state == "READY":
            yield from _ending(subject, name, _config(address, name))


def _config(address: Address, model: str) -> dict[str, Any]:
    """Returns the model's configuration; empty if the server has none of it, as of a critic's operations elsewhere."""
    try:
        return fetch_json(address, f"/v2/models/{quote(model, safe='')}/config", dict)
    except GuerdonError:
        return {}


def _examine_grpc(address: Address) -> Iterator[Finding]:
    subject = address.url
    if find_spec("tritonclient") is None or find_spec("grpc") is None:
        yield problem(subject, "gRPC is not installed", f"{install_command('grpc')}, or give the server's HTTP URL")
        return
    import grpc
    from google.protobuf import json_format
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    key = address.credentials.authorization
    options: dict[str, Any] = {"timeout": _TIMEOUT_S, "metadata": () if key is None else (("authorization", key),)}
    authorities, private_key, certificate = address.credentials.read()
    channel = (
        grpc.secure_channel(address.netloc, grpc.ssl_channel_credentials(authorities, private_key, certificate))
        if address.has_tls
        else grpc.insecure_channel(address.netloc)
    )
    with channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            stub.ServerLive(pb.ServerLiveRequest(), **options)
            started = time.perf_counter()
            stub.ServerLive(pb.ServerLiveRequest(), **options)
            yield ok(subject, f"live; answers within {1e3 * (time.perf_counter() - started):.1f} ms")
            if not stub.ServerReady(pb.ServerReadyRequest(), **options).ready:
                yield problem(subject, "not ready", _READY)
            about = stub.ServerMetadata(pb.ServerMetadataRequest(), **options)
            yield _version(subject, about.name, about.version)
            for model in stub.RepositoryIndex(pb.RepositoryIndexRequest(), **options).models:
                yield _model(subject, model.name, model.state, model.reason, "")
                if model.state == "READY":
                    with contextlib.suppress(grpc.RpcError):  # another server may have no configurations
                        found = stub.ModelConfig(pb.ModelConfigRequest(name=model.name), **options).config
                        config = json_format.MessageToDict(found, preserving_proto_field_name=True)
                        yield from _ending(subject, model.name, config)
        except grpc.RpcError as e:
            code, refused = e.code().name, ("UNAUTHENTICATED", "PERMISSION_DENIED")
            remedy = _KEY if code in refused else "check that this is a gRPC port, its TLS (grpcs://), and the host"
            yield problem(subject, f"{code}: {e.details()}", remedy)


def _version(subject: str, name: str, version: str) -> Finding:
    own = version_of("guerdon")
    if name != "guerdon":
        return note(subject, f"{name} {version}, a server of the open inference protocol", "nothing, if intended")
    if own is not None and version != own:
        return note(
            subject, f"guerdon {version}; here is {own}", "install the same version on both sides if something fails"
        )
    return ok(subject, f"guerdon {version}, the same as here")


def _model(subject: str, name: str, state: str, reason: str, more: str) -> Finding:
    if state == "READY":
        return ok(subject, f"model {name} is ready{more and ': ' + more}")
    remedy = f"an admin may load it: POST /v2/repository/models/{name}/load" if reason == "unloaded" else _READY
    return note(subject, f"model {name} is {state.lower() or 'unknown'}{reason and ': ' + reason}", remedy)


def _ending(subject: str, name: str, config: dict[str, Any]) -> Iterator[Finding]:
    """Says how the model's chat template ends an answer, if its configuration does."""
    outputs = [str(output.get("name")) for output in config.get("output", ())]
    if text := describe_ending(f"model {name}", Ending.reported(config), outputs):
        yield ok(subject, text)


def _metrics(address: Address) -> str:
    """Returns the server's metrics; an empty text if it has none, or does not show them."""
    try:
        return fetch(address, "/metrics").text
    except GuerdonError:
        return ""


def _failures(subject: str, name: str, metrics: str) -> Iterator[Finding]:
    """Reports how many requests and samples of a model failed since the server's start, if it had any."""
    requests, samples = (_outcomes(metrics, metric, name) for metric in _COUNTED)
    if not requests and not samples:
        return
    refused = {kind: count for kind, count in requests.items() if kind not in ("ok", "Cancelled")}
    lost, num_samples = samples.get("failed", 0), sum(samples.values())
    kinds = f" ({', '.join(f'{kind} {count:,}' for kind, count in refused.items())})" if refused else ""
    text = (
        f"model {name} since the start: {lost:,} of {num_samples:,} samples without a score, "
        f"{sum(refused.values()):,} of {sum(requests.values()):,} requests failed{kinds}"
    )
    if not lost and not refused:
        yield ok(subject, text)
        return
    level = problem if lost and lost == num_samples else note
    yield level(subject, text, f"look at {subject}/#errors for their kinds; the answer to each says why")


def _outcomes(metrics: str, metric: str, model: str) -> dict[str, int]:
    """Returns a counter's numbers for the model by outcome, without zeros."""
    found = {}
    for match in filter(None, map(_COUNT.fullmatch, metrics.splitlines())):
        labels = dict(_LABEL.findall(match[2]))
        if match[1] == metric and labels["model"] == model and (count := round(float(match[3]))):
            found[labels["outcome"]] = count
    return found


def _infos(text: str) -> dict[str, str]:
    """Reads descriptions of the models from the server's metrics, by name."""
    infos = {}
    for match in filter(None, map(_INFO.fullmatch, text.splitlines())):
        labels = dict(_LABEL.findall(match[1]))
        if {"model", "kind", "dtype", "device", "path", "weights_version"} <= labels.keys():
            infos[labels["model"]] = "{kind}, {dtype} on {device}, {path}, weights {weights_version}".format(**labels)
    return infos


_DEVELOPMENT = ("dev", "docs", "fuzz", "manifests")
_PURPOSES = {
    "grpc": "grpc:// URLs",
    "server": "serve, serve-critic, serve-teacher, serve-judge, score --model",
    "actor": "reinforce, ppo, distill",
    "plot": "score --plot",
    "otel": "serve --traces",
    "lora": "low-rank adapters",
    "8bit": "the optimiser adamw_8bit",
    "gguf": "convert",
    "data": "prompts from Parquet files and data sets",
    "wandb": "Weights & Biases",
    "mlflow": "MLflow",
    "math": "guerdon.verifiers.mathematics",
    "ray": "guerdon.deploy.ray",
    "vllm": "rollouts by vLLM",
}
"""What needs each extra."""


def examine_installation() -> Iterator[Finding]:
    """Checks Python, guerdon, its dependencies and its extras."""
    own = read_metadata("guerdon")
    wanted = own["Requires-Python"] if own is not None else ">=3.11"
    python = f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}"
    if SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        yield ok("python", python)
    else:
        yield problem("python", python, f"guerdon needs Python {wanted}: create an environment with it")
    yield ok("platform", f"{platform.platform()}, {platform.machine()}")
    if own is None:
        yield note("guerdon", "run from a source tree, not installed", f"{install_command()}, for its dependencies")
        return
    yield ok("guerdon", own["Version"])
    requirements = requirements_of(own)
    yield from _check_base([part for part in requirements if not part.extra])
    for extra in own.get_all("Provides-Extra") or []:
        if extra not in _DEVELOPMENT:
            yield _check_extra(extra, of_extra(requirements, extra))


def _check_base(requirements: list[Requirement]) -> Iterator[Finding]:
    missing, outside = find_lacking(requirements)
    if missing or outside:
        yield problem("client", ", ".join([*missing, *outside]), install_command())
    else:
        yield ok("client", "complete: " + describe_versions(requirements))


def _check_extra(extra: str, requirements: list[Requirement]) -> Finding:
    subject, line = f"extra {extra}", install_command(extra)
    missing, outside = find_lacking(requirements)
    what = f" ({_PURPOSES[extra]})" if extra in _PURPOSES else ""
    own = [part for part in requirements if part.extra == extra]  # contained extras have their own lines
    if outside:  # pip would refuse it
        return problem(subject, ", ".join(outside), line)
    if not own:
        return note(subject, f"not available for this platform or Python{what}", "nothing; the rest works without it")
    if missing:
        return note(subject, f"{', '.join(find_lacking(own)[0] or missing)}{what}", f"{line}, if you need it")
    return ok(subject, describe_versions(own) + what)


PORTS = {
    5555: "guerdon serve, HTTP",
    5556: "guerdon serve-critic, HTTP",
    5557: "guerdon serve, gRPC",
    5558: "guerdon serve-critic, gRPC",
}
"""The default ports."""

_FILES = 4096
"""Files that a busy server may open: one per connection, and those of models and libraries."""
_FREE_GIB = 5.0


def examine_machine() -> Iterator[Finding]:
    """Checks ports, the limit on open files, the model cache, keys and proxies."""
    for port, what in PORTS.items():
        yield _check_port(port, what)
    yield _check_open_files()
    yield check_cache(os.environ)
    yield from _check_keys()
    yield from _check_proxies()


def _check_port(port: int, what: str) -> Finding:
    subject = f"port {port}"
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ok(subject, f"free ({what})")
    except OSError as e:
        holder = _server_on(port)
        why = f"taken by {holder}" if holder else f"cannot be bound: {e.strerror}"
    flag = "--grpc-port" if "gRPC" in what else "--port"
    return note(subject, f"{why} ({what})", f"give another port by {flag}, unless that is your server")


def _server_on(port: int) -> str:
    """Returns name and version of the server on the port, empty if it is none."""
    try:
        (address,) = addresses(f"http://127.0.0.1:{port}", Credentials())
        about = fetch_json(address, "/v2", dict, timeout_s=1.0)
        return f"{about['name']} {about['version']}"
    except (GuerdonError, KeyError):  # not a server of the protocol
        return ""


def _check_open_files() -> Finding:
    subject = "open files"
    try:
        import resource
    except ImportError:  # not on Windows
        return ok(subject, "this platform sets no limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard:,}"
    if hard != resource.RLIM_INFINITY and hard < _FILES:
        return note(
            subject,
            f"{limit}, and each connection needs one",
            f"`ulimit -Hn {_FILES}` as root before `guerdon serve`, or LimitNOFILE={_FILES} in its systemd unit",
        )
    return ok(subject, f"{limit} ({soft:,} by default; a server raises it)")


def check_cache(environment: Mapping[str, str]) -> Finding:
    """Checks the cache of the Hugging Face hub."""
    subject, folder = "model cache", _cache_folder(environment)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free_gib = shutil.disk_usage(existing).free / 2**30
    except OSError as e:
        why = f"{folder} cannot be written: {e.strerror}"
        return problem(subject, why, "set HF_HOME to a writable folder; models in local folders work without it")
    text = f"{folder}, {free_gib:,.1f} GiB free"
    if free_gib < _FREE_GIB:
        return note(subject, text, "make room, or set HF_HOME to a folder on a larger disk, for models of the hub")
    return ok(subject, text + (", offline: nothing is downloaded" if environment.get("HF_HUB_OFFLINE") else ""))


def _cache_folder(environment: Mapping[str, str]) -> Path:
    """Returns the folder in which huggingface_hub keeps models."""
    if own := environment.get("HF_HUB_CACHE"):
        return Path(own).expanduser()
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser().absolute() / "hub"


def _check_keys() -> Iterator[Finding]:
    """Checks the variables with keys; never reports their values."""
    if not has_keys(AccessConfig()):
        yield ok(KEYS_VARIABLE, "not set: servers require no key")
    elif any(map(is_entry, split_keys_variable())):
        yield ok(KEYS_VARIABLE, "set: servers started here require a key")
    else:
        what = "write `ROLE NAME KEY` entries into it, or unset it"
        yield problem(KEYS_VARIABLE, "set but empty: no server starts here without a file of keys", what)
    try:
        credentials = Credentials.from_environment()
        credentials.read()
    except ConfigError as e:
        yield problem("client's credentials", str(e), e.help)
        return
    yield ok("GUERDON_API_KEY", "set: clients send it" if credentials.api_key else "not set: clients send none")


def _check_proxies() -> Iterator[Finding]:
    names = [name for name in ("http_proxy", "https_proxy", "all_proxy") if _variable(name)]
    if names:
        yield note(
            "proxy",
            f"{', '.join(names)} set: HTTP clients use it, except for {_variable('no_proxy') or 'nothing'}",
            "add 127.0.0.1, localhost and your servers' names to NO_PROXY to reach them directly",
        )


def _variable(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.upper()) or ""


def examine_devices() -> Iterator[Finding]:
    """Checks torch, if installed, its devices, and the attention path on each."""
    if find_spec("torch") is None:
        yield note("torch", "not installed: only the client works", f"{install_command('server')}, to serve models")
        return
    try:
        import torch
    except Exception as e:  # a broken installation may raise anything
        yield problem("torch", f"cannot be imported: {_first_line(e)}", "reinstall it: https://pytorch.org/get-started")
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    if getattr(torch.version, "hip", None):
        build = f"built for ROCm {torch.version.hip}"
    yield ok("torch", f"{torch.__version__}, {build}, threads: {torch.get_num_threads()}")
    yield from _check_gpus(torch)
    yield _check_memory()
    yield _check_products(torch)
    if find_spec("transformers") is None:
        yield note("attention", "transformers is not installed", install_command("server"))
        return
    yield _check_attention("cpu")
    if torch.cuda.is_available():
        yield _check_attention("cuda")


def _check_gpus(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists():
            yield problem(
                "GPU",
                f"this machine has NVIDIA's driver, but torch {torch.__version__} finds no GPU",
                "install a CUDA build of torch that the driver supports (https://pytorch.org/get-started), and check "
                "CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok("GPU", "none; models run on the CPU, in float32 unless you give --dtype")
        return
    for i in range(torch.cuda.device_count()):
        subject = f"cuda:{i}"
        try:
            free, total = torch.cuda.mem_get_info(i)
            properties = torch.cuda.get_device_properties(i)
            with torch.cuda.device(i):
                has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        except Exception as e:  # for example another process holds it exclusively
            yield problem(subject, _first_line(e), "see nvidia-smi for its users, or set CUDA_VISIBLE_DEVICES")
            continue
        text = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
        if has_bf16:
            yield ok(subject, text + ", bfloat16")
        else:
            yield note(subject, text + ", no native bfloat16", "give --dtype float16 or float32: auto is bfloat16")


def _check_memory() -> Finding:
    from guerdon.engine.checkpoint import placement

    free = placement._host_bytes()
    return ok("memory", "unknown on this platform" if free is None else f"{free / 2**30:.1f} GiB free for models")


def _check_products(torch: Any) -> Finding:
    """Measures products in every dtype that `--dtype` takes: processors without units for half precision are slow."""
    from guerdon.engine.products import flops_per_second

    base, *halves = flops_per_second(torch.float32, torch.bfloat16, torch.float16)
    shares = (
        f"{name} {rate / base:.1f} times as fast" for name, rate in zip(("bfloat16", "float16"), halves, strict=True)
    )
    return ok("products on cpu", f"float32 {base / 1e9:,.0f} GFLOP/s per core, {', '.join(shares)}")


def _check_attention(device: str) -> Finding:
    """Loads a small Llama and reports its path, by the self-check of every start."""
    subject = f"attention on {device}"
    try:
        path, why = _try_small_model(device)
    except Exception as e:  # an untested version of a library may raise anything
        return problem(subject, f"a small model fails: {_first_line(e)}", install_command("server"))
    if path == "packed+shared":
        return ok(subject, f"{path}: {why}")
    return note(subject, f"{path}: {why}", "it is exact but slower; check the versions of torch and transformers above")


def _try_small_model(device: str) -> tuple[str, str]:
    import torch
    import transformers

    from guerdon.engine.checkpoint.reward_models import load_reward_model
    from guerdon.engine.engine import Engine
    from guerdon.settings.config import ModelConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        info = Engine(load_reward_model(ModelConfig(model=folder, device=device))).info
    return info.path, f"a small Llama in {info.dtype} {info.why}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
