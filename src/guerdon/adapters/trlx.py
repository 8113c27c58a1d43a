"""trlX's reward function: of a served reward model, or of one in the trainer's own process.

    reward_fn = create_reward_fn("./my-reward-model", tokenizer="gpt2", delta_reward=True)
    trlx.train(reward_fn=reward_fn, prompts=[{"prompt": ..., "original_output": ...}], config=config)

If TRITON_HOST=host:port/model is set, the rewards come from the server there over gRPC, guerdon's or any Triton; for
TLS set grpcs://host:port/model. Its key comes from GUERDON_API_KEY, or from x:KEY@host:port/model.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from guerdon import errors
from guerdon.adapters.judge import TIMEOUT_S, read_config, refuse_other_tokenizer
from guerdon.client import RetryPolicy, RewardClient, Scores
from guerdon.client.calls import Call
from guerdon.endings import Ending
from guerdon.settings.access import strip_credentials
from guerdon.wire.tensors import InferReply, InferRequest, Tensor

if TYPE_CHECKING:
    from guerdon.local import LocalRewardModel

__all__ = ["TrlxReward", "create_reward_fn"]

log = logging.getLogger(__name__)

_DEFAULT_TOKENIZER = "gpt2"
_MAX_KEPT = 100_000
"""Rewards of originals that are cached, a few bytes each."""
_TRIES = 5
"""Tries if the server takes new weights between samples and originals."""


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
) -> TrlxReward | Literal[True]:
    """Returns a `reward_fn` for `trlx.train`; True on ranks that trlX never asks for rewards computed in this process.

    The server is `triton_host`, else the environment's TRITON_HOST; without one the checkpoint `model` is loaded here,
    on `device` (default: the last GPU, as in trlX's example) in `dtype` (default: float16 on a GPU). `tokenizer` is
    the reward model's, or its name (default: `model`'s, or gpt2's without one, as in trlX's example). Each sample ends
    with an EOS, and is scored at its first one. `max_length` truncates samples at the left; without it, too long ones
    are refused. A request has at most `batch_size` rows; a model loaded here makes its own batches. A server that is
    down or has not started is retried until `timeout_s` is over.

    `delta_reward` subtracts the reward of the data set's `original_output`. `dense` gives a list of rewards a sample,
    one for each token of its output, from a model with values. Raises ConfigError for settings that conflict.
    """
    host = triton_host or os.environ.get("TRITON_HOST")
    if not host and os.environ.get("RANK", "0") != "0":
        return True
    if dense and delta_reward:
        raise errors.ConfigError("delta_reward goes with one reward a sample", "leave out dense or delta_reward")
    if not host and model is None:
        raise errors.ConfigError(
            "no server and no model: TRITON_HOST and model are not set",
            "set TRITON_HOST=host:port/model in the environment, or give model",
        )
    if tokenizer is None or isinstance(tokenizer, str):
        tokenizer = _tokenizer(tokenizer or model)
    if host:
        scheme, _, rest = host.rpartition("://")
        address, slash, name = rest.partition("/")
        if not slash or not name or "/" in name or scheme not in ("", "grpc", "grpcs"):
            raise errors.ConfigError(
                f"TRITON_HOST is {strip_credentials(host)!r}",
                "give host:port/model, such as 10.0.0.1:5557/reward_model",
            )
        policy = RetryPolicy.patient(timeout_s, wait_for_start=True)
        client: Any = InputIdsClient(f"{scheme or 'grpc'}://{address}", name, policy=policy)
    else:
        import torch  # installed with trlX

        from guerdon.local import LocalRewardModel

        assert model is not None
        gpus = torch.cuda.device_count()
        device = device or (f"cuda:{gpus - 1}" if gpus else "cpu")
        client = LocalRewardModel(model, device=device, dtype=dtype or ("auto" if device == "cpu" else "float16"))
    return TrlxReward(TextScorer(client, tokenizer, max_length, batch_size), delta_reward, dense)


class TrlxReward:
    """Takes every form in which trlX since 0.2 calls its `reward_fn`; raises if a sample gets no reward."""

    def __init__(self, scorer: TextScorer, delta_reward: bool, dense: bool) -> None:
        self._scorer, self._is_delta, self._is_dense = scorer, delta_reward, dense
        self._originals = OriginalRewards(scorer.score_samples)

    def __call__(
        self,
        samples: Sequence[str],
        prompts: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        *,
        original_output: Sequence[str] | None = None,
        tokenizer: Any = None,
        **metadata: Any,
    ) -> list[float] | list[list[float]]:
        """Returns the samples' rewards; if they are dense, one for each token. `tokenizer` is the trainer's."""
        if not len(samples):
            return []
        if self._is_dense:
            if prompts is None or outputs is None:
                raise errors.InvalidRequest("dense rewards need prompts and outputs, which trlX gives since 0.4")
            return self._scorer.score_tokens(prompts, outputs, tokenizer)
        if not self._is_delta:
            return self._scorer.score_samples(samples).rewards.tolist()
        if prompts is None or original_output is None:
            raise errors.InvalidRequest(
                "delta rewards need original_output: train on rows of {'prompt', 'original_output'} with trlX 0.7 or "
                "later by PPO, or create the reward function without delta_reward"
            )
        originals = [prompt + original for prompt, original in zip(prompts, original_output, strict=True)]
        return self._originals.subtract(samples, originals).tolist()

    def close(self) -> None:
        """Closes the connections, or unloads the model; happens by itself otherwise."""
        self._scorer.client.close()


class TextScorer:
    """Tokenises as trlX's reward models do, and scores at a server or in this process; not thread-safe."""

    def __init__(
        self, client: InputIdsClient | LocalRewardModel, tokenizer: Any, max_length: int | None, batch_size: int
    ) -> None:
        self.client = client
        self._tokenizer, self._max_length, self._batch_size = tokenizer, max_length, batch_size
        self._is_checked = self._has_warned = False
        self._ending: Ending | None = None

    def score_samples(self, samples: Sequence[str]) -> Scores:
        """Appends an EOS to each sample and scores it at its first EOS; raises if a sample gets no reward.

        Samples that the reward model's chat template has made end as it ends an answer, and are scored there: it may
        write an EOS after every turn.
        """
        self._check_tokenizer()
        whole = [] if self._ending is None else [self._ending.complete(sample) for sample in samples]
        if whole and None not in whole:
            return self.client.score(tokens=self._rows(whole, add_special_tokens=False)).raise_for_failed()
        if whole and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the chat template of the reward model has not made the sample %r: it is scored at an EOS after it",
                samples[whole.index(None)][:80],
            )
        eos = self._tokenizer.eos_token_id
        rows = self._rows([sample + self._tokenizer.eos_token for sample in samples])
        if isinstance(self.client, InputIdsClient):
            return self.client.score_input_ids(rows, eos, self._batch_size)
        # A model loaded here does not look for an EOS: the lengths place it.
        return self.client.score(tokens=[row[: row.index(eos) + 1] for row in rows]).raise_for_failed()

    def score_tokens(self, prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any) -> list[list[float]]:
        """Returns the values of each output's tokens; raises InvalidRequest if the trainer's `tokenizer` differs."""
        self._check_tokenizer()
        ours = self._tokenizer(list(outputs))["input_ids"]
        theirs = ours if tokenizer is None else tokenizer(list(outputs))["input_ids"]
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                raise errors.InvalidRequest(
                    f"output {i} is {len(our)} tokens to the reward model and {len(their)} others to the trainer: "
                    "dense rewards need one tokenizer for both"
                )
        rows = [prompt + output for prompt, output in zip(self._rows(prompts), ours, strict=True)]
        values = self.client.score(tokens=rows).raise_for_failed().values
        if values is None:
            raise errors.InvalidRequest("the reward model has no values, and dense rewards need one for each token")
        return [row[len(row) - len(output) :].tolist() for row, output in zip(values, ours, strict=True)]

    def _check_tokenizer(self) -> None:
        """Raises ConfigError if token ids mean other tokens to the server's model, as far as it reports them."""
        if self._is_checked:
            return
        config = read_config(self.client)
        self._ending = Ending.reported(config)
        where, remedy = f"the reward model of {self.client}", "give tokenizer: the reward model's, or its folder"
        refuse_other_tokenizer(self._tokenizer, config, where, remedy)
        self._is_checked = True

    def _rows(self, texts: Sequence[Any], **settings: bool) -> list[list[int]]:
        """Returns the last `max_length` token ids of each text."""
        rows = self._tokenizer(list(texts), **settings)["input_ids"]
        return rows if self._max_length is None else [row[-self._max_length :] for row in rows]


class InputIdsClient(RewardClient):
    """A reward client for any server whose model takes `input_ids` and gives `rewards`."""

    def score_input_ids(self, rows: Sequence[Sequence[int]], fill: int, batch_size: int) -> Scores:
        """Returns the scores of rows of ids, padded with `fill`, in requests of at most `batch_size` rows.

        Sends all requests at once. Raises the server's error after all tries, and SampleFailed for a reward that is not
        finite.
        """
        table = np.full((len(rows), max(map(len, rows))), fill, np.int32)
        for out, row in zip(table, rows, strict=True):
            out[: len(row)] = row
        starts = range(0, len(rows), batch_size)
        calls = [_prepare_input_ids(self._model, table[start : start + batch_size]) for start in starts]
        futures = [self._submit(self._caller.ask(call)) for call in calls]
        parts = []
        for start, future in zip(starts, futures, strict=True):
            try:
                parts.append(future.result())
            except errors.GuerdonError as e:
                e.add_note(f"asked for {min(batch_size, len(rows) - start)} samples; row 0 is sample {start}")
                raise
        rewards = np.concatenate([part.rewards for part in parts])
        versions = sorted({part.weights_version for part in parts})  # several while the server takes new weights
        return Scores(rewards, [None] * len(rows), weights_version=" ".join(versions))


def _prepare_input_ids(model: str, table: np.ndarray) -> Call[Scores]:
    def parse(reply: InferReply, queue_s: float, compute_s: float) -> Scores:
        outputs = {tensor.name: tensor.data for tensor in reply.outputs}
        rewards = np.asarray(outputs.get("rewards", ()), np.float32).reshape(-1)
        if len(rewards) != len(table):
            raise errors.ServerFault(f"the server sent {len(rewards)} rewards for {len(table)} samples")
        if not np.isfinite(rewards).all():
            raise errors.SampleFailed(
                f"row {np.flatnonzero(~np.isfinite(rewards))[0]}: the server gave no finite reward"
            )
        version = str(reply.parameters.get("weights_version", ""))
        return Scores(rewards, [None] * len(table), weights_version=version, queue_s=queue_s, compute_s=compute_s)

    # Names no outputs, as trlX's own request: the server gives its default ones.
    request = InferRequest({"input_ids": Tensor("input_ids", "INT32", table.shape, table)})
    return Call(model, lambda _signature, _left_s: request, parse, table.size)


class OriginalRewards:
    """Caches the rewards of the data set's own outputs while the weights stay the same; not thread-safe."""

    def __init__(self, score: Callable[[Sequence[str]], Scores]) -> None:
        """`score` gives every text a reward, or raises."""
        self._score = score
        self._rewards: OrderedDict[bytes, np.float32] = OrderedDict()
        self._weights_version: str | None = None

    def subtract(self, samples: Sequence[str], originals: Sequence[str]) -> np.ndarray:
        """Returns each sample's reward minus its original's, float32 `[B]`, both by the same weights.

        Raises ServerFault if the weights differed at every try, and what `score` raises.
        """
        for _ in range(_TRIES):
            scores = self._ask(samples)
            rewards = self._rewards_of(originals)
            if self._weights_version == scores.weights_version:
                return scores.rewards - rewards
        raise errors.ServerFault(f"samples and originals were scored by different weights, {_TRIES} times in a row")

    def _rewards_of(self, texts: Sequence[str]) -> np.ndarray:
        known = self._rewards
        digests = [blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in texts]
        texts_of = dict(zip(digests, texts, strict=True))
        while missing := [digest for digest in texts_of if digest not in known]:
            scores = self._ask([texts_of[digest] for digest in missing])
            known.update(zip(missing, scores.rewards, strict=True))
        rewards = np.array([known[digest] for digest in digests], np.float32)
        for digest in texts_of:
            known.move_to_end(digest)
        while len(known) > _MAX_KEPT:
            known.popitem(last=False)
        return rewards

    def _ask(self, texts: Sequence[str]) -> Scores:
        scores = self._score(texts)
        if scores.weights_version != self._weights_version:
            self._rewards.clear()
            self._weights_version = scores.weights_version
        return scores


def _tokenizer(name: str | None) -> Any:
    from transformers import AutoTokenizer  # installed with trlX

    if name is not None:
        return AutoTokenizer.from_pretrained(name)
    try:
        return AutoTokenizer.from_pretrained(_DEFAULT_TOKENIZER)
    except (OSError, ValueError) as e:  # missing or incomplete
        raise errors.ConfigError(
            f"no tokenizer is given, and {_DEFAULT_TOKENIZER}'s, which trlX's example takes, does not load: "
            + str(e).partition("\n")[0],
            "give tokenizer: the reward model's, or its folder",
        ) from e
