"""An environment in the middle of a response: a user's function that answers a stop text, as a tool does."""

from __future__ import annotations

from typing import Any

from guerdon.actor.rollouts import Prompt, decode
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.functions import import_function
from guerdon.errors import ConfigError, RunFailed, describe
from guerdon.settings.actors import RolloutConfig


class Environment:
    """Calls `function(prompt, response)` with both as text, special tokens included, when a stop text is complete.

    The function returns the text to append before generation continues, or None to end the response. It must answer the
    same to the same text, so that a resumed run repeats its steps.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        """Imports the function from `module:function`; raises CheckpointError."""
        self._name, self._tokenizer = name, tokenizer
        self._function = import_function(name)

    def __call__(self, prompt: Prompt, response: list[int]) -> list[int] | None:
        """Returns the tokens to append, or None; raises RunFailed if the function fails or returns anything else."""
        texts = [decode(self._tokenizer, tokens) for tokens in (prompt.tokens.tolist(), response)]
        try:
            answer = self._function(*texts)
        except Exception as e:
            raise RunFailed(f"{self._name} failed on the response {texts[1]!r}: {describe(e)}") from e
        if answer is None:
            return None
        if not isinstance(answer, str):
            raise RunFailed(f"{self._name} returned {type(answer).__name__}; it must return text, or None at the end")
        tokens: list[int] = self._tokenizer.encode(answer, add_special_tokens=False)
        return tokens


def check_environment(rollouts: RolloutConfig, ranks: Ranks = ALONE) -> None:
    """Raises CheckpointError if the function cannot be imported, ConfigError if ranks would each ask their own."""
    if rollouts.environment is None:
        return
    import_function(rollouts.environment)
    if ranks.tensor_size > 1:
        raise ConfigError(
            f"rollouts.environment is {rollouts.environment}, and {ranks.tensor_size} tensor-parallel ranks generate "
            "each response together",
            "lower parallel.tensor_parallel to 1: every other rank generates responses of its own",
        )
