"""A model that is swapped on two ranks: both load it, both or neither have it, and its scores are one process's."""

import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

import zoo
from guerdon.client import RewardClient, Scores
from guerdon.settings.access import KEYS_VARIABLE
from launched import Launch
from server.swapping import ROWS, checkpoints
from test_ranks_served import serving

pytestmark = pytest.mark.slow
KEY = "an-admins-key-of-some-length"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_two_ranks_swap_a_model_or_keep_it(
    tensor_parallel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUERDON_API_KEY", KEY)
    old, _ = checkpoints(tmp_path / "repository")
    wanted = {name: zoo.reference(tmp_path / "repository" / name, ROWS) for name in ("old", "new")}
    settings = {
        "models": [{"model": str(old), "deterministic": True}],
        "model_repository": str(tmp_path / "repository"),
        "tensor_parallel": tensor_parallel,
        "port": 0,
        "grpc_port": None,
    }
    zoo.checkpoint("llama", tmp_path / "repository" / "two", num_labels=2)
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(settings))
    with serving("--config", tmp_path / "server.yaml", **{KEYS_VARIABLE: f"admin ops {KEY}"}) as (launch, url):
        first = score(url)
        assert first.rewards == pytest.approx(wanted["old"], abs=1e-4)
        for source, says in (("two", "attribute_names"), ("nowhere", "no folder")):
            refused = ask(url, "load", source)
            assert refused.status_code == 400 and says in refused.text, refused.text
            assert score(url).weights_version == first.weights_version

        replies: list[Scores] = []
        is_over = threading.Event()

        def go_on() -> None:
            while not is_over.is_set():
                replies.append(score(url))

        asking = threading.Thread(target=go_on)
        asking.start()
        try:
            loaded = ask(url, "load", "new")
            assert loaded.status_code == 200, (loaded.text, launch.output())
            began = len(replies)
            while len(replies) < began + 3 and asking.is_alive():
                is_over.wait(0.05)
        finally:
            is_over.set()
            asking.join(120)
        by_version = {first.weights_version: wanted["old"]}
        last = replies[-1].weights_version
        assert last != first.weights_version
        by_version[last] = wanted["new"]
        for reply in replies:
            assert np.asarray(reply.rewards) == pytest.approx(by_version[reply.weights_version], abs=1e-4)

        assert ask(url, "unload").status_code == 200
        assert httpx.get(url + "/v2/models/reward_model/ready", headers=bearer()).status_code == 400
        assert ask(url, "load").status_code == 200  # where it came from: the new one
        assert score(url).weights_version == last
        ends_well(launch)


def score(url: str) -> Scores:
    with RewardClient(url) as client:
        return client.score(tokens=ROWS)


def bearer() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


def ask(url: str, what: str, source: str | None = None) -> httpx.Response:
    asked = {} if source is None else {"parameters": {"model": source}}
    url = f"{url}/v2/repository/models/reward_model/{what}"
    return httpx.post(url, json=asked, headers=bearer(), timeout=120)


def ends_well(launch: Launch) -> None:
    launch.rank(0).terminate()
    assert launch.torchrun.wait(120) == 0, launch.output()
    assert "Traceback" not in launch.output(), launch.output()
