"""Balancing over several servers: literal times, no clock."""

from __future__ import annotations

from guerdon.client.endpoints import Endpoints


def test_the_fewest_outstanding_tokens_win_and_ties_take_turns() -> None:
    endpoints = Endpoints(["a", "b"])
    first, second = endpoints.take(100, 0.0), endpoints.take(10, 0.0)
    assert [first.url, second.url] == ["a", "b"]
    assert [endpoints.take(50, 0.0).url, endpoints.take(50, 0.0).url] == ["b", "b"]  # 10, then 60, against 100
    assert endpoints.take(1, 0.0).url == "a"  # 110 against 100
    endpoints.mark_answered(first, 100)
    assert [e.outstanding for e in endpoints.all] == [1, 110]


def test_a_lost_server_is_left_out_probed_by_one_request_and_taken_back() -> None:
    a, b = (endpoints := Endpoints(["a", "b"], probe_s=1.0)).all
    assert endpoints.take(1, 0.0) is a
    endpoints.mark_lost(a, 1, 0.0)
    assert a.outstanding == 0
    assert {endpoints.take(1, 0.9).url for _ in range(5)} == {"b"}
    assert endpoints.take(1, 1.0) is a  # the probe
    assert endpoints.take(1, 1.0) is b  # no second one beside it
    endpoints.mark_lost(a, 1, 1.0)
    assert endpoints.take(1, 2.9) is b  # now two seconds
    assert endpoints.take(1, 3.0) is a
    endpoints.mark_answered(a, 1)
    assert [endpoints.take(1, 3.0) for _ in range(4)] == [a, a, a, a]  # b has seven outstanding


def test_one_crash_under_many_requests_is_one_failure() -> None:
    a, _ = (endpoints := Endpoints(["a", "b"], probe_s=1.0, max_probe_s=8.0)).all
    taken = [endpoints.take(1, 0.0) for _ in range(100)]
    for endpoint in taken:
        if endpoint is a:
            endpoints.mark_lost(a, 1, 0.1)
    assert a.num_failures == 1
    assert a.down_until == 1.1
    assert a.outstanding == 0
    for now in (2.0, 4.0, 8.0, 20.0, 40.0):
        assert endpoints.take(1, now) is a
        endpoints.mark_lost(a, 1, now)
    assert a.down_until == 48.0


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
    endpoints.mark_lost(endpoints.take(1, 0.2), 1, 0.2)
    assert not endpoints.has_free(0.3)
    assert endpoints.is_none_known()
    assert endpoints.take(1, 0.3) is a
    assert endpoints.has_free(0.7)  # b's probe
    endpoints.mark_lost(a, 1, 0.6, has_answered=True)
    assert not endpoints.is_none_known()
    assert b.num_requests == 0


def test_a_released_request_leaves_no_trace() -> None:
    endpoints = Endpoints(["a"])
    endpoint = endpoints.take(7, 0.0)
    endpoints.release(endpoint, 7)
    assert (endpoint.outstanding, endpoint.num_requests, endpoint.num_failures, endpoint.seen) == (0, 0, 0, False)
