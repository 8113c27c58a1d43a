"""What computes here: torch's build, the devices, and the path that a small model takes on each."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from guerdon.cli.doctor.findings import Finding, note, ok, problem
from guerdon.errors import install_command


def examine() -> Iterator[Finding]:
    """Torch, each device, and the attention path there; torch is imported, where it is installed."""
    if find_spec("torch") is None:
        yield note("torch", "not installed: this is the client alone", f"{install_command('server')}, to serve models")
        return
    try:
        import torch
    except Exception as e:  # whatever a broken installation raises
        yield problem("torch", f"cannot be imported: {_said(e)}", "install it again: https://pytorch.org/get-started")
        return
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    if getattr(torch.version, "hip", None):
        build = f"built for ROCm {torch.version.hip}"
    yield ok("torch", f"{torch.__version__}, {build}, threads: {torch.get_num_threads()}")
    yield from _gpus(torch)
    yield _memory()
    if find_spec("transformers") is None:
        yield note("attention", "transformers is not installed", install_command("server"))
        return
    yield _attention("cpu")
    if torch.cuda.is_available():
        yield _attention("cuda")


def _gpus(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists():
            yield problem(
                "GPU",
                f"this machine has NVIDIA's driver, and torch {torch.__version__} sees no GPU",
                "install a build of torch for CUDA that the driver supports (https://pytorch.org/get-started), and "
                "look at CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok("GPU", "none; models run on the CPU, in float32 unless --dtype says otherwise")
        return
    for i in range(torch.cuda.device_count()):
        subject = f"cuda:{i}"
        try:
            free, total = torch.cuda.mem_get_info(i)
            properties = torch.cuda.get_device_properties(i)
            with torch.cuda.device(i):
                has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        except Exception as e:  # such as one that another process holds for itself
            yield problem(subject, _said(e), "see with nvidia-smi who uses it; choose another by CUDA_VISIBLE_DEVICES")
            continue
        told = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        )
        if has_bf16:
            yield ok(subject, told + ", bfloat16")
        else:
            yield note(subject, told + ", no bfloat16 of its own", "give --dtype float16 or float32: auto is bfloat16")


def _memory() -> Finding:
    from guerdon.engine.checkpoint import placement

    free = placement._host_bytes()
    return ok("memory", "unknown on this platform" if free is None else f"{free / 2**30:.1f} GiB are free for a model")


def _attention(device: str) -> Finding:
    """The path that a small Llama takes, by the comparison that every start makes."""
    subject = f"attention on {device}"
    try:
        path, why = _tried(device)
    except Exception as e:  # whatever a library in a version of its own raises
        return problem(subject, f"a small model cannot be run: {_said(e)}", install_command("server"))
    if path == "packed+shared":
        return ok(subject, f"{path}: {why}")
    return note(
        subject, f"{path}: {why}", "it is exact, and slower; check the versions of torch and transformers above"
    )


def _tried(device: str) -> tuple[str, str]:
    import torch
    import transformers

    from guerdon.engine.checkpoint.reward_models import load_reward_model
    from guerdon.engine.forward import Forward
    from guerdon.engine.self_check import choose_path
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
        loaded = load_reward_model(ModelConfig(model=folder, device=device))
        forward = Forward(loaded)
        choose_path(forward, loaded)
    info = forward.info
    return info.path, f"a small Llama in {info.dtype} {info.why}"


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
