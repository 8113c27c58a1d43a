"""Compares answers by the reward model, which the policy learned from, and by the judge, which it never met."""

import math
import statistics
from collections.abc import Sequence

from judging import Judge

from guerdon import RewardClient


def score(client: RewardClient, rows: list[dict], key: str) -> list[float]:
    """Returns the reward of each row's answer to its prompt."""
    chats = [[{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}] for row in rows]
    return client.score(messages=chats).rewards.tolist()


def rate_accuracy(client: RewardClient, judge: Judge, pairs: list[dict]) -> dict[str, float]:
    """Returns the shares of pairs in which each of four ways finds the chosen answer; all but the last see cut ones."""
    chosen, rejected = (score(client, pairs, key) for key in ("chosen", "rejected"))
    return {
        "reward_model": statistics.fmean(a > b for a, b in zip(chosen, rejected, strict=True)),
        "judge": statistics.fmean(judge.prefers(pair["chosen"], pair["rejected"]) for pair in pairs),
        "more_characters": statistics.fmean(len(pair["chosen"]) > len(pair["rejected"]) for pair in pairs),
        "longer_uncut": statistics.fmean(pair["longer_wins"] for pair in pairs),
        "pairs": len(pairs),
    }


def compare(client: RewardClient, judge: Judge, written: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    """Returns the figures of each policy; the first one is that before training. Adds "reward" to each row."""
    figures, before = {}, next(iter(written.values()))
    for name, rows in written.items():
        for row, reward in zip(rows, score(client, rows, "response"), strict=True):
            row["reward"] = reward
        pairs = list(zip(rows, before, strict=True))
        rise = mean_by_prompt([(row["prompt"], row["reward"] - old["reward"]) for row, old in pairs])
        wins = mean_by_prompt([(row["prompt"], judge.prefers(row["response"], old["response"])) for row, old in pairs])
        figures[name] = {
            "reward": statistics.fmean(row["reward"] for row in rows),
            "reward_std": statistics.pstdev(row["reward"] for row in rows),
            "rise": rise[0], "rise_error": rise[1], "judge_wins": wins[0], "judge_wins_error": wins[1],
            **{key: statistics.fmean(row[key] for row in rows) for key in ("kl", "tokens", "ended")},
        }  # fmt: skip
    return figures


def mean_by_prompt(values: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """Returns the mean over prompts, and its standard error: responses to one prompt are no independent draws."""
    groups: dict[str, list[float]] = {}
    for prompt, value in values:
        groups.setdefault(prompt, []).append(value)
    means = [statistics.fmean(group) for group in groups.values()]
    return statistics.fmean(means), statistics.stdev(means) / math.sqrt(len(means))
