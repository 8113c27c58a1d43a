"""NeMo-RL's value model for PPO, served by `guerdon serve-critic`. In the script that starts the run, before `setup`:

from guerdon.adapters import nemo_rl_critic
nemo_rl_critic.register("http://10.0.0.1:5556")
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guerdon.adapters.critics import TIMEOUT_S, check_tokenizer, connect, load_beside, save_beside
from guerdon.client import CriticClient
from guerdon.critic_core import TrainReport

if TYPE_CHECKING:
    import torch

_COUNT = "served_critic_updates"
"""The file in a checkpoint of NeMo-RL's with the number of train requests before it."""


def register(url: str, name: str = "critic", *, run: str = "ppo", timeout_s: float = TIMEOUT_S) -> None:
    """Has NeMo-RL's PPO use the critic at `url` in place of its value workers.

    The train requests have the ids RUN:0, RUN:1, ..., none of which is applied twice: another run with the same critic
    needs another name. A call fails after `timeout_s`.
    """
    from nemo_rl.algorithms import ppo

    ppo.Value = functools.partial(ServedValue, connect(url, name, timeout_s), run)


class ServedValue:
    """A ValueInterface of NeMo-RL, answered by the served critic; the settings of training are the server's."""

    def __init__(
        self, critic: CriticClient, run: str, *, weights_path: str | Path | None = None, tokenizer: Any = None, **_: Any
    ) -> None:
        """Goes back to the critic's checkpoint if `weights_path` is given, as when NeMo-RL resumes.

        NeMo-RL's cluster, config and optimiser are not needed. Raises ConfigError if the critic has another tokenizer.
        """
        check_tokenizer(critic, tokenizer)
        self._critic, self._run, self._num_updates = critic, run, 0
        if weights_path is not None:
            load_beside(critic, weights_path)
            self._num_updates = int((Path(weights_path) / _COUNT).read_text())

    def get_values(self, data: Any, timer: Any = None) -> Any:
        """Returns `values` float32 `[B,S]`, each of the state before its token; 0 for pads."""
        import torch

        values = torch.zeros(data["input_ids"].shape)
        answer = self._critic.infer(**_rows(data)).raise_for_failed()
        for row, found in zip(values, answer.values, strict=True):
            row[1 : len(found)] = torch.from_numpy(found[:-1])
        return type(data)({"values": values})

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **_: Any) -> dict[str, Any]:
        """Trains on the batch, or only measures with `eval_mode`; returns NeMo-RL's metrics.

        The loss is the server's, which is that of NeMo-RL's `loss_fn` without its scale.
        """
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        arguments = _rows(data) | {
            name: table[:, 1:].float().numpy()  # index t is of the state before the token t+1
            for name, table in (("returns", data["returns"]), ("prev_values", data["values"]), ("mask", mask))
        }
        if eval_mode:
            return _metrics(self._critic.validate(**arguments), data["returns"][mask > 0])
        future = self._critic.train(**arguments, train_id=f"{self._run}:{self._num_updates}")
        report = future.result()
        self._num_updates += 1
        return _metrics(report, data["returns"][mask > 0])

    def save_checkpoint(self, weights_path: str, *_: Any, **__: Any) -> None:
        """Saves a checkpoint at the server, and its name in NeMo-RL's folder."""
        save_beside(self._critic, weights_path, self._num_updates)
        (Path(weights_path) / _COUNT).write_text(str(self._num_updates))

    def shutdown(self) -> bool:
        """Closes the connection; the server keeps running."""
        self._critic.close()
        return True

    def prepare_for_training(self, *_: Any, **__: Any) -> None:
        """Does nothing, as those below: the critic has its own device."""

    prepare_for_inference = finish_training = finish_inference = prepare_for_training


def _rows(data: Any) -> dict[str, Any]:
    return {"tokens": data["input_ids"].numpy(), "lengths": data["input_lengths"].numpy()}


def _metrics(report: TrainReport, returns: torch.Tensor) -> dict[str, Any]:
    import torch

    # NeMo-RL makes its explained variance of these two, and of means that are 0 if left out.
    variance = float(returns.double().var(unbiased=False))
    return {
        "loss": torch.tensor([report.loss]),
        "grad_norm": torch.tensor([report.grad_norm]),
        "all_mb_metrics": {
            "lr": [report.learning_rate],
            "global_valid_toks": [returns.numel()],
            "vf_clipfrac": [report.clip_fraction],
            "returns_sq_mean": [variance],
            "residual_sq_mean": [(1 - report.explained_variance) * variance],
        },
    }
