"""A critic served from a checkpoint: what its clients are answered is what plain transformers and torch compute."""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from safetensors.torch import load_file, save_file

import served
import zoo
from guerdon import AsyncCriticClient, CriticClient, Gae, RewardClient, TrainReport, assembly, cli
from guerdon.assembly import build_service
from guerdon.critic_core import TrainRequest
from guerdon.engine.engine import Engine
from guerdon.errors import ConfigError, Exit, InvalidRequest, StartError
from guerdon.kinds.reward import RewardKind
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from guerdon.training.algorithms.advantages import adaptive_lams, gae
from guerdon.trees import Forest, flatten
from ports import free_port
from processes import environment
from server.arithmetic_critic import arrays_of
from tiers import slow_but
from training.plain import PlainCritic, request, tree

GBS, LR = 4, 1e-3
pytriton_client = pytest.importorskip("pytriton.client")
pytestmark = [
    pytest.mark.filterwarnings("ignore:tritonclient.* doesn't support"),
    pytest.mark.usefixtures("one_self_check"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model `model`, and another one `reward`, of the same tokenizer."""
    folder = tmp_path_factory.mktemp("critic")
    for seed, name in enumerate(("model", "reward")):
        zoo.tokenizer(zoo.checkpoint("llama", folder / name, seed=seed))
    return folder


@contextmanager
def serving(folder: Path, checkpoints: Path | None, **settings: object) -> Iterator[RunningServer]:
    critic = CriticConfig(
        model=str(folder / "model"),
        checkpoint_dir=None if checkpoints is None else str(checkpoints),
        global_batch_size=GBS,
        learning_rate=LR,
        max_batch_tokens=150,
        **settings,  # type: ignore[arg-type]
    )
    with served.running(grpc_port=0, critic=critic) as running:
        yield running


def rows_of(count: int, *, shared: bool) -> list[np.ndarray]:
    groups = ((30, count),) if shared else ((20, 1),) * count
    return zoo.rows(0, groups=groups, least=5)[:count]


def parts_of(asked: TrainRequest) -> list[TrainRequest]:
    """The paths of each of the request's trees, which are its global batches."""
    flat, trees = flatten(asked)
    parts = [trees == root for root in dict.fromkeys(trees.tolist())]
    return [TrainRequest("part", *(table[part] for table in arrays_of(flat).values())) for part in parts]


@pytest.mark.parametrize("shared", slow_but((True,), [True, False]), ids=["shared", "apart"])
@pytest.mark.parametrize("count", slow_but((3, 10), [3, GBS, 10]))
def test_a_train_over_http_is_the_step_of_plain_torch(count: int, shared: bool, folder: Path, tmp_path: Path) -> None:
    rows = rows_of(count, shared=shared)
    asked = request(rows)
    plain = PlainCritic(folder / "model", lr=LR)
    tokens, lengths = asked.tokens, np.array([[len(row)] for row in rows])
    with serving(folder, tmp_path / "critic") as server:
        clients = {n: pytriton_client.FuturesModelClient(server.http_url, f"critic_{n}") for n in ("infer", "train")}
        try:  # as NeMo-Aligner's actor asks
            before = clients["infer"].infer_batch(tokens=tokens, sequence_lengths=lengths).result(120)["values"]
            want_before = [plain.values(row).detach().numpy() for row in rows]
            loss = clients["train"].infer_sample(**arrays_of(asked)).result(120)["loss_mean"]
            after = clients["infer"].infer_batch(tokens=tokens, sequence_lengths=lengths).result(120)["values"]
        finally:
            for client in clients.values():
                client.close()
        losses, _ = plain.train(asked, GBS)
        with CriticClient(server.grpc_url or "") as critic:
            saved = critic.save()
    for values, want in ((before, want_before), (after, [plain.values(row).detach().numpy() for row in rows])):
        for got, own in zip(values, want, strict=True):
            np.testing.assert_allclose(got[: len(own)], own, atol=1e-4)
    sums = [float(asked.mask[i : i + GBS].sum()) for i in range(0, count, GBS)]
    assert loss.shape == (1,) and loss[0] == pytest.approx(np.average(losses, weights=sums), abs=1e-5)
    weights = load_file(tmp_path / "critic" / saved.name / "model.safetensors")
    own = {f"model.{name}": p.detach() for name, p in plain.trunk.named_parameters()}
    own["score.weight"] = plain.head.weight.detach()
    assert weights.keys() == own.keys()
    begun = load_file(folder / "model" / "model.safetensors")
    for name, weight in own.items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm(), name
        assert not torch.equal(weights[name], begun[name]), f"{name} has not moved"


@pytest.mark.parametrize("transport", slow_but(("http",), ["http", "grpc"]))
def test_one_call_of_rewards_trains_on_the_returns_and_answers_the_advantages(
    transport: str, folder: Path, tmp_path: Path
) -> None:
    asked, random = request(rows_of(6, shared=True)), np.random.default_rng(0)
    rewards = random.normal(size=asked.mask.shape).astype(np.float32)
    rule = Gae(0.95, 1.0, lam_alpha=0.4)
    with serving(folder, tmp_path / "critic", reward_model=str(folder / "reward")) as server:
        url = server.http_url if transport == "http" else server.grpc_url or ""
        with CriticClient(url) as critic:
            served = torch.from_numpy(np.stack([v[:-1] for v in critic.infer(asked.tokens).values]))
            measured = critic.validate(asked.tokens, mask=asked.mask, rewards=rewards, gae=rule)
            report = critic.train(asked.tokens, mask=asked.mask, rewards=rewards, gae=rule, updates=2, train_id="a")
            first = report.result(120)

            async def ask_again() -> TrainReport:
                async with AsyncCriticClient(url) as other:
                    return await other.train(
                        asked.tokens, mask=asked.mask, rewards=rewards, gae=rule, updates=2, train_id="a"
                    )

            again = asyncio.run(ask_again())
            state = critic.state()
    mask = torch.from_numpy(asked.mask)
    _, returns = gae(torch.from_numpy(rewards), served, mask, 0.95, 1.0)
    advantages, _ = gae(torch.from_numpy(rewards), served, mask, 0.95, adaptive_lams(mask, 0.4))
    for found in (measured, first, again):
        np.testing.assert_allclose(found.advantages, advantages, atol=1e-5)
        np.testing.assert_allclose(found.returns, returns, atol=1e-5)
    np.testing.assert_array_equal(first.advantages, again.advantages)
    assert again == first and state.step == first.num_steps == 4
    # As plain torch learns on these returns, from the values before.
    plain = PlainCritic(folder / "model", lr=LR)
    told = replace(asked, returns=returns.numpy(), prev_values=served.numpy())
    losses = [loss for _ in range(2) for loss in plain.train(told, GBS)[0]]
    assert first.losses == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("transport", slow_but(("grpc",), ["http", "grpc"]))
def test_trees_have_the_values_and_the_steps_of_their_paths(transport: str, folder: Path) -> None:
    asked = tree()
    assert asked.parents is not None and asked.lengths is not None
    forest = Forest.of(asked.parents, asked.lengths, asked.tokens.shape[1])
    segments = {"tokens": asked.tokens, "lengths": asked.lengths, "parents": asked.parents}
    given = {name: getattr(asked, name) for name in ("returns", "prev_values", "mask")}
    with serving(folder, None, reward_model=str(folder / "reward")) as server:
        url = server.http_url if transport == "http" else server.grpc_url or ""
        plain = PlainCritic(folder / "model", lr=LR)
        with CriticClient(url) as critic:
            values = critic.infer(**segments).raise_for_failed().values
            assert [len(own) for own in values] == asked.lengths.tolist()
            paths = [plain.values(path).detach().numpy() for path in forest.paths(asked.tokens)]
            for own, home, start in zip(values, forest.homes, forest.starts, strict=True):
                np.testing.assert_allclose(own, paths[home][start : start + len(own)], atol=1e-4)
            report = critic.train(**segments, **given, updates=2, train_id="a").result(120)
            wrong = critic.train(**segments | {"parents": asked.parents[::-1]}, **given)
            with pytest.raises(InvalidRequest, match="parents is 0 in row 0: give -1"):
                wrong.result(120)

        async def ask_again() -> tuple[TrainReport, TrainReport, list[np.ndarray]]:
            async with AsyncCriticClient(url) as other:
                again = await other.train(**segments, **given, updates=2, train_id="a")
                return again, await other.validate(**segments, **given), (await other.infer(**segments)).values

        again, measured, later = asyncio.run(ask_again())
    assert again == report and report.num_tokens == 2 * (asked.mask > 0).sum()
    losses = [plain.train(part, 100)[0][0] for _ in range(2) for part in parts_of(asked)]
    assert report.losses == pytest.approx(losses, rel=1e-4)
    losses = [plain.train(part, 100)[0][0] for part in parts_of(asked)]
    assert measured.losses[0] == pytest.approx(losses[0], rel=1e-4)
    assert max(np.abs(a - b).max() for a, b in zip(values, later, strict=True)) > 1e-3


@pytest.mark.parametrize("with_rewards", [True, False])
@pytest.mark.parametrize("count", [2, 3])
def test_rows_that_all_fail_have_values_over_every_transport(count: int, with_rewards: bool, folder: Path) -> None:
    tokens = np.full((3, 5), zoo.VOCAB_SIZE + 7)  # unknown ones, but for the last row's
    tokens[2] = zoo.FIRST_TOKEN
    arrays = {"tokens": tokens[:count], "sequence_lengths": np.full((count, 1), 5)}
    names = ["values", "errors", "rewards"][: 2 + with_rewards]
    found = []
    with serving(folder, None, **({"reward_model": str(folder / "reward")} if with_rewards else {})) as server:
        for module, url in ((tritonclient.http, server.http_url), (tritonclient.grpc, server.grpc_url or "")):
            for binary in (True, False) if module is tritonclient.http else (None,):
                more = {} if binary is None else {"binary_data": binary}
                inputs = [module.InferInput(name, array.shape, "INT64") for name, array in arrays.items()]
                for made, array in zip(inputs, arrays.values(), strict=True):
                    made.set_data_from_numpy(array, **more)
                with module.InferenceServerClient(url.partition("://")[2]) as client:
                    asked = [module.InferRequestedOutput(name, **more) for name in names]
                    result = client.infer("critic_infer", inputs, outputs=asked)
                    found.append({name: result.as_numpy(name) for name in names})
    for outputs in found:
        assert outputs["values"].shape == (count, 5) and np.isnan(outputs["values"][:2].astype(float)).all()
        assert np.isfinite(outputs["values"][2:].astype(float)).all()
        assert all("vocabulary" in str(error) for error in outputs["errors"][:2].ravel())
        assert np.isnan(outputs.get("rewards", np.full(2, np.nan))[:2].astype(float)).all()


@pytest.mark.parametrize("memory", ["resident", "swap"])
def test_rewards_come_with_the_values(memory: str, folder: Path) -> None:
    rows = zoo.rows(1)
    with (
        serving(folder, None, reward_model=str(folder / "reward"), reward_model_memory=memory) as server,
        CriticClient(server.http_url) as critic,
    ):
        for _ in range(2):
            scores = critic.infer_with_rewards(tokens=rows)
            np.testing.assert_allclose(scores.rewards, zoo.reference(folder / "reward", rows), atol=1e-4)
            plain = PlainCritic(folder / "model", lr=LR)
            for got, row in zip(scores.values, rows, strict=True):
                np.testing.assert_allclose(got, plain.values(row).detach().numpy(), atol=1e-4)
        critic.train(**arrays_of(request(rows))).result(120)
        again = critic.infer_with_rewards(tokens=rows)
        np.testing.assert_array_equal(again.rewards, scores.rewards)
        assert again.weights_version != scores.weights_version
        with pytriton_client.ModelClient(server.http_url, "critic_infer") as client:
            out = client.infer_batch(sentences=np.array([[b"the"], [b"in a"]]))
        assert out["rewards"].shape == (2, 1) and out["values"].shape[0] == 2


@pytest.mark.slow
def test_the_reward_model_has_settings_of_its_own(folder: Path, tmp_path: Path) -> None:
    rows = zoo.rows(1)
    several = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "several", seed=4, num_labels=3))
    outputs = zoo.reference_outputs(several, rows)
    for own, want in (
        ({}, outputs.mean(axis=1)),
        (
            {"reward_attribute_weights": [1.0, 0.5, 0.0], "reward_mean": 0.25, "reward_std": 2.0},
            (outputs @ [1.0, 0.5, 0.0] - 0.25) / 2.0,
        ),
    ):
        critics = {"mean": 3.0, "std": 5.0, "attribute_weights": [1.0], "revision": "of-the-critic"}
        with (
            serving(folder, None, reward_model=str(several), **critics, **own) as server,
            CriticClient(server.http_url) as critic,
        ):
            scores = critic.infer_with_rewards(tokens=rows)
        np.testing.assert_allclose(scores.rewards, want, atol=1e-4)
        plain = PlainCritic(folder / "model", lr=LR)
        for got, row in zip(scores.values, rows, strict=True):
            np.testing.assert_allclose(got, (plain.values(row).detach().numpy() - 3.0) / 5.0, atol=1e-4)


@pytest.mark.slow
def test_a_revision_is_of_one_of_the_two(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    plain = RewardKind.load
    monkeypatch.setattr(
        RewardKind, "load", lambda kind, config, ranks: (asked.append(config.revision), plain(kind, config, ranks))[1]
    )
    paths = {"model": str(folder / "model"), "reward_model": str(folder / "reward")}
    assembly.build_trainer(CriticConfig(**paths, revision="a"))
    assembly.build_trainer(CriticConfig(**paths, revision="a", reward_revision="b"))
    assert asked == [None, "b"]


@pytest.mark.slow
def test_values_alone_leave_the_reward_model_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = []
    onload = Engine.onload
    monkeypatch.setattr(Engine, "onload", lambda engine: (moves.append(engine.info.name), onload(engine)))
    rows = zoo.rows(1)
    settings = {"reward_model": str(folder / "reward"), "reward_model_memory": "swap"}
    with serving(folder, None, **settings) as server:
        for url in (server.http_url, server.grpc_url or ""):
            with CriticClient(url) as critic:
                critic.infer_with_rewards(tokens=rows)
                critic.train(**arrays_of(request(rows))).result(120)  # the critic is there
                moves.clear()
                scores = critic.infer(tokens=rows)
                assert scores.rewards is None and len(scores.values) == len(rows)
                assert critic.infer(texts=["the"]).rewards is None
                assert moves == []
                rewards = critic.infer_with_rewards(tokens=rows).rewards
                np.testing.assert_allclose(rewards, zoo.reference(folder / "reward", rows), atol=1e-4)
                assert moves


@pytest.mark.slow
def test_the_best_loss_is_kept_where_the_mode_is_not_said(folder: Path, tmp_path: Path) -> None:
    with (
        serving(folder, tmp_path / "critic", keep_best="loss", keep_checkpoints=1) as server,
        CriticClient(server.http_url) as critic,
    ):
        for seed, loss in enumerate((0.5, 0.1, 0.9, 0.4)):
            critic.train(**arrays_of(request(rows_of(4, shared=True), seed=seed))).result(120)
            critic.save(metrics={"loss": loss})
        assert [info.metrics["loss"] for info in critic.state().checkpoints] == [0.1, 0.4]


@pytest.mark.parametrize(
    ("other", "message"), [({"model": "reward"}, "another model"), ({"mean": 0.5}, "another standardisation, mean 0.0")]
)
def test_the_folder_of_another_critic_is_refused(other: Any, message: str, folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "critic") as server, CriticClient(server.http_url) as critic:
        critic.train(**arrays_of(request(rows_of(4, shared=True)))).result(120)
        critic.save()
    if "model" in other:
        other = {"model": str(folder / other["model"])}
    settings = {"model": str(folder / "model"), "checkpoint_dir": str(tmp_path / "critic"), **other}
    with pytest.raises(StartError, match=message) as caught:
        build_service(ServerConfig(critic=CriticConfig(**settings)))
    assert "another checkpoint_dir" in caught.value.help


@pytest.mark.slow
def test_a_journal_is_not_replayed_on_other_weights(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder / "model", tmp_path / "model")
    file, asked = model / "model.safetensors", request(rows_of(4, shared=True))
    with serving(tmp_path, tmp_path / "critic") as server, CriticClient(server.http_url) as critic:
        critic.train(**arrays_of(asked)).result(120)
        trained = critic.infer(tokens=asked.tokens).values
    whole, tensors = file.read_bytes(), load_file(file)
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 3
    save_file(tensors, file, metadata={"format": "pt"})
    said = r"the journal was written with weights .*; now: weights "
    with pytest.raises(StartError, match=said) as refused, serving(tmp_path, tmp_path / "critic"):
        pass
    assert "restore the old files" in refused.value.help and "--checkpoint-dir" in refused.value.help
    file.write_bytes(whole)
    with serving(tmp_path, tmp_path / "critic") as server, CriticClient(server.http_url) as critic:
        for row, wanted in zip(critic.infer(tokens=asked.tokens).values, trained, strict=True):
            np.testing.assert_array_equal(row, wanted)


def test_a_saved_checkpoint_is_served_as_any_other(folder: Path, tmp_path: Path) -> None:
    rows = rows_of(5, shared=True)
    with serving(folder, tmp_path / "critic") as server, CriticClient(server.http_url) as critic:
        critic.train(**arrays_of(request(rows))).result(120)
        values = critic.infer(tokens=rows).values
        saved = tmp_path / "critic" / critic.save().name
    models = [ModelConfig(model=str(saved), name="critic_of_then")]
    with (
        served.running(*models, critic=CriticConfig(model=str(saved))) as server,
        RewardClient(server.http_url, model="critic_of_then") as client,
        CriticClient(server.http_url) as critic,
    ):
        scores = client.score(tokens=rows)
        for got, also, want in zip(scores.values or [], critic.infer(tokens=rows).values, values, strict=True):
            np.testing.assert_allclose(got[: len(want)], want, atol=1e-5)
            np.testing.assert_allclose(also, want, atol=1e-5)
        with pytest.raises(InvalidRequest, match="checkpoint-dir"):
            critic.save()


def test_what_cannot_be_a_critic_is_refused_at_the_start(folder: Path, tmp_path: Path) -> None:
    encoder = zoo.checkpoint("bert", tmp_path / "bert")
    with pytest.raises(StartError, match="is an encoder"):
        build_service(ServerConfig(critic=CriticConfig(model=str(encoder))))
    two = [ModelConfig(model=str(folder / "reward"), name="critic_infer")]
    with pytest.raises(ConfigError, match="two models are named critic_infer"):
        build_service(ServerConfig(models=two, critic=CriticConfig(model=str(folder / "model"))))
    with serving(folder, tmp_path / "critic"), pytest.raises(StartError, match="another server"):
        build_service(
            ServerConfig(critic=CriticConfig(model=str(folder / "model"), checkpoint_dir=str(tmp_path / "critic")))
        )


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_stopped(folder: Path, tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "critic.yaml"
    file.write_text(f"critic:\n  model: {folder / 'model'}\n  global_batch_size: {GBS}\n  learning_rate: 1e-3\n")
    command = [sys.executable, "-m", "guerdon", "serve-critic", "--config", str(file), "--port", str(port), "--no-grpc"]
    asked = request(rows_of(10, shared=True))
    said, states = [], []
    with CriticClient(f"http://127.0.0.1:{port}") as critic:
        for stop in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
            process = subprocess.Popen(
                [*command, "--checkpoint-dir", str(tmp_path / "critic")],
                stdout=subprocess.PIPE, text=True, env=environment(),
            )  # fmt: skip
            critic.wait_ready(timeout_s=120)
            states.append(critic.state().step)
            critic.train(**arrays_of(asked)).result(120)
            process.send_signal(stop)
            said.append(process.communicate(timeout=120)[0])
            assert process.returncode == (-stop if stop is signal.SIGKILL else 0)
    assert states == [0, 3, 6]
    assert f"what it learns is saved in {tmp_path / 'critic'}" in said[0]
    assert f"ready at http://127.0.0.1:{port}" in said[2]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_stopped_critic_says_what_is_saved_journalled_or_lost(
    is_kept: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, saved = arrays_of(request(rows_of(10, shared=True))), []

    def ask(url: str) -> None:
        with CriticClient(url) as critic:
            critic.train(**asked).result(120)
            saved.extend([critic.save().name] if is_kept else [])
            critic.train(**asked).result(120)

    monkeypatch.setattr("guerdon.server.runtime.run", served.briefly(ask))
    command = ["serve-critic", str(folder / "model"), "--port", "0", "--no-grpc", "--global-batch-size", str(GBS)]
    command += ["--checkpoint-dir", str(tmp_path / "critic")] if is_kept else []
    assert cli.main(command) == Exit.DONE
    said = capsys.readouterr().out.splitlines()
    assert "ready at http://127.0.0.1:" in said[-3]
    assert said[-2:] == [
        f"guerdon: stopped; requests answered: {3 if is_kept else 2}, refused or failed: 0",
        f"guerdon: critic stopped at step 6: in {tmp_path / 'critic'} step 3 is saved as {saved[0]}, train "
        "requests journalled since then: 1; the same command resumes there"
        if is_kept
        else "guerdon: critic stopped at step 6; WHAT IT LEARNED IS LOST, because there is no --checkpoint-dir",
    ]
