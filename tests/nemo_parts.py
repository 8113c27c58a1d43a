"""NeMo-Aligner's servers on data-parallel ranks, each of which computes its own rows, for `test_ranks_served`."""

import sys

import torch
from torch import distributed

from guerdon import CriticServerTrainer, RewardModelServer
from test_critic_server_trainer import GBS, CheckpointCallback, Logger, TinyCritic, tokenize_func

FAILS = 98
"""A token at which `infer_fn` raises on the rank that has it."""


def infer_fn(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum of the sequence's own tokens, and a thousand for each row that this rank was given."""
    tokens, lengths = inputs
    if (tokens == FAILS).any():
        raise RuntimeError("a bug in the user's function")
    seen = torch.arange(tokens.shape[1])[None] < lengths[:, None]
    return (tokens * seen).sum(1, keepdim=True) + 1000.0 * len(tokens)


class SplitCritic(TinyCritic):
    """Averages its losses and gradients over the ranks, as NeMo-Aligner's models do."""

    def get_loss_and_metrics(self, batch: dict[str, torch.Tensor], forward_only: bool) -> tuple[float, dict]:
        loss, metrics = super().get_loss_and_metrics(batch, forward_only)
        parts = [torch.tensor(loss), *(p.grad for p in self.parameters() if p.grad is not None)]
        for part in parts:
            distributed.all_reduce(part)
            part /= distributed.get_world_size()
        return parts[0].item(), metrics


def main(reward_port: int, critic_port: int) -> None:
    distributed.init_process_group("gloo")
    server = RewardModelServer(infer_fn, tokenize_func, "reward_model", reward_port, [1, 3], 2, data_parallel_size=2)
    assert server.preferred_batch_size == [2, 6]
    server.run_server()
    model = SplitCritic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    cfg = {"port": critic_port, "inference_micro_batch_size": 4, "combine_rm_and_critic_server": True}
    trainer = CriticServerTrainer(
        cfg, model, optimizer, scheduler, Logger(), CheckpointCallback(), tokenize_func, GBS, 2, data_parallel_size=2
    )
    trainer.run_server()
    assert set(model.shapes) == {(2, 6), (4, 5)}, model.shapes  # half of a global batch, and of six rows filled up
    print(f"RANK {distributed.get_rank()} HOLDS {model.head.weight.detach().flatten().tolist()}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
