"""Adapters load nothing that trainers may not have, or have already in a version of their own."""

import subprocess
import sys
from pathlib import Path

from guerdon import adapters
from processes import environment

FOLDER = Path(adapters.__file__).parent
SERVING = ("critic_server_trainer", "reinforce_actor", "reward_model_server")
"""NeMo-Aligner's server side: it runs models itself."""
MODULES_OF_TRL = ("trl_models", "trl_critic")
"""Their classes are torch's modules and transformers' callbacks, because TRL asks for such."""
MODULES = sorted(
    "guerdon.adapters." + ".".join(path.relative_to(FOLDER).with_suffix("").parts)
    for path in [*FOLDER.glob("*.py"), *FOLDER.glob("*/*.py")]
    if (path.name != "__init__.py" or path.parent != FOLDER) and path.stem not in SERVING + MODULES_OF_TRL
)
HEAVY = ("torch", "transformers", "starlette", "uvicorn", "ray", "grpc", "yaml", "nemo_rl", "rewardbench", "trl",
         "verifiers", "openenv", "guerdon.local", "guerdon.server", "guerdon.engine", "guerdon.assembly")  # fmt: skip


def test_importing_adapters_loads_none_of_it() -> None:
    code = f"""
import importlib, sys
for module in {MODULES}:
    before = set(sys.modules)
    importlib.import_module(module.removesuffix(".__init__"))
    for heavy in {HEAVY}:
        if heavy in sys.modules and heavy not in before:
            print(module, "loads", heavy)
"""
    assert {"guerdon.adapters.nemo_rl", "guerdon.adapters.trlx"} < {*MODULES} and len(MODULES) > 9
    in_a_package = {path.stem for path in (FOLDER / "nemo_aligner").glob("*.py")} - {*SERVING}
    assert {"remote_clients", "__init__"} <= in_a_package <= {name.rpartition(".")[2] for name in MODULES}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout == ""
