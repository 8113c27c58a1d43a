"""What a rank of `test_ranks_zoo` does: each architecture by tensor parallelism, compared with itself as one process.

Arguments: an empty folder, and the names of architectures.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed

import zoo
from engine.rank_checks import _norms, critic, farthest, rewards, values
from guerdon.distributed.ranks import start
from guerdon.errors import CheckpointError
from guerdon.settings.config import ParallelConfig


def main() -> None:
    torch.set_num_threads(1)
    own = Path(sys.argv[1]) / os.environ["RANK"]
    # Among ranks, transformers lets only the first one write.
    folders = {name: zoo.checkpoint(name, own / name) for name in sys.argv[2:]}
    ranks = start(ParallelConfig(tensor_parallel=2), "cpu")
    rows = zoo.rows(seed=3, groups=((40, 3), (20, 1)), least=2)
    for name, folder in folders.items():
        try:
            report = {"rewards": farthest([rewards(folder, rows, ranks)], [rewards(folder, rows)])}
            got, gradients = values(*critic(folder, ranks), rows)
            want, wanted = values(*critic(folder), rows)
            report |= {"values": farthest(got, want), "gradients": _norms(gradients, wanted)}
            outcome = json.dumps(report)
        except CheckpointError as e:
            outcome = json.dumps(str(e))
        if ranks.is_leader:
            print("REPORT", json.dumps([name, json.loads(outcome)]), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
