"""Text as trlX's reward models read it, and their scores of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from guerdon.adapters.trlx.input_ids import InputIdsClient
from guerdon.client import Scores
from guerdon.errors import ConfigError, DeadlineExceeded, GuerdonError, InvalidRequest, Unavailable
from guerdon.vocabulary import difference, identity, reported

if TYPE_CHECKING:
    from guerdon.local import LocalRewardModel


class Scoring:
    """Scores by a server or by a model in this process; not for several threads at once."""

    def __init__(
        self, client: InputIdsClient | LocalRewardModel, tokenizer: Any, max_length: int | None, batch_size: int
    ) -> None:
        self.client = client
        self._tokenizer, self._max_length, self._batch_size = tokenizer, max_length, batch_size
        # A tokenizer of one's own may have no vocabulary to compare.
        self._is_checked = not (isinstance(client, InputIdsClient) and hasattr(tokenizer, "get_added_vocab"))

    def of_samples(self, samples: Sequence[str]) -> Scores:
        """Scores of the samples with an EOS behind them, each at its first EOS; raises where one has none."""
        self._check_tokenizer()
        eos = self._tokenizer.eos_token_id
        rows = self._rows([sample + self._tokenizer.eos_token for sample in samples])
        if isinstance(self.client, InputIdsClient):
            return self.client.score_input_ids(rows, eos, self._batch_size)
        # A model that is loaded here looks for no EOS: it is told the lengths.
        return self.client.score(tokens=[row[: row.index(eos) + 1] for row in rows]).raise_for_failed()

    def of_tokens(self, prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any) -> list[list[float]]:
        """The values of each output's tokens, which must be the same ones to the trainer's `tokenizer`."""
        self._check_tokenizer()
        ours = self._tokenizer(list(outputs))["input_ids"]
        theirs = ours if tokenizer is None else tokenizer(list(outputs))["input_ids"]
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                raise InvalidRequest(
                    f"output {i} is {len(our)} tokens to the reward model and {len(their)} others to the trainer: "
                    "dense rewards need one tokenizer for both"
                )
        rows = [prompt + output for prompt, output in zip(self._rows(prompts), ours, strict=True)]
        values = self.client.score(tokens=rows).raise_for_failed().values
        if values is None:
            raise InvalidRequest("the reward model gives no values, and dense rewards need one for each token")
        return [row[len(row) - len(output) :].tolist() for row, output in zip(values, ours, strict=True)]

    def _check_tokenizer(self) -> None:
        """Raises ConfigError if token ids mean other tokens to the server's model, as far as it reports them."""
        if self._is_checked:
            return
        try:
            theirs = reported(self.client.config())
        except (Unavailable, DeadlineExceeded):
            raise
        except GuerdonError:  # not every server has configurations; what else is wrong, the scores' own error says
            theirs = ""
        if theirs and (why := difference(identity(self._tokenizer), theirs)) is not None:
            raise ConfigError(
                f"the tokenizer is not that of the reward model of {self.client}: {why}",
                "give tokenizer: the reward model's, or its folder",
            )
        self._is_checked = True

    def _rows(self, texts: Sequence[str]) -> list[list[int]]:
        """The texts' ids as the tokenizer makes them, the last `max_length` of each."""
        rows = self._tokenizer(list(texts))["input_ids"]
        return rows if self._max_length is None else [row[-self._max_length :] for row in rows]
