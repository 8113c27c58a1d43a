"""Try it: what the page has scored is scored as any request is, and told token by token."""

from collections.abc import Iterator

import httpx
import numpy as np
import orjson
import pytest

import served
import zoo
from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import InvalidRequest
from guerdon.server.page import trying
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, TeacherConfig
from served import Serve
from server.helpers import outcomes

PROMPT, RESPONSES = "Who wrote Faust — and why?", [" Goethe did ✓", " I don't know."]


class Unasked:
    """An encoder that nothing may be asked of."""


class Counting(TextEncoder):
    """An encoder that keeps the texts that it has encoded."""

    texts: list[str]

    def _ids(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        self.texts = [*getattr(self, "texts", ()), *texts]
        return super()._ids(texts, add_special_tokens)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    """`rm`, `critic` (a value a token), `steps` (process rewards), `attributes`, `flaky`, and the sum `total`."""
    folder = tmp_path_factory.mktemp("trying")
    made = {
        "rm": zoo.checkpoint("llama", folder / "rm", num_labels=1),
        "critic": zoo.checkpoint("llama", folder / "critic", "trl"),
        "steps": zoo.checkpoint("qwen2", folder / "steps", "tokcls", num_labels=2),
        "attributes": zoo.checkpoint("llama", folder / "attributes", num_labels=3),
    }
    models = [ModelConfig(model=str(zoo.tokenizer(path)), name=name, deterministic=True) for name, path in made.items()]
    models[0].max_length = 100
    teacher = TeacherConfig(model=str(zoo.tokenizer(zoo.language_model("llama", folder / "teacher"))), max_top_k=3)
    models[2].step_separator = "##"
    models.append(ModelConfig(model="served:flaky", name="flaky"))
    total = RewardConfig(name="total", components=[ComponentConfig(model="rm"), ComponentConfig(model="flaky")])
    return serve(*models, teacher, rewards=[total])


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, timeout=120) as client:
        yield client


def tried(client: httpx.Client, **asked: object) -> dict:
    response = client.post("/dashboard/try", json=asked)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_scores_are_those_of_the_trainers_forms(client):
    told = tried(client, model="rm", prompt=PROMPT, responses=RESPONSES)
    asked = {"model": "rm", "query": [PROMPT + response for response in RESPONSES]}
    assert [one["reward"] for one in told["results"]] == client.post("/get_reward", json=asked).json()["rewards"]
    assert told["weights_version"]
    assert told["compute_s"] > 0


def test_tokens_make_up_the_text_and_say_which_of_them_are_the_prompts(client):
    for one, response in zip(
        tried(client, model="rm", prompt=PROMPT, responses=RESPONSES)["results"], RESPONSES, strict=True
    ):
        assert len(one["tokens"]) == one["num_tokens"]
        assert "".join(token["text"] for token in one["tokens"]) == PROMPT + response
        assert "".join(token["text"] for token in one["tokens"] if token["in_prompt"]) == PROMPT
        assert {token["value"] for token in one["tokens"]} == {None}
    (alone,) = tried(client, model="rm", responses=["No prompt"])["results"]
    assert not any(token["in_prompt"] for token in alone["tokens"])


def test_a_value_is_told_of_every_token(client):
    (one,) = tried(client, model="critic", prompt=PROMPT, responses=RESPONSES[:1])["results"]
    reply = client.post(
        "/v2/models/critic/infer",
        json={
            "inputs": [{"name": "sentences", "shape": [1], "datatype": "BYTES", "data": [PROMPT + RESPONSES[0]]}],
            "outputs": [{"name": "values"}],
        },
    ).json()
    values = np.array([token["value"] for token in one["tokens"]], np.float32)
    assert values.tolist() == np.array(reply["outputs"][0]["data"], np.float32).tolist()


def test_steps_are_told_where_they_end(client):
    text = " First.## Then.## So."
    (one,) = tried(client, model="steps", prompt=PROMPT, responses=[text])["results"]
    pieces = [token["text"] for token in one["tokens"]]
    ends = ["".join(pieces[: step["index"] + 1]) for step in one["steps"]]
    assert ends == [PROMPT + " First.##", PROMPT + " First.## Then.##"]
    assert one["reward"] == pytest.approx(min(step["reward"] for step in one["steps"]))
    (without,) = tried(client, model="steps", responses=["no step"])["results"]
    assert without["reward"] is None
    assert "no step to reward" in without["error"]
    assert [token["text"] for token in without["tokens"]][:2] == ["n", "o"]


def test_attributes_and_components_are_told_by_name(client):
    (one,) = tried(client, model="attributes", responses=["x"])["results"]
    assert list(one["attributes"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert one["reward"] == pytest.approx(np.mean([*one["attributes"].values()]), rel=1e-5)
    (one,) = tried(client, model="total", responses=["four"])["results"]
    assert one["components"]["flaky"] == 4
    assert one["reward"] == pytest.approx(sum(one["components"].values()))
    assert one["tokens"] is None


def test_the_chat_template_is_used_if_the_page_asks_for_it(client):
    (one,) = tried(client, model="rm", prompt="Hi", responses=["Ho"], template=True)["results"]
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert one == tried(client, model="rm", messages=[conversation])["results"][0]
    assert "".join(token["text"] for token in one["tokens"]) == "<s>user: Hi</s>\nassistant: Ho</s>\n"
    assert "".join(token["text"] for token in one["tokens"] if token["in_prompt"]) == "<s>user: Hi</s>\n"


def test_a_teacher_tells_logprobs_and_what_was_likeliest(client):
    (one,) = tried(client, model="teacher", prompt=PROMPT, responses=RESPONSES[:1])["results"]
    asked = {"model": "teacher", "prompt": PROMPT + RESPONSES[0], "max_tokens": 0, "prompt_logprobs": 3}
    (choice,) = client.post("/v1/completions", json=asked).json()["choices"]
    assert one["reward"] is None and one["error"] is None
    first, *others = one["tokens"]
    assert first["value"] is None and "likeliest" not in first
    for token, position in zip(others, choice["prompt_logprobs"][1:], strict=True):
        own, *_ = position.values()
        assert (token["value"], token["rank"]) == (pytest.approx(own["logprob"], abs=1e-5), own["rank"])
        best = sorted(position.values(), key=lambda entry: entry["rank"])[:3]
        for (text, _), entry in zip(token["likeliest"], best, strict=True):
            assert text == entry["decoded_token"] or text.endswith("\ufffd")  # alone it may be a part of a character
        assert [value for _, value in token["likeliest"]] == pytest.approx(
            [entry["logprob"] for entry in best], abs=1e-5
        )
    values = [token["value"] for token in others if not token["in_prompt"]]
    assert one["attributes"]["log-prob of the response"] == pytest.approx(sum(values), rel=1e-5)
    assert one["attributes"]["per token"] == pytest.approx(np.mean(values), rel=1e-5)
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (chat,) = tried(client, model="teacher", messages=[conversation])["results"]
    assert "".join(token["text"] for token in chat["tokens"] if token["in_prompt"]) == "<s>user: Hi</s>\n"


def test_ids_are_tried_as_well(client):
    asked = {"tokens": [[5, 6, 7, 8], [5, 6, 7, 9999]], "prompt_length": 3}
    fine, wrong = tried(client, model="teacher", **asked)["results"]
    assert [token["in_prompt"] for token in fine["tokens"]] == [True, True, True, False]
    assert fine["attributes"]["per token"] == pytest.approx(fine["tokens"][3]["value"])
    assert "token id 9999 is outside the vocabulary" in wrong["error"] and wrong["tokens"] is None
    (one,) = tried(client, model="rm", tokens=[[5, 6, 7, 2**62]])["results"]
    assert "outside the vocabulary" in one["error"]
    (short,) = tried(client, model="teacher", tokens=[[5, 6]], prompt_length=3)["results"]
    assert "prompt length 3 lies outside the sample's 2 tokens" in short["error"]


def test_a_failed_response_is_told_in_its_place(client):
    told = tried(client, model="flaky", responses=["fine", served.FAILS])["results"]
    assert (told[0]["reward"], told[0]["error"]) == (4, None)
    assert told[1]["reward"] is None
    assert told[1]["error"]
    (long,) = tried(client, model="rm", responses=["far too long " * 50])["results"]
    assert "at most 100" in long["error"]


def test_very_long_texts_are_shown_without_tokens(client):
    text = "far too long " * 15_000
    (one,) = tried(client, model="flaky", responses=[text])["results"]
    assert one["num_tokens"] == 1 + len(text) // 4
    trial = trying.read(orjson.dumps({"model": "rm", "prompt": text, "responses": ["x"]}))
    info, reply = ModelInfo("rm", "echo"), ScoreReply([Score(1.0)], [90], "1")  # as many as it was cut to
    assert trying.answer(trial, info, reply, Unasked())["results"][0]["tokens"] is None


def test_a_prompt_is_encoded_once_for_all_its_responses(tmp_path):
    encoder = Counting.load(zoo.tokenizer(tmp_path))
    trial = trying.read(orjson.dumps({"model": "rm", "prompt": "a prompt", "responses": ["x", "y", "z"]}))
    told = trying.answer(trial, ModelInfo("rm", "echo"), ScoreReply([Score(1.0)] * 3, [9] * 3, "1"), encoder)
    assert [len(one["tokens"]) for one in told["results"]] == [9, 9, 9]
    assert encoder.texts.count("a prompt") <= 2  # by itself, to know where it ends


def test_it_counts_as_any_request_does(client, server):
    before = outcomes(server.http_url)
    tried(client, model="rm", responses=["x"])
    client.post("/dashboard/try", json={"model": "rm"})
    after = outcomes(server.http_url)
    assert after["rm", "ok"] - before.get(("rm", "ok"), 0) == 1
    assert sum(after.values()) - sum(before.values()) == 2


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([], "the body is a list"),
        ({}, "no 'responses'"),
        ({"responses": []}, "empty list"),
        ({"responses": ["x"] * 17}, "17 entries, at most 16"),
        ({"responses": ["x"], "prompt": 5}, "prompt is 5"),
        ({"responses": ["x"], "respones": []}, "unknown key 'respones'"),
        ({"responses": ["x"], "template": 1}, "template is 1"),
        ({"responses": ["x"], "messages": [[{"role": "user"}]]}, "send one of both"),
        ({"messages": {}}, "messages is an object; send at most 16 conversations"),
        ({"messages": [["x"]]}, "messages[0][0] is a string"),
        ({"responses": ["x"], "model": 7}, "model is 7"),
        ({"tokens": [[5]], "responses": ["x"]}, "the body has tokens, and text, too"),
        ({"tokens": [[]]}, "tokens[0] is an empty list"),
        ({"tokens": [[-1]]}, "tokens[0][0] is -1"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(body, told):
    with pytest.raises(InvalidRequest) as raised:
        trying.read(orjson.dumps(body))
    assert told in str(raised.value)
