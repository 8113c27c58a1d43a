"""trlX's reward function: of a served reward model, or of one in the trainer's own process.

    reward_fn = create_reward_fn("./my-reward-model", tokenizer="gpt2", delta_reward=True)
    trlx.train(reward_fn=reward_fn, prompts=[{"prompt": ..., "original_output": ...}], config=config)

With TRITON_HOST=host:port/model in the environment the server there is asked over gRPC, guerdon's or any Triton; over
TLS with grpcs://host:port/model. Its key is GUERDON_API_KEY's, or stands in x:KEY@host:port/model.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from guerdon.adapters.judge import TIMEOUT_S
from guerdon.adapters.trlx.function import RewardFunction
from guerdon.adapters.trlx.input_ids import InputIdsClient
from guerdon.adapters.trlx.scoring import Scoring
from guerdon.client import RetryPolicy
from guerdon.errors import ConfigError
from guerdon.settings.access import strip_credentials

__all__ = ["RewardFunction", "create_reward_fn"]

_DEFAULT_TOKENIZER = "gpt2"


def create_reward_fn(
    model: str | None = None,
    *,
    tokenizer: Any = None,
    triton_host: str | None = None,
    delta_reward: bool = False,
    dense: bool = False,
    max_length: int | None = None,
    batch_size: int = 24,
    device: str | None = None,
    dtype: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> RewardFunction | Literal[True]:
    """A `reward_fn` for `trlx.train`; True on ranks that trlX never asks for rewards that are computed here.

    The server is `triton_host`, else the environment's TRITON_HOST; without one the checkpoint `model` is loaded here,
    on `device` (default: the last GPU, as in trlX's example) in `dtype` (default: float16 on a GPU). `tokenizer` is
    the reward model's, or its name (default: that of `model`, and without one gpt2's, as in trlX's example); each
    sample gets its EOS at the end, and is scored at the first. With `max_length` samples lose tokens at the left beyond
    it; without it too long ones are refused. A request has `batch_size` rows at most; a model loaded here makes batches
    of its own. A server that is away or not up yet is tried again until `timeout_s` have gone by.

    `delta_reward`: less the reward of the data set's `original_output`. `dense`: a list of rewards a sample, one for
    each token of its output, from a model that gives values. Raises ConfigError for settings that do not go together.
    """
    host = triton_host or os.environ.get("TRITON_HOST")
    if not host and os.environ.get("RANK", "0") != "0":
        return True
    if dense and delta_reward:
        raise ConfigError("delta_reward goes with one reward a sample", "leave out dense or delta_reward")
    if not host and model is None:
        raise ConfigError(
            "neither a server nor a model is named: TRITON_HOST is not set, and model is not given",
            "set TRITON_HOST=host:port/model in the environment, or give model",
        )
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = _tokenizer(tokenizer or model)
    if host:
        scheme, _, rest = host.rpartition("://")
        address, slash, name = rest.partition("/")
        if not slash or not name or "/" in name or scheme not in ("", "grpc", "grpcs"):
            raise ConfigError(
                f"TRITON_HOST is {strip_credentials(host)!r}",
                "give host:port/model, such as 10.0.0.1:5557/reward_model",
            )
        policy = RetryPolicy.patient(timeout_s, wait_for_start=True)
        client: Any = InputIdsClient(f"{scheme or 'grpc'}://{address}", name, policy=policy)
    else:
        import torch  # trlX has it

        from guerdon.local import LocalRewardModel

        assert model is not None
        gpus = torch.cuda.device_count()
        device = device or (f"cuda:{gpus - 1}" if gpus else "cpu")
        client = LocalRewardModel(model, device=device, dtype=dtype or ("auto" if device == "cpu" else "float16"))
    return RewardFunction(Scoring(client, tokenizer, max_length, batch_size), delta_reward, dense)


def _tokenizer(name: str | None) -> Any:
    from transformers import AutoTokenizer  # trlX has it

    if name is not None:
        return AutoTokenizer.from_pretrained(name)
    try:
        return AutoTokenizer.from_pretrained(_DEFAULT_TOKENIZER)
    except (OSError, ValueError) as e:  # there is none, or only a part of one
        raise ConfigError(
            f"no tokenizer is given, and {_DEFAULT_TOKENIZER}'s, which trlX's example takes, does not load: "
            + str(e).partition("\n")[0],
            "give tokenizer: the reward model's, or its folder",
        ) from e
