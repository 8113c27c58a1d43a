"""NeMo-Aligner's servers in processes that a script of the user's has joined, for `test_ranks_served`."""

import sys

import torch
from torch import distributed

from guerdon import RewardModelServer
from test_critic_server_trainer import make


def over_all_ranks(number: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, for which each of them must be there."""
    distributed.all_reduce(number)
    return number


def infer_fn(inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The sum of the sequence's own tokens, half of it from each of two ranks."""
    tokens, lengths = inputs
    seen = torch.arange(tokens.shape[1])[None] < lengths[:, None]
    return over_all_ranks((tokens * seen).sum(1).double() / distributed.get_world_size())


def tokenize_func(sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [torch.tensor([ord(c) for c in text]) for text in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def main(reward_port: int, critic_port: int) -> None:
    distributed.init_process_group("gloo")
    server = RewardModelServer(infer_fn, tokenize_func, "reward_model", reward_port, 4, 2)
    server.run_server()
    torch.manual_seed(0)
    trainer = make({"port": critic_port, "inference_micro_batch_size": 4, "combine_rm_and_critic_server": False})
    trainer.run_server()
    weights = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
    apart = weights - over_all_ranks(weights.clone()) / distributed.get_world_size()
    assert trainer.step == 2 and not apart.any()
    print(f"RANK {distributed.get_rank()} HOLDS", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
