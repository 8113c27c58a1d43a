"""slime's critic, served by `guerdon serve-critic`, for the flag `--custom-advantage-function-path`:

    --custom-advantage-function-path guerdon.adapters.slime_critic.compute_advantages --custom-config-path slime.yaml

with a section `critic_server` in slime.yaml, whose keys are `Settings`. slime places no critic of its own. One train
request has a whole rollout: the critic makes returns and advantages of rewards and its values, learns, and answers.
"""

from __future__ import annotations

import dataclasses
import uuid
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.adapters.critics import at_tokens_before, before_response, connect, load_beside, save_beside
from guerdon.adapters.judge import refuse_unknown
from guerdon.critic_core import Gae
from guerdon.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Settings:
    """The keys of `critic_server`. The λ are those of `Gae`; the default is slime's `--lambd`."""

    url: str
    name: str = "critic"
    updates: int = 1
    lam_critic: float | None = None
    lam_policy: float | None = None
    lam_alpha: float | None = None
    timeout_s: float | None = None


@dataclasses.dataclass
class RolloutRow:
    """One sample: its place in the rollout, tokens `[T]`, its response's loss mask `[R]`, and KL penalties or None."""

    place: int
    tokens: np.ndarray
    mask: np.ndarray
    reward: float
    penalties: np.ndarray | None


Answer = dict[int, tuple[np.ndarray, np.ndarray]]
"""Each sample's advantages and returns, float32 `[R]`, by its place in the rollout."""


def compute_advantages(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Trains the served critic on the rollout, and sets the batch's `advantages` and `returns`.

    Collective over the last pipeline stage; one rank sends the request. Tokens without loss mask get 0, and are skipped
    as if absent; a reward is the last unmasked token's. Any rank's error is raised on all.
    """
    import torch
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    answer = _ask_once(args, _make_rows(args, rollout_data))
    if isinstance(answer, Exception):
        raise answer
    device = rollout_data["tokens"][0].device
    lengths = list(zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True))
    for i, name in enumerate(("advantages", "returns")):
        columns = [torch.tensor(answer[place][i], device=device) for place in rollout_data["partition"]]
        parts = [slice_log_prob_with_cp(column, *both) for column, both in zip(columns, lengths, strict=True)]
        rollout_data[name] = parts


def _make_rows(args: Namespace, data: dict[str, Any]) -> list[RolloutRow]:
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

    penalties: list[Any] = [None] * len(data["tokens"])
    if args.kl_coef != 0:
        lengths = zip(data["kl"], data["total_lengths"], data["response_lengths"], strict=True)
        penalties = [(-args.kl_coef * all_gather_with_cp(*kl)).detach().float().cpu().numpy() for kl in lengths]
    return [
        RolloutRow(place, tokens.cpu().numpy(), mask.cpu().numpy(), float(reward), penalty)
        for place, tokens, mask, reward, penalty in zip(
            data["partition"], data["tokens"], data["loss_masks"], data["rewards"], penalties, strict=True
        )
    ]


def _ask_once(args: Namespace, rows: list[RolloutRow]) -> Answer | Exception:
    """Returns the critic's answer to the rows of all ranks, or the error, on each of them."""
    import torch.distributed as dist
    from megatron.core import mpu

    answers: list[Any] = [None]
    if mpu.get_tensor_model_parallel_rank() == 0:  # the others have the same rows
        group = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
        asks = dist.get_rank(group) == 0
        leader = dist.get_global_rank(group, 0)
        parts: list[Any] | None = [None] * dist.get_world_size(group) if asks else None
        dist.gather_object(rows if mpu.get_context_parallel_rank() == 0 else [], parts, dst=leader, group=group)
        if parts is not None:
            try:
                answers = [_critic(args).train([row for part in parts for row in part])]
            except Exception as e:  # else the other ranks would wait for it in vain
                answers = [e]
        dist.broadcast_object_list(answers, src=leader, group=group)
    if mpu.get_tensor_model_parallel_world_size() > 1:
        group = mpu.get_tensor_model_parallel_group()
        dist.broadcast_object_list(answers, src=mpu.get_tensor_model_parallel_src_rank(), group=group)
    answer: Answer | Exception = answers[0]
    return answer


class _Critic:
    """The served critic during one run of slime, which counts the rollouts as slime does."""

    def __init__(self, args: Namespace, settings: Settings) -> None:
        self._args, self._settings = args, settings
        timeout_s = settings.timeout_s or 0.9 * 60 * args.distributed_timeout_minutes
        saves = args.save_interval is not None
        self._client = connect(settings.url, settings.name, timeout_s, saves=saves, instead="leave out --save-interval")
        lam_critic = args.lambd if settings.lam_critic is None else settings.lam_critic
        self._rule = Gae(args.gamma, lam_critic, settings.lam_policy, settings.lam_alpha)
        self._run = args.save or uuid.uuid4().hex
        self._rollout = args.start_rollout_id
        if self._rollout is None:  # behind that of the checkpoint which slime has loaded
            step = args.ckpt_step or (Path(args.load) / "latest_checkpointed_iteration.txt").read_text()
            self._rollout = int(step) + 1
        if self._rollout > 0:
            load_beside(self._client, _folder(args.load, self._rollout - 1))

    def train(self, rows: list[RolloutRow]) -> Answer:
        from slime.utils.misc import should_run_periodic_action

        rows = sorted(rows, key=lambda row: row.place)
        tokens = [row.tokens for row in rows]
        mask = at_tokens_before([row.mask for row in rows], tokens)
        rewards: Any = np.array([row.reward for row in rows], np.float32)
        if rows[0].penalties is not None:
            rewards = at_tokens_before([_shape_rewards(row) for row in rows], tokens)
        report = self._client.train(
            tokens, rewards=rewards, mask=mask, gae=self._rule, updates=self._settings.updates,
            train_id=f"{self._run}:{self._rollout}",
        ).result()  # fmt: skip
        assert report.advantages is not None and report.returns is not None
        if should_run_periodic_action(self._rollout, self._args.save_interval, None, self._args.num_rollout):
            save_beside(self._client, _folder(self._args.save, self._rollout), self._rollout)
        is_warm = self._rollout >= self._args.num_critic_only_steps
        self._rollout += 1
        answer = {}
        for i, row in enumerate(rows):
            span = before_response(len(row.tokens), len(row.mask))
            answer[row.place] = (report.advantages[i, span] * is_warm, report.returns[i, span])
        return answer


_critics: dict[Settings, _Critic] = {}


def _critic(args: Namespace) -> _Critic:
    if not getattr(args, "critic_server", None):
        raise ConfigError("critic_server is not given", "name a YAML file with it by --custom-config-path")
    known = [field.name for field in dataclasses.fields(Settings)]
    refuse_unknown(args.critic_server.keys() - {*known}, "critic_server.", ", ".join(known))
    settings = Settings(**args.critic_server)
    if settings not in _critics:
        _critics[settings] = _Critic(args, settings)
    return _critics[settings]


def _folder(of_slime: str, rollout: int) -> Path:
    return Path(of_slime) / "served_critic" / f"rollout_{rollout}"


def _shape_rewards(row: RolloutRow) -> np.ndarray:
    """Returns the rewards of the response's tokens `[R]`: the KL penalties, and at the last unmasked one the reward."""
    assert row.penalties is not None
    shaped = row.penalties.copy()
    (unmasked,) = row.mask.nonzero()
    shaped[unmasked[-1:]] += row.reward
    return shaped
