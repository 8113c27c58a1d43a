"""Prints and writes what a whole run of the example found, and what its parts took."""

import json
from pathlib import Path

from measured import took

LINES = {
    "reward": "mean reward of the reward model",
    "reward_std": "its standard deviation over responses",
    "rise": "rise of the reward",
    "rise_error": "  standard error over prompts",
    "judge_wins": "share that the judge prefers to the answer before, both cut to one length",
    "judge_wins_error": "  standard error over prompts",
    "kl": "KL to the chat model before, nats per response",
    "tokens": "length in tokens",
    "ended": "share that ended by EOS",
}


def report(
    out: Path, accuracy: dict[str, float], figures: dict[str, dict], written: dict[str, list[dict]], seconds: float
) -> None:
    """Writes verdict.json and samples.txt, and prints the table."""
    verdict = {"accuracy": accuracy, "policies": figures, "parts": took, "seconds": seconds}
    (out / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
    (out / "samples.txt").write_text(as_text(written), encoding="utf-8")

    print(f"\n  The chosen answer of {accuracy['pairs']} held-out pairs, cut to equally many words, is found by")
    print(f"    {accuracy['reward_model']:.2f}  the reward model")
    print(f"    {accuracy['judge']:.2f}  the judge: another kind of model, other prompts")
    print(f"    {accuracy['more_characters']:.2f}  the number of characters")
    print(f"    {accuracy['longer_uncut']:.2f}  the number of words, if nothing is cut\n")
    print("  " + "".join(f"{name:>11}" for name in figures))
    for key, meaning in LINES.items():
        print("  " + "".join(f"{figures[name][key]:11.3f}" for name in figures) + f"  {meaning}")
    print(f"\n  {'seconds':>8} {'processor':>9} {'memory':>8}")
    for part in took:
        seconds, processor, memory = part["seconds"], part["cpu_seconds"], part["gigabytes"]
        print(f"  {seconds:8.0f} {processor:9.0f} {memory:5.1f} GB  {part['name']}")
    print(f"\n  samples to read  {out / 'samples.txt'}\n  figures          {out / 'verdict.json'}")
    print(f"  curves           {out / 'reinforce/curves.png'}, {out / 'ppo/curves.png'}")


def as_text(written: dict[str, list[dict]]) -> str:
    """Returns all responses, those to one prompt together."""
    parts = []
    for rows in zip(*written.values(), strict=True):
        parts.append(f"{'=' * 100}\n{rows[0]['prompt']}\n")
        parts += [
            f"[{name}, reward {row['reward']:.2f}]\n{row['response']}\n"
            for name, row in zip(written, rows, strict=True)
        ]
    return "\n".join(parts)
