"""Judges that compare, over the wire: verdicts equal separate forwards of transformers, in both orders."""

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import judged
import served
import zoo
from guerdon.adapters.trl import reward_function as RewardFunction
from guerdon.client import RewardClient, Scores
from guerdon.comparisons import bradley_terry, make_pairs
from guerdon.errors import GuerdonError
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, JudgeConfig, RewardConfig, ServerConfig
from judged import COMPARED, COMPARED_LABELS, COMPARED_WEIGHTS, wanted_verdict

NAMES = ("llama", "gpt2", "gemma3", "mixtral", "mamba", "falcon-h1")
BASE = "mixtral"
"""Its two orders agree about half of the pairs."""
COMPONENTS = (*COMPARED, "other_mass", "disagreed")
PROMPT = "two and two? "
RESPONSES = ["the answer is {4}", "that is no number I can name", "red", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("judges")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    """Judges of several architectures, and the other schedules, scores and bounds with one of them."""

    def judge(name: str, of: str = "", old: str = "", new: str = "", bound: float = 1.0, **more: Any) -> JudgeConfig:
        rubric = judged.write(folder, judged.COMPARING.replace(old, new), f"{name}.yaml")
        model = str(folder / (of or name))
        return JudgeConfig(model=model, name=name, rubric=rubric, max_other_mass=bound, **more)

    for name in NAMES:
        zoo.tokenizer(zoo.language_model(name, folder / name))
    zoo.tokenizer(zoo.language_model("llama", folder / "raw"), chat_template=None)
    models = [*map(judge, NAMES), judge("raw"), judge("circular", BASE, "round_robin", "circular")]
    models += [judge("reference", BASE, "round_robin", "reference"), judge("strengths", BASE, "wins", "bradley_terry")]
    models += [judge("likeliest", BASE, verdict="likeliest"), judge("strict", BASE, bound=0.5)]
    models += [judge("principled", BASE, "Q: {prompt}", "{reference} Q: {prompt}")]
    models += [judge("three", "llama", "{h: 1, p: 0}", "{y: 1, n: 0, m: 0.5}")]
    total = RewardConfig(name="total", components=[ComponentConfig(BASE, 2.0), ComponentConfig("gpt2", -1.0)])
    with served.running(ServerConfig(port=0, grpc_port=0, models=[*models], rewards=[total])) as running:
        yield running


def table(folder: Path, **labels: float) -> dict[tuple[int, int], tuple[np.ndarray, ...]]:
    """What plain forwards say of each pair: verdicts, disagreements and other mass, each `[K]`."""
    return {
        (i, j): wanted_verdict(folder, PROMPT, RESPONSES[i], RESPONSES[j], labels or COMPARED_LABELS)
        for i, j in combinations(range(len(RESPONSES)), 2)
    }


def mean_wins(verdicts: dict[tuple[int, int], tuple[np.ndarray, ...]], number: int) -> np.ndarray:
    """Each response's share of wins, `[N,K]`."""
    wins, counts = np.zeros((number, len(COMPARED))), np.zeros((number, 1))
    for (i, j), (verdict, *_) in verdicts.items():
        wins[i] += verdict
        wins[j] += 1 - verdict
        counts[[i, j]] += 1
    return wins / counts


def ask(server: RunningServer, name: str, responses: list[str] = RESPONSES, **more: Any) -> Scores:
    with RewardClient(more.pop("url", server.http_url), name) as client:
        texts = [PROMPT + text for text in responses]
        return client.score(texts=texts, prompts=[PROMPT] * len(responses), **more)


@pytest.mark.parametrize("name", [*NAMES, "raw", "three"])
def test_scores_are_those_of_separate_forwards(name: str, server: RunningServer, folder: Path) -> None:
    want = table(folder / "llama", y=1.0, n=0.0, m=0.5) if name == "three" else table(folder / name)
    scores = ask(server, name)
    assert scores.attribute_names == COMPONENTS and scores.attributes is not None
    wins = mean_wins(want, 4)
    np.testing.assert_allclose(scores.attributes[:, :2], wins, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.rewards, wins @ COMPARED_WEIGHTS, rtol=0, atol=1e-5)
    own = [[value for pair, value in want.items() if i in pair] for i in range(4)]
    masses = [max(other.max() for *_, other in values) for values in own]
    np.testing.assert_allclose(scores.attributes[:, 2], masses, rtol=0, atol=1e-5)
    shares = [np.mean([disagreed for _, disagreed, _ in values]) for values in own]
    np.testing.assert_allclose(scores.attributes[:, 3], shares, atol=1e-6)


def test_a_pairs_verdict_is_swapped_with_its_responses(server: RunningServer) -> None:
    for i, j in combinations(range(4), 2):
        pair = [RESPONSES[i], RESPONSES[j]]
        straight, swapped = ask(server, BASE, pair), ask(server, BASE, pair[::-1])
        assert straight.attributes is not None and swapped.attributes is not None
        np.testing.assert_allclose(swapped.attributes[::-1], straight.attributes, rtol=0, atol=1e-6)
        np.testing.assert_allclose(straight.attributes[:, :2].sum(0), [1, 1], atol=1e-6)


@pytest.mark.parametrize("name", [BASE, "three", "circular", "strengths", "likeliest", "reference"])
def test_a_permuted_group_gets_permuted_rewards(name: str, server: RunningServer) -> None:
    order = [2, 0, 3, 1]
    straight = ask(server, name, labels=["4"] * 4)
    mixed = ask(server, name, [RESPONSES[i] for i in order], labels=["4"] * 4)
    np.testing.assert_allclose(mixed.rewards, straight.rewards[order], rtol=0, atol=1e-5)


def test_every_schedule_and_score_follows_from_the_verdicts(server: RunningServer, folder: Path) -> None:
    verdicts = {pair: one[0] for pair, one in table(folder / BASE).items()}
    assert {*(np.array([*verdicts.values()]) == 0.5).ravel()} == {True, False}
    pairs = np.array([*verdicts])
    want = np.stack([bradley_terry(pairs, column, 4) for column in np.array([*verdicts.values()]).T], -1)
    np.testing.assert_allclose(ask(server, "strengths").attributes[:, :2], want, rtol=0, atol=1e-4)  # type: ignore[index]
    circle = {
        (min(i, j), max(i, j)): table(folder / BASE)[min(i, j), max(i, j)] for i, j in make_pairs("circular", RESPONSES)
    }
    assert len(circle) == 4
    np.testing.assert_allclose(
        ask(server, "circular").attributes[:, :2],
        mean_wins(circle, 4),
        rtol=0,
        atol=1e-5,  # type: ignore[index]
    )
    references = ["4", "red", "4", "5"]
    want = np.stack(
        [wanted_verdict(folder / BASE, PROMPT, *pair)[0] for pair in zip(RESPONSES, references, strict=True)]
    )
    scores = ask(server, "reference", labels=references)
    np.testing.assert_allclose(scores.attributes[:, :2], want, rtol=0, atol=1e-5)  # type: ignore[index]
    assert {*(want == 0.5).ravel()} == {True, False}


def test_conversations_forms_sums_and_grpc_give_the_same_rewards(server: RunningServer) -> None:
    want = ask(server, BASE).rewards
    np.testing.assert_allclose(ask(server, BASE, url=server.grpc_url).rewards, want, atol=1e-6)
    messages = [[{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text}] for text in RESPONSES]
    with RewardClient(server.http_url, BASE) as client:
        np.testing.assert_allclose(client.score(messages=messages).rewards, want, atol=1e-6)
    body = {"model": BASE, "text_1": PROMPT, "text_2": RESPONSES, "use_activation": False}
    rows = httpx.post(f"{server.http_url}/score", json=body).raise_for_status().json()["data"]
    np.testing.assert_allclose([row["score"] for row in rows], want, atol=1e-6)
    assert {*rows[0]["components"]} == {*COMPONENTS}
    body = {"model": BASE, "query": [PROMPT + text for text in RESPONSES], "prompts": [PROMPT] * 4}
    reply = httpx.post(f"{server.http_url}/get_reward", json=body).raise_for_status().json()
    np.testing.assert_allclose(reply["rewards"], want, atol=1e-6)
    total = 2 * want - ask(server, "gpt2").rewards
    np.testing.assert_allclose(ask(server, "total").rewards, total, atol=3e-6)


def test_trl_gets_the_rewards_of_its_groups(server: RunningServer) -> None:
    """Two prompts, whose completions come mixed."""
    want, other = ask(server, BASE).rewards, RESPONSES[:2]
    prompts = [PROMPT, "a colour? ", PROMPT, PROMPT, "a colour? ", PROMPT]
    completions = [RESPONSES[0], other[0], RESPONSES[1], RESPONSES[2], other[1], RESPONSES[3]]
    made = RewardFunction(server.http_url, BASE)(prompts, completions)
    assert [made[i] for i in (0, 2, 3, 5)] == pytest.approx(want.tolist(), abs=1e-6)
    assert made[1] is not None and made[4] is not None
    assert made[1] + made[4] == pytest.approx(float(COMPARED_WEIGHTS.sum()), abs=1e-6)


def test_what_cannot_be_compared_fails_alone(server: RunningServer) -> None:
    want = ask(server, BASE)
    scores = ask(server, BASE, [*RESPONSES[:2], "red" * 200, *RESPONSES[2:]])
    np.testing.assert_allclose(scores.rewards[[0, 1, 3, 4]], want.rewards, atol=1e-6)
    assert np.isnan(scores.rewards[2])
    assert re.search(r"compared with sample \d: .* mixtral takes at most 256; shorten it", scores.errors[2] or "")
    groups = ask(server, BASE, groups=[1, 1, 2, 3])
    assert np.isnan(groups.rewards).tolist() == [False, False, True, True]
    assert "this sample is alone" in (groups.errors[3] or "")
    with pytest.raises(GuerdonError, match="reference compares with a reference, and this sample's label was not sent"):
        ask(server, "reference").raise_for_failed()
    strict = ask(server, "strict")
    assert np.isnan(strict.rewards).all()
    assert re.search(r"compared with sample \d: \w+: 0\.\d+ of the probability is on tokens", strict.errors[0] or "")


def compare(server: RunningServer, responses: list[Any], **more: Any) -> httpx.Response:
    said = [{"output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]} for text in responses]
    body = {"conversation_history": [{"role": "user", "content": PROMPT}], "response_objs": said, **more}
    return httpx.post(f"{server.http_url}/compare", json=body)


def test_gyms_form_gives_the_rewards_and_their_verdicts(server: RunningServer, folder: Path) -> None:
    want = ask(server, BASE)
    told = compare(server, RESPONSES, model=BASE).raise_for_status().json()
    np.testing.assert_allclose(told["rewards"], want.rewards, rtol=0, atol=1e-6)
    verdicts = table(folder / BASE)
    assert len(told["comparison_results"]) == 12
    for one in told["comparison_results"]:
        verdict, disagreed, _ = verdicts[one["response_i"], one["response_j"]]
        k = one["judge_idx"]
        assert (one["criterion"], one["disagreed"]) == ([*COMPARED][k], disagreed[k])
        assert one["score_1"] == pytest.approx(verdict[k], abs=1e-5)
        assert one["score_1"] + one["score_2"] == pytest.approx(1)
        assert one["ranking"] == pytest.approx(6 - 5 * one["score_1"])
    metrics = told["metrics"]
    assert metrics["mean_individual_score"] == pytest.approx(0.5)
    assert metrics["disagreement_rate"] == np.mean([one["disagreed"] for one in told["comparison_results"]])
    # Without a name, the first judge that compares answers; a response without a text is compared as an empty one.
    first = compare(server, ["", *RESPONSES[:2]]).raise_for_status().json()["rewards"]
    np.testing.assert_allclose(first, ask(server, NAMES[0], ["", *RESPONSES[:2]]).rewards, atol=1e-6)


def test_gyms_form_never_makes_a_reward_up(server: RunningServer) -> None:
    for responses, model, status, message in (
        ([*RESPONSES, "red" * 200], BASE, 400, "row 4: compared with sample"),
        (RESPONSES[:1], BASE, 400, "this sample is alone"),
        (RESPONSES, "strict", 500, "of the probability is on tokens that are no labels"),
        (RESPONSES, "total", 400, "total does not compare; name a judge whose rubric has `compare`"),
        (RESPONSES, "reference", 400, "the template of reference has a {reference}, which is the principle here"),
    ):
        answer = compare(server, responses, model=model)
        assert answer.status_code == status and message in answer.json()["error"], answer.text
    answer = compare(server, RESPONSES, model="reference", principle="Be brief.")
    assert answer.status_code == 400 and "compares each response with its reference, not with" in answer.json()["error"]
    answer = compare(server, RESPONSES, model=BASE, principle="Be brief.")
    assert answer.status_code == 400 and "mixtral has no place for a principle" in answer.json()["error"]


def test_a_principle_stands_for_the_reference(server: RunningServer) -> None:
    want = ask(server, "principled", labels=["Be brief."] * 4).rewards
    told = compare(server, RESPONSES, model="principled", principle="Be brief.").raise_for_status().json()
    np.testing.assert_allclose(told["rewards"], want, atol=1e-6)
    assert np.abs(want - ask(server, BASE).rewards).max() > 1e-4


def test_comparisons_and_disagreements_are_counted(server: RunningServer, folder: Path) -> None:
    def counted(metric: str) -> dict[str, float]:
        text = httpx.get(f"{server.http_url}/metrics").text
        rows = re.findall(rf'{metric}_total{{criterion="(\w+)",model="mixtral"}} (\S+)', text)
        return {criterion: float(value) for criterion, value in rows}

    before = [counted(f"guerdon_judge_{what}") for what in ("comparisons", "disagreements")]
    ask(server, "mixtral")
    after = [counted(f"guerdon_judge_{what}") for what in ("comparisons", "disagreements")]
    disagreed = sum(one[1].astype(int) for one in table(folder / "mixtral").values())
    for k, name in enumerate(COMPARED):
        assert after[0][name] - before[0].get(name, 0) == 6
        assert after[1][name] - before[1].get(name, 0) == disagreed[k]
