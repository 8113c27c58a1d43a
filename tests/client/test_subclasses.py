"""Clients that a user has derived: their own calls pass keywords on, and unknown ones are refused as before."""

from typing import Any

import pytest

from client.echo_server import EchoProcess
from guerdon.client import RewardClient
from guerdon.client.reward_client import Scores


class Counting(RewardClient):
    asked = 0

    def score(self, *args: Any, **samples: Any) -> Scores:
        self.asked += 1
        return super().score(*args, **samples)


def test_a_call_that_a_subclass_overrides_works_and_refuses_unknown_keywords() -> None:
    with EchoProcess() as server, Counting(server.http_url) as client:
        assert list(client.score(texts=["ab", "abc"])) == [2.0, 3.0]
        with pytest.raises(TypeError, match=r"score\(\) got an unexpected keyword argument 'txets'"):
            client.score(txets=["ab"])
        assert client.asked == 2
