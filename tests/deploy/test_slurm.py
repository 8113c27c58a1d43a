"""The Slurm script's flags exist, and it runs with stand-ins for Slurm's commands."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import served
from deploy.manifests import DEPLOY, settings
from guerdon.client import Credentials, CriticClient
from guerdon.client.retry import RetryPolicy
from ports import free_port
from processes import environment

SCRIPT = DEPLOY / "slurm/critic.slurm"
KEY = "key-of-the-trainer-0123456789"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that the script needs."""
    monkeypatch.setenv("GUERDON_API_KEYS", f"train trainer {KEY}")


def test_the_slurm_scripts_flags_exist() -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    text = SCRIPT.read_text().replace("\\\n", " ")
    (words,) = re.findall(r"-m guerdon (serve-critic .*?) &$", text, re.MULTILINE)
    config = settings([re.sub(r"\$\{\w+:-(\d+)\}", r"\1", word).strip('"') for word in words.split()])
    assert config.critic is not None
    assert (config.host, config.port, config.fsdp, config.critic.save_every) == ("0.0.0.0", 5556, True, 50)


SCONTROL = """#!/usr/bin/env bash
printf '127.0.0.2\\n127.0.0.1\\n'
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
for node in 127.0.0.1 127.0.0.2; do
    SLURMD_NODENAME=$node "$@" &
    nodes+=($!)
done
# As Slurm's: SIGTERM is forwarded as SIGKILL, SIGUSR1 as it is, here to every process of the step.
below() { for child in $(pgrep -P "$1"); do echo "$child"; below "$child"; done; }
trap 'for node in "${nodes[@]}"; do kill -KILL $(below "$node") "$node"; done' TERM
trap 'for node in "${nodes[@]}"; do kill -USR1 "$node" $(below "$node"); done' USR1
worst=0
for node in "${nodes[@]}"; do
    while kill -0 "$node" 2>/dev/null; do wait "$node" || true; done
    status=0; wait "$node" || status=$?
    [[ $status == 0 ]] || worst=$status
done
exit "$worst"
"""
TORCHRUN = f"""#!/usr/bin/env bash
exec {sys.executable} -m torch.distributed.run "$@"
"""


def test_the_shell_returns_the_processs_status_after_any_number_of_signals() -> None:
    (function,) = re.findall(r"^status_of\(\) \{.*?^\}$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    for ending, status in (("kill -TERM $BASHPID", 143), ("exit 7", 7), ("exit 0", 0)):
        text = f"""{function}
        trap : TERM
        (sleep 0.6; {ending}) &
        child=$!
        (for i in 1 2; do sleep 0.2; kill -TERM $$; done) &
        status_of "$child"
        """
        assert subprocess.run(["bash", "-c", text], timeout=120, check=False).returncode == status


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_slurm_script_serves_from_two_nodes_and_ends_in_good_order(tmp_path: Path) -> None:
    """srun and scontrol are stand-ins, with two addresses of this machine for the nodes."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("torchrun", TORCHRUN)):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    port, model = free_port(), served.reward_model(tmp_path / "rm")
    job = {"SLURM_JOB_NODELIST": "two", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"}
    job |= {"MODEL": str(model), "CHECKPOINTS": str(tmp_path / "critic"), "INTERFACE": "lo", "TENSOR_PARALLEL": "2"}
    job |= {"PORT": str(port), "RDZV_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    job |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with (tmp_path / "log").open("w") as log:
        script = subprocess.Popen(
            ["bash", SCRIPT], env=environment() | job, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        patient = RetryPolicy.patient(180, wait_for_start=True)
        with CriticClient(url, policy=patient, credentials=Credentials(KEY)) as client:
            row = [np.arange(5, 11)]
            signals = [np.linspace(0, 1, 5, dtype=np.float32)]
            report = client.train(row, signals, signals, [np.ones(5, np.float32)]).result()
        assert report.num_steps == 1
        script.send_signal(signal.SIGTERM)
        assert script.wait(120) == 0, (tmp_path / "log").read_text()
        assert f"clients: {url}\n" in (tmp_path / "log").read_text()
    except BaseException:
        print((tmp_path / "log").read_text())
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
