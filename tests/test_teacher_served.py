"""Teachers over the wire: by real clients, over HTTP and gRPC, beside reward models; and what is refused."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from safetensors import safe_open
from transformers import AutoTokenizer

import served
import zoo
from guerdon import TeacherClient
from guerdon.assembly import build_service
from guerdon.core import Score, ScoreRequest, Sequence
from guerdon.engine.heads import rebuild
from guerdon.errors import ConfigError, InvalidRequest, SampleFailed
from guerdon.server import reading
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig, TeacherConfig
from guerdon.settings.fields import check_settings, from_mapping
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from served import Serve
from teaching import check, plain
from tiers import asked, of_each_kind

NAMES = [*zoo.DECODERS, *zoo.LANGUAGE_MODELS]
ROWS = zoo.rows(0, ((40, 3), (20, 2)))
PROMPTS = [40, 40, 40, 20, 20, 4, 40]
GIVEN = np.array([[3, 7, -1]] * len(ROWS))
OUTPUTS = (
    "logprobs", "logprob_counts", "top_ids", "top_logprobs", "target_logprobs", "entropy", "ranks", "next_ids",
    "next_logprobs", "hidden_states", "hidden_offsets",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve, request: pytest.FixtureRequest) -> RunningServer:
    """A teacher of every architecture that is tried, one in bfloat16, and a reward model behind them."""
    models: list[Any] = [
        TeacherConfig(model=str(zoo.language_model(name, folder / name)), name=name, max_batch_tokens=300)
        for name in asked(request, NAMES, ["llama"])
    ]
    models.append(TeacherConfig(model=str(folder / "llama"), name="half", dtype="bfloat16", max_top_k=7))
    models.append(ModelConfig(model=str(served.reward_model(folder / "rm"))))
    return serve(*models, grpc_port=0)


def padded(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    tokens = np.zeros((len(rows), max(map(len, rows)) + 3), dtype=np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return {"tokens": tokens, "sequence_lengths": np.array([[len(row)] for row in rows])}


def ask(url: str, name: str, arrays: dict[str, np.ndarray], outputs: tuple[str, ...], **parameters: Any) -> Any:
    """What tritonclient gives, by output."""
    module: Any = tritonclient.grpc if url.startswith("grpc") else tritonclient.http
    inputs = []
    for key, value in arrays.items():
        inputs.append(module.InferInput(key, value.shape, "INT64"))
        inputs[-1].set_data_from_numpy(value.astype(np.int64))
    wanted = [module.InferRequestedOutput(output) for output in outputs] or None
    with module.InferenceServerClient(url.partition("//")[2]) as client:
        reply = client.infer(name, inputs, outputs=wanted, parameters=parameters)
        response = reply.get_response()
    names = (
        [o.name for o in response.outputs] if module is tritonclient.grpc else [o["name"] for o in response["outputs"]]
    )
    return {output: reply.as_numpy(output) for output in names}


def answers(got: dict[str, np.ndarray]) -> list[TokenLogprobs]:
    """The answers in the tensors, each cut to its length."""
    found = []
    for i, n in enumerate(got["logprob_counts"][:, 0].tolist()):
        start, stop = got["hidden_offsets"][i : i + 2]
        assert stop - start == n
        for name in ("logprobs", "top_logprobs", "target_logprobs", "entropy", "ranks"):
            assert not got[name][i, n:].any()
        assert (got["top_ids"][i, n:] == -1).all()
        found.append(
            TokenLogprobs(
                logprobs=got["logprobs"][i, :n],
                entropy=got["entropy"][i, :n],
                ranks=got["ranks"][i, :n],
                top_ids=got["top_ids"][i, :n],
                top_logprobs=got["top_logprobs"][i, :n],
                given_logprobs=got["target_logprobs"][i, :n],
                next_ids=got["next_ids"][i],
                next_logprobs=got["next_logprobs"][i],
                hidden=got["hidden_states"][start:stop],
            )
        )
    return found


@pytest.mark.parametrize("name", of_each_kind(NAMES))
def test_answers_over_the_wire_equal_transformers(name: str, server: RunningServer, folder: Path) -> None:
    assert server.grpc_url is not None
    logits = plain(folder / name, ROWS)
    for temperature, url in ((1.0, server.http_url), (0.5, server.grpc_url)):
        query = LogprobQuery(
            top_k=5, temperature=temperature, with_entropy=True, with_ranks=True, with_next=True, given=GIVEN[0]
        )
        arrays = {**padded(ROWS), "prompt_lengths": np.array(PROMPTS), "target_ids": GIVEN}
        got = ask(url, name, arrays, OUTPUTS, top_k=5, temperature=temperature)
        for answer, table, row, prompt in zip(answers(got), logits, ROWS, PROMPTS, strict=True):
            check(answer, table, Sequence(row, prompt_length=prompt, ask=query))


def test_without_outputs_it_gives_what_the_parameters_ask_for(server: RunningServer) -> None:
    got = ask(server.http_url, "llama", padded(ROWS), ())
    assert sorted(got) == ["logprob_counts", "logprobs"]
    assert got["logprob_counts"][:, 0].tolist() == [len(row) - 1 for row in ROWS]
    more = ask(server.http_url, "llama", {**padded(ROWS), "target_ids": GIVEN}, (), top_k=2, start=10)
    assert sorted(more) == ["logprob_counts", "logprobs", "target_logprobs", "top_ids", "top_logprobs"]
    assert more["top_ids"].shape == (*more["logprobs"].shape, 2) and more["top_ids"].dtype == np.int32
    np.testing.assert_array_equal(more["logprobs"][0, :5], got["logprobs"][0, 9:14])


def test_a_row_of_input_ids_goes_on_behind_an_eos(server: RunningServer) -> None:
    ids = np.array([[5, 6, zoo.EOS, 7, 8]])
    got = ask(server.http_url, "llama", {"input_ids": ids}, ())
    assert got["logprob_counts"].tolist() == [[4]]


def test_ids_may_differ_by_position(server: RunningServer, folder: Path) -> None:
    random = np.random.default_rng(0)
    width = max(len(row) - prompt for row, prompt in zip(ROWS, PROMPTS, strict=True))
    given = random.integers(-1, zoo.VOCAB_SIZE, (len(ROWS), width, 4))
    for i, (row, prompt) in enumerate(zip(ROWS, PROMPTS, strict=True)):
        given[i, len(row) - prompt :] = -1
    arrays = {**padded(ROWS), "prompt_lengths": np.array(PROMPTS), "target_ids": given}
    got = ask(server.http_url, "llama", arrays, ("target_logprobs", "logprobs"))
    for i, (row, prompt, logits) in enumerate(zip(ROWS, PROMPTS, plain(folder / "llama", ROWS), strict=True)):
        n = len(row) - prompt
        answer = TokenLogprobs(logprobs=got["logprobs"][i, :n], given_logprobs=got["target_logprobs"][i, :n])
        check(answer, logits, Sequence(row, prompt_length=prompt, ask=LogprobQuery(given=given[i])))


def test_bfloat16_hidden_states_are_the_models_own_bits(server: RunningServer) -> None:
    outputs = ("hidden_states", "hidden_offsets")
    assert server.grpc_url is not None
    half = ask(server.http_url, "half", padded(ROWS), outputs)
    again = ask(server.grpc_url, "half", padded(ROWS), outputs)
    np.testing.assert_array_equal(half["hidden_states"], again["hidden_states"])
    bits = half["hidden_states"].astype(np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any() and half["hidden_offsets"][-1] == len(bits) == sum(len(row) - 1 for row in ROWS)
    full = ask(server.http_url, "llama", padded(ROWS), outputs)["hidden_states"]
    rounded = ask(server.http_url, "llama", padded(ROWS), outputs, hidden_dtype="bfloat16")["hidden_states"]
    np.testing.assert_array_equal(torch.from_numpy(full.copy()).bfloat16().float().numpy(), rounded.astype(np.float32))


@pytest.mark.parametrize("name", of_each_kind(NAMES))
def test_dense_divergences_come_from_hidden_states_and_the_head(name: str, server: RunningServer, folder: Path) -> None:
    """As a trainer has them that fetches the head once, against the logits of transformers."""
    file = httpx.get(f"{server.http_url}/v2/models/{name}/head")
    assert file.status_code == 200 and int(file.headers["content-length"]) == len(file.content)
    (folder / "head.safetensors").write_bytes(file.content)
    with safe_open(folder / "head.safetensors", "pt") as opened:
        metadata, head = opened.metadata(), {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    cap = float(metadata["soft_cap"]) if "soft_cap" in metadata else None
    got = ask(server.http_url, name, padded(ROWS), ("hidden_states", "hidden_offsets"))
    hidden = torch.from_numpy(got["hidden_states"].copy())
    rebuilt = rebuild(hidden, head, float(metadata["logit_scale"]), cap)
    teacher = torch.cat([logits[:-1] for logits in plain(folder / name, ROWS)])
    student = torch.log_softmax(torch.randn(teacher.shape, generator=torch.Generator().manual_seed(0)), -1)
    local, remote = (
        (student.exp() * (student - torch.log_softmax(logits, -1))).sum(-1) for logits in (teacher, rebuilt)
    )
    torch.testing.assert_close(remote, local, rtol=1e-6, atol=1e-5)
    assert file.headers["guerdon-weights-version"] == metadata["weights_version"]
    assert file.headers["etag"] == f'"{metadata["digest"]}"'


def test_a_head_is_sent_once_and_by_teachers_only(server: RunningServer) -> None:
    url = f"{server.http_url}/v2/models/half/head"
    first = httpx.get(url)
    again = httpx.get(url, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    about = httpx.head(f"{server.http_url}/v2/models/half/versions/1/head")
    assert about.content == b"" and about.headers["content-length"] == str(len(first.content))
    other = httpx.get(f"{server.http_url}/v2/models/llama/head")
    assert other.headers["etag"] != first.headers["etag"]
    refused = httpx.get(f"{server.http_url}/v2/models/reward_model/head")
    assert refused.status_code == 400 and "reward_model is no teacher" in refused.json()["error"]


def post(server: RunningServer, name: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.http_url}/v2/models/{name}/infer", json=body)


def tokens(*rows: list[int]) -> list[dict[str, Any]]:
    """Rows of one length as JSON inputs."""
    return [
        {"name": "tokens", "datatype": "INT64", "shape": [len(rows), len(rows[0])], "data": [*rows]},
        {"name": "sequence_lengths", "datatype": "INT64", "shape": [len(rows), 1], "data": [len(r) for r in rows]},
    ]


def test_json_has_everything_as_well(server: RunningServer) -> None:
    outputs = [{"name": name} for name in ("logprobs", "hidden_states", "errors")]
    reply = post(server, "half", inputs=tokens([5, 6, 7]), outputs=outputs).json()
    logprobs, hidden, errors = reply["outputs"]
    assert len(logprobs["data"]) == 2 and all(value < 0 for value in logprobs["data"])
    assert hidden["datatype"] == "BF16" and hidden["shape"] == [2, zoo.HIDDEN] and len(hidden["data"]) == 2 * zoo.HIDDEN
    assert errors["data"] == [""] and reply["parameters"]["weights_version"]


def test_the_metadata_lists_what_it_takes_and_gives(server: RunningServer) -> None:
    metadata = httpx.get(f"{server.http_url}/v2/models/half").json()
    assert {"tokens", "sequence_lengths", "input_ids", "target_ids", "prompt_lengths"} <= {
        tensor["name"] for tensor in metadata["inputs"]
    }
    given = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in metadata["outputs"]}
    assert set(OUTPUTS) <= set(given) and "rewards" not in given and "exceeded" not in given
    assert given["hidden_states"] == ("BF16", [-1, zoo.HIDDEN]) and given["top_ids"] == ("INT32", [-1, -1, -1])
    config = httpx.get(f"{server.http_url}/v2/models/half/config").json()
    assert [tensor["name"] for tensor in config["output"]] == ["logprobs", "logprob_counts"]


WRONG: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "more ids than it gives": ({"top_k": 8}, [], "top_k is 8; it must be from 0 to 7"),
    "ids of no number": ({"top_k": -1}, [], "parameter 'top_k' is -1"),
    "a start behind the end": ({"start": 4}, [], "start is 4, after the end of the sample's 3 tokens"),
    "a start at the first token": ({"start": 0}, [], "the first token has no log-prob"),
    "no temperature": ({"temperature": 0}, [], "the temperature is 0; it must be finite and above 0"),
    "a temperature below 0": ({"temperature": -1.5}, [], "the temperature is -1.5"),
    "a temperature beyond floats": ({"temperature": 10**400}, [], "parameter 'temperature' is 1000"),
    "a temperature of words": ({"temperature": "hot"}, [], "parameter 'temperature' is 'hot'"),
    "a temperature that is no number": ({"temperature": True}, [], "parameter 'temperature'"),
    "another dtype": ({"hidden_dtype": "int8"}, ["hidden_states"], "parameter 'hidden_dtype' is 'int8'"),
    "ids without a number": ({}, ["top_ids"], "output 'top_ids' needs the parameter top_k"),
    "targets without ids": ({}, ["target_logprobs"], "needs the input target_ids"),
    "a reward": ({}, ["rewards"], "unknown output 'rewards'; model 'half' gives logprobs"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_question_is_one_clear_error(wrong: str, server: RunningServer) -> None:
    parameters, outputs, message = WRONG[wrong]
    body: dict[str, Any] = {"inputs": tokens([5, 6, 7]), "parameters": parameters}
    if outputs:
        body["outputs"] = [{"name": name} for name in outputs]
    reply = post(server, "half", **body)
    assert reply.status_code == 400 and message in reply.json()["error"], reply.text


def test_a_question_that_suits_no_sample_is_refused_whole_to_clients_too(server: RunningServer) -> None:
    with TeacherClient(server.http_url, "half") as client:
        with pytest.raises(InvalidRequest, match="top_k is 8; it must be from 0 to 7"):
            client.top(8, tokens=ROWS)
        with pytest.raises(InvalidRequest, match="the temperature is 0; it must be finite and above 0"):
            client.logprobs(tokens=ROWS, temperature=0)


GIVEN_WRONG = {
    "beyond the vocabulary": ([1, 1], [zoo.VOCAB_SIZE], "the given id 300 is outside the vocabulary (0 to 299"),
    "below the pad": ([1, 1], [-2], "the given id -2 is outside the vocabulary"),
    "too many": ([1, 8], list(range(8)), "8 ids are given for each position; at most 7 can be"),
    "too few rows": ([1, 1, 1], [5], "ids are given for 1 positions, and 2 tokens are asked"),
    "too many rows": ([1, 3, 1], [5, 5, 5], "ids are given for more than the 2 tokens that are asked"),
    "another shape": ([2], [5, 5], "'target_ids' must have shape [1, K]"),
    "no ids": ([1, 0], [], "'target_ids' must have shape [1, K]"),
}


@pytest.mark.parametrize("wrong", GIVEN_WRONG)
def test_wrong_ids_are_one_clear_error(wrong: str, server: RunningServer) -> None:
    shape, data, message = GIVEN_WRONG[wrong]
    given = {"name": "target_ids", "datatype": "INT64", "shape": shape, "data": data}
    reply = post(server, "half", inputs=[*tokens([5, 6, 7]), given])
    assert reply.status_code == 400 and message in reply.json()["error"], reply.text


def test_a_wrong_sample_harms_no_other(server: RunningServer) -> None:
    outputs = [{"name": name} for name in ("logprobs", "logprob_counts", "top_ids", "errors")]
    reply = post(
        server, "llama", inputs=tokens([5, 6, 7], [5, 6, zoo.VOCAB_SIZE]), outputs=outputs, parameters={"top_k": 1}
    )
    logprobs, counts, top, errors = (tensor["data"] for tensor in reply.json()["outputs"])
    assert counts == [2, 0] and logprobs[0] < 0 and logprobs[2:] == [None, None] and top[2:] == [-1, -1]
    assert errors[0] == "" and "token id 300 is outside the vocabulary of llama" in errors[1]
    alone = post(server, "llama", inputs=tokens([5, 6, 7], [5, 6, zoo.VOCAB_SIZE]))
    assert alone.status_code == 400 and "row 1" in alone.json()["error"]


@pytest.mark.slow
def test_an_answer_that_is_too_large_is_refused_before_it_is_computed(server: RunningServer) -> None:
    rows = np.full((65_000, 250), 5)
    arrays = {"tokens": rows, "sequence_lengths": np.full((len(rows), 1), 250)}
    with pytest.raises(Exception, match=r"the answer would have .* MiB, and may have at most 1,024 MiB"):
        ask(server.http_url, "half", arrays, ("logprobs", "top_ids"), top_k=7)


def test_other_servers_forms_take_the_first_model_that_gives_rewards(server: RunningServer) -> None:
    body = {"query": ["hello"], "prompts": ["h"]}
    assert httpx.post(f"{server.http_url}/get_reward", json=body).status_code == 200
    refused = httpx.post(f"{server.http_url}/get_reward?model=llama", json=body)
    assert refused.status_code == 400 and "llama gives logprobs and no rewards" in refused.text


def test_its_text_is_the_checkpoints_own(folder: Path) -> None:
    path = zoo.tokenizer(zoo.language_model("llama", folder / "with-text"))
    config = ServerConfig(port=0, grpc_port=None, models=[TeacherConfig(model=str(path), name="t", recheck_share=1.0)])
    service = build_service(config)
    with RunningServer(service, config) as server:
        text = {"name": "sentences", "datatype": "BYTES", "shape": [1, 1], "data": ["the thing on a"]}
        message = json.dumps([{"role": "user", "content": "hello"}, {"role": "assistant", "content": "in the"}])
        said = post(server, "t", inputs=[text]).json()["outputs"][0]
        chat = post(server, "t", inputs=[{**text, "name": "messages", "data": [message]}]).json()["outputs"][0]
        assert said["shape"][1] > 3 and chat["shape"][1] > said["shape"][1]
        page = httpx.post(f"{server.http_url}/dashboard/try", json={"model": "t", "responses": ["the thing"]})
        assert page.status_code == 200 and page.json()["results"][0]["error"] is None
    assert 'guerdon_recheck_sequences_total{model="t",outcome="same"} 3.0' in service.metrics.render().decode()


def texts(name: str, *values: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(values), 1], "data": [*values]}


def test_prompts_and_responses_may_come_apart(folder: Path) -> None:
    path = zoo.tokenizer(zoo.language_model("llama", folder / "apart"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts, responses = ["in the", "in the", "on a thing "], [" thing", " a", "on the"]
    rows = [
        np.array(tokenizer.encode(p + r, add_special_tokens=False)) for p, r in zip(prompts, responses, strict=True)
    ]
    lengths = [len(tokenizer.encode(p, add_special_tokens=False)) for p in prompts]
    with served.running(TeacherConfig(model=str(path))) as server:
        whole = [p + r for p, r in zip(prompts, responses, strict=True)]
        apart = post(server, "teacher", inputs=[texts("prompts", *prompts), texts("sentences", *whole)]).json()
        together = ask(server.http_url, "teacher", {**padded(rows), "prompt_lengths": np.array(lengths)}, ())
        logprobs, counts = apart["outputs"]
        assert counts["data"] == [len(row) - n for row, n in zip(rows, lengths, strict=True)]
        np.testing.assert_allclose(np.reshape(logprobs["data"], logprobs["shape"]), together["logprobs"], atol=1e-5)

        # "t" and "h" are two tokens, "th" is one.
        outputs = [{"name": "errors"}, {"name": "logprobs"}]
        seams = [texts("prompts", "a t", "a t"), texts("sentences", "a the", "a t e")]
        errors = post(server, "teacher", inputs=seams, outputs=outputs).json()["outputs"][0]["data"]
        alone, joined = (tokenizer.encode(text, add_special_tokens=False) for text in ("a t", "a the"))
        same = next(i for i, (a, b) in enumerate(zip(alone, joined, strict=False)) if a != b)
        assert f"alone has {alone[same:]}, and with the response {joined[same:]}" in errors[0] and errors[1] == ""
        assert post(server, "teacher", inputs=seams).status_code == 400

        alone = post(server, "teacher", inputs=[texts("prompts", "a t"), texts("sentences", " e")])
        assert alone.status_code == 400 and "' e', does not begin with its prompt, 'a t'" in alone.json()["error"]
        wrong = post(server, "teacher", inputs=[*tokens([5, 6]), texts("prompts", "a")])
        assert wrong.status_code == 400 and "prompts go with sentences" in wrong.json()["error"]


async def test_another_checkpoint_takes_its_place_with_a_head_of_its_own(tmp_path: Path) -> None:
    for seed, name in enumerate(("old", "new")):
        zoo.language_model("llama", tmp_path / name, seed=seed)
    zoo.language_model("llama", tmp_path / "wider", hidden_size=2 * zoo.HIDDEN)
    models: list[Any] = [TeacherConfig(model=str(tmp_path / "old"))]
    service = build_service(ServerConfig(models=models, model_repository=str(tmp_path)))
    service.start()
    request = ScoreRequest(tokens=ROWS, asks=[LogprobQuery()] * len(ROWS))
    try:
        versions, digests = [], []
        for name in ("old", "new"):
            reply = await service.score("teacher", request)
            for result, logits, row in zip(reply.results, plain(tmp_path / name, ROWS), ROWS, strict=True):
                assert isinstance(result, Score) and result.answer is not None
                check(result.answer, logits, Sequence(row))
            served_now: Any = service.catalog.entry("teacher").loaded()
            file = served_now.head_file()
            versions.append(reply.weights_version)
            digests.append(file.digest)
            assert file.weights_version == reply.weights_version
            if name == "old":
                await service.repository.load("teacher", "new")
        assert len({*versions}) == len({*digests}) == 2
        with pytest.raises(InvalidRequest, match="hidden_size is 64 and not 32"):
            await service.repository.load("teacher", "wider")
    finally:
        await asyncio.to_thread(service.stop)


def test_yaml_tells_kinds_apart() -> None:
    config = from_mapping(ServerConfig, {"models": [{"kind": "teacher", "model": "a", "max_top_k": 3}, {"model": "b"}]})
    assert [type(model) for model in config.models] == [TeacherConfig, ModelConfig]
    assert (config.models[0].name, config.models[1].name) == ("teacher", "reward_model")
    with pytest.raises(ConfigError, match=r"models\[0\].kind is 'jury'") as wrong:
        from_mapping(ServerConfig, {"models": [{"kind": "jury", "model": "a"}]})
    assert "reward_model, teacher, judge" in wrong.value.help
    with pytest.raises(ConfigError, match=r"unknown setting models\[0\].pooling"):
        from_mapping(ServerConfig, {"models": [{"kind": "teacher", "model": "a", "pooling": "last"}]})
    rewards = [{"name": "sum", "components": [{"model": "teacher"}]}]
    summed = from_mapping(ServerConfig, {"models": [{"kind": "teacher", "model": "a"}], "rewards": rewards})
    with pytest.raises(ConfigError, match=r"'teacher', which gives no reward"):
        check_settings(summed)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% if 'think' in messages[-1]['content'] %}hmm{% endif %}{% endif %}"
)
"""Its generation prompt may have more than the turn that follows, as those of models that think have."""


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


ASKING = [
    [turn("user", "in the thing")],
    [turn("system", "be on"), turn("user", "a"), turn("assistant", "the"), turn("user", "on a thing")],
    [turn("user", [{"type": "text", "text": "in parts"}])],
]
ANSWERS = ["the other", "a", "on the thing"]


@pytest.fixture(scope="module")
def messages_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    return zoo.tokenizer(zoo.language_model("llama", folder / "teacher"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def messages_server(messages_folder: Path, tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> RunningServer:
    reward_model = served.reward_model(tmp_path_factory.mktemp("rm"))
    models: list[Any] = [TeacherConfig(model=str(messages_folder)), ModelConfig(model=str(reward_model))]
    return serve(*models, grpc_port=0)


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, messages_server: RunningServer) -> Iterator[TeacherClient]:
    url = messages_server.http_url if request.param == "http" else messages_server.grpc_url
    with TeacherClient(str(url)) as client:
        yield client


def rendered(folder: Path, conversations: list[Any], *, is_prompt: bool) -> list[np.ndarray]:
    """The ids of each conversation by transformers' template; its contents are texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [[{**m, "content": m["content"] if isinstance(m["content"], str) else "in parts"} for m in one]
             for one in conversations]  # fmt: skip
    return [
        np.array(tokenizer.apply_chat_template(one, add_generation_prompt=is_prompt, return_dict=False))
        for one in texts
    ]


def check_all(folder: Path, logprobs: Any, rows: list[np.ndarray], prompts: list[np.ndarray]) -> None:
    for own, row, prompt, logits in zip(logprobs, rows, prompts, plain(folder, rows), strict=True):
        assert len(own) == len(row) - len(prompt) > 0
        check(TokenLogprobs(logprobs=own), logits, Sequence(row, prompt_length=len(prompt)))


@pytest.mark.parametrize("at_once", [2, 64])
def test_the_assistants_last_message_is_the_response(
    at_once: int, client: TeacherClient, messages_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RENDERED_AT_ONCE", at_once)
    whole = [[*before, turn("assistant", text)] for before, text in zip(ASKING, ANSWERS, strict=True)]
    answers = client.logprobs(messages=whole)
    prompts = rendered(messages_folder, ASKING, is_prompt=True)
    check_all(messages_folder, answers.logprobs, rendered(messages_folder, whole, is_prompt=False), prompts)


def test_a_text_may_be_the_response_to_messages(client: TeacherClient, messages_folder: Path) -> None:
    """Nothing but the text is asked: not what ends the turn."""
    tokenizer = AutoTokenizer.from_pretrained(messages_folder)
    prompts = rendered(messages_folder, ASKING, is_prompt=True)
    texts = [np.array(tokenizer.encode(text, add_special_tokens=False)) for text in ANSWERS]
    rows = [np.concatenate(both) for both in zip(prompts, texts, strict=True)]
    check_all(messages_folder, client.logprobs(messages=ASKING, responses=ANSWERS).logprobs, rows, prompts)
    top = client.top(3, messages=ASKING, responses=ANSWERS)
    assert top.top_ids is not None and [len(ids) for ids in top.top_ids] == [len(text) for text in texts]


def test_a_conversation_without_a_response_is_asked_from_its_start(
    client: TeacherClient, messages_folder: Path
) -> None:
    only = [[turn("assistant", "the other")]]
    for conversations in (ASKING, only):
        rows = rendered(messages_folder, conversations, is_prompt=False)
        check_all(messages_folder, client.logprobs(messages=conversations).logprobs, rows, [row[:1] for row in rows])


def test_a_prompt_that_the_turn_does_not_begin_with_is_an_error_of_its_sample(
    client: TeacherClient, messages_server: RunningServer, messages_folder: Path
) -> None:
    thinks = [turn("user", "think"), turn("assistant", "the thing")]
    answers = client.logprobs(messages=[thinks, [*ASKING[0], turn("assistant", "a")], [turn("user", 7), thinks[1]]])
    assert answers.logprobs is not None and [len(row) > 0 for row in answers.logprobs] == [False, True, False]
    (alone,), (whole,) = (rendered(messages_folder, [one], is_prompt=len(one) == 1) for one in (thinks[:1], thinks))
    same = next(i for i, (a, b) in enumerate(zip(alone, whole, strict=False)) if a != b)
    told = f"alone has {alone[same : same + 8].tolist()}, and with the response {whole[same : same + 8].tolist()}"
    assert told in str(answers.errors[0]) and "message 0 needs a content" in str(answers.errors[2])
    with pytest.raises(SampleFailed, match="the tokens change where the prompt ends"):
        answers.raise_for_failed()
    continued = [[turn("user", "a"), turn("assistant", "a t")]]
    with pytest.raises(SampleFailed, match="the tokens change where the prompt ends"):
        client.logprobs(messages=continued, responses=["he"]).raise_for_failed()
    # All tokens may be asked, whatever the template does.
    message = {"name": "messages", "datatype": "BYTES", "shape": [1], "data": [json.dumps(thinks)]}
    body = {"inputs": [message], "parameters": {"start": 1}}
    reply = httpx.post(f"{messages_server.http_url}/v2/models/teacher/infer", json=body).json()
    check_all(messages_folder, [np.array(reply["outputs"][0]["data"], np.float32)], [whole], [whole[:1]])


MESSAGES_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "prompts and messages": ({"prompts": ["a"]}, "with prompts or with messages, one before each"),
    "lengths": ({"prompt_lengths": [1]}, "with prompts or with messages, one before each, and with nothing else"),
    "too few": ({"messages": []}, "messages must be a list of at least one sample, not empty"),
    "one too many": ({"messages": [[turn("user", "a")]] * 2}, "messages has 2 entries for 1 responses"),
}


@pytest.mark.parametrize("wrong", MESSAGES_WRONG)
def test_a_wrong_mixture_is_one_clear_error(wrong: str, client: TeacherClient) -> None:
    changes, message = MESSAGES_WRONG[wrong]
    with pytest.raises(InvalidRequest, match=message):
        client.logprobs(**{"messages": [[turn("user", "a")]], "responses": ["a"]} | changes)


def test_a_reward_model_takes_one_of_both(messages_server: RunningServer) -> None:
    inputs = [
        {"name": "sentences", "datatype": "BYTES", "shape": [1], "data": ["a"]},
        {"name": "messages", "datatype": "BYTES", "shape": [1], "data": [json.dumps(ASKING[0])]},
    ]
    reply = httpx.post(f"{messages_server.http_url}/v2/models/reward_model/infer", json={"inputs": inputs})
    assert reply.status_code == 400 and "the request has messages and sentences" in reply.text
