"""`guerdon doctor`: examines servers, models, the installation, this machine and its devices; says what to do."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from guerdon.cli.console import describe_ending
from guerdon.cli.doctor_model import examine_model, is_model
from guerdon.cli.findings import Finding, note, ok, problem
from guerdon.client import Credentials
from guerdon.client.addresses import Address, addresses
from guerdon.client.http_transport import fetch, fetch_json
from guerdon.client.statuses import error_of
from guerdon.endings import Ending
from guerdon.errors import ConfigError, Forbidden, GuerdonError, Unauthenticated, first_line, install_command
from guerdon.settings import access
from guerdon.settings.config import ModelConfig


def examine(targets: Iterable[str]) -> Iterator[Finding]:
    """Examines the servers and models, then the installation, this machine and its devices."""
    for target in targets:
        yield from examine_model(target) if is_model(target) else examine_server(target)
    yield from examine_installation()
    yield from examine_machine()
    yield from examine_devices()


_TIMEOUT_S = 5.0
_READY = "wait until its models are loaded; its log shows the progress"
_METRIC = re.compile(r"(guerdon_(?:model_info|requests_total|sequences_total))\{(.*)\} (\d\S*)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Ask = Callable[..., dict[str, Any]]
"""Calls a method of the protocol by its name in gRPC, perhaps for a model; returns the reply."""
Samples = list[tuple[str, dict[str, str], float]]
"""A server's metrics: name, labels, value."""


def examine_server(url: str) -> Iterator[Finding]:
    """Checks that the server is reachable and ready; reports its version and models."""
    subject, remedy = access.strip_credentials(url), "give it as the server printed it"
    try:
        (address,) = addresses(url, None)
        subject, remedy = address.url, "check that it runs there, its host, its port of HTTP or gRPC, and its scheme"
        if not address.is_grpc:
            yield from _examine(subject, lambda *asked: _ask_http(address, *asked), _metrics(address))
        elif find_spec("tritonclient") is None or find_spec("grpc") is None:
            yield problem(subject, "gRPC is not installed", f"{install_command('grpc')}, or give the server's HTTP URL")
        else:
            with _grpc(address) as ask:
                yield from _examine(subject, ask, [])
    except (Unauthenticated, Forbidden) as e:
        yield problem(subject, str(e), "set GUERDON_API_KEY to a key that the server knows")
    except ConfigError as e:
        yield problem(subject, str(e), e.help)
    except GuerdonError as e:
        yield problem(subject, str(e), remedy)


def _ask_http(address: Address, method: str, model: str = "") -> dict[str, Any]:
    match method:
        case "ServerMetadata":
            return fetch_json(address, "/v2", dict, timeout_s=_TIMEOUT_S)
        case "RepositoryIndex":
            return {"models": fetch_json(address, "/v2/repository/index", list, method="POST")}
        case "ModelConfig":
            return {"config": fetch_json(address, f"/v2/models/{quote(model, safe='')}/config", dict)}
    fetch(address, f"/v2/health/{method.removeprefix('Server').lower()}", timeout_s=_TIMEOUT_S)
    return {"ready": True}


@contextlib.contextmanager
def _grpc(address: Address) -> Iterator[Ask]:
    import grpc
    from google.protobuf import json_format
    from tritonclient.grpc import service_pb2 as pb
    from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

    def ask(method: str, model: str = "") -> dict[str, Any]:
        request = getattr(pb, f"{method}Request")(**({"name": model} if model else {}))
        try:
            reply = getattr(stub, method)(request, timeout=_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as e:
            raise error_of(e.code().name, f"{e.code().name}: {e.details()}") from e
        return json_format.MessageToDict(reply, preserving_proto_field_name=True)

    key = address.credentials.authorization
    metadata = () if key is None else (("authorization", key),)
    tls = grpc.ssl_channel_credentials(*address.credentials.read()) if address.has_tls else None
    with grpc.secure_channel(address.netloc, tls) if tls else grpc.insecure_channel(address.netloc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        yield ask


def _examine(subject: str, ask: Ask, metrics: Samples) -> Iterator[Finding]:
    ask("ServerLive")
    started = time.perf_counter()
    ask("ServerLive")
    yield ok(subject, f"live; answers within {1e3 * (time.perf_counter() - started):.1f} ms")
    if not _try(ask, "ServerReady").get("ready"):
        yield problem(subject, "not ready", _READY)
    about = ask("ServerMetadata")
    name, version, own = str(about.get("name", "?")), str(about.get("version", "?")), _version_of("guerdon")
    if name != "guerdon":
        yield note(subject, f"{name} {version}, a server of the open inference protocol", "nothing, if intended")
    elif own is not None and version != own:
        remedy = "install the same version on both sides if something fails"
        yield note(subject, f"guerdon {version}; here is {own}", remedy)
    else:
        yield ok(subject, f"guerdon {version}, the same as here")
    for model in ask("RepositoryIndex").get("models", []):
        if isinstance(model, dict):
            name, state, reason = (str(model.get(key, "")) for key in ("name", "state", "reason"))
            yield from _examine_served(subject, name, state, reason, metrics)
            if state == "READY":
                config = _try(ask, "ModelConfig", name).get("config", {})
                outputs = [str(output.get("name")) for output in config.get("output", ())]
                if text := describe_ending(f"model {name}", Ending.reported(config), outputs):
                    yield ok(subject, text)


def _try(ask: Ask, *asked: str) -> dict[str, Any]:
    """Returns the reply; empty if there is none, as of the configuration of another server's model."""
    try:
        return ask(*asked)
    except GuerdonError:
        return {}


def _metrics(address: Address) -> Samples:
    """Returns the models' figures from the server's metrics; empty without metrics or access."""
    try:
        lines = fetch(address, "/metrics").text.splitlines()
    except GuerdonError:
        return []
    found = filter(None, map(_METRIC.fullmatch, lines))
    return [(match[1], dict(_LABEL.findall(match[2])), float(match[3])) for match in found]


def _examine_served(subject: str, name: str, state: str, reason: str, metrics: Samples) -> Iterator[Finding]:
    """Reports a model's state, and how many requests and samples failed since the server's start, if it had any."""
    if state == "READY":
        about = "{kind}, {dtype} on {device}, {path}, weights {weights_version}"
        more = [about.format(**of) for kind, of, _ in metrics if kind == "guerdon_model_info" and of["model"] == name]
        yield ok(subject, ": ".join([f"model {name} is ready", *more[-1:]]))
    else:
        remedy = f"an admin may load it: POST /v2/repository/models/{name}/load" if reason == "unloaded" else _READY
        yield note(subject, f"model {name} is {state.lower() or 'unknown'}{reason and ': ' + reason}", remedy)
    requests, samples = (
        {of["outcome"]: round(count) for kind, of, count in metrics if (kind, of["model"]) == (metric, name) and count}
        for metric in ("guerdon_requests_total", "guerdon_sequences_total")
    )
    refused = {kind: count for kind, count in requests.items() if kind not in ("ok", "Cancelled")}
    lost, num_samples = samples.get("failed", 0), sum(samples.values())
    kinds = f" ({', '.join(f'{kind} {count:,}' for kind, count in refused.items())})" if refused else ""
    text = (
        f"model {name} since the start: {lost:,} of {num_samples:,} samples without a score, "
        f"{sum(refused.values()):,} of {sum(requests.values()):,} requests failed{kinds}"
    )
    if lost or refused:
        level = problem if lost and lost == num_samples else note
        yield level(subject, text, f"look at {subject}/#errors for their kinds; the answer to each says why")
    elif requests or samples:
        yield ok(subject, text)


_DEVELOPMENT = ("dev", "docs", "fuzz", "manifests")
_PURPOSES = {
    "grpc": "grpc:// URLs", "server": "serve, serve-critic, serve-teacher, serve-judge, score --model",
    "actor": "reinforce, ppo, distill", "plot": "score --plot", "otel": "serve --traces", "lora": "low-rank adapters",
    "8bit": "the optimiser adamw_8bit", "gguf": "convert", "data": "prompts from Parquet files and data sets",
    "wandb": "Weights & Biases", "mlflow": "MLflow", "math": "guerdon.verifiers.mathematics",
    "ray": "guerdon.deploy.ray", "vllm": "rollouts by vLLM",
}  # fmt: skip
"""The commands or features that need each extra."""


def examine_installation() -> Iterator[Finding]:
    """Checks Python, guerdon, its dependencies and its extras."""
    own = _metadata("guerdon")
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
    present, missing, outside = _compare(requirements_of("guerdon"))
    if missing or outside:
        yield problem("client", ", ".join([*missing, *outside]), install_command())
    else:
        yield ok("client", f"complete: {', '.join(present)}")
    for extra in own.get_all("Provides-Extra") or []:
        if extra not in _DEVELOPMENT:
            yield _check_extra(extra)


def _check_extra(extra: str) -> Finding:
    subject, line = f"extra {extra}", install_command(extra)
    purpose = f" ({_PURPOSES[extra]})" if extra in _PURPOSES else ""
    own = list(requirements_of("guerdon", extra, with_contained=False))  # contained extras have their own lines
    _, missing, outside = _compare(requirements_of("guerdon", extra))
    present, own_missing, _ = _compare(own)
    if outside:  # pip would refuse it
        return problem(subject, ", ".join(outside), line)
    if not own:
        remedy = "nothing; the rest works without it"
        return note(subject, f"not available for this platform or Python{purpose}", remedy)
    if missing:
        return note(subject, f"{', '.join(own_missing or missing)}{purpose}", f"{line}, if you need it")
    return ok(subject, ", ".join(present) + purpose)


def requirements_of(name: str, extra: str = "", *, with_contained: bool = True) -> Iterator[Requirement]:
    """Yields a distribution's requirements on this platform, or those of one extra."""
    own = _metadata(name)
    for wanted in map(Requirement, own.get_all("Requires-Dist") or [] if own is not None else []):
        is_always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if is_always == bool(extra) or not (is_always or wanted.marker.evaluate({"extra": extra})):  # type: ignore[union-attr]
            continue
        if wanted.name != name:
            yield wanted
        elif with_contained:
            for contained in wanted.extras:
                yield from requirements_of(name, contained)


def _compare(requirements: Iterable[Requirement]) -> tuple[list[str], list[str], list[str]]:
    """Returns the installed packages with their versions, the missing ones, and those of an untested version."""
    present, missing, outside = [], [], []
    for wanted in requirements:
        name, version = wanted.name, _version_of(wanted.name)
        if version is None:
            missing.append(f"{name} is missing")
            continue
        present.append(f"{name} {version}")
        if not wanted.specifier.contains(version, prereleases=True):
            tested = ",".join(sorted(map(str, wanted.specifier), reverse=True))
            outside.append(f"{name} {version} is not {tested}, the tested range")
            continue
        parts = [(part.name, extra) for extra in wanted.extras for part in requirements_of(name, extra)]
        missing += [f"{part} (of {name}[{extra}]) is missing" for part, extra in parts if not _version_of(part)]
    return present, list(dict.fromkeys(missing)), list(dict.fromkeys(outside))


def _metadata(name: str) -> metadata.PackageMetadata | None:
    try:
        return metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None


def _version_of(name: str) -> str | None:
    """Returns the version of a distribution without importing it; None if it is not installed."""
    own = _metadata(name)
    return None if own is None else own["Version"]


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
    names = [name for name in ("http_proxy", "https_proxy", "all_proxy") if _variable(name)]
    if names:
        text = f"{', '.join(names)} set: HTTP clients use it, except for {_variable('no_proxy') or 'nothing'}"
        yield note("proxy", text, "add 127.0.0.1, localhost and your servers' names to NO_PROXY to reach them directly")


def _variable(name: str) -> str | None:
    return os.environ.get(name) or os.environ.get(name.upper())


def _check_port(port: int, what: str) -> Finding:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ok(f"port {port}", f"free ({what})")
    except OSError as e:
        why = f"cannot be bound: {e.strerror}"
    with contextlib.suppress(GuerdonError, KeyError):  # not a server of the protocol
        (address,) = addresses(f"http://127.0.0.1:{port}", Credentials())
        about = fetch_json(address, "/v2", dict, timeout_s=1.0)
        why = f"taken by {about['name']} {about['version']}"
    flag = "--grpc-port" if "gRPC" in what else "--port"
    return note(f"port {port}", f"{why} ({what})", f"give another port by {flag}, unless that is your server")


def _check_open_files() -> Finding:
    try:
        import resource
    except ImportError:  # not on Windows
        return ok("open files", "this platform sets no limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_endless = hard == resource.RLIM_INFINITY
    if not is_endless and hard < _FILES:
        remedy = f"`ulimit -Hn {_FILES}` as root before `guerdon serve`, or LimitNOFILE={_FILES} in its systemd unit"
        return note("open files", f"at most {hard:,}, and each connection needs one", remedy)
    limit = "no limit" if is_endless else f"at most {hard:,}"
    return ok("open files", f"{limit} ({soft:,} by default; a server raises it)")


def check_cache(environment: Mapping[str, str]) -> Finding:
    """Checks the cache of the Hugging Face hub, in the folder where huggingface_hub keeps models."""
    subject = "model cache"
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    folder = Path(environment.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser().absolute()
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


def _check_keys() -> Iterator[Finding]:
    """Checks the variables with keys; never reports their values."""
    if not access.has_keys(access.AccessConfig()):
        yield ok(access.KEYS_VARIABLE, "not set: servers require no key")
    elif any(map(access.is_entry, access.split_keys_variable())):
        yield ok(access.KEYS_VARIABLE, "set: servers started here require a key")
    else:
        what = "write `ROLE NAME KEY` entries into it, or unset it"
        yield problem(access.KEYS_VARIABLE, "set but empty: no server starts here without a file of keys", what)
    try:
        credentials = Credentials.from_environment()
        credentials.read()
        yield ok("GUERDON_API_KEY", "set: clients send it" if credentials.api_key else "not set: clients send none")
    except ConfigError as e:
        yield problem("client's credentials", str(e), e.help)


def examine_devices() -> Iterator[Finding]:
    """Checks torch, if installed, its devices, and the attention path on each."""
    if find_spec("torch") is None:
        yield note("torch", "not installed: only the client works", f"{install_command('server')}, to serve models")
        return
    try:
        import torch
    except Exception as e:  # a broken installation may raise anything
        yield problem("torch", f"cannot be imported: {first_line(e)}", "reinstall it: https://pytorch.org/get-started")
        return
    cuda, rocm = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"ROCm {rocm}" if rocm else f"CUDA {cuda}" if cuda else "CPUs"
    yield ok("torch", f"{torch.__version__}, built for {build}, threads: {torch.get_num_threads()}")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield from (_check_gpu(torch, index) for index in range(num_gpus))
    if not num_gpus and (shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists()):
        remedy = "install a CUDA build of torch that the driver supports (https://pytorch.org/get-started), and check "
        text = f"this machine has NVIDIA's driver, but torch {torch.__version__} finds no GPU"
        yield problem("GPU", text, remedy + "CUDA_VISIBLE_DEVICES")
    elif not num_gpus:
        yield ok("GPU", "none; models run on the CPU, in float32 unless you give --dtype")
    yield from _check_cpu(torch)
    if find_spec("transformers") is None:
        yield note("attention", "transformers is not installed", install_command("server"))
        return
    for device in ("cpu", "cuda")[: 2 if num_gpus else 1]:
        yield _check_attention(device)


def _check_gpu(torch: Any, index: int) -> Finding:
    subject = f"cuda:{index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        gpu = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except Exception as e:  # for example another process holds it exclusively
        return problem(subject, first_line(e), "see nvidia-smi for its users, or set CUDA_VISIBLE_DEVICES")
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    text = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory}"
    if has_bf16:
        return ok(subject, text + ", bfloat16")
    return note(subject, text + ", no native bfloat16", "give --dtype float16 or float32: auto is bfloat16")


def _check_cpu(torch: Any) -> Iterator[Finding]:
    """Reports the memory, and measures products: processors without units for half precision are slow with it."""
    from guerdon.engine.checkpoint import placement
    from guerdon.engine.native.library import find
    from guerdon.engine.product_speed import flops_per_second

    free = placement._host_bytes()
    yield ok("memory", "unknown on this platform" if free is None else f"{free / 2**30:.1f} GiB free for models")
    base, bfloat16, float16 = flops_per_second(torch.float32, torch.bfloat16, torch.float16)
    halves = f"bfloat16 {bfloat16 / base:.1f} times as fast, float16 {float16 / base:.1f} times as fast"
    yield ok("products on cpu", f"float32 {base / 1e9:,.0f} GFLOP/s per core, {halves}")
    library, text = find()
    if library is not None:
        yield ok("kernels on cpu", f"compiled for {text}: scores have the same bits in any batch")
        return
    remedy = "install g++, then guerdon again: attention takes half the time, with the same bits in any batch"
    yield note("kernels on cpu", f"none, {text}", remedy)


def _check_attention(device: str) -> Finding:
    """Loads a small Llama and reports its path, by the self-check of every start."""
    subject = f"attention on {device}"
    try:
        import torch
        import transformers

        from guerdon.engine.checkpoint.reward_models import load_reward_model
        from guerdon.engine.engine import Engine

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
    except Exception as e:  # an untested version of a library may raise anything
        return problem(subject, f"a small model fails: {first_line(e)}", install_command("server"))
    text = f"{info.path}: a small Llama in {info.dtype} {info.why}"
    if info.path == "packed+shared":
        return ok(subject, text)
    return note(subject, text, "it is exact but slower; check the versions of torch and transformers above")
