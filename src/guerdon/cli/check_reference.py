"""The reference of `guerdon check`: a local checkpoint by plain transformers, one sequence at a time, float32."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from guerdon.cli.check_forms import TextPair
from guerdon.cli.check_subject import FellShort, clip
from guerdon.errors import ConfigError


class Reference:
    """A checkpoint's numbers and tokens; nothing of guerdon's engine is used."""

    def __init__(self, folder: str, gives: str) -> None:
        """Loads the folder's model for what the server `gives`; raises ConfigError if it has none of that kind."""
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        auto: Any = transformers.AutoModelForSequenceClassification
        if gives != "rewards":
            auto = transformers.AutoModelForCausalLM
        options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
        try:
            self._model, loaded = auto.from_pretrained(folder, **options)
        except (OSError, ValueError, KeyError) as e:
            raise ConfigError(
                f"--reference {folder} cannot be loaded: {clip(str(e), 300)}", "give a folder that transformers loads"
            ) from e
        if loaded["missing_keys"]:
            what = f"lacks {min(loaded['missing_keys'])}, which transformers would make up"
            raise ConfigError(f"--reference {folder} {what}", f"give the checkpoint of a server of {gives}")
        self._model.eval()
        self.gives = gives
        self._known: dict[tuple[int, ...], np.ndarray] = {}
        config = self._model.config.get_text_config()
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
            except (OSError, ValueError, KeyError):
                self.tokenizer = None
        if getattr(self.tokenizer, "is_fast", False) and (file := Path(folder, "tokenizer.json")).is_file():
            # transformers 5 builds both anew by the model's type, whatever the file says (transformers#45488)
            own, backend = tokenizers.Tokenizer.from_file(str(file)), self.tokenizer.backend_tokenizer
            backend.normalizer, backend.pre_tokenizer = own.normalizer, own.pre_tokenizer

    @torch.no_grad()
    def numbers(self, ids: list[int]) -> np.ndarray:
        """Returns the logits of a classifier `[A]`, or the log-probs of all ids but the first `[T-1]`."""
        if (known := self._known.get(tuple(ids))) is None:
            try:
                logits = self._model(input_ids=torch.tensor([ids])).logits[0].double()
            except (IndexError, RuntimeError) as e:  # of another vocabulary, or for shorter sequences
                raise FellShort(f"the reference takes no {len(ids)} ids up to {max(ids)}: {clip(str(e))}") from e
            if self.gives != "rewards":
                logits = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            known = self._known[tuple(ids)] = logits.numpy()
        return known

    def readings(self, pair: TextPair) -> dict[str, list[int]]:
        """Returns the ids of a text in each way that servers read it, by the way's name."""
        one, plain = self.tokenizer, {"add_special_tokens": False}
        apart = one(pair.prompt, **plain).input_ids + one(pair.response, **plain).input_ids
        return {
            "as one text": one(pair.prompt + pair.response, **plain).input_ids,
            "as one text with special tokens": one(pair.prompt + pair.response).input_ids,
            "prompt and response apart": apart,
            "as a pair with special tokens": one(pair.prompt, pair.response).input_ids,
        }

    def mistakes(self, ids: list[int]) -> dict[str, np.ndarray]:
        """Returns what servers are known to give in place of `numbers`, by the mistake's name."""
        raw = self.numbers(ids)
        with np.errstate(over="ignore"):
            made = {"a sigmoid of the raw score": 1 / (1 + np.exp(-raw)), "a tanh of the raw score": np.tanh(raw)}
        made["a softmax of the raw scores"] = np.exp(raw - raw.max()) / np.exp(raw - raw.max()).sum()
        made["the raw score divided by its length"] = raw / np.linalg.norm(raw)
        if self.gives == "rewards" and len(ids) > 1:
            made["the score without the last token"] = self.numbers(ids[:-1])
            bos, eos = (getattr(self.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
            if bos is not None:
                made["the score with a BOS added"] = self.numbers([bos, *ids])
            if eos is not None:
                made["the score with an EOS added"] = self.numbers([*ids, eos])
        return made
