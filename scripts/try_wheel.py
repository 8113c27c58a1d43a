"""Checks a wheel for Linux: that it has the kernels, and that it scores where nothing else is installed.

pip wheel --no-deps -w dist . && python scripts/try_wheel.py contents dist/guerdon-*.whl
python -m venv bare && bare/bin/pip install -c constraints.txt "$(echo dist/guerdon-*.whl)[server]"
bare/bin/python scripts/try_wheel.py score
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NATIVE = "guerdon/engine/native"
SAME_BITS = "same bits in any batch"


def contents(wheel: Path) -> set[str]:
    """Returns the wheel's libraries; exits if one is missing, or if one is not ours.

    PyTorch has an OpenMP runtime, and a process must not have two: none may be in the wheel.
    """
    with zipfile.ZipFile(wheel) as file:
        found = {name for name in file.namelist() if re.search(r"\.so(\.\d+)*$", name)}
    levels = ("baseline", "avx2", "avx512", "avx512_bf16") if wheel.stem.endswith("x86_64") else ("baseline",)
    wanted = {f"{NATIVE}/kernels_{level}.so" for level in levels}
    if found != wanted:
        sys.exit(f"{wheel.name} has {sorted(found)} instead of {sorted(wanted)}")
    return found


def score() -> None:
    """Scores by a server of the installed package; exits unless its scores have the same bits in any batch."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from guerdon import RewardClient

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForSequenceClassification(LlamaConfig(vocab_size=99, num_labels=1, pad_token_id=0, **sizes))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        model.save_pretrained(folder)
        command = [sys.executable, "-m", "guerdon", "serve", folder, "--port", "0", "--no-grpc"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            said = _wait_until_ready(server)
            maps = Path(f"/proc/{server.pid}/maps").read_text()
            if ready := re.search(r"ready at (http://\S+)", said):
                with RewardClient(ready[1]) as client:
                    client.score(tokens=[[5, 6, 7]])
            server.send_signal(signal.SIGTERM)
            said += server.communicate(timeout=60)[0]
        finally:
            server.kill()
        log.seek(0)
        said += log.read()
    runtimes = set(re.findall(r"/\S*lib(?:gomp|omp|iomp)\S*\.so\S*", maps))
    kernels = set(re.findall(rf"\S*{NATIVE}/kernels_\w+\.so", maps))
    if server.returncode or SAME_BITS not in said or len(runtimes) != 1 or len(kernels) != 1:
        sys.exit(f"the server ended with {server.returncode}, had {runtimes | kernels}, and said:\n{said}")
    sys.stdout.write("".join(f"{name}\n" for name in (SAME_BITS, *kernels, *runtimes)))


def _wait_until_ready(server: subprocess.Popen[str]) -> str:
    """Returns what the server printed until it was ready, or until it ended."""
    assert server.stdout is not None
    said = ""
    for line in server.stdout:
        said += line
        if "ready at" in line:
            break
    return said


def main() -> None:
    match sys.argv[1:]:
        case ["contents", wheel]:
            sys.stdout.write("".join(f"{name}\n" for name in sorted(contents(Path(wheel)))))
        case ["score"]:
            score()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
