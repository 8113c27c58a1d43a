"""The walk of a call, step by step with a clock of its own: no server, no waiting."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from guerdon.client import Scores
from guerdon.client.calls import ModelSignature, make_request, prepare_score
from guerdon.client.endpoints import Endpoints
from guerdon.client.retry import Describe, Infer, InferResult, Probe, Ready, RetryingCaller, RetryPolicy, Step, Wait
from guerdon.errors import (
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    Offloaded,
    Overloaded,
    ServerFault,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from guerdon.wire.tensors import InferReply, Tensor

SIGNATURE = ModelSignature("m", ("1",), "", {"sentences": "BYTES"}, {"rewards": "FP32"})
POLICY = RetryPolicy(tries=4, backoff_s=1.0, max_backoff_s=3.0, jitter=0.0)
ANSWER = InferResult(InferReply("m", "1", [Tensor("rewards", "FP32", (1, 1), np.ones((1, 1), np.float32))]))


class World:
    """Performs steps by asking `server`, and keeps the time and the steps."""

    def __init__(self, server: Callable[[Any], Any], urls: list[str], policy: RetryPolicy = POLICY) -> None:
        self.now = 0.0
        self.steps: list[Step] = []
        self.times: list[float] = []
        self.server = server
        self.caller = RetryingCaller(Endpoints(urls, rng=random.Random(0)), policy, lambda: self.now, random.Random(0))

    def away(self, urls: str, until: float) -> Callable[[Any], Any]:
        """Servers of which those in `urls` refuse connections until that time."""

        def server(step: Any) -> Any:
            if step.endpoint.url in urls and self.now < until:
                raise Unreachable(f"refused by {step.endpoint.url}", may_have_arrived=False)
            return answering(step)

        return server

    def score(self, timeout_s: float | None = None) -> Scores:
        return self.run(self.caller.ask(prepare_score("m", make_request(texts=["a"], timeout_s=timeout_s))))

    def run(self, call: Any) -> Any:
        try:
            step = next(call)
            while True:
                self.steps.append(step)
                self.times.append(self.now)
                if isinstance(step, Wait):
                    self.now += step.seconds
                    step = call.send(None)
                    continue
                if isinstance(step, Probe):
                    self.probe(step)
                    step = call.send(None)
                    continue
                try:
                    result = self.server(step)
                except GuerdonError as e:
                    step = call.throw(e)
                else:
                    step = call.send(result)
        except StopIteration as done:
            return done.value

    def probe(self, step: Probe) -> None:
        error = None
        try:
            self.server(Ready(step.endpoint, step.model, step.timeout_s))
        except GuerdonError as e:
            error = e
        self.caller.end_probe(step.endpoint, error)

    def trace(self) -> list[str]:
        """The steps, without probes; neighbouring waits are one."""
        told: list[str] = []
        waited_s = 0.0
        for step in self.steps:
            if isinstance(step, Wait):
                waited_s += step.seconds
            elif not isinstance(step, Probe):
                told += [f"wait {waited_s:g}"] * (waited_s > 0) + [f"{type(step).__name__} {step.endpoint.url}"]
                waited_s = 0.0
        return told

    def outstanding(self) -> list[int]:
        return [e.outstanding + e.num_requests for e in self.caller.endpoints.all]


def answering(step: Step) -> Any:
    return SIGNATURE if isinstance(step, Describe) else ANSWER


def failing(*failures: GuerdonError | None) -> Callable[[Any], Any]:
    """A server whose infer calls end so, one after the other, and then well; it is not ready while the next fails."""
    left = list(failures)

    def server(step: Step) -> Any:
        if isinstance(step, Ready) and left and left[0] is not None:
            raise left[0]
        if isinstance(step, Infer) and left and (error := left.pop(0)) is not None:
            raise error
        return answering(step)

    return server


def test_delays_double_up_to_the_bound_and_end_after_the_tries() -> None:
    delays = [POLICY.next_delay(n, Unavailable("x"), random.Random(0)) for n in (1, 2, 3, 4)]
    assert delays == [1.0, 2.0, 3.0, None]
    assert POLICY.next_delay(1, InvalidRequest("x"), random.Random(0)) is None
    assert POLICY.next_delay(1, DeadlineExceeded("x"), random.Random(0)) is None
    assert POLICY.next_delay(1, ServerFault("x"), random.Random(0)) is None


def test_retry_after_is_a_lower_bound_and_jitter_spreads_the_rest() -> None:
    policy = RetryPolicy(backoff_s=1.0, jitter=0.5)
    delays = [policy.next_delay(1, Overloaded("x", 2.5), random.Random(seed)) for seed in range(50)]
    assert all(delay is not None and 3.0 <= delay <= 3.5 for delay in delays)
    assert len(set(delays)) == 50
    assert policy.next_delay(9, Overloaded("x", 60.0), random.Random(0)) > 60.0  # type: ignore[operator]


def test_metadata_is_fetched_once_and_again_after_a_loss() -> None:
    world = World(failing(None, None, Unreachable("cut")), ["a"])
    for _ in range(3):
        assert world.score().rewards.tolist() == [1.0]
    assert world.trace() == [
        "Describe a", "Infer a", "Infer a", "Infer a", "wait 1", "Describe a", "Infer a",
    ]  # fmt: skip
    assert world.outstanding() == [0]


def test_a_connection_that_breaks_moves_the_request_without_waiting() -> None:
    world = World(failing(None, None, Unreachable("cut")), ["a", "b"])
    for _ in range(3):
        world.score()
    assert world.trace()[4:] == ["Infer a", "Infer b"]
    assert world.outstanding() == [0, 0]


@pytest.mark.parametrize("last", [Unreachable("cut"), Unavailable("502 of a proxy")], ids=str)
def test_a_request_without_an_id_is_sent_once(last: Unavailable) -> None:
    refused = Unreachable("refused", may_have_arrived=False)
    world = World(failing(Overloaded("full", 2.5), refused, last), ["a", "b"])
    errand = prepare_score("m", make_request(texts=["a"]))
    errand = dataclasses.replace(errand, may_repeat=lambda signature: "report" in signature.outputs)
    with pytest.raises(type(last), match=str(last)) as raised:
        world.run(world.caller.ask(errand))
    assert "not retried" in raised.value.__notes__[0]
    # An overloaded server has not taken it, and where there was no connection none has got it.
    assert len([t for t in world.trace() if t.startswith("Infer")]) == 3
    assert world.outstanding() == [0, 0]


def test_a_request_with_an_id_is_sent_again_after_any_break() -> None:
    world = World(failing(Unavailable("stopping"), Unreachable("cut")), ["a"])
    errand = dataclasses.replace(prepare_score("m", make_request(texts=["a"])), may_repeat=lambda _: True)
    assert world.run(world.caller.ask(errand)).rewards.tolist() == [1.0]


def test_a_server_that_comes_back_gets_work_within_two_seconds_however_long_it_was_away() -> None:
    world = World(answering, ["a", "b"])
    world.score()
    world.score()
    world.server = world.away("a", until=600.0)
    while world.now < 602.0:
        world.score()
        world.now += 0.1
    taken = [(at, step) for at, step in zip(world.times, world.steps, strict=True) if not isinstance(step, Wait)]
    sent = [(at, step) for at, step in taken if step.endpoint.url == "a" and at > 0.0]
    probes = [at for at, step in sent if isinstance(step, Probe)]
    assert 600 / 1.35 <= len(probes) <= 600 / 0.75  # 0.1 s between the calls that look
    assert all(isinstance(step, Probe) for at, step in sent if at < 600.0)  # no request waits for a lost server
    assert any(isinstance(step, Infer) for at, step in sent)


def test_calls_that_wait_for_lost_servers_go_on_within_two_seconds_of_the_first_that_is_back() -> None:
    policy = dataclasses.replace(POLICY, backoff_s=60.0, max_backoff_s=60.0, tries=3)
    world = World(answering, ["a", "b"], policy)
    world.score()
    world.score()
    world.server = world.away("ab", until=50.0)
    assert world.score().rewards.tolist() == [1.0]
    assert 50.0 <= world.now <= 52.0


def test_a_try_before_its_time_is_not_counted() -> None:
    """The server says that it is ready, and is not."""
    policy = dataclasses.replace(POLICY, backoff_s=60.0, max_backoff_s=60.0, tries=3)
    world = World(answering, ["a"], policy)
    world.score()

    def lying(step: Any) -> Any:
        if not isinstance(step, Ready) and world.now < 100.0:
            raise Unavailable("no")
        return answering(step)

    world.server = lying
    assert world.score().rewards.tolist() == [1.0]
    assert 100.0 <= world.now <= 102.0


def test_an_answer_to_a_probe_that_no_wait_can_mend_is_for_the_next_call() -> None:
    world = World(failing(None, None, Unreachable("cut")), ["a", "b"])
    for _ in range(3):
        world.score()

    def refusing(step: Any) -> Any:
        if step.endpoint.url == "a":
            raise Unauthenticated("the key was withdrawn")
        return answering(step)

    world.server = refusing
    world.now = 2.0
    with pytest.raises(Unauthenticated):
        world.score()


@pytest.mark.parametrize("error", [InvalidRequest("bad"), Offloaded("offloaded")])
def test_an_answer_that_no_other_server_betters_is_no_loss_and_asked_for_once(error: GuerdonError) -> None:
    world = World(failing(error), ["a", "b"])
    with pytest.raises(type(error), match=str(error)):
        world.score()
    assert world.trace() == ["Describe a", "Infer a"]
    assert world.outstanding() == [0, 0]
    assert world.caller.endpoints.all[0].num_failures == 0


def test_an_overloaded_server_is_given_its_time_and_not_left_out() -> None:
    world = World(failing(Overloaded("full", 2.5), Overloaded("full", 2.5)), ["a"])
    world.score()
    assert world.trace() == ["Describe a", "Infer a", "wait 3.5", "Infer a", "wait 4.5", "Infer a"]
    assert world.caller.endpoints.all[0].num_failures == 0


def full(*urls: str, retry_after_s: float = 2.5) -> Callable[[Any], Any]:
    """Several servers, some of them full for ever."""

    def server(step: Any) -> Any:
        if isinstance(step, Infer) and step.endpoint.url in urls:
            raise Overloaded(f"{step.endpoint.url} is full", retry_after_s)
        return answering(step)

    return server


def test_a_full_server_is_not_asked_again_while_another_has_room() -> None:
    world = World(full("a"), ["a", "b"])
    for _ in range(3):
        assert world.score().rewards.tolist() == [1.0]
    assert world.trace() == ["Describe a", "Infer a", "Describe b", "Infer b", "Infer b", "Infer b"]
    world.now = 2.5
    world.score()
    assert world.trace()[6:] == ["Infer a", "Infer b"]
    assert [e.num_failures for e in world.caller.endpoints.all] == [0, 0]
    assert world.outstanding() == [0, 0]


def test_servers_that_are_all_full_are_asked_in_turn_between_the_pauses() -> None:
    world = World(full("a", "b", "c"), ["a", "b", "c"])
    with pytest.raises(Overloaded) as raised:
        world.score()
    each = ["Infer a", "Infer b", "Infer c"]
    assert [t for t in world.trace() if not t.startswith("Describe")] == [
        *each, "wait 3.5", *each, "wait 4.5", *each, "wait 5.5", *each,
    ]  # fmt: skip
    assert raised.value.__notes__ == ["gave up after 4 tries"]
    world = World(full("a", "b", retry_after_s=0.0), ["a", "b"], dataclasses.replace(POLICY, backoff_s=0.0))
    with pytest.raises(Overloaded):
        world.score()  # and comes to an end where nothing is waited for
    assert len([t for t in world.trace() if t.startswith("Infer")]) == 8


def test_a_server_that_is_not_ready_is_tried_until_the_tries_are_spent() -> None:
    world = World(failing(*[Unavailable("starting")] * 9), ["a"])
    with pytest.raises(Unavailable, match="starting") as raised:
        world.score()
    assert [t for t in world.trace() if t.startswith("wait")] == ["wait 1", "wait 2", "wait 3"]
    assert raised.value.__notes__ == ["gave up after 4 tries"]
    assert world.outstanding() == [0]


def test_an_address_that_never_answered_fails_at_once() -> None:
    def refuse(step: Step) -> Any:
        raise Unreachable(f"refused by {step.endpoint.url}")  # type: ignore[union-attr]

    world = World(refuse, ["a"])
    with pytest.raises(Unreachable, match="refused by a"):
        world.score()
    assert world.trace() == ["Describe a"]
    world = World(refuse, ["a", "b"])
    with pytest.raises(Unreachable, match="none of the servers answers; refused by b"):
        world.score()
    assert world.trace() == ["Describe a", "Describe b"]


def test_servers_that_have_not_started_are_waited_for_if_requested(caplog: pytest.LogCaptureFixture) -> None:
    policy = dataclasses.replace(POLICY, tries=99, timeout_s=60.0, wait_for_start=True)
    starts_at = 20.0

    def starting(step: Step) -> Any:
        if world.now < starts_at:
            raise Unreachable(f"refused by {step.endpoint.url}")  # type: ignore[union-attr]
        return answering(step)

    world = World(starting, ["a"], policy)
    assert len(world.score()) == 1 and world.now >= starts_at
    starts_at = 1e9
    world = World(starting, ["a", "b"], policy)
    for _ in range(2):
        with pytest.raises(Unreachable, match="none of the servers answers; refused by"):
            world.score(timeout_s=30.0)
    assert 50 < world.now <= 60
    told = [record.message for record in caplog.records if "waiting for it" in record.message]
    assert told == [
        "refused by a; waiting for it, up to 60 s",
        "none of the servers answers; refused by b; waiting for it, up to 30 s",
    ]


def test_no_pause_goes_beyond_the_deadline() -> None:
    world = World(failing(*[Overloaded("full", 4.0)] * 9), ["a"])
    with pytest.raises(Overloaded):
        world.score(timeout_s=6.0)
    assert world.trace() == ["Describe a", "Infer a", "wait 5", "Infer a"]
    assert [s.timeout_s for s in world.steps if isinstance(s, Infer)] == [6.0, 1.0]
    assert [s.request.parameters["timeout"] for s in world.steps if isinstance(s, Infer)] == [6_000_000, 1_000_000]


def test_a_cancelled_call_gives_its_tokens_back() -> None:
    world = World(answering, ["a"])
    call = world.caller.ask(prepare_score("m", make_request(texts=["x" * 400])))
    next(call)
    assert world.outstanding() == [102]
    call.close()
    assert world.outstanding() == [0]


def test_waiting_asks_every_server_and_reports_each_answer(caplog: pytest.LogCaptureFixture) -> None:
    def starting(step: Ready) -> Any:
        if step.endpoint.url == "b" and world.now > 5.0:
            return None
        raise Unavailable(f"{step.endpoint.url} is loading")

    world = World(starting, ["a", "b"])
    world.run(world.caller.wait_ready("m", 60.0))
    assert 5.0 < world.now < 8.0
    assert "still waiting: a is loading; b is loading" in caplog.text
    world = World(starting, ["a", "b"])
    with pytest.raises(DeadlineExceeded, match=r"within 4 s: a is loading; b is loading"):
        world.run(world.caller.wait_ready("m", 4.0))
    assert world.now == pytest.approx(4.0)


def test_a_server_with_another_model_than_described_is_described_again() -> None:
    other = ModelSignature("m", ("2",), "", {"sentences": "BYTES"}, {"rewards": "FP32"})
    signatures = [SIGNATURE, other]
    infer = failing(None, InvalidRequest("no such input"))
    world = World(lambda step: signatures.pop(0) if isinstance(step, Describe) else infer(step), ["a"])
    world.score()
    world.score()
    assert world.trace() == ["Describe a", "Infer a", "Infer a", "Describe a", "Infer a"]
    assert world.outstanding() == [0]


def test_a_wrong_request_to_the_model_that_was_described_is_not_sent_again() -> None:
    world = World(failing(None, InvalidRequest("bad")), ["a"])
    world.score()
    with pytest.raises(InvalidRequest, match="bad"):
        world.score()
    assert world.trace() == ["Describe a", "Infer a", "Infer a", "Describe a"]


def test_waiting_goes_on_while_one_server_may_yet_have_the_model() -> None:
    def starting(step: Ready) -> Any:
        if step.endpoint.url == "a":
            raise UnknownModel("unknown model 'm'")
        if world.now < 3.0:
            raise Unavailable("loading")

    world = World(starting, ["a", "b"])
    world.run(world.caller.wait_ready("m", 60.0))
    world = World(starting, ["a"])
    with pytest.raises(UnknownModel):
        world.run(world.caller.wait_ready("m", 60.0))
    assert world.now == 0.0


def test_a_long_wait_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    world = World(failing(*[Unavailable("starting")] * 30), ["a"], RetryPolicy(tries=99, backoff_s=1.0, jitter=0.0))
    world.score()
    assert [record.getMessage() for record in caplog.records] == [
        "no answer for 3 s: starting; trying again",
        "no answer for 15 s: starting; trying again",
        "no answer for 65 s: starting; trying again",
        "no answer for 265 s: starting; trying again",
    ]


def test_each_model_at_a_server_is_described_once() -> None:
    world = World(answering, ["a"])
    for model in ("m", "n", "m", "n"):
        world.run(world.caller.ask(prepare_score(model, make_request(texts=["a"]))))
    assert [s.model for s in world.steps if isinstance(s, Describe)] == ["m", "n"]
    assert [s.model for s in world.steps if isinstance(s, Infer)] == ["m", "n", "m", "n"]
