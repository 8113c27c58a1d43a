import contextlib

import pytest

from guerdon.errors import Overloaded
from guerdon.server.front.admission import Gate, Place
from guerdon.settings.config import ServerConfig

MIB = 1 << 20


def entered(gate: Gate, client: str, most: int = 1000) -> int:
    """How many requests of the client find a place."""
    with contextlib.ExitStack() as held:
        for count in range(most):
            try:
                held.enter_context(Place(gate, client))
            except Overloaded:
                held.pop_all()  # they stay
                return count
    raise AssertionError("there is no bound")


def test_one_client_has_all_places():
    gate = Gate(ServerConfig(max_requests=10))
    assert entered(gate, "") == 10


def test_a_flood_of_one_client_leaves_places_for_the_others():
    gate = Gate(ServerConfig(max_requests=12), ("a", "b", "c"))
    assert entered(gate, "a") == 8  # everybody's half, and its own sixth
    assert entered(gate, "b") == 2
    assert entered(gate, "c") == 2
    assert gate.requests.taken == 12


def test_one_clients_announced_bodies_leave_room_for_the_others():
    gate = Gate(ServerConfig(max_body_mb=1, max_bodies_mb=8), ("a", "b"))
    first, second = Place(gate, "a"), Place(gate, "b")
    first.hold(6 * MIB)
    with pytest.raises(Overloaded, match=r"would exceed 8 MiB, or a's share of it; try again"):
        first.hold(6 * MIB + 1)
    second.hold(2 * MIB)
    first.hold(MIB)
    second.hold(3 * MIB)
    assert gate.bytes.taken == 4 * MIB


@pytest.mark.parametrize("clients", [(), ("a",), ("a", "b"), tuple("abcdefghij")])
def test_one_body_of_the_largest_size_always_fits(clients):
    gate = Gate(ServerConfig(max_body_mb=64, max_bodies_mb=1), clients)
    with Place(gate, "a") as place:
        place.hold(64 * MIB)
    assert gate.bytes.taken == 0
    assert gate.requests.taken == 0


def test_an_answered_request_holds_only_its_bytes():
    gate = Gate(ServerConfig(max_requests=1))
    with Place(gate) as first:
        first.hold(MIB)
        with pytest.raises(Overloaded, match="1 requests are in progress"):
            gate.check_room("")
        first.leave()
        with Place(gate):
            assert (gate.requests.taken, gate.bytes.taken) == (1, MIB)
        assert gate.requests.taken == 0
    assert (gate.requests.taken, gate.bytes.taken) == (0, 0)


def test_a_refused_hold_changes_nothing():
    gate = Gate(ServerConfig(max_body_mb=1, max_bodies_mb=1))
    with Place(gate) as place:
        place.hold(1000)
        with pytest.raises(Overloaded):
            place.hold(2 * MIB)
        assert gate.bytes.taken == 1000
        place.hold(10)
        assert gate.bytes.taken == 10
        place.reach(5)
        assert gate.bytes.taken == 10
    assert gate.bytes.taken == 0
