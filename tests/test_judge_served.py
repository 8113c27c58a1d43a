"""Judges over the wire: scores equal separate forwards of transformers, by every client of reward models."""

import io
import logging
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import chats
import judged
import served
import zoo
from guerdon.adapters.trl import reward_function as RewardFunction
from guerdon.cli.doctor import examine_server
from guerdon.client import RewardClient, Scores
from guerdon.errors import GuerdonError
from guerdon.kinds.compare import bradley_terry, make_pairs
from guerdon.server.runtime import RunningServer
from guerdon.settings.access import KEYS_VARIABLE
from guerdon.settings.config import ComponentConfig, JudgeConfig, RewardConfig
from judged import (
    COMPARED,
    COMPARED_LABELS,
    COMPARED_WEIGHTS,
    CRITERIA,
    PROMPTS,
    RESPONSES,
    TEXTS,
    wanted,
    wanted_verdict,
)
from served import Serve
from server.helpers import wait_until
from tiers import asked, of_each_kind, slow_but

NAMES = [*zoo.DECODERS, *zoo.LANGUAGE_MODELS]
COMPONENTS = (*CRITERIA, "other_mass", "label_entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judges")


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve, request: pytest.FixtureRequest) -> RunningServer:
    """A judge of each architecture that is tried; others with a real template, without one, of the likeliest label."""
    rubric = judged.write(folder)
    referring = judged.write(folder, judged.RUBRIC.replace("{prompt}", "{reference}"), "referring.yaml")

    def judge(name: str, of: str = "", rubric: str = rubric, bound: float = 1.0, **settings: str) -> JudgeConfig:
        model = str(folder / (of or name))
        return JudgeConfig(model=model, name=name, rubric=rubric, max_other_mass=bound, **settings)  # type: ignore[arg-type]

    names = asked(request, NAMES, ["llama", "gpt2"])
    for name in names:
        zoo.tokenizer(zoo.language_model(name, folder / name))
    zoo.tokenizer(zoo.language_model("llama", folder / "raw"), chat_template=None)
    chats.save("chatml", zoo.language_model("llama", folder / "chatml", vocab_size=chats.VOCAB_SIZE))
    models = [*map(judge, names), judge("raw"), judge("chatml"), judge("likeliest", "llama", verdict="likeliest")]
    models += [judge("strict", "llama", bound=0.5), judge("referring", "llama", referring)]
    total = RewardConfig(name="total", components=[ComponentConfig("llama", 2.0), ComponentConfig("gpt2", -1.0)])
    return serve(*models, grpc_port=0, rewards=[total])


@pytest.mark.parametrize("name", [*of_each_kind(NAMES), "raw", "chatml"])
def test_scores_are_those_of_separate_forwards(name: str, server: RunningServer, folder: Path) -> None:
    want = wanted(folder / name)
    with RewardClient(server.http_url, name) as client:
        scores = client.score(texts=TEXTS, prompts=PROMPTS)
    assert scores.attribute_names == COMPONENTS
    assert scores.attributes is not None
    np.testing.assert_allclose(scores.rewards, want["rewards"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.attributes[:, :-2], want["values"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.attributes[:, -2], want["other"].max(-1), rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.attributes[:, -1], want["entropy"].max(-1), rtol=0, atol=1e-5)


def test_the_likeliest_label_may_decide(server: RunningServer, folder: Path) -> None:
    want = wanted(folder / "llama")
    with RewardClient(server.grpc_url, "likeliest") as client:
        scores = client.score(texts=TEXTS, prompts=PROMPTS)
    assert scores.attributes is not None
    np.testing.assert_array_equal(scores.attributes[:, :-2], want["likeliest"])
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
    logging.getLogger("guerdon.server.metrics").addHandler(handler)
    try:
        with served.running(judge) as running:
            with RewardClient(running.http_url, "judge") as client:
                for _ in range(3):
                    assert np.isnan(client.score(texts=TEXTS, prompts=PROMPTS).rewards).all()
            (found,) = (one for one in examine_server(running.http_url) if "without a score" in one.text)
    finally:
        logging.getLogger("guerdon.server.metrics").removeHandler(handler)
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
    with served.running(judge) as running:
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
    with (
        served.running(judge, model_repository=str(tmp_path)) as running,
        RewardClient(running.http_url, "judge") as client,
    ):
        first = client.score(texts=TEXTS, prompts=PROMPTS)
        np.testing.assert_allclose(first.rewards, wanted(old)["rewards"], rtol=0, atol=1e-5)
        answer = httpx.post(
            f"{running.http_url}/v2/repository/models/judge/load",
            json={"parameters": {"model": "new"}},
            headers={"Authorization": "Bearer an-admins-key-of-some-length"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        second = client.score(texts=TEXTS, prompts=PROMPTS)
        np.testing.assert_allclose(second.rewards, wanted(new)["rewards"], rtol=0, atol=1e-5)
        assert second.weights_version != first.weights_version


COMPARING_NAMES = ("llama", "gpt2", "gemma3", "mixtral", "mamba", "falcon-h1")
BASE = "mixtral"
"""Its two orders agree about half of the pairs."""
COMPARING_COMPONENTS = (*COMPARED, "other_mass", "disagreed", "label_entropy")
PROMPT = "two and two? "
COMPARING_RESPONSES = ["the answer is {4}", "that is no number I can name", "red", "4"]


@pytest.fixture(scope="module")
def comparing_server(folder: Path, serve: Serve) -> RunningServer:
    """Judges of several architectures, and the other schedules, scores and bounds with one of them."""

    def judge(name: str, of: str = "", old: str = "", new: str = "", bound: float = 1.0, **more: Any) -> JudgeConfig:
        rubric = judged.write(folder, judged.COMPARING.replace(old, new), f"{name}.yaml")
        model = str(folder / (of or name))
        return JudgeConfig(model=model, name=name, rubric=rubric, max_other_mass=bound, **more)

    for name in COMPARING_NAMES:
        zoo.tokenizer(zoo.language_model(name, folder / name))
    zoo.tokenizer(zoo.language_model("llama", folder / "raw"), chat_template=None)
    models = [*map(judge, COMPARING_NAMES), judge("raw"), judge("circular", BASE, "round_robin", "circular")]
    models += [judge("reference", BASE, "round_robin", "reference"), judge("strengths", BASE, "wins", "bradley_terry")]
    models += [judge("likeliest", BASE, verdict="likeliest"), judge("strict", BASE, bound=0.5)]
    models += [judge("principled", BASE, "Q: {prompt}", "{reference} Q: {prompt}")]
    models += [judge("three", "llama", "{h: 1, p: 0}", "{y: 1, n: 0, m: 0.5}")]
    total = RewardConfig(name="total", components=[ComponentConfig(BASE, 2.0), ComponentConfig("gpt2", -1.0)])
    return serve(*models, grpc_port=0, rewards=[total])


def table(folder: Path, **labels: float) -> dict[tuple[int, int], tuple[np.ndarray, ...]]:
    """What plain forwards say of each pair: verdicts, disagreements, other mass and entropy, each `[K]`."""
    return {
        (i, j): wanted_verdict(
            folder, PROMPT, COMPARING_RESPONSES[i], COMPARING_RESPONSES[j], labels or COMPARED_LABELS
        )
        for i, j in combinations(range(len(COMPARING_RESPONSES)), 2)
    }


def mean_wins(verdicts: dict[tuple[int, int], tuple[np.ndarray, ...]], number: int) -> np.ndarray:
    """Each response's share of wins, `[N,K]`."""
    wins, counts = np.zeros((number, len(COMPARED))), np.zeros((number, 1))
    for (i, j), (verdict, *_) in verdicts.items():
        wins[i] += verdict
        wins[j] += 1 - verdict
        counts[[i, j]] += 1
    return wins / counts


def ask(server: RunningServer, name: str, responses: list[str] = COMPARING_RESPONSES, **more: Any) -> Scores:
    with RewardClient(more.pop("url", server.http_url), name) as client:
        texts = [PROMPT + text for text in responses]
        return client.score(texts=texts, prompts=[PROMPT] * len(responses), **more)


@pytest.mark.parametrize("name", [*slow_but(("llama",), COMPARING_NAMES), "raw", "three"])
def test_comparing_scores_are_those_of_separate_forwards(
    name: str, comparing_server: RunningServer, folder: Path
) -> None:
    want = table(folder / "llama", y=1.0, n=0.0, m=0.5) if name == "three" else table(folder / name)
    scores = ask(comparing_server, name)
    assert scores.attribute_names == COMPARING_COMPONENTS and scores.attributes is not None
    wins = mean_wins(want, 4)
    np.testing.assert_allclose(scores.attributes[:, :2], wins, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.rewards, wins @ COMPARED_WEIGHTS, rtol=0, atol=1e-5)
    own = [[value for pair, value in want.items() if i in pair] for i in range(4)]
    for column, row in ((2, 2), (4, 3)):
        most = [max(value[row].max() for value in values) for values in own]
        np.testing.assert_allclose(scores.attributes[:, column], most, rtol=0, atol=1e-5)
    shares = [np.mean([value[1] for value in values]) for values in own]
    np.testing.assert_allclose(scores.attributes[:, 3], shares, atol=1e-6)


def test_a_pairs_verdict_is_swapped_with_its_responses(comparing_server: RunningServer) -> None:
    for i, j in combinations(range(4), 2):
        pair = [COMPARING_RESPONSES[i], COMPARING_RESPONSES[j]]
        straight, swapped = ask(comparing_server, BASE, pair), ask(comparing_server, BASE, pair[::-1])
        assert straight.attributes is not None and swapped.attributes is not None
        np.testing.assert_allclose(swapped.attributes[::-1], straight.attributes, rtol=0, atol=1e-6)
        np.testing.assert_allclose(straight.attributes[:, :2].sum(0), [1, 1], atol=1e-6)


@pytest.mark.parametrize("name", [BASE, "three", "circular", "strengths", "likeliest", "reference"])
def test_a_permuted_group_gets_permuted_rewards(name: str, comparing_server: RunningServer) -> None:
    order = [2, 0, 3, 1]
    straight = ask(comparing_server, name, labels=["4"] * 4)
    mixed = ask(comparing_server, name, [COMPARING_RESPONSES[i] for i in order], labels=["4"] * 4)
    np.testing.assert_allclose(mixed.rewards, straight.rewards[order], rtol=0, atol=1e-5)


def test_every_schedule_and_score_follows_from_the_verdicts(comparing_server: RunningServer, folder: Path) -> None:
    verdicts = {pair: one[0] for pair, one in table(folder / BASE).items()}
    assert {*(np.array([*verdicts.values()]) == 0.5).ravel()} == {True, False}
    pairs = np.array([*verdicts])
    want = np.stack([bradley_terry(pairs, column, 4) for column in np.array([*verdicts.values()]).T], -1)
    np.testing.assert_allclose(ask(comparing_server, "strengths").attributes[:, :2], want, rtol=0, atol=1e-4)  # type: ignore[index]
    circle = {
        (min(i, j), max(i, j)): table(folder / BASE)[min(i, j), max(i, j)]
        for i, j in make_pairs("circular", COMPARING_RESPONSES)
    }
    assert len(circle) == 4
    np.testing.assert_allclose(
        ask(comparing_server, "circular").attributes[:, :2],
        mean_wins(circle, 4),
        rtol=0,
        atol=1e-5,  # type: ignore[index]
    )
    references = ["4", "red", "4", "5"]
    want = np.stack(
        [wanted_verdict(folder / BASE, PROMPT, *pair)[0] for pair in zip(COMPARING_RESPONSES, references, strict=True)]
    )
    scores = ask(comparing_server, "reference", labels=references)
    np.testing.assert_allclose(scores.attributes[:, :2], want, rtol=0, atol=1e-5)  # type: ignore[index]
    assert {*(want == 0.5).ravel()} == {True, False}


def test_conversations_forms_sums_and_grpc_give_the_same_rewards(comparing_server: RunningServer) -> None:
    want = ask(comparing_server, BASE).rewards
    np.testing.assert_allclose(ask(comparing_server, BASE, url=comparing_server.grpc_url).rewards, want, atol=1e-6)
    messages = [
        [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text}] for text in COMPARING_RESPONSES
    ]
    with RewardClient(comparing_server.http_url, BASE) as client:
        np.testing.assert_allclose(client.score(messages=messages).rewards, want, atol=1e-6)
    body = {"model": BASE, "text_1": PROMPT, "text_2": COMPARING_RESPONSES, "use_activation": False}
    rows = httpx.post(f"{comparing_server.http_url}/score", json=body).raise_for_status().json()["data"]
    np.testing.assert_allclose([row["score"] for row in rows], want, atol=1e-6)
    assert {*rows[0]["components"]} == {*COMPARING_COMPONENTS}
    body = {"model": BASE, "query": [PROMPT + text for text in COMPARING_RESPONSES], "prompts": [PROMPT] * 4}
    reply = httpx.post(f"{comparing_server.http_url}/get_reward", json=body).raise_for_status().json()
    np.testing.assert_allclose(reply["rewards"], want, atol=1e-6)
    total = 2 * want - ask(comparing_server, "gpt2").rewards
    np.testing.assert_allclose(ask(comparing_server, "total").rewards, total, atol=3e-6)


def test_trl_gets_the_rewards_of_its_groups(comparing_server: RunningServer) -> None:
    """Two prompts, whose completions come mixed."""
    want, other = ask(comparing_server, BASE).rewards, COMPARING_RESPONSES[:2]
    prompts = [PROMPT, "a colour? ", PROMPT, PROMPT, "a colour? ", PROMPT]
    completions = [
        COMPARING_RESPONSES[0],
        other[0],
        COMPARING_RESPONSES[1],
        COMPARING_RESPONSES[2],
        other[1],
        COMPARING_RESPONSES[3],
    ]
    made = RewardFunction(comparing_server.http_url, BASE)(prompts, completions)
    assert [made[i] for i in (0, 2, 3, 5)] == pytest.approx(want.tolist(), abs=1e-6)
    assert made[1] is not None and made[4] is not None
    assert made[1] + made[4] == pytest.approx(float(COMPARED_WEIGHTS.sum()), abs=1e-6)


def test_what_cannot_be_compared_fails_alone(comparing_server: RunningServer) -> None:
    want = ask(comparing_server, BASE)
    scores = ask(comparing_server, BASE, [*COMPARING_RESPONSES[:2], "red" * 200, *COMPARING_RESPONSES[2:]])
    np.testing.assert_allclose(scores.rewards[[0, 1, 3, 4]], want.rewards, atol=1e-6)
    assert np.isnan(scores.rewards[2])
    assert re.search(r"compared with sample \d: .* mixtral takes at most 256; shorten it", scores.errors[2] or "")
    groups = ask(comparing_server, BASE, groups=[1, 1, 2, 3])
    assert np.isnan(groups.rewards).tolist() == [False, False, True, True]
    assert "this sample is alone" in (groups.errors[3] or "")
    with pytest.raises(GuerdonError, match="reference compares with a reference, and this sample's label was not sent"):
        ask(comparing_server, "reference").raise_for_failed()
    strict = ask(comparing_server, "strict")
    assert np.isnan(strict.rewards).all()
    assert re.search(r"compared with sample \d: \w+: 0\.\d+ of the probability is on tokens", strict.errors[0] or "")


def compare(server: RunningServer, responses: list[Any], **more: Any) -> httpx.Response:
    said = [{"output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]} for text in responses]
    body = {"conversation_history": [{"role": "user", "content": PROMPT}], "response_objs": said, **more}
    return httpx.post(f"{server.http_url}/compare", json=body)


def test_gyms_form_gives_the_rewards_and_their_verdicts(comparing_server: RunningServer, folder: Path) -> None:
    want = ask(comparing_server, BASE)
    told = compare(comparing_server, COMPARING_RESPONSES, model=BASE).raise_for_status().json()
    np.testing.assert_allclose(told["rewards"], want.rewards, rtol=0, atol=1e-6)
    verdicts = table(folder / BASE)
    assert len(told["comparison_results"]) == 12
    for one in told["comparison_results"]:
        verdict, disagreed, *_ = verdicts[one["response_i"], one["response_j"]]
        k = one["judge_idx"]
        assert (one["criterion"], one["disagreed"]) == ([*COMPARED][k], disagreed[k])
        assert one["score_1"] == pytest.approx(verdict[k], abs=1e-5)
        assert one["score_1"] + one["score_2"] == pytest.approx(1)
        assert one["ranking"] == pytest.approx(6 - 5 * one["score_1"])
    metrics = told["metrics"]
    assert metrics["mean_individual_score"] == pytest.approx(0.5)
    assert metrics["disagreement_rate"] == np.mean([one["disagreed"] for one in told["comparison_results"]])
    # Without a name, the first judge that compares answers; a response without a text is compared as an empty one.
    first = compare(comparing_server, ["", *COMPARING_RESPONSES[:2]]).raise_for_status().json()["rewards"]
    np.testing.assert_allclose(
        first, ask(comparing_server, COMPARING_NAMES[0], ["", *COMPARING_RESPONSES[:2]]).rewards, atol=1e-6
    )


def test_gyms_form_never_makes_a_reward_up(comparing_server: RunningServer) -> None:
    for responses, model, status, message in (
        ([*COMPARING_RESPONSES, "red" * 200], BASE, 400, "row 4: compared with sample"),
        (COMPARING_RESPONSES[:1], BASE, 400, "this sample is alone"),
        (COMPARING_RESPONSES, "strict", 500, "of the probability is on tokens that are no labels"),
        (COMPARING_RESPONSES, "total", 400, "total does not compare; name a judge whose rubric has `compare`"),
        (
            COMPARING_RESPONSES,
            "reference",
            400,
            "the template of reference has a {reference}, which is the principle here",
        ),
    ):
        answer = compare(comparing_server, responses, model=model)
        assert answer.status_code == status and message in answer.json()["error"], answer.text
    answer = compare(comparing_server, COMPARING_RESPONSES, model="reference", principle="Be brief.")
    assert answer.status_code == 400 and "compares each response with its reference, not with" in answer.json()["error"]
    answer = compare(comparing_server, COMPARING_RESPONSES, model=BASE, principle="Be brief.")
    assert answer.status_code == 400 and "mixtral has no place for a principle" in answer.json()["error"]


def test_a_principle_stands_for_the_reference(comparing_server: RunningServer) -> None:
    want = ask(comparing_server, "principled", labels=["Be brief."] * 4).rewards
    told = (
        compare(comparing_server, COMPARING_RESPONSES, model="principled", principle="Be brief.")
        .raise_for_status()
        .json()
    )
    np.testing.assert_allclose(told["rewards"], want, atol=1e-6)
    assert np.abs(want - ask(comparing_server, BASE).rewards).max() > 1e-4


def test_comparisons_and_disagreements_are_counted(comparing_server: RunningServer, folder: Path) -> None:
    def counted(metric: str) -> dict[str, float]:
        text = httpx.get(f"{comparing_server.http_url}/metrics").text
        rows = re.findall(rf'{metric}_total{{criterion="(\w+)",model="mixtral"}} (\S+)', text)
        return {criterion: float(value) for criterion, value in rows}

    before = [counted(f"guerdon_judge_{what}") for what in ("comparisons", "disagreements")]
    ask(comparing_server, "mixtral")
    after = [counted(f"guerdon_judge_{what}") for what in ("comparisons", "disagreements")]
    disagreed = sum(one[1].astype(int) for one in table(folder / "mixtral").values())
    for k, name in enumerate(COMPARED):
        assert after[0][name] - before[0].get(name, 0) == 6
        assert after[1][name] - before[1].get(name, 0) == disagreed[k]
