"""Judges over the wire: scores equal separate forwards of transformers, by every client of reward models."""

import io
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import chats
import judged
import served
import zoo
from guerdon.cli.doctor import examine_server
from guerdon.client import RewardClient
from guerdon.errors import GuerdonError
from guerdon.server.runtime import RunningServer
from guerdon.settings.access import KEYS_VARIABLE
from guerdon.settings.config import ComponentConfig, JudgeConfig, RewardConfig, ServerConfig
from judged import CRITERIA, PROMPTS, RESPONSES, TEXTS, wanted
from server.helpers import wait_until

NAMES = [*zoo.DECODERS, *zoo.LANGUAGE_MODELS]
COMPONENTS = (*CRITERIA, "other_mass")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("judges")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """A judge of every architecture; others with a real family's template, without one, and of the likeliest label."""
    rubric = judged.write(folder)
    referring = judged.write(folder, judged.RUBRIC.replace("{prompt}", "{reference}"), "referring.yaml")

    def judge(name: str, of: str = "", rubric: str = rubric, bound: float = 1.0, **settings: str) -> JudgeConfig:
        model = str(folder / (of or name))
        return JudgeConfig(model=model, name=name, rubric=rubric, max_other_mass=bound, **settings)  # type: ignore[arg-type]

    for name in NAMES:
        zoo.tokenizer(zoo.language_model(name, folder / name))
    zoo.tokenizer(zoo.language_model("llama", folder / "raw"), chat_template=None)
    chats.save("chatml", zoo.language_model("llama", folder / "chatml", vocab_size=chats.VOCAB_SIZE))
    models = [*map(judge, NAMES), judge("raw"), judge("chatml"), judge("likeliest", "llama", verdict="likeliest")]
    models += [judge("strict", "llama", bound=0.5), judge("referring", "llama", referring)]
    total = RewardConfig(name="total", components=[ComponentConfig("llama", 2.0), ComponentConfig("gpt2", -1.0)])
    config = ServerConfig(port=0, grpc_port=0, models=[*models], rewards=[total])
    with served.running(config) as running:
        yield running


@pytest.mark.parametrize("name", [*NAMES, "raw", "chatml"])
def test_scores_are_those_of_separate_forwards(name: str, server: RunningServer, folder: Path) -> None:
    want = wanted(folder / name)
    with RewardClient(server.http_url, name) as client:
        scores = client.score(texts=TEXTS, prompts=PROMPTS)
    assert scores.attribute_names == COMPONENTS
    assert scores.attributes is not None
    np.testing.assert_allclose(scores.rewards, want["rewards"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.attributes[:, :-1], want["values"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.attributes[:, -1], want["other"].max(-1), rtol=0, atol=1e-5)


def test_the_likeliest_label_may_decide(server: RunningServer, folder: Path) -> None:
    want = wanted(folder / "llama")
    with RewardClient(server.grpc_url, "likeliest") as client:
        scores = client.score(texts=TEXTS, prompts=PROMPTS)
    assert scores.attributes is not None
    np.testing.assert_array_equal(scores.attributes[:, :-1], want["likeliest"])
    np.testing.assert_allclose(scores.rewards, want["likeliest_rewards"])


def test_many_samples_get_the_scores_of_few(server: RunningServer, folder: Path) -> None:
    """So many answers are put together in a thread."""
    want = wanted(folder / "llama")["rewards"]
    with RewardClient(server.http_url, "llama") as client:
        scores = client.score(texts=TEXTS * 200, prompts=PROMPTS * 200)
    np.testing.assert_allclose(scores.rewards, np.tile(want, 200), rtol=0, atol=1e-5)


def test_conversations_prompts_and_forms_give_the_same_rewards(server: RunningServer, folder: Path) -> None:
    want = wanted(folder / "llama")["rewards"]
    pairs = [*zip(PROMPTS, RESPONSES, strict=True)]
    messages = [[{"role": "user", "content": p}, {"role": "assistant", "content": r}] for p, r in pairs]
    with RewardClient(server.http_url, "llama") as client:
        np.testing.assert_allclose(client.score(messages=messages).rewards, want, atol=1e-5)
    with httpx.Client(base_url=server.http_url) as http:
        body = {"model": "llama", "text_1": PROMPTS, "text_2": RESPONSES, "use_activation": False}
        scored = http.post("/score", json=body).raise_for_status().json()["data"]
        np.testing.assert_allclose([row["score"] for row in scored], want, atol=1e-5)
        assert {*scored[0]["components"]} == {*COMPONENTS}
        body = {"model": "llama", "messages": messages[0], "use_activation": False}
        (row,) = http.post("/classify", json=body).raise_for_status().json()["data"]
        np.testing.assert_allclose(row["probs"], want[:1], atol=1e-5)
        assert row["num_classes"] == 1 and {*row["components"]} == {*COMPONENTS}
        body = {"model": "llama", "query": TEXTS[:1], "prompts": PROMPTS[:1]}
        reply = http.post("/get_reward", json=body).raise_for_status().json()
        np.testing.assert_allclose(reply["rewards"], want[:1], atol=1e-5)
        assert {*reply["extra_logs"]} >= {*COMPONENTS}


def test_a_sum_has_judges_as_components(server: RunningServer, folder: Path) -> None:
    want = 2 * wanted(folder / "llama")["rewards"] - wanted(folder / "gpt2")["rewards"]
    with RewardClient(server.http_url, "total") as client:
        scores = client.score(texts=TEXTS, prompts=PROMPTS)
    np.testing.assert_allclose(scores.rewards, want, atol=3e-5)
    assert scores.attribute_names == ("llama", "gpt2")


def test_several_messages_before_the_response_are_told_apart(server: RunningServer, folder: Path) -> None:
    said = [("user", "One?"), ("assistant", "1."), ("user", "Two?"), ("assistant", "2.")]
    (want,) = wanted(folder / "llama", ["user: One?\n\nassistant: 1.\n\nuser: Two?"], ["2."])["rewards"]
    with RewardClient(server.http_url, "llama") as client:
        scores = client.score(messages=[[{"role": role, "content": text} for role, text in said]])
    np.testing.assert_allclose(scores.rewards, [want], atol=1e-5)


def test_a_reference_is_read_or_missed(server: RunningServer, folder: Path) -> None:
    want = wanted(folder / "llama", ["4", '{"any": ["é"]}'], RESPONSES[:2])["rewards"]
    with RewardClient(server.http_url, "referring") as client:
        scores = client.score(texts=RESPONSES[:2], labels=["4", {"any": ["é"]}])
        np.testing.assert_allclose(scores.rewards, want, atol=1e-5)
        with pytest.raises(GuerdonError, match="this sample's label was not sent"):
            client.score(texts=RESPONSES[:2]).raise_for_failed()


def test_the_mass_of_no_label_is_told_and_fails_a_sample_above_the_bound(server: RunningServer, folder: Path) -> None:
    worst = wanted(folder / "llama")["other"]
    with RewardClient(server.http_url, "strict") as client:
        scores = client.score(texts=TEXTS, prompts=PROMPTS)
    assert np.isnan(scores.rewards).all()
    for error, other in zip(scores.errors, worst, strict=True):
        name = [*CRITERIA][int(other.argmax())]
        assert re.search(rf"{name}: 0\.\d+ of the probability is on tokens that are no labels, .* 0\.5 may be", error)
    text = httpx.get(f"{server.http_url}/metrics").text
    found = re.search(r'guerdon_judge_other_mass_sum\{criterion="right",model="strict"\} (\S+)', text)
    assert found is not None
    np.testing.assert_allclose(float(found[1]), worst[:, 0].sum(), atol=1e-4)


def test_a_batch_without_a_score_is_logged_once_and_counted_by_doctor(folder: Path) -> None:
    judge = JudgeConfig(model=str(folder / "llama"), rubric=judged.write(folder), max_other_mass=0.0)
    logged = io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger("guerdon.server.failure_log").addHandler(handler)
    try:
        with served.running(ServerConfig(port=0, grpc_port=None, models=[judge])) as running:
            with RewardClient(running.http_url, "judge") as client:
                for _ in range(3):
                    assert np.isnan(client.score(texts=TEXTS, prompts=PROMPTS).rewards).all()
            (found,) = (one for one in examine_server(running.http_url) if "without a score" in one.text)
    finally:
        logging.getLogger("guerdon.server.failure_log").removeHandler(handler)
    assert logged.getvalue().startswith("judge: 3 of 3 samples have no score (NoVerdict 3)")
    assert logged.getvalue().count("\n") == 1 and "colour" not in logged.getvalue()
    assert (found.level, found.help != "") == ("problem", True)
    assert found.text == ("model judge since the start: 9 of 9 samples without a score, 0 of 3 requests failed")


def test_a_failed_sample_leaves_the_others_their_scores(server: RunningServer, folder: Path) -> None:
    want = wanted(folder / "llama")["rewards"]
    with RewardClient(server.http_url, "llama") as client:
        scores = client.score(texts=[*TEXTS[:2], "red" * 200], prompts=[PROMPTS[0], "other", ""])
        np.testing.assert_allclose(scores.rewards[:1], want[:1], atol=1e-5)
        assert np.isnan(scores.rewards[1:]).all()
        assert "does not begin with its prompt, 'other'" in scores.errors[1]
        assert "llama takes at most 256; shorten it" in scores.errors[2] and "truncation" not in scores.errors[2]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"texts": TEXTS}, "the template of llama has a prompt, and this text's was not sent"),
        ({"tokens": [[5, 6]]}, "model 'llama' takes no input 'tokens'; it takes sentences, messages"),
        ({"messages": [[{"role": "user", "content": "Hi"}]]}, "the last message is the user's"),
    ],
)
def test_what_a_judge_does_not_read_is_refused(samples: dict[str, Any], message: str, server: RunningServer) -> None:
    with RewardClient(server.http_url, "llama") as client, pytest.raises(GuerdonError, match=message):
        client.score(**samples).raise_for_failed()


def test_a_share_of_the_answers_is_checked_by_the_plain_forward(folder: Path, tmp_path: Path) -> None:
    model = zoo.tokenizer(zoo.language_model("llama", tmp_path / "llama"))
    judge = JudgeConfig(model=str(model), rubric=judged.write(tmp_path), max_other_mass=1.0, recheck_share=1.0)
    with served.running(ServerConfig(port=0, grpc_port=None, models=[judge])) as running:
        with RewardClient(running.http_url, "judge") as client:
            client.score(texts=TEXTS, prompts=PROMPTS).raise_for_failed()

        def is_checked() -> bool:
            text = httpx.get(f"{running.http_url}/metrics").text
            return 'guerdon_recheck_sequences_total{model="judge",outcome="same"} 9.0' in text

        wait_until(is_checked)


def test_another_checkpoint_is_judged_with_after_a_swap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rubric stays, and its labels are looked up by the new tokenizer."""
    monkeypatch.setenv(KEYS_VARIABLE, "admin ops an-admins-key-of-some-length")
    monkeypatch.setenv("GUERDON_API_KEY", "an-admins-key-of-some-length")
    old, new = (
        zoo.tokenizer(zoo.language_model("llama", tmp_path / name, seed=seed))
        for seed, name in enumerate(("old", "new"))
    )
    judge = JudgeConfig(model=str(old), rubric=judged.write(tmp_path), max_other_mass=1.0)
    config = ServerConfig(port=0, grpc_port=None, models=[judge], model_repository=str(tmp_path))
    with served.running(config) as running, RewardClient(running.http_url, "judge") as client:
        first = client.score(texts=TEXTS, prompts=PROMPTS)
        np.testing.assert_allclose(first.rewards, wanted(old)["rewards"], rtol=0, atol=1e-5)
        answer = httpx.post(
            f"{running.http_url}/v2/repository/models/judge/load",
            json={"parameters": {"model": "new"}},
            headers={"Authorization": "Bearer an-admins-key-of-some-length"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        second = client.score(texts=TEXTS, prompts=PROMPTS)
        np.testing.assert_allclose(second.rewards, wanted(new)["rewards"], rtol=0, atol=1e-5)
        assert second.weights_version != first.weights_version
