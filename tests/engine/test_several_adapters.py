"""Several adapters over one base: each scores as its own unmerged model in peft does, and they share the weights."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

import zoo
from guerdon import LocalRewardModel
from guerdon.assembly import build_scorer, build_service
from guerdon.core import Sequence
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.errors import CheckpointError, ConfigError, StartError, Unsupported
from guerdon.server.batching.jobs import Batch, Job
from guerdon.settings.config import (
    AdapterConfig,
    ComponentConfig,
    ModelConfig,
    RewardConfig,
    ServerConfig,
    TokenRewardConfig,
)
from guerdon.settings.fields import check_settings
from light_peft import import_bitsandbytes
from served import Serve
from tiers import slow_but

import_bitsandbytes()
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear", "r": 4},
    "patterns": {"target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"q_proj": 2}, "r": 8},
    "rs": {"target_modules": ["o_proj", "up_proj"], "use_rslora": True, "r": 8},
}
NAMES = {"gpt2": ["c_attn"], "qwen3_next": ["q_proj", "in_proj_qkvz", "out_proj"]}


def adapt(base: Path, folder: Path, seed: int, *, labels: int = 1, **settings: Any) -> Any:
    """Saves a random adapter as TRL's trainer does; returns peft's own model, unmerged."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, attn_implementation="eager", num_labels=labels)
    model = peft.get_peft_model(model.eval(), peft.LoraConfig(lora_alpha=8, task_type="SEQ_CLS", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.requires_grad)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def alone(model: Any, rows: list[np.ndarray]) -> np.ndarray:
    """Rewards of each row by itself: the mean of all labels."""
    return np.array([model(input_ids=torch.from_numpy(row)[None]).logits.mean().item() for row in rows])


def config(base: Path, *folders: Path, **settings: Any) -> ModelConfig:
    adapters = [AdapterConfig(name=folder.name, model=str(folder)) for folder in folders]
    return ModelConfig(model=str(base), adapters=adapters, **settings)


@pytest.mark.slow
def test_an_adapter_of_a_model_in_memory_names_no_base(base: Path, folders: list[Path]) -> None:
    for folder, named in zip(folders, ("", None), strict=True):
        zoo.configure(folder, "adapter_config.json", base_model_name_or_path=named)
    assert len(several(base, *folders).members) == 2


def several(base: Path, *folders: Path, **settings: Any) -> Any:
    return build_scorer(config(base, *folders, **settings))


@pytest.mark.parametrize("name", slow_but(("llama", "gpt2"), ["llama", "gpt2", "qwen3_next", "gemma3"]))
def test_one_batch_of_all_scores_as_each_alone(name: str, tmp_path: Path) -> None:
    base = zoo.language_model(name, tmp_path / "base")
    kinds = {k: {**v, "target_modules": NAMES.get(name, v["target_modules"])} for k, v in KINDS.items()}
    models = [adapt(base, tmp_path / k, i, labels=1 + i, **own) for i, (k, own) in enumerate(kinds.items())]
    engine, rows = several(base, *(tmp_path / k for k in kinds)), zoo.rows()
    sequences = [Sequence(row, adapter=i) for row in rows for i in range(len(models))]
    want = np.stack([alone(model, rows) for model in models], 1).ravel()
    assert np.abs(want[::3] - want[1::3]).min() > 1e-3
    got = np.array([score.reward for score in engine.score(sequences)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert engine.path == ("shared" if name == "qwen3_next" else "packed+shared")
    assert [len(x.attributes) for x in engine.score(sequences[1:3])] == [2, 3]
    if name != "qwen3_next" and "same bits in any batch" in engine.info.proofs:
        for i in (0, 1, 2):  # whatever shares their batch
            mine = [k for k, s in enumerate(sequences) if s.adapter == i]
            assert [x.reward for x in engine.score([sequences[k] for k in mine])] == got[mine].tolist()
    np.testing.assert_allclose([x.reward for x in engine.score_plainly(sequences)], want, rtol=1e-5, atol=1e-5)
    engine.members[1].leave_path("a test")
    assert {member.path for member in engine.members} == {member.info.path for member in engine.members} == {"single"}
    np.testing.assert_allclose([x.reward for x in engine.score(sequences)], want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_other_heads_over_the_same_base(tmp_path: Path) -> None:
    """LlamaFactory's value head beside an adapter for language models, and rewards that are read from logits."""
    base, rows = zoo.language_model("llama", tmp_path / "base"), zoo.rows()
    trunks = [adapt(base, tmp_path / name, seed, **KINDS["all"]) for seed, name in enumerate(("factory", "plain"))]
    for name in ("factory", "plain"):
        zoo.configure(tmp_path / name, "adapter_config.json", task_type="CAUSAL_LM")
        state = load_file(tmp_path / name / "adapter_model.safetensors")
        save_file({k: v for k, v in state.items() if "score" not in k}, tmp_path / name / "adapter_model.safetensors")
    weight = torch.randn(1, zoo.HIDDEN)
    with pytest.raises(CheckpointError, match="without a reward head"):
        several(base, tmp_path / "factory")
    want = []
    output = load_file(base / "model.safetensors")["lm_head.weight"]
    for model in trunks:
        with torch.no_grad():
            run = model.base_model.model.model
            states = torch.stack([run(torch.from_numpy(row)[None]).last_hidden_state[0, -1] for row in rows])
        want.append([states @ weight[0] + 0.5, states @ output[7]])
    read = several(base, tmp_path / "factory", tmp_path / "plain", reward=TokenRewardConfig(ids=[7]))
    for i in (0, 1):
        got = [x.reward for x in read.score([Sequence(row, adapter=i) for row in rows])]
        np.testing.assert_allclose(got, want[i][1], rtol=1e-5, atol=1e-5)
    head = {"v_head.summary.weight": weight, "v_head.summary.bias": torch.tensor([0.5])}
    for name in ("factory", "plain"):
        save_file(head, tmp_path / name / "value_head.safetensors")
    made = several(base, tmp_path / "factory", tmp_path / "plain")
    for i in (0, 1):
        got = [x.reward for x in made.score([Sequence(row, adapter=i) for row in rows])]
        np.testing.assert_allclose(got, want[i][0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_their_weights_are_one_bases(tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base")
    folders = [tmp_path / f"a{i}" for i in range(4)]
    for i, folder in enumerate(folders):
        adapt(base, folder, i, **KINDS["all"])
    engine = several(base, *folders)

    def num_bytes(engines: list[Any]) -> int:
        own = {}
        for module in (m for e in engines for m in (e.trunk, e.head)):
            own |= {t.data_ptr(): t.nbytes for t in (*module.parameters(), *module.buffers()) if not t.is_mkldnn}
            own |= {id(t): t.to_dense().nbytes for t in module.parameters() if t.is_mkldnn}
        return sum(own.values())

    one = build_scorer(ModelConfig(model=str(folders[0])))
    stored = sum(t.nbytes for folder in folders for t in load_file(folder / "adapter_model.safetensors").values())
    assert num_bytes(engine.members) <= num_bytes([one]) + stored + 4096
    assert len({member.info.weights_version for member in engine.members}) == 4
    assert engine.info.weights_version == open_checkpoint(str(folders[0])).version


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path / "base"))


@pytest.fixture
def folders(base: Path, tmp_path: Path) -> Iterator[list[Path]]:
    made = [tmp_path / "helpful", tmp_path / "harmless"]
    for i, folder in enumerate(made):
        adapt(base, folder, i, **KINDS["all"])
    return made


def test_they_are_served_by_their_names_and_in_sums(base: Path, folders: list[Path], serve: Serve) -> None:
    parts = [ComponentConfig(model="helpful", weight=2.0), ComponentConfig(model="harmless", weight=-1.0)]
    server = serve(config(base, *folders), rewards=[RewardConfig(name="both", components=parts)])
    texts = [f"Question {i}: what is {i}+{i}? Answer: {i} is what I think." for i in range(5)]

    def ask(name: str) -> Any:
        body = {"model": name, "input": texts}
        reply = httpx.post(f"{server.http_url}/pooling", json=body, timeout=120)
        versions[name] = reply.headers["guerdon-weights-version"]
        return [one["data"][0] if isinstance(one["data"], list) else one["data"] for one in reply.json()["data"]]

    got: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for folder in folders:
        with LocalRewardModel(str(folder)) as one:
            got[folder.name] = ask(folder.name)
            np.testing.assert_allclose(got[folder.name], one.score(texts=texts).rewards, rtol=1e-5, atol=1e-5)
            assert versions[folder.name] == one.score(texts=["a"]).weights_version
    want = 2 * np.array(got["helpful"]) - got["harmless"]
    np.testing.assert_allclose(ask("both"), want, rtol=1e-5, atol=1e-5)


def test_requests_for_different_adapters_share_a_batch(base: Path, folders: list[Path]) -> None:
    service = build_service(ServerConfig(models=[config(base, *folders)]))
    with pytest.raises(Unsupported, match=r"helpful shares .*base with other adapters, and cannot be loaded"):
        asyncio.run(service.repository.load("helpful", None))
    for i, folder in enumerate(folders):
        rows = [Sequence(np.arange(4, 9), adapter=i), Sequence(np.arange(5, 7), adapter=i)]
        service.loops.of[folder.name].submit(folder.name, Job(rows))
    loop = service.loops.of["helpful"]
    assert loop._turn == ["helpful"]
    batch = loop._schedulers["helpful"].take(0.0)
    assert isinstance(batch, Batch) and sorted(s.adapter for s in batch.sequences) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"r": 3}, "helpful.*(size mismatch|does not fit)"),
        ({"use_dora": True}, "helpful is LORA, use_dora, which is more than plain LoRA"),
        ({"layer_replication": [[1, 2], [0, 1]]}, "helpful is LORA, layer_replication, which is more than plain LoRA"),
        ({"init_lora_weights": "pissa"}, "helpful is LORA, pissa, which is more"),
        ({"base_model_name_or_path": "other"}, "was trained on .*other, whose weights are not those of"),
        ({"target_modules": ["q_proj"]}, "does not fit .*: it holds"),
    ],
)
def test_an_adapter_that_does_not_fit(damage: dict[str, Any], message: str, base: Path, folders: list[Path]) -> None:
    zoo.language_model("llama", base.parent / "other", seed=9)
    if damage.get("base_model_name_or_path"):
        damage = {"base_model_name_or_path": str(base.parent / "other")}
    zoo.configure(folders[0], "adapter_config.json", **damage)
    with pytest.raises(CheckpointError, match=message) as caught:
        several(base, *folders)
    assert caught.value.help


def test_what_cannot_be_shared(base: Path, folders: list[Path], tmp_path: Path) -> None:
    small = zoo.language_model("llama", tmp_path / "small", hidden_size=16, intermediate_size=32)
    adapt(small, tmp_path / "smaller", 3, **KINDS["all"])
    zoo.configure(tmp_path / "smaller", "adapter_config.json", base_model_name_or_path="org/unknown")
    adapt(base, tmp_path / "embeds", 4, target_modules=["embed_tokens", "q_proj"])
    state = load_file(folders[0] / "adapter_model.safetensors")
    shutil.copytree(folders[0], tmp_path / "headless")
    save_file({k: v for k, v in state.items() if "score" not in k}, tmp_path / "headless/adapter_model.safetensors")
    (tmp_path / "broken").mkdir()
    shutil.copyfile(folders[0] / "adapter_config.json", tmp_path / "broken/adapter_config.json")
    broken = {k: v * float("inf") if "lora_B" in k else v for k, v in state.items()}
    save_file(broken, tmp_path / "broken/adapter_model.safetensors")
    refusals = {
        (base, tmp_path / "broken"): "the adapter .*broken has numbers in .* that are not finite as torch.float32",
        (base, tmp_path / "smaller"): "size mismatch",
        (base, tmp_path / "embeds"): "also changes model.embed_tokens",
        (base, tmp_path / "headless"): "headless .*: it lacks .*score",
        (base, base): "stands under adapters, and is none",
        (zoo.checkpoint("bert", tmp_path / "bert"), folders[0]): "it is an encoder",
    }
    for (own, folder), message in refusals.items():
        with pytest.raises(StartError, match=message):
            several(own, folder)
    with pytest.raises(ConfigError, match="a local model is one"):
        LocalRewardModel(str(base), adapters=[{"name": "a", "model": str(folders[0])}])
    model = AutoModelForTokenClassification.from_pretrained(base, num_labels=2)
    steps = peft.get_peft_model(model, peft.LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"]))
    steps.save_pretrained(tmp_path / "steps")
    with pytest.raises(ConfigError, match="truncation left is set, but steps answers for single tokens"):
        several(base, folders[0], tmp_path / "steps", truncation="left")
    with pytest.raises(ConfigError, match="adapters is set, but served:agreement is a function"):
        several(Path("served:agreement"), folders[0])
    with pytest.raises(ConfigError, match="model is not given"):
        check_settings(ModelConfig(model=str(base), adapters=[AdapterConfig(name="a")]))
