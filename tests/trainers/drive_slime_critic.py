"""slime's `compute_advantages_and_returns` with a served critic: `drive_slime_critic.py CHECKOUT SETTINGS ROWS`.

SETTINGS has the flags that differ from the defaults here, and the sizes "dp", "cp" and "tp" of data, context and tensor
parallelism. ROWS has {"prompt", "response", "mask", "reward", "kl"} of token ids. Each rank is a process with gloo's
groups, as slime's own tests have them: only Megatron's `mpu` is stood for. They do the rollouts 0, 1 and 2, of which
slime saves after the second, and new processes that resume from there do the third again. Prints for each rollout the
advantages and returns of each row.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, f"{sys.argv[1]}/tests")

import _cp_dist_helpers as helpers  # stands for Megatron, before slime is imported
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

settings, rows_file = json.loads(sys.argv[2]), sys.argv[3]
DP, CP, TP = (settings.pop(name, 1) for name in ("dp", "cp", "tp"))
ROLLOUTS = 3


def make_args(folder: str) -> Namespace:
    return Namespace(**{
        "advantage_estimator": "grpo", "normalize_advantages": False, "kl_coef": 0.0, "kl_loss_type": "k1",
        "use_rollout_logprobs": False, "use_opd": False, "gamma": 1.0, "lambd": 1.0, "num_critic_only_steps": 0,
        "custom_advantage_function_path": "guerdon.adapters.slime_critic.compute_advantages", "save": folder,
        "load": folder, "save_interval": 2, "num_rollout": 100, "start_rollout_id": 0, "ckpt_step": None,
        "distributed_timeout_minutes": 10, **settings,
    })  # fmt: skip


def pretend_megatron(rank: int) -> int:
    """Sets what slime asks of Megatron's `mpu` for this rank; returns its data-parallel rank."""
    dp, cp, tp = rank // (CP * TP), rank // TP % CP, rank % TP
    world = torch.arange(DP * CP * TP).reshape(DP, CP, TP)

    def group_of(columns: torch.Tensor) -> Any:
        groups = [dist.new_group(column) for column in columns.tolist()]  # every rank makes all of them
        return next(g for g, column in zip(groups, columns.tolist(), strict=True) if rank in column)

    helpers.stub_megatron_in_worker(CP, cp)
    mpu: Any = sys.modules["megatron.core.mpu"]
    both = group_of(world.permute(2, 0, 1).reshape(TP, -1))
    tensor_group = group_of(world.reshape(-1, TP))
    context_group = group_of(world.permute(0, 2, 1).reshape(-1, CP))
    mpu.is_pipeline_last_stage = lambda: True
    mpu.get_tensor_model_parallel_rank, mpu.get_tensor_model_parallel_world_size = lambda: tp, lambda: TP
    mpu.get_tensor_model_parallel_group = lambda: tensor_group
    mpu.get_tensor_model_parallel_src_rank = lambda: rank - tp
    mpu.get_context_parallel_group = lambda: context_group
    mpu.get_data_parallel_group_gloo = lambda with_context_parallel: both
    return dp


def work(rank: int, port: int, first: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=DP * CP * TP)
    dp = pretend_megatron(rank)
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns

    args = make_args(folder)
    if first > 0:
        args.start_rollout_id = None  # as slime leaves it where it loads a checkpoint of Megatron's
    rows = json.loads(Path(rows_file).read_text())
    told = []
    for _ in range(first, ROLLOUTS):
        places = list(range(dp, len(rows), DP))
        mine = [rows[i] for i in places]
        lengths = [(len(row["prompt"] + row["response"]), len(row["response"])) for row in mine]
        data = {
            "partition": places,
            "tokens": [torch.tensor(row["prompt"] + row["response"]) for row in mine],
            "loss_masks": [torch.tensor(row["mask"], dtype=torch.int) for row in mine],
            "rewards": [row["reward"] for row in mine],
            "total_lengths": [total for total, _ in lengths],
            "response_lengths": [response for _, response in lengths],
            "log_probs": [slice_log_prob_with_cp(torch.tensor(row["kl"]), *n)
                          for row, n in zip(mine, lengths, strict=True)],
        }  # fmt: skip
        data["ref_log_probs"] = [torch.zeros_like(x) for x in data["log_probs"]]
        compute_advantages_and_returns(args, data)
        told.append({
            name: {place: all_gather_with_cp(x, *n).tolist()
                   for place, x, n in zip(places, data[name], lengths, strict=True)}
            for name in ("advantages", "returns")
        })  # fmt: skip
    Path(folder, f"from{first}-rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def spawn(first: int, folder: Path) -> list[dict[str, list[list[float]]]]:
    """Returns what all ranks have together, which is the same for those that share rows."""
    mp.spawn(work, (helpers.free_port(), first, str(folder)), nprocs=DP * CP * TP)
    ranks = [json.loads((folder / f"from{first}-rank{rank}.json").read_text()) for rank in range(DP * CP * TP)]
    together = []
    for parts in zip(*ranks, strict=True):
        found: dict[str, dict[int, list[float]]] = {"advantages": {}, "returns": {}}
        for part in parts:
            for name, by_place in part.items():
                for place, numbers in by_place.items():
                    assert found[name].setdefault(int(place), numbers) == numbers
        together.append({name: [by_place[i] for i in sorted(by_place)] for name, by_place in found.items()})
    return together


if __name__ == "__main__":
    folder = Path("trained").absolute()
    folder.mkdir()
    steps = spawn(0, folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")  # as Megatron notes it
    print(json.dumps({"steps": steps + spawn(2, folder)}))
