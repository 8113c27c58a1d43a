"""The environments of the trainers that guerdon is tried with, each with the real library.

    python tests/trainers/environments.py [NAME ...]      makes .venvs/NAME, or all of them where none is named
    python tests/trainers/environments.py --missing       makes those that are not there
    python tests/trainers/environments.py --list          names them
    python tests/trainers/environments.py --newest NAME   makes it with the trainer's newest release or commit

Each borrows what this interpreter's environment has (torch, transformers) and adds the trainer without its
dependencies, of which those follow that its way to a reward needs: a whole installation would bring CUDA.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path(os.environ.get("GUERDON_TRAINERS", ROOT / ".venvs"))


@dataclass(frozen=True)
class Environment:
    """What one trainer needs: packages without and with their dependencies, and a source where it is not on PyPI.

    `older` releases lie beside the one that is imported, each in a folder of its own. An environment is whole once its
    modules in `imports` can be imported. One of other `interpreters`, of which the first that is there serves, borrows
    nothing.
    """

    alone: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    older: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    source: str = ""
    commit: str = ""
    interpreters: list[str] = field(default_factory=list)


ENVIRONMENTS = {
    # The oldest that pyproject.toml admits, for the tests that compare with it; it runs no trainer.
    "transformers": Environment(["transformers==5.2.0", "tokenizers==0.22.2"]),
    "openrlhf": Environment(
        ["openrlhf==0.11.2", "loralib", "optree", "torchdata", "torchmetrics", "lightning-utilities", "pylatexenc",
         "deepspeed==0.18.2"],
        ["ray", "aiohttp", "einops", "hjson", "jsonlines", "msgpack", "ninja", "py-cpuinfo"],
        [f"openrlhf=={version}" for version in ("0.5.0", "0.5.9", "0.6.4", "0.8.2", "0.8.11", "0.9.0")],
    ),
    "trl": Environment(older=[f"trl=={version}" for version in ("1.1.0", "1.10.0")]),
    "verl": Environment(
        ["verl==0.9.1", "tensordict==0.10.0", "pyvers<0.2", "TransferQueue", "torchdata"],
        ["ray", "cachetools", "cloudpickle", "codetiming", "fastapi", "hydra-core"],
        ["verl==0.7.1"],
        imports=["verl.trainer.ppo.reward", "verl.experimental.reward_loop", "verl.workers.reward_manager",
                 "verl.trainer.main_ppo", "verl.trainer.ppo.v1"],
    ),
    "areal": Environment(
        ["areal==1.0.4", "torchdata"],
        ["aiofiles", "aiohttp", "colorlog", "einops", "flask", "hydra-core", "lark", "numba", "openai", "pybase64",
         "ray", "tenacity"],
    ),
    "vllm": Environment(
        ["vllm==0.33.0", "transformers==5.20.2", "xgrammar", "apache-tvm-ffi", "llguidance", "openai-harmony"],
        ["fastapi", "msgspec", "cachetools", "cbor2", "cloudpickle", "openai", "pybase64", "py-cpuinfo",
         "partial-json-parser", "watchfiles"],
    ),
    "sglang": Environment(
        ["sglang==0.5.23", "compressed-tensors", "gguf", "torchvision", "triton", "apache-tvm-ffi"],
        ["msgspec", "openai", "pybase64", "partial-json-parser", "ipython", "loguru"],
    ),
    "rewardbench": Environment(
        ["rewardbench==0.1.4", "transformers==4.51.0", "tokenizers==0.21.4", "huggingface_hub==0.36.2", "trl==0.16.1",
         "accelerate==1.6.0", "fschat"],
        ["setuptools<81", "wandb"],
        imports=["rewardbench.rewardbench"],
    ),
    "slime": Environment(
        ["pylatexenc"],
        ["aiohttp"],
        source="https://github.com/THUDM/slime",
        commit="624b824a898ab0ec1fcb4d373004c7f3852bf515",
    ),
    "miles": Environment(
        ["pylatexenc"],
        ["aiohttp", "ray"],
        source="https://github.com/radixark/miles",
        commit="31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
    ),
    "prime_rl": Environment(
        ["verifiers==0.4.0", "renderers==0.1.12", "vllm==0.26.0", "transformers==5.6.2", "tokenizers==0.22.2",
         "xgrammar", "apache-tvm-ffi", "llguidance", "openai-harmony"],
        ["openai<3", "anthropic", "mcp==2.0.0", "gepa", "math-verify", "prime-pydantic-config", "prime-runs",
         "prime-sandboxes", "prime-tunnel", "aiohttp", "cachetools", "cbor2", "cloudpickle", "fastapi", "httpx2",
         "loguru", "msgspec", "partial-json-parser", "py-cpuinfo", "pybase64", "tenacity", "tiktoken", "tomli-w",
         "wandb", "watchfiles"],
        imports=["verifiers.v1", "vllm.entrypoints.scale_out.token_in_token_out.protocol"],
        source="https://github.com/PrimeIntellect-ai/prime-rl",
        commit="559b44772e471d1538537b8805cc77f3824a5e64",
    ),
    "nemo_rl": Environment(
        ["transformers==5.11.0", "tokenizers==0.22.2", "torchdata", "latex2sympy2-extended", "math-verify"],
        ["ray", "hydra-core", "pynvml"],
        source="https://github.com/NVIDIA-NeMo/RL",
        commit="7ea279abfbeb698b092856d0dab61e7cf39bc909",
    ),
    "openenv": Environment(
        ["openenv==0.10.0"],
        ["fastapi", "uvicorn", "requests", "websockets", "fastmcp<4", "openai", "rich", "tomli", "tomli-w", "typer"],
        imports=["openenv.core.env_server.http_server", "openenv.core.rubrics"],
    ),
    "verifiers": Environment(
        ["verifiers==0.4.0", "renderers==0.1.12"],
        ["openai<3", "anthropic", "mcp==2.0.0", "gepa", "math-verify", "prime-pydantic-config", "prime-runs",
         "prime-sandboxes", "prime-tunnel", "aiohttp", "cachetools", "httpx2", "loguru", "msgpack", "tenacity",
         "tomli-w"],
        imports=["verifiers.v1"],
    ),
    "nemo_gym": Environment(
        packages=["nemo-gym==0.4.0"],
        imports=["nemo_gym.rollout_collection", "responses_api_agents.simple_agent"],
        interpreters=["python3.12", "python3.13"],
    ),
    "skyrl": Environment(
        ["jaxtyping", "wadler-lindig", "tensordict==0.10.0", "pyvers<0.2", "torchdata"],
        ["ray", "loguru", "omegaconf", "hydra-core", "aiohttp", "cachetools", "cloudpickle"],
        source="https://github.com/NovaSky-AI/SkyRL",
        commit="a9564572eb8e91076be43c1bd5e4615e3de17265",
    ),
    "nemo_aligner": Environment(
        ["nemo_toolkit==2.1.0", "megatron-core==0.10.0", "lightning", "lightning-utilities", "torchmetrics"],
        ["hydra-core", "onnx", "pandas<3", "einops", "sentencepiece", "python-dateutil", "wget", "setuptools<81"],
        source="https://github.com/NVIDIA/NeMo-Aligner",
        commit="af2b3bd96ad78190f6ebfb552b9e599e313ce027",
    ),
}  # fmt: skip


USED: set[str] = set()
"""Names whose interpreter was requested; the report of a test resets and reads them."""


def python_of(name: str) -> Path:
    """The interpreter of a trainer's environment, whether it is there or not."""
    USED.add(name)
    return HOME / name / "bin/python"


def source_of(name: str) -> Path:
    """Where the checkout of a trainer lies that is not on PyPI."""
    return HOME / name / "source"


def older_of(name: str, release: str) -> Path:
    """The folder of an older release of a trainer."""
    return HOME / name / "older" / release


def stamp_of(name: str) -> Path:
    """A file that is there once the environment is whole."""
    return HOME / name / ".made"


def version_of(name: str) -> str:
    """The release that an environment has, or the commit of its checkout."""
    if source_of(name).exists():
        log = ["git", "-C", source_of(name), "log", "-1", "--format=%h, %cs"]
        return subprocess.check_output(log, text=True).strip()
    wanted = (ENVIRONMENTS[name].alone or ENVIRONMENTS[name].packages or [name])[0].partition("==")[0]
    asked = f"from importlib.metadata import version; print(version('{wanted}'))"
    return subprocess.check_output([python_of(name), "-c", asked], text=True).strip()


def make(name: str, is_newest: bool = False) -> None:
    """Makes the environment of that name."""
    wanted, python = ENVIRONMENTS[name], python_of(name)
    if is_newest:
        alone = [package.partition("==")[0] for package in wanted.alone[:1]] + wanted.alone[1:]
        packages = [package.partition("==")[0] for package in wanted.packages]
        wanted = replace(wanted, alone=alone, packages=packages, commit="HEAD")
    pip, constraints = [python, "-m", "pip", "install", "-q"], ["-c", ROOT / "constraints.txt"]
    if wanted.interpreters:
        there = [interpreter for interpreter in wanted.interpreters if shutil.which(interpreter)]
        if not there:
            sys.exit(f"{name} needs one of {', '.join(wanted.interpreters)}, and none is on the PATH")
        subprocess.run([there[0], "-m", "venv", HOME / name], check=True)
        constraints = []  # they are those of this interpreter's environment
    else:
        venv.create(HOME / name, with_pip=True)
        packages = Path(subprocess.check_output([python, "-c", _WHERE], text=True).strip())
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if wanted.packages:
        subprocess.run([*pip, *constraints, *wanted.packages], check=True)
    if wanted.alone:
        subprocess.run([*pip, "--no-deps", *wanted.alone], check=True)
    for release in wanted.older:
        folder = older_of(name, release.partition("==")[2])
        subprocess.run([*pip, "--no-deps", "--target", folder, release], check=True)
    if wanted.source and not source_of(name).exists():  # a checkout that somebody put there will do
        git = ["git", "-C", source_of(name)]
        source_of(name).mkdir(parents=True)
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "fetch", "-q", "--depth", "1", wanted.source, wanted.commit], check=True)
        subprocess.run([*git, "checkout", "-q", "FETCH_HEAD"], check=True)
    if wanted.imports:
        subprocess.run([python, "-c", f"import {', '.join(wanted.imports)}"], check=True)
    stamp_of(name).touch()


_WHERE = "import sysconfig; print(sysconfig.get_path('purelib'))"


if __name__ == "__main__":
    missing = [name for name in ENVIRONMENTS if not stamp_of(name).exists()]
    if "--list" in sys.argv:
        print(*ENVIRONMENTS)
        sys.exit()
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    for chosen in names or (missing if "--missing" in sys.argv else list(ENVIRONMENTS)):
        print(f"{chosen}: {HOME / chosen}", flush=True)
        make(chosen, "--newest" in sys.argv)
