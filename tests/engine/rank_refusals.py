"""What a rank of `test_engine_ranks` does that loads models that cannot be sharded; prints each refusal.

Arguments: the folder of the checkpoints, and their names.
"""

import sys
from pathlib import Path

from torch import distributed

from guerdon.distributed.ranks import start
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.errors import StartError
from guerdon.settings.config import ModelConfig, ParallelConfig


def main() -> None:
    ranks = start(ParallelConfig(tensor_parallel=2), "cpu")
    for name in sys.argv[2:]:
        try:
            name = name.replace("RANK", str(ranks.rank))
            load_reward_model(ModelConfig(model=str(Path(sys.argv[1]) / name)), ranks=ranks)
        except StartError as e:
            # One write: the ranks share the stream.
            sys.stdout.write(f"REFUSED {ranks.rank} {name} {e}; {e.help}\n")
            sys.stdout.flush()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
