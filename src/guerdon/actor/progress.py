"""The progress bar of a run."""

from __future__ import annotations

import sys

from tqdm import tqdm

_SHOWN = {"reward": "reward", "kl": "KL", "entropy": "entropy", "response_length": "length"}


class Progress:
    """A bar over the steps with reward, KL, entropy and length; nothing where it is not wanted."""

    def __init__(self, step: int, steps: int, is_wanted: bool) -> None:
        self._bar = tqdm(
            total=steps,
            initial=step,
            desc="step",
            unit="step",
            disable=not is_wanted,
            file=sys.stderr,
            dynamic_ncols=True,
        )

    def update(self, metrics: dict[str, float]) -> None:
        """One step more, with its metrics; those that a step has not remain absent."""
        shown = {label: f"{metrics[name]:.3g}" for name, label in _SHOWN.items() if name in metrics}
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()
