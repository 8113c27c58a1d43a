"""RewardBench's own command, scoring through a server:

    python -m guerdon.adapters.rewardbench --server http://127.0.0.1:5555 \\
        --model my-reward-model --tokenizer ./my-reward-model [RewardBench's flags]

`--model` names the results; `--tokenizer` is the served model's, with its chat template.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from guerdon.adapters.judge import TIMEOUT_S, JudgeClient, judge, read_config, refuse_other_tokenizer
from guerdon.errors import ConfigError


class ServerPipeline:
    """Stands in for RewardBench's pipeline; scores at a server."""

    def __init__(self, scorer: JudgeClient, tokenizer: Any, send: str = "tokens") -> None:
        """`send: tokens` scores the ids that RewardBench makes of a text; `texts` scores the text itself."""
        self._scorer, self.tokenizer, self._send = scorer, tokenizer, send
        self._is_checked = False
        self.model: Any = SimpleNamespace(config=SimpleNamespace(pad_token_id=tokenizer.pad_token_id))

    def __call__(self, samples: Sequence[str], **kwargs: Any) -> list[dict[str, float]]:
        """Returns each sample's `score`; raises SampleFailed if one got none, and what the server raised.

        Raises ConfigError if ids are sent, and the tokenizer is not the served model's.
        """
        cut = {"truncation": True, "max_length": kwargs["max_length"]} if kwargs.get("truncation") else {}
        if self._send == "tokens":
            if not self._is_checked:
                refuse_other_tokenizer(
                    self.tokenizer, read_config(self._scorer), "the served model", "give its own by --tokenizer"
                )
                self._is_checked = True
            rows, bos = self.tokenizer(list(samples), **cut)["input_ids"], self.tokenizer.bos_token_id
            # Without a second BOS, if both the template and the tokenizer add one.
            rows = [row[1:] if bos is not None and row[:2] == [bos, bos] else row for row in rows]
            scores = self._scorer.score(tokens=rows)
        elif cut:
            raise ConfigError("truncation is requested, but texts are sent", "leave out --send texts")
        else:
            scores = self._scorer.score(texts=list(samples))
        return [{"score": reward} for reward in scores.raise_for_failed()]


def register(scorer: JudgeClient, model: str, send: str = "tokens") -> None:
    """Has RewardBench use the scorer for the model that it calls `model`."""
    from rewardbench import REWARD_MODEL_CONFIG

    REWARD_MODEL_CONFIG[model] = {
        "model_builder": lambda *_, **__: None,
        "pipeline_builder": lambda *_, tokenizer, **__: ServerPipeline(scorer, tokenizer, send),
        "quantized": False,
        "custom_dialogue": False,
        "model_type": "Seq. Classifier",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Reads `--server`, `--server-model` and `--send`, and passes all else to RewardBench."""
    parser = argparse.ArgumentParser(prog="python -m guerdon.adapters.rewardbench", allow_abbrev=False)
    parser.add_argument("--server", metavar="URL", action="append", required=True, help="repeat it to share the load")
    parser.add_argument("--server-model", metavar="NAME", default="reward_model", help="the model's name there")
    parser.add_argument("--send", choices=["tokens", "texts"], default="tokens", help="what to send")
    parser.add_argument("--model", metavar="NAME", required=True, help="its name in RewardBench's results")
    ours, theirs = parser.parse_known_args(argv)
    from rewardbench import rewardbench

    register(judge(ours.server, ours.server_model, TIMEOUT_S), ours.model, ours.send)
    sys.argv = ["rewardbench", "--model", ours.model, *theirs]
    rewardbench.main()


if __name__ == "__main__":
    main()
