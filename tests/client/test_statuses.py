"""Statuses as the errors that a server raised."""

import pytest

from guerdon import errors
from guerdon.client.endpoints import Endpoint
from guerdon.client.http_transport import HttpExchange, HttpReply
from guerdon.client.retry import Describe
from guerdon.client.statuses import error_of

BY_STATUS = (
    errors.InvalidRequest("x"),
    errors.RouteNotFound("x"),
    errors.MethodNotAllowed("x"),
    errors.PayloadTooLarge("x"),
    errors.ServerFault("x"),
    errors.Unsupported("x"),
    errors.Unavailable("x"),
    errors.Overloaded("x", 2.5),
    errors.DeadlineExceeded("x"),
)
BY_KIND = (
    *BY_STATUS,
    errors.UnknownModel("x"),
    errors.SampleFailed("x"),
    errors.TrainFailed("x"),
    errors.Offloaded("x"),
    errors.StorageFailed("x"),
    errors.Cancelled("x"),
)


@pytest.mark.parametrize("error", BY_STATUS, ids=lambda e: type(e).__name__)
def test_the_client_raises_the_class_that_the_server_raised(error: errors.GuerdonError) -> None:
    seen = error_of(error.http, "x", error.retry_after_s)
    assert type(seen) is type(error)
    assert seen.retry_after_s == error.retry_after_s
    if type(error) not in (errors.RouteNotFound, errors.MethodNotAllowed):  # HTTP's own
        assert type(error_of(error.grpc, "x", error.retry_after_s)) is type(error)


@pytest.mark.parametrize("error", BY_KIND, ids=lambda e: type(e).__name__)
def test_the_kind_distinguishes_errors_of_one_status(error: errors.GuerdonError) -> None:
    for status in (error.http, error.grpc):
        seen = error_of(status, "x", error.retry_after_s, type(error).__name__)
        assert type(seen) is type(error)
        assert (str(seen), seen.retry_after_s) == ("x", error.retry_after_s)


@pytest.mark.parametrize("kind", ["StartError", "annotations", "Nonsense", "", b"Offloaded", None])
def test_a_kind_that_is_none_leaves_it_to_the_status(kind: str | bytes | None) -> None:
    assert type(error_of(503, "x", None, kind)) is errors.Unavailable


def test_statuses_that_others_send() -> None:
    assert type(error_of("NOT_FOUND", "x")) is errors.UnknownModel
    assert type(error_of(429, "x")) is errors.Overloaded
    assert type(error_of(502, "x")) is errors.Unavailable
    assert type(error_of(401, "x")) is errors.Unauthenticated
    assert type(error_of(507, "x")) is errors.StorageFailed
    assert type(error_of(599, "x")) is errors.ServerFault


@pytest.mark.parametrize(
    ("body", "headers", "raised"),
    [
        (b"Internal Server Error", {"x-request-id": "7"}, errors.Unavailable),
        (b"Internal Server Error", {"server": "uvicorn"}, errors.Unavailable),
        (b"Internal Server Error", {}, errors.ServerFault),
        (b"a bug", {"server": "uvicorn"}, errors.ServerFault),
        (b'{"error": "a bug"}', {"x-request-id": "7"}, errors.ServerFault),
        (b"<html>500 Internal Server Error</html>", {}, errors.ServerFault),
    ],
)
def test_a_500_without_json_is_retried_only_from_ray(body: bytes, headers: dict[str, str], raised: type) -> None:
    exchange = HttpExchange(Describe(Endpoint("http://proxy"), "m", 1.0))
    with pytest.raises(errors.GuerdonError) as told:
        exchange.result(HttpReply(500, headers, body))
    assert type(told.value) is raised
    assert told.value.retryable is (raised is errors.Unavailable)
