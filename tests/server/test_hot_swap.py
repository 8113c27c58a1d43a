"""Models that are loaded and unloaded while they serve: which weights answer what, and what goes wrong alone."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

import zoo
from guerdon.assembly import Parts, build_scorer
from guerdon.core import Command, ModelInfo, ScoreRequest, Sequence, Signal
from guerdon.distributed import computing
from guerdon.engine.checkpoint import placement
from guerdon.errors import Forbidden, InvalidRequest, Overloaded, ServerFault, Unavailable, UnknownModel, Unsupported
from guerdon.kinds.kind import Tokenizer
from guerdon.server import runtime, status
from guerdon.server.service import Service
from guerdon.settings.config import CriticConfig, ServerConfig
from server.arithmetic_critic import ArithmeticService
from server.swapping import ROWS, checkpoints, held, rewards, score, serving, until, version

TEXTS = ["the other one", "a thing"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(root: Path) -> dict[str, np.ndarray]:
    return {name: zoo.reference(root / name, ROWS) for name in ("old", "new")}


async def test_every_reply_is_of_one_version_and_names_it(root: Path, wanted: dict[str, np.ndarray]) -> None:
    async with serving(root, max_batch_tokens=128) as service:
        replies, is_over = [], False

        async def ask() -> None:
            while not is_over:
                replies.append((asyncio.get_running_loop().time(), await score(service)))

        asking = [asyncio.create_task(ask()) for _ in range(3)]
        versions = {version(service): "old"}
        for source, name in ((str(root / "new"), "new"), ("old", "old"), ("new", "new")):
            began = len(replies)
            loaded = await service.repository.load("reward_model", source)
            assert loaded == version(service)
            versions[loaded] = name
            since = asyncio.get_running_loop().time()
            await until(lambda began=began: len(replies) > began + 6)  # type: ignore[misc]
        is_over = True
        await asyncio.gather(*asking)
    assert len(versions) == 2 and len(replies) > 18
    for _, reply in replies:
        assert rewards(reply) == pytest.approx(wanted[versions[reply.weights_version]], abs=1e-5)
    assert {versions[reply.weights_version] for _, reply in replies} == {"old", "new"}
    assert {versions[reply.weights_version] for began, reply in replies[-3:] if began > since} <= {"new"}


async def test_earlier_requests_are_scored_by_the_old_model_later_ones_by_the_new(root: Path) -> None:
    async with serving(root) as service:
        old = version(service)
        with held(service):
            before = asyncio.create_task(score(service))
            await until(lambda: service.loops.depth()["reward_model"][0] == len(ROWS))
            loading = asyncio.create_task(service.repository.load("reward_model", "new"))
            await until(lambda: version(service) != old)
            after = asyncio.create_task(score(service))
            await until(lambda: service.loops.depth()["reward_model"][0] > 2 * len(ROWS))
            assert not loading.done()
        new = await loading
        assert ((await before).weights_version, (await after).weights_version) == (old, new)
        assert not np.allclose(rewards(await before), rewards(await after), atol=1e-3)


async def test_a_text_that_the_old_tokenizer_read_is_read_again(root: Path, tmp_path: Path) -> None:
    other = zoo.checkpoint("llama", root / "tokens", seed=1)
    zoo.tokenizer(other)
    made = json.loads((other / "tokenizer.json").read_text())
    made["model"]["merges"] = []  # other ids for the same text
    (other / "tokenizer.json").write_text(json.dumps(made))
    async with serving(root) as service:
        first = await score(service, texts=TEXTS)
        encoder = service.catalog.entries["reward_model"].loaded().encoder
        assert isinstance(encoder, Tokenizer)
        encode, has_read, go_on = encoder.encode_in_steps, threading.Event(), threading.Event()

        def slow(*asked: Any, **more: Any) -> Any:
            ids = yield from encode(*asked, **more)
            has_read.set()
            go_on.wait(120)
            return ids

        encoder.encode_in_steps = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(score(service, texts=TEXTS))
        await until(has_read.is_set)
        new = await service.repository.load("reward_model", "tokens")
        go_on.set()
        reply = await asking
        assert reply.weights_version == new
        own = service.catalog.entries["reward_model"].loaded().encoder
        assert own is not None
        rows = own.encode(TEXTS)
        assert reply.lengths == [len(row) for row in rows] != first.lengths
        assert rewards(reply) == pytest.approx(zoo.reference(other, rows), abs=1e-5)  # type: ignore[arg-type]


def test_a_model_is_laid_out_while_nothing_computes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_is_over, amid, seen = threading.Event(), [], []
    set_dtype = torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda d: (amid.append(len(seen) % 2), set_dtype(d)))

    def compute() -> None:
        while not worker_is_over.is_set():
            with computing.HERE.computing():
                seen.append("begins")
                worker_is_over.wait(0.01)
                seen.append("ends")

    threads = [threading.Thread(target=compute)]
    threads[0].start()
    try:
        asyncio.run(_load_in_bfloat16(root))
    finally:
        worker_is_over.set()
        threads[0].join()
    assert amid and not any(amid)


async def _load_in_bfloat16(root: Path) -> None:
    async with serving(root, dtype="bfloat16", deterministic=True) as service:
        await service.repository.load("reward_model", "new")


# ------------------------------------------------------------------------------------------- what goes wrong


def broken(root: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None], **more: Any) -> str:
    """Another checkpoint in the repository, with its tensors changed; its name."""
    folder = zoo.tokenizer(zoo.checkpoint("llama", root / name, seed=2, **more))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return name


def fill(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].fill_(value)

    return change


def cut_short(root: Path) -> str:
    name = broken(root, "short", lambda _: None)
    file = root / name / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return name


def without_tokenizer(root: Path) -> str:
    return zoo.checkpoint("llama", root / "mute", seed=2).name


def other_tokens(root: Path) -> str:
    """One whose tokenizer has the same tokens by other ids."""
    name = broken(root, "tokens-of-another", lambda _: None)
    file = root / name / "tokenizer.json"
    made = json.loads(file.read_text())
    vocabulary = made["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(made))
    return name


def one_bad_token(root: Path) -> str:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][100:150] = float("inf")

    return broken(root, "spoilt", spoil)


def other_signature(root: Path) -> str:
    more = {"num_labels": 2, "vocab_size": 310, "max_position_embeddings": 64}
    return broken(root, "another", lambda _: None, **more)


BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "absent": (lambda _: "nowhere", "no folder 'nowhere'"),
    "no checkpoint": (lambda root: (root / "empty").mkdir(exist_ok=True) or "empty", "no config.json"),
    "cut short": (cut_short, "truncated"),
    "NaN weights": (lambda root: broken(root, "nan", fill("score.weight", float("nan"))), "scores nothing"),
    "NaN trunk": (lambda root: broken(root, "trunk", fill("model.norm.weight", float("nan"))), "scores nothing"),
    "some fail": (one_bad_token, "random sequences fail"),
    "signature": (
        other_signature,
        "outputs is .*; attribute_names is .*; vocab_size is 310 and not 300.*; max_length is 64",
    ),
    "tokens": (other_tokens, "vocabulary is"),
    "tokenizer": (without_tokenizer, "takes_text is False and not True"),
    "a function": (lambda _: "rewarding:length", "not the name of a folder"),
    "above": (lambda _: "../old", "no folder"),
    "far above": (lambda _: "old/../../../../../../../../etc", "no folder"),
    "absolute": (lambda _: "/etc", "no folder"),
    "NUL": (lambda _: "old\0", "no folder"),
    "surrogate": (lambda _: "\ud800", "no folder"),
    "long": (lambda _: "x" * 5000, "no folder"),
    "file": (lambda _: "old/config.json", "no folder"),
}


@pytest.fixture
async def service(root: Path) -> Any:
    async with serving(root) as made:
        yield made


async def test_a_checkpoint_that_cannot_replace_the_model_changes_nothing(
    root: Path, wanted: dict[str, np.ndarray], tmp_path: Path
) -> None:
    checkpoints(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside" / "new")
    (root / "linked").mkdir()
    for file in (tmp_path / "outside" / "new").iterdir():
        (root / "linked" / file.name).symlink_to(file)
    async with serving(root) as service:
        old = version(service)
        for what, (make, says) in {
            **BAD,
            "a link": (lambda _: "link", "no folder 'link'"),
            "a folder of links": (lambda _: "linked", "no folder 'linked'"),
        }.items():
            with pytest.raises(InvalidRequest, match=says) as told:
                await service.repository.load("reward_model", make(root))
            assert "serves on as before" in str(told.value) or "folder" in str(told.value), what
            assert version(service) == old and status.is_ready(service, "reward_model")
            assert rewards(await score(service)) == pytest.approx(wanted["old"], abs=1e-5), what
        assert not service.loops.of["reward_model"]._group._beside  # type: ignore[attr-defined]
        with pytest.raises(UnknownModel):
            await service.repository.load("../reward_model", None)


@pytest.mark.slow
async def test_adapters_are_loaded_with_a_base_in_the_repository_or_the_given_one(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    root, outside = tmp_path / "repository", tmp_path / "outside"
    checkpoints(root)
    checkpoints(outside)
    wanted = {}
    for name, base in {"inside": root / "old", "leads-out": outside / "old", "on-it": root / "leads-out"}.items():
        model = AutoModelForSequenceClassification.from_pretrained(root / "old", attn_implementation="eager")
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)).eval()
        model.peft_config["default"].base_model_name_or_path = str(base)
        model.save_pretrained(root / name)
        with torch.no_grad():
            wanted[name] = [model(input_ids=torch.from_numpy(row)[None]).logits.item() for row in ROWS]
    async with serving(root) as service:
        await service.repository.load("reward_model", "inside")
        assert rewards(await score(service)) == pytest.approx(wanted["inside"], abs=1e-5)
        for name in ("leads-out", "on-it"):
            with pytest.raises(Forbidden, match=f"'{name}' is an adapter whose base model is not in .* --base"):
                await service.repository.load("reward_model", name)
        assert rewards(await score(service)) == pytest.approx(wanted["inside"], abs=1e-5)
    async with serving(root, model=str(root / "inside"), base=str(outside / "old")) as service:
        await service.repository.load("reward_model", "leads-out")
        assert rewards(await score(service)) == pytest.approx(wanted["leads-out"], abs=1e-5)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA")])
async def test_no_memory_for_a_second_model_is_no_harm_to_the_first(
    root: Path, wanted: dict[str, np.ndarray], error: Exception
) -> None:
    fails = False

    def scorer(*asked: Any) -> Any:
        if fails:
            raise error
        return build_scorer(*asked)

    async with serving(root, parts=Parts(scorer=scorer)) as service:
        fails = True
        with pytest.raises(ServerFault, match=rf"serves on as before: {type(error).__name__}"):
            await service.repository.load("reward_model", "new")
        assert rewards(await score(service)) == pytest.approx(wanted["old"], abs=1e-5)
        fails = False
        await service.repository.load("reward_model", "new")
        assert rewards(await score(service)) == pytest.approx(wanted["new"], abs=1e-5)


async def test_a_model_for_which_there_is_no_memory_is_no_wrong_request(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(root) as service:
        monkeypatch.setattr(placement, "_host_bytes", lambda: 10)
        with pytest.raises(ServerFault, match="GiB are free on this machine; unload a model first, or free some"):
            await service.repository.load("reward_model", "new")


async def test_system_exit_while_loading_only_fails_the_load(root: Path) -> None:
    ends = False

    def scorer(*asked: Any) -> Any:
        if ends:
            raise SystemExit(3)
        return build_scorer(*asked)

    async with serving(root, parts=Parts(scorer=scorer)) as service:
        ends = True
        with pytest.raises(ServerFault, match="SystemExit: 3"):
            await service.repository.load("reward_model", "new")
        assert len((await score(service)).results) == len(ROWS)


async def test_the_log_tells_how_a_change_went_and_who_asked(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (root / "bare").mkdir(exist_ok=True)
    async with serving(root) as service:
        service.catalog.sums.clear()
        left = asyncio.create_task(service.repository.load("reward_model", "bare", "operator"))
        await asyncio.sleep(0)  # in which it is begun, and not yet refused
        assert service.repository._changing
        left.cancel()
        await until(lambda: not service.repository._changing)
        del left
        gc.collect()
        await asyncio.sleep(0)
        await service.repository.load("reward_model", "new", "operator")
        await service.repository.unload("reward_model", "another")
    told = [record.getMessage() for record in caplog.records]
    assert not any("never retrieved" in text for text in told)
    assert sum("on request of 'operator'" in text for text in told) == 2
    assert any("stays" not in text and "serves on as before" in text and "no config.json" in text for text in told)
    assert any("now serves" in text and "new', version" in text for text in told) and "reward_model: unloaded" in told
    assert any("on request of 'another'" in text for text in told)


async def test_only_checkpoints_can_be_loaded_and_unloaded(service: Service, tmp_path: Path) -> None:
    for ask in (lambda name: service.repository.load(name, None), service.repository.unload):
        with pytest.raises(Unsupported, match="length is a function"):
            await ask("length")
        with pytest.raises(Unsupported, match="total is a sum"):
            await ask("total")
        with pytest.raises(UnknownModel):
            await ask("another")
    critic = ArithmeticService(server=ServerConfig(critic=CriticConfig(model="arithmetic")))
    critic.start()
    try:
        for name, says in (("critic_infer", "is a critic"), ("critic_train", "operation of a critic")):
            with pytest.raises(Unsupported, match=says):
                await critic.repository.load(name, None)
    finally:
        await asyncio.to_thread(critic.stop)


async def test_without_a_repository_only_the_same_folder_is_read_again(
    root: Path, wanted: dict[str, np.ndarray], tmp_path: Path
) -> None:
    old, new = checkpoints(tmp_path)
    async with serving(tmp_path) as service:
        service.repository._root = None
        with pytest.raises(Forbidden, match="--model-repository"):
            await service.repository.load("reward_model", str(old))
        (old / "model.safetensors").write_bytes((new / "model.safetensors").read_bytes())
        first = version(service)
        assert await service.repository.load("reward_model", None) == version(service) != first
        assert rewards(await score(service)) == pytest.approx(wanted["new"], abs=1e-5)


async def test_a_model_is_changed_once_at_a_time_and_to_the_end(root: Path) -> None:
    async with serving(root) as service:
        old = version(service)
        with held(service):
            first = asyncio.create_task(service.repository.load("reward_model", "new"))
            await until(lambda: version(service) != old)
            with pytest.raises(Overloaded, match="being loaded or unloaded") as told:
                await service.repository.load("reward_model", None)
            assert told.value.retry_after_s
            first.cancel()  # whoever asked for it has left
            await asyncio.sleep(0)
            assert first.cancelled() or first.cancelling()
        await until(lambda: not service.repository._changing)
        assert (await score(service)).weights_version == version(service) != old


async def test_a_full_queue_keeps_no_admin_out(root: Path) -> None:
    async with serving(root, max_queue_sequences=len(ROWS)) as service:
        with held(service):
            waiting = asyncio.create_task(score(service))
            await until(lambda: service.loops.depth()["reward_model"][0] == len(ROWS))
            with pytest.raises(Overloaded):
                await score(service)
            with pytest.raises(Overloaded):
                service.check_room("reward_model")
            loading = asyncio.create_task(service.repository.load("reward_model", "new"))
            old = version(service)
            await until(lambda: version(service) != old)
        assert (await waiting).weights_version == old
        assert await loading == version(service)


# ------------------------------------------------------------------------------------------- sums, unloading


async def test_a_sum_names_the_new_version_of_its_component(root: Path, wanted: dict[str, np.ndarray]) -> None:
    async with serving(root) as service:
        before = await score(service, texts=TEXTS, name="total")
        new = await service.repository.load("reward_model", "new")
        after = await score(service, texts=TEXTS, name="total")
        length = version(service, "length")
        assert after.weights_version == version(service, "total") == f"reward_model={new};length={length}"
        assert after.weights_version != before.weights_version
        with pytest.raises(InvalidRequest, match="reward_model is a component of total"):
            await service.repository.unload("reward_model")


async def test_an_unloaded_model_refuses_requests_and_can_be_loaded_again(
    root: Path, wanted: dict[str, np.ndarray]
) -> None:
    async with serving(root) as service:
        service.catalog.sums.clear()
        trunk = weakref.ref(service.catalog.entries["reward_model"].loaded().trunk)  # type: ignore[attr-defined]
        runtime.settle()  # as every server does once it has loaded: what it has then no collection looks at
        with held(service):
            waiting = asyncio.create_task(score(service))
            await until(lambda: service.loops.depth()["reward_model"][0] == len(ROWS))
            unloading = asyncio.create_task(service.repository.unload("reward_model"))
            await until(lambda: not status.is_ready(service, "reward_model"))
            with pytest.raises(Unavailable, match="reward_model is unloaded; an admin may load it"):
                await score(service)
        await unloading
        assert rewards(await waiting) == pytest.approx(wanted["old"], abs=1e-5)
        assert trunk() is None
        with pytest.raises(Unavailable, match="unloaded"):
            service.check_room("reward_model")
        index = {each["name"]: (each["state"], each["reason"]) for each in status.repository_index(service, False)}
        assert index == {"reward_model": ("UNAVAILABLE", "unloaded"), "length": ("READY", "")}
        assert status.is_ready(service) and [info.name for info in service.catalog.loaded()] == ["length"]
        assert {info.name for info in service.catalog.models()} == {"reward_model", "length"}
        assert b'guerdon_model_info{device="cpu",dtype="float32",kind="seqcls",model="reward_model"' not in (
            service.metrics.render()
        )
        await service.repository.unload("reward_model")  # again is no error
        (root / "bare").mkdir(exist_ok=True)
        with pytest.raises(InvalidRequest, match="stays unloaded"):
            await service.repository.load("reward_model", "bare")
        loaded = await service.repository.load("reward_model", None)
        assert status.is_ready(service, "reward_model") and loaded == version(service)
        assert rewards(await score(service)) == pytest.approx(wanted["old"], abs=1e-5)


async def test_a_swap_leaves_nothing_of_the_old_model(root: Path) -> None:
    async with serving(root) as service:
        trunk = weakref.ref(service.catalog.entries["reward_model"].loaded().trunk)  # type: ignore[attr-defined]
        await score(service)
        await service.repository.load("reward_model", "new")
        assert trunk() is None


async def test_a_stopping_server_swaps_nothing_and_ends(root: Path) -> None:
    async with serving(root) as service:
        await asyncio.to_thread(service.stop)
        with pytest.raises(Unavailable, match="stopping"):
            await service.repository.load("reward_model", "new")


async def test_a_change_holds_the_server_up_for_no_collection_of_all_its_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(root) as service:
        own = service.catalog.entries["reward_model"].loaded()
        weights = [weakref.ref(weight) for weight in own.trunk.parameters()]  # type: ignore[attr-defined]
        runtime.settle()  # as every server does: what it has then no collection looks at
        monkeypatch.setattr(gc, "unfreeze", lambda: pytest.fail("all memory is looked through"))
        own.trunk.held_by_a_cycle = [own]  # type: ignore[attr-defined]
        del own
        await service.repository.load("reward_model", "new")
        assert not any(weight() is not None for weight in weights)
    monkeypatch.undo()


async def test_the_batches_are_as_the_model_that_serves_needs_them(root: Path) -> None:
    zoo.tokenizer(zoo.checkpoint("bert", root / "bert", seed=3))
    async with serving(root) as service:
        scheduler = service.loops.of["reward_model"]._schedulers["reward_model"]
        scheduler.resize(64)  # as where there was no memory for more
        assert scheduler.limits.shares
        await service.repository.load("reward_model", "bert")
        info = service.catalog.model("reward_model")
        assert isinstance(info, ModelInfo) and info.path == "packed"
        assert not scheduler.limits.shares and scheduler.limits.max_batch_tokens > 64


async def test_a_model_is_found_by_the_checkpoint_that_was_named_at_the_start(root: Path) -> None:
    async with serving(root) as service:
        new = await service.repository.load("reward_model", "new")
        info = service.catalog.scored_by(str(root / "old"))
        assert (info.name, info.weights_version, info.source) == ("reward_model", new, str(root / "old"))
        assert new == await service.repository.load("reward_model", None)  # what serves, read again


# ------------------------------------------------------------------------------------------- other limits


async def test_one_request_has_no_more_samples_than_the_server_takes(root: Path) -> None:
    async with serving(root) as service:
        service.max_request_sequences = 2
        with pytest.raises(InvalidRequest, match=r"has 3 samples, .* at most 2; .*--max-request-sequences"):
            await service.score("total", ScoreRequest(texts=["a", "b", "c"]))
        assert len((await service.score("total", ScoreRequest(texts=["a", "b"]))).results) == 2


async def test_jobs_are_their_clients(root: Path) -> None:
    async with serving(root) as service:
        seen: list[str] = []
        for loop in service.loops.of.values():
            submit = loop.submit
            loop.submit = lambda name, job, submit=submit: (seen.append(job.client), submit(name, job))[1]  # type: ignore
        await service.score("total", ScoreRequest(texts=["a"]), "trainer")
        await service.score("length", ScoreRequest(texts=["a"]))
    assert seen == ["trainer", "trainer", ""]


async def test_the_plain_forward_is_asked_of_the_model_that_serves(root: Path, wanted: dict[str, np.ndarray]) -> None:
    async with serving(root) as service:
        group = service.loops.of["reward_model"]._group
        entry = service.catalog.entries["reward_model"].loaded()
        assert entry.info.path == "packed+shared"
        sequences = [Sequence(row) for row in ROWS]
        paths: list[str] = []
        use = entry.use  # type: ignore[attr-defined]
        entry.use = lambda path: (paths.append(path), use(path))[1]  # type: ignore[attr-defined]
        plain = group.execute(Command(Signal.FORWARD, "reward_model", sequences, plain=True))
        assert [r.reward for r in plain.results] == pytest.approx(wanted["old"], abs=1e-5)
        assert paths == ["single", "packed+shared"]
        group.execute(Command(Signal.FORWARD, "reward_model", sequences))
        assert len(paths) == 2


async def test_a_change_between_the_ends_of_a_large_file_is_another_version(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "old", hidden_size=256, intermediate_size=1024))
    file = folder / "model.safetensors"
    tensors, whole = load_file(file), file.read_bytes()
    async with serving(tmp_path) as service:
        old, before = version(service), await score(service)
        tensors["model.layers.0.mlp.gate_proj.weight"] *= 3
        save_file(tensors, file, metadata={"format": "pt"})
        data, edge = file.read_bytes(), 1 << 20
        assert (data[:edge], data[-edge:], len(data)) == (whole[:edge], whole[-edge:], len(whole)) and data != whole
        new = await service.repository.load("reward_model", None)
        after = await score(service)
    assert (before.weights_version, after.weights_version) == (old, new)
    assert np.abs(rewards(after) - rewards(before)).max() > 1e-3 and new != old
