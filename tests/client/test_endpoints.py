"""Balancing over several servers: literal times, no clock."""

import random

from guerdon.client.endpoints import Endpoints


def test_the_fewest_outstanding_tokens_win_and_ties_take_turns() -> None:
    endpoints = Endpoints(["a", "b"])
    first, second = endpoints.take(100, 0.0), endpoints.take(10, 0.0)
    assert [first.url, second.url] == ["a", "b"]
    assert [endpoints.take(50, 0.0).url, endpoints.take(50, 0.0).url] == ["b", "b"]  # 10, then 60, against 100
    assert endpoints.take(1, 0.0).url == "a"  # 110 against 100
    endpoints.mark_answered(first, 100)
    assert [e.outstanding for e in endpoints.all] == [1, 110]


def test_a_lost_server_is_probed_tried_by_one_request_and_taken_back() -> None:
    a, b = (endpoints := Endpoints(["a", "b"], rng=random.Random(0))).all
    assert endpoints.take(1, 0.0) is a
    endpoints.mark_lost(a, 1, 0.0)
    assert a.outstanding == 0
    assert endpoints.take_probes(0.7) == []
    assert {endpoints.take(1, 5.0).url for _ in range(5)} == {"b"}  # no request goes there unless a probe said so
    assert endpoints.take_probes(1.3) == [a]
    assert endpoints.take_probes(9.0) == []  # one at a time
    endpoints.end_probe(a, 9.0, is_ready=False)
    assert endpoints.take(1, 9.0) is b
    assert endpoints.take_probes(9.7) == []
    assert endpoints.take_probes(10.3) == [a]
    endpoints.end_probe(a, 10.3, is_ready=True)
    assert endpoints.take(1, 10.3) is a
    assert endpoints.take(1, 10.3) is b  # no second one beside the trial
    endpoints.mark_lost(a, 1, 10.4)  # it was not ready after all
    assert endpoints.take(1, 10.4) is b
    assert endpoints.take_probes(11.7) == [a]
    endpoints.end_probe(a, 11.7, is_ready=True)
    assert endpoints.take(1, 11.7) is a
    endpoints.mark_answered(a, 1)
    assert [endpoints.take(1, 11.7) for _ in range(4)] == [a, a, a, a]  # b has eight outstanding
    assert endpoints.take_probes(99.0) == []


def test_one_crash_under_many_requests_delays_no_probe() -> None:
    a, _ = (endpoints := Endpoints(["a", "b"], rng=random.Random(0))).all
    taken = [endpoints.take(1, 0.0) for _ in range(100)]
    for i, endpoint in enumerate(taken):
        if endpoint is a:
            endpoints.mark_lost(a, 1, 0.1 + i / 200)
    assert a.num_failures == 1
    assert a.probe_at <= 0.1 + 1.25
    assert a.outstanding == 0


def test_probes_go_on_about_every_second_and_many_clients_spread_theirs() -> None:
    pauses = []
    for seed in range(50):
        a, _ = (endpoints := Endpoints(["a", "b"], rng=random.Random(seed))).all
        endpoints.mark_lost(endpoints.take(1, 0.0), 1, 0.0)
        for _ in range(100):
            now = a.probe_at
            assert endpoints.take_probes(now) == [a]
            endpoints.end_probe(a, now, is_ready=False)
            pauses.append(a.probe_at - now)
    assert 0.75 <= min(pauses) < 0.8 and 1.2 < max(pauses) <= 1.25


def test_a_full_server_is_passed_over_while_another_has_room() -> None:
    a, b, c = (endpoints := Endpoints(["a", "b", "c"])).all
    assert endpoints.take(1, 0.0) is a
    endpoints.mark_full(a, 1, 10.0)
    assert (a.outstanding, a.num_requests, a.num_failures, a.seen) == (0, 0, 0, True)
    assert [endpoints.take(50, 9.9) for _ in range(4)] == [b, c, b, c]
    endpoints.mark_lost(c, 50, 9.9)
    endpoints.mark_full(b, 50, 15.0)
    assert not endpoints.has_free(9.9)
    assert endpoints.take(1, 9.9) is a  # the first that will have room
    assert endpoints.has_free(10.0)
    assert endpoints.take(1, 10.0) is a
    assert b.num_failures == 0


def test_if_all_are_down_the_next_to_be_probed_is_tried() -> None:
    a, b = (endpoints := Endpoints(["a", "b"])).all
    assert not endpoints.is_none_known()
    endpoints.mark_lost(endpoints.take(1, 0.0), 1, 0.0)
    endpoints.mark_lost(endpoints.take(1, 2.0), 1, 2.0)
    assert not endpoints.has_free(9.0)
    assert endpoints.is_none_known()
    assert endpoints.take(1, 2.1) is a
    endpoints.mark_lost(a, 1, 2.1, has_answered=True)
    assert not endpoints.is_none_known()
    endpoints.take_probes(4.0)
    endpoints.end_probe(b, 4.0, is_ready=True)
    assert endpoints.has_free(4.0)
    assert endpoints.take(1, 4.0) is b
    assert not endpoints.has_free(4.0)


def test_a_probe_that_ends_after_an_answer_changes_nothing() -> None:
    (a,) = (endpoints := Endpoints(["a"])).all
    endpoints.mark_lost(endpoints.take(1, 0.0), 1, 0.0)
    endpoints.take_probes(2.0)
    endpoints.mark_answered(endpoints.take(1, 2.0), 1)
    for is_ready in (True, False):
        endpoints.end_probe(a, 3.0, is_ready=is_ready)
        assert endpoints.take_probes(9.0) == []
        assert [endpoints.take(1, 9.0) for _ in range(2)] == [a, a]
        assert endpoints.has_free(9.0)


def test_a_released_request_leaves_no_trace() -> None:
    endpoints = Endpoints(["a"])
    endpoint = endpoints.take(7, 0.0)
    endpoints.release(endpoint, 7)
    assert (endpoint.outstanding, endpoint.num_requests, endpoint.num_failures, endpoint.seen) == (0, 0, 0, False)
