"""A reward model, a judge or a teacher in this process: a client's calls without a server or sockets."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack

from guerdon.assembly import build_service
from guerdon.client import Head, Scores, TeacherAnswers, teacher_calls
from guerdon.client.calls import Call, ModelSignature, accept, make_request, prepare_score, takes
from guerdon.client.reward_client import ScoreArgs
from guerdon.client.teacher_calls import GivenIds, TeacherArgs
from guerdon.core import ModelInfo
from guerdon.errors import Cancelled, ConfigError, GuerdonError
from guerdon.server.service import Service
from guerdon.settings.config import (
    JudgeConfig,
    ModelConfig,
    ServedModelConfig,
    ServerConfig,
    TeacherConfig,
)
from guerdon.settings.fields import check_settings, from_mapping
from guerdon.wire import score_tensors, signature

T = TypeVar("T")

_PATIENT = {"max_queue_tokens": sys.maxsize, "max_queue_sequences": sys.maxsize}
"""A server refuses requests that it has no room for, and clients retry; here any number of samples waits."""
_FOREVER_S = 1e9
_END_S = 1.0
"""How long `close` waits for the batch in progress."""


class _LocalModel:
    """One model that this process loads, asked through the code of client and server; for many threads."""

    def __init__(self, config: ServedModelConfig) -> None:
        check_settings(config)
        if getattr(config, "adapters", None):
            raise ConfigError(
                "adapters is set, and a local model is one", "give an adapter as the model, or serve them"
            )
        limits = {"request_timeout_s": _FOREVER_S, "max_request_sequences": sys.maxsize}
        self._service = build_service(ServerConfig(models=[config], **limits))  # type: ignore[arg-type]
        self._model, self._name = config.model, config.name
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="guerdon-local", daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(_start(self._service), self._loop).result()
        self._lock = threading.Lock()
        self._is_closed = False
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _stop, self._service, self._loop, thread, self._pid)

    def info(self) -> ModelSignature:
        """Returns the model's inputs and outputs."""
        return ModelSignature.from_metadata({**signature.metadata(self._info())})

    def config(self) -> dict[str, Any]:
        """Returns the model's configuration in Triton's terms."""
        return {**signature.config(self._info(), self._service.max_request_sequences)}

    def close(self) -> None:
        """Ends at once: futures without a result fail with Cancelled."""
        if os.getpid() == self._pid:  # in a fork the lock may be held by a thread that is gone
            with self._lock:
                self._is_closed = True
        self._finalizer()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r}, name={self._name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _info(self) -> ModelInfo:
        return self._service.catalog.scored_by(self._name)

    def _submit(self, call: Call[T]) -> Future[T]:
        if os.getpid() != self._pid:
            raise GuerdonError("the model was loaded before this process was forked: load it in this process")
        with self._lock:
            if self._is_closed:
                raise Cancelled("the model is closed")
            return asyncio.run_coroutine_threadsafe(self._ask(call), self._loop)

    async def _ask(self, call: Call[T]) -> T:
        if (task := asyncio.current_task()) is not None:
            task.add_done_callback(_retrieve)  # a future that the caller has cancelled does not
        info = self._info()
        sent = call.build(self.info(), call.timeout_s or _FOREVER_S)
        try:
            reply = await self._service.score(self._name, score_tensors.to_request(sent, info))
        except asyncio.CancelledError:
            if not self._is_closed:  # the caller has cancelled the future
                raise
            raise Cancelled("the model was closed before the answer") from None
        return call.parse(score_tensors.to_reply(reply, sent, info), reply.queue_s, reply.compute_s)


class LocalRewardModel(_LocalModel):
    """Scores samples with a model that this process loads; safe to use from many threads.

    Its scores are those of a server with the same settings: all code between call and model is the same. It closes by
    itself. A forked child lacks the threads that compute: there it raises GuerdonError.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """Loads `model`, a folder, hub id or module:function; `settings` are `ModelConfig`'s, such as `device`.

        Raises StartError if it cannot be served, ConfigError for a setting that is unknown or out of bounds.
        """
        super().__init__(from_mapping(ModelConfig, {**_PATIENT, **settings, "model": str(model)}))

    @takes(ScoreArgs)
    def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """Returns the samples' scores; blocks. As `RewardClient.score`, with a server's errors."""
        return self.submit(**samples).result()

    @takes(ScoreArgs)
    def submit(self, **samples: Unpack[ScoreArgs]) -> Future[Scores]:
        """Returns a future of `score`'s result at once; cancelling drops the samples. Thousands may be in progress."""
        return self._submit(prepare_score(self._name, make_request(**accept(self.submit, samples))))


class LocalJudge(LocalRewardModel):
    """Scores samples with a judge that this process loads; it is like LocalRewardModel in all else."""

    def __init__(self, model: str | Path, rubric: str | Path, **settings: Any) -> None:
        """Loads `model`, a folder or hub id, and the `rubric`, a YAML file; `settings` are `JudgeConfig`'s.

        Raises StartError if it cannot be served, ConfigError for a setting that is unknown or out of bounds.
        """
        names = {"model": str(model), "rubric": str(rubric)}
        _LocalModel.__init__(self, from_mapping(JudgeConfig, {**_PATIENT, **settings, **names}))


class LocalTeacher(_LocalModel):
    """A `TeacherClient`'s calls, by a language model in this process.

    It is like LocalRewardModel in all else.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """Loads `model`, a folder or hub id; `settings` are `TeacherConfig`'s, such as `max_top_k`.

        Raises StartError if it cannot be served, ConfigError for a setting that is unknown or out of bounds.
        """
        super().__init__(from_mapping(TeacherConfig, {**_PATIENT, **settings, "model": str(model)}))

    @takes(TeacherArgs)
    def logprobs(self, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the log-probs of the samples' own tokens; blocks. Raises a server's errors."""
        return self._submit(teacher_calls.prepare_logprobs(self._name, accept(self.logprobs, samples))).result()

    @takes(TeacherArgs)
    def submit(self, k: int = 0, **samples: Unpack[TeacherArgs]) -> Future[TeacherAnswers]:
        """Returns a future of `logprobs`'s result, with a `k` of `top`'s."""
        return self._submit(teacher_calls.prepare_top(self._name, k, accept(self.submit, samples)))

    @takes(TeacherArgs)
    def top(self, k: int, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the `k` likeliest ids of each asked token with their log-probs, and what `logprobs` returns."""
        return self._submit(teacher_calls.prepare_top(self._name, k, accept(self.top, samples))).result()

    @takes(TeacherArgs)
    def given(self, ids: GivenIds, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns the log-probs of `ids`, as `TeacherClient.given` takes them, and what `logprobs` returns."""
        return self._submit(teacher_calls.prepare_given(self._name, ids, accept(self.given, samples))).result()

    @takes(TeacherArgs)
    def hidden(self, *, dtype: Literal["bfloat16"] | None = None, **samples: Unpack[TeacherArgs]) -> TeacherAnswers:
        """Returns what the head turns into the logits of each asked token."""
        return self._submit(teacher_calls.prepare_hidden(self._name, dtype, accept(self.hidden, samples))).result()

    def head(self, known: Head | None = None) -> Head:
        """Returns the head, `known` if it is still the same.

        Raises Unsupported if its logits are not one matrix times hidden states.
        """
        served: Any = self._service.catalog.entry(self._name).loaded()
        file = served.head_file()
        if known is not None and known.digest == file.digest:
            return known
        return Head.from_file(b"".join(file.pieces()))


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Looks at the task's error, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()


async def _start(service: Service) -> None:
    service.start()


def _stop(service: Service, loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:  # a fork has no threads to end
        return
    if threading.current_thread() is thread:  # the last reference was dropped on the loop's own thread
        threading.Thread(target=_stop, args=(service, loop, thread, pid)).start()
        return

    async def cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(cancel_all(), loop).result()
    service.stop(_END_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
