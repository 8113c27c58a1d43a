"""The nouns of a judge, a language model that answers each criterion of a rubric by one token; numpy only, as `core`.

Legend: N samples, K criteria, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import Literal

import numpy as np

from guerdon.core import Score
from guerdon.errors import SampleFailed

FIELDS = ("prompt", "response", "reference", "criterion")
"""What a template may have in braces."""
OTHER_MASS = "other_mass"
"""The component beside the criteria: the most probability that any of them leaves to tokens that are no labels."""

Verdict = Literal["expected", "likeliest"]


@dataclass(frozen=True, slots=True)
class Criterion:
    """One question about a response; its value counts `weight` times in the reward."""

    name: str
    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a judge reads: a response, and the prompt and reference if its template has them."""

    response: str
    prompt: str = ""
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Rubric:
    """What a judge is asked about each response, and what its answers are worth.

    The `template` has FIELDS in braces; `system` is the system message of a chat, if any. Each of the `labels` is an
    answer that has the value at the same place in `values`. `path` is the file that it was read from.
    """

    template: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    criteria: tuple[Criterion, ...]
    system: str = ""
    path: str = ""

    @property
    def fields(self) -> set[str]:
        """The template's fields."""
        return {name for _, name, _, _ in Formatter().parse(self.template) if name is not None}

    @property
    def names(self) -> tuple[str, ...]:
        """The criteria's names, in order."""
        return tuple(criterion.name for criterion in self.criteria)

    def render(self, sample: Sample) -> list[str]:
        """Returns the template filled for each criterion; braces in the sample's own texts stay as they are."""
        given = {"prompt": sample.prompt, "response": sample.response, "reference": sample.reference}
        return [self.template.format(**given, criterion=criterion.text) for criterion in self.criteria]

    def judge(
        self, logprobs: np.ndarray, verdict: Verdict, max_other_mass: float
    ) -> tuple[list[Score | SampleFailed], np.ndarray]:
        """Returns each sample's score, and the probability of no label, float64 `[N,K]`.

        `logprobs` are the labels', `[N,K,L]`. A criterion's value is the labels' mean by their probabilities, which are
        normalised to 1 over the labels, or the likeliest label's. A sample fails if a criterion leaves more than
        `max_other_mass` to other tokens. Attributes are the criteria's values, and OTHER_MASS behind them.
        """
        wide = logprobs.astype(np.float64)
        other = np.clip(1 - np.exp(wide).sum(-1), 0, 1)
        with np.errstate(invalid="ignore"):  # if no label is possible, the values are NaN
            shares = np.exp(wide - wide.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            values = np.asarray(self.values)
            made = shares @ values if verdict == "expected" else values[shares.argmax(-1)] + 0 * shares.sum(-1)
        rewards = made @ np.array([criterion.weight for criterion in self.criteria])
        attributes = np.concatenate([made, other.max(-1, keepdims=True)], -1).astype(np.float32)
        results: list[Score | SampleFailed] = list(map(Score, rewards.tolist(), attributes))
        for i in np.flatnonzero((other > max_other_mass).any(-1) | ~np.isfinite(rewards)):
            worst = int(other[i].argmax())
            results[i] = SampleFailed(
                f"{self.names[worst]}: {other[i, worst]:.3g} of the probability is on tokens that are no labels, and "
                f"at most {max_other_mass:g} may be (max_other_mass); the likeliest cause is a template that does not "
                "ask for a label alone"
            )
        return results, other
