"""Estimates a 70B reward model on 64 GPUs, from parts that scale.py measured and from data sheets; see `Setting`.

Everything that is not measured is a field of `Setting`, so that doubted numbers can be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from guerdon.core import common_prefix
from guerdon.distributed.shards import shards


@dataclass(frozen=True)
class Setting:
    """The assumptions: the machine (H100 SXM's data sheet), the model (Llama 3 70B's shapes) and the batch.

    `mfu` is the share of the peak that the products reach, `wire` that of the links: both are guesses in the range
    that others report, and the only two of them.
    """

    num_gpus: int = 64
    tensor_size: int = 8
    peak_flops: float = 989e12
    """FLOP/s of one GPU, bfloat16, dense."""
    nvlink_bytes_s: float = 450e9
    """One way; the data sheet's 900 GB/s are both ways."""
    mfu: float = 0.4
    wire: float = 0.8
    num_layers: int = 80
    hidden: int = 8192
    num_parameters: float = 70.6e9
    num_prompts: int = 256
    responses: int = 8
    prompt_tokens: int = 512
    response_tokens: int = 512
    batch_tokens: int = 16_384
    """Token budget of one part's forward: `max_batch_tokens`."""

    @property
    def num_parts(self) -> int:
        """Data-parallel parts, or replicas."""
        return self.num_gpus // self.tensor_size

    @property
    def num_samples(self) -> int:
        """The number of sequences in the batch."""
        return self.num_prompts * self.responses

    @property
    def received_tokens(self) -> int:
        """The tokens as clients send them."""
        return self.num_samples * (self.prompt_tokens + self.response_tokens)

    @property
    def computed_tokens(self) -> int:
        """The tokens with each prompt counted once."""
        return self.num_prompts * (self.prompt_tokens + self.responses * self.response_tokens)


@dataclass(frozen=True)
class Measured:
    """What one core of the machine does; `command_s` has a command's seconds by bytes, by number of ranks."""

    tokenise_tokens_s: float
    decode_bytes_s: float
    bytes_a_token: float
    shards_tokens_s: float
    command_s: dict[int, list[tuple[float, float]]]


def model(setting: Setting, measured: Measured) -> dict[str, dict[str, float]]:
    """Returns the seconds of one batch by part, for one server on all GPUs and for one server per T GPUs."""
    s, m = setting, measured
    part_tokens = s.computed_tokens / s.num_parts
    context = s.prompt_tokens + s.response_tokens / 2
    flops_a_token = 2 * s.num_parameters + 4 * s.num_layers * s.hidden * context
    compute_s = part_tokens * flops_a_token / (s.tensor_size * s.peak_flops * s.mfu)
    # Two all-reduces a layer; a ring sends each byte 2 (T - 1) / T times.
    ring = 2 * (s.tensor_size - 1) / s.tensor_size
    reduce_s = 2 * s.num_layers * part_tokens * s.hidden * 2 * ring / (s.nvlink_bytes_s * s.wire)
    text_bytes = s.received_tokens * m.bytes_a_token
    one: dict[str, float] = {"products": compute_s, "all-reduces": reduce_s}
    many = dict(one)
    commands = math.ceil(part_tokens / s.batch_tokens)
    command_bytes = 8 * s.received_tokens / commands
    prompts_each = max(1, s.num_prompts // commands)
    one["waiting for the slowest part"] = (compute_s + reduce_s) * _imbalance(s, prompts_each, by_shards)
    # Replicas wait for each other only at the end of the whole batch, not at that of each command.
    many["waiting for the slowest part"] = (compute_s + reduce_s) * _imbalance(s, s.num_prompts, by_arrival)
    # Once to know this rank's part, once to put the parts together.
    one["splitting the batch"] = 2 * s.received_tokens / m.shards_tokens_s
    many["splitting the batch"] = 0.0
    one["commands: broadcast and gather"] = commands * command_s(m, s.num_gpus, command_bytes)
    many["commands: broadcast and gather"] = commands * command_s(m, s.tensor_size, command_bytes / s.num_parts)
    beside = {"tokenising, beside it": s.received_tokens / m.tokenise_tokens_s}
    beside["JSON, beside it"] = text_bytes / m.decode_bytes_s
    return {
        "one server, 8 data-parallel parts": one | beside,
        "8 replicas behind a balancer": many | {name: t / s.num_parts for name, t in beside.items()},
    }


def busy_s(times: dict[str, float]) -> float:
    """Returns the seconds that the GPUs work or wait for others."""
    return sum(t for name, t in times.items() if not name.endswith("beside it"))


def host_s(times: dict[str, float]) -> float:
    """Returns the seconds of one core on rank 0, beside the GPUs' work."""
    return sum(t for name, t in times.items() if name.endswith("beside it"))


def command_s(measured: Measured, num_ranks: int, size: float) -> float:
    """Returns the seconds of a command of `size` bytes, extrapolated from two measured numbers of ranks."""
    few, more = sorted(measured.command_s)
    at_few, at_more = (_interpolated(measured.command_s[n], size) for n in (few, more))
    a_doubling = max(0.0, at_more - at_few) / math.log2(more / few)
    return at_few + a_doubling * math.log2(num_ranks / few)


Divide = Callable[[list[list[np.ndarray]], int], list[int]]
"""Divides prompts' rows over a number of parts; returns the tokens that each computes."""


def by_shards(groups: list[list[np.ndarray]], count: int) -> list[int]:
    """Divides rows as one server divides a command's."""
    rows = [row for group in groups for row in group]
    owner = [i for i, group in enumerate(groups) for _ in group]
    loads = []
    for part in shards(rows, count):
        prompts = {owner[i] for i in part}
        shared = sum(_shared([rows[i] for i in part if owner[i] == prompt]) for prompt in prompts)
        loads.append(sum(len(rows[i]) for i in part) - shared)
    return loads


def by_arrival(groups: list[list[np.ndarray]], count: int) -> list[int]:
    """Divides rows as a balancer does: each prompt in turn to the least loaded replica."""
    loads = [0] * count
    for group in groups:
        loads[loads.index(min(loads))] += sum(map(len, group)) - _shared(group)
    return loads


def _imbalance(setting: Setting, num_prompts: int, divide: Divide) -> float:
    """Returns the slowest part's time over the mean, for log-normal response lengths."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(5):
        groups = []
        for _ in range(num_prompts):
            prompt = rng.integers(3, 8192, setting.prompt_tokens)
            lengths = np.clip(rng.lognormal(np.log(setting.response_tokens), 0.5, setting.responses), 16, 2048)
            groups.append([np.concatenate([prompt, rng.integers(3, 8192, int(n))]) for n in lengths])
        loads = divide(groups, setting.num_parts)
        found.append(max(loads) * len(loads) / sum(loads) - 1)
    return float(np.mean(found))


def _shared(rows: list[np.ndarray]) -> int:
    """Returns the tokens of a prompt's rows that are computed once for all of them."""
    return (len(rows) - 1) * min((common_prefix(rows[0], row) for row in rows[1:]), default=0)


def _interpolated(points: list[tuple[float, float]], size: float) -> float:
    """Returns the seconds at that many bytes, interpolated linearly, and extrapolated at the last rate."""
    sizes, seconds = zip(*points, strict=True)
    if size > sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    return float(np.interp(size, sizes, seconds))
