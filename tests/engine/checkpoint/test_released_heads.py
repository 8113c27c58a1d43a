"""Heads in the layouts of released reward models, beside formulas written from their cards or public code.

The trunk is transformers', one sequence at a time. ArmoRM: copies of its `modeling_custom.py`, and `stage-2_prepare.py`
of RLHFlow's repository; URM: SGLang's `llama_reward.py`; INF-ORM: its card's class, copied by autometrics, which Qwen's
repeat (vLLM, SGLang, TensorRT-LLM); Skywork: skywork-o1-prm-inference, copied by openr; LlamaFactory: `_get_scores` of
its `chat/hf_engine.py`. Of QRM's own code no copy was found: its formula is its paper's.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import SELU, BatchNorm1d, Dropout, Linear, Module, ReLU, Sequential
from transformers import AutoModel, AutoTokenizer

import zoo
from guerdon import LocalRewardModel
from guerdon.core import Sequence as Tokens
from guerdon.engine.checkpoint.reward_models import load_critic, load_reward_model
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError
from guerdon.kinds.samples import find_fault
from guerdon.settings.config import ModelConfig
from served import Serve

BEGINS = [128009, 128006, 78191, 128007, 271]  # <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n
H, A = zoo.HIDDEN, 5
SCALE, TRANSFORM = torch.tensor([1.5]), torch.randn(A, A, generator=torch.Generator().manual_seed(0))


def head_of(name: str) -> dict[str, Module]:
    """The modules of the class by their names in the file, ArmoRM's with its activations; random."""
    torch.manual_seed(1)
    two = Sequential(Linear(H, H), ReLU(), Linear(H, 2 if "Process" in name else 1))
    armo = Sequential(Linear(H, 8), ReLU(), Linear(8, 8), ReLU(), Linear(8, 8), ReLU(), Linear(8, A))
    qrm = [Linear(H, 8, bias=False), ReLU(), BatchNorm1d(8), Dropout(), Linear(8, 8, bias=False), ReLU()]
    qrm += [BatchNorm1d(8), Dropout(), Linear(8, 8, bias=False), ReLU(), BatchNorm1d(8), Linear(8, A)]
    urm = Sequential(Linear(H, H), SELU(), Linear(H, H), SELU(), Linear(H, A))
    if "Gating" in name:
        made = {"regression_layer": Linear(H, 3 * A if "QRM" in name else A, bias=False)}
        made["gating.layers"] = Sequential(*qrm).eval() if "QRM" in name else armo
    elif "Normal" in name:
        made = {"score": Linear(H, 2 * A, bias=False), "weights.fc": urm}
    else:
        made = {"score": two} if "Rew" in name or "INF" in name else {"v_head.summary": Linear(H, 1)}
    for tensor in (tensor for module in made.values() for tensor in module.state_dict().values()):
        tensor.copy_(torch.rand_like(tensor) - 0.4 if tensor.dim() > 1 else torch.rand_like(tensor.float()) + 0.1)
        if "Normal" in name:
            tensor /= 4  # its reward is a sum of products, which cancel: their rounding has to stay below the bound
    return made


@torch.no_grad()
def formula(name: str, states: torch.Tensor, row: list[int]) -> np.ndarray:
    """The reward of a row, or its steps', of the hidden states `[T,H]`."""
    head, steps = head_of(name), [len(row) // 2, len(row) - 1]
    if "Causal" in name or "Prm" in name:
        values = head["v_head.summary"](states)[:, 0]
        made = values[steps].sigmoid() if "Prm" in name else values[-1]
    elif "Gating" in name:
        at = max(i for i in range(len(row)) if row[i : i + 5] == BEGINS)
        gate = torch.softmax(head["gating.layers"](states[at, None])[0] / 10, -1) * SCALE
        objectives = head["regression_layer"](states[-1]).view(A, -1).mean(1)
        made = (gate * (objectives if "QRM" in name else objectives @ TRANSFORM)).sum()
    elif "Normal" in name:
        made = (head["score"](states[-1]).view(A, 2)[:, 0] * head["weights.fc"](states[-1])).sum()
    else:
        made = head["score"](states)
        made = made.softmax(-1)[steps, 1] if "Process" in name else made[-1, 0]
    return made.numpy()


def released(folder: Path, name: str) -> Path:
    """Writes a random checkpoint in that layout; LlamaFactory's head is in a file of its own."""
    zoo.checkpoint("qwen2" if name.startswith("Qwen2") else "llama", folder, vocab_size=128300)
    state = load_file(folder / "model.safetensors")
    del state["score.weight"]
    head = {f"{part}.{n}": tensor for part, m in head_of(name).items() for n, tensor in m.state_dict().items()}
    if "Gating" in name:
        head["gating.logit_scale"] = SCALE
    if name.endswith("Gating"):  # its file numbers the linear layers alone
        head = {n.translate({50: "1", 52: "2", 54: "3"}) if "layers" in n else n: t for n, t in head.items()}
        head["reward_transform_matrix"] = TRANSFORM
    files = {"": state, "value_head": head} if "Causal" in name else {"": state | head}
    for file, tensors in files.items():
        save_file(tensors, folder / f"{file or 'model'}.safetensors")
    return zoo.configure(folder, architectures=name.split()[:1], num_labels=2 * A if "With" in name else 1)


def wanted(folder: Path, name: str, rows: list[np.ndarray]) -> list[np.ndarray]:
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [formula(name, trunk(torch.from_numpy(row)[None]).last_hidden_state[0], row.tolist()) for row in rows]


@pytest.mark.parametrize(
    "name",
    [
        "INFORMForSequenceClassification",
        *(f"Qwen2For{kind}Model" for kind in ("Reward", "ProcessReward", "Prm")),
        *("LlamaForCausalLM", "LlamaForRewardModelWithGating", "LlamaForRewardModelWithGating of QRM"),
        "LlamaForSequenceClassificationWithNormal_Weights",
    ],
)
def test_a_released_layout_scores_as_its_code_does(name: str, tmp_path: Path) -> None:
    folder, random = released(tmp_path, name), np.random.default_rng(3)
    asked = random.integers(5, 128000, 20)
    rows = [np.r_[asked, BEGINS, random.integers(5, 128000, n)] for n in (3, 11)]
    rows.append(np.r_[rows[0], BEGINS, 9, 8])  # the last answer counts
    engine, want = Engine(load_reward_model(ModelConfig(model=str(folder)))), wanted(folder, name, rows)
    results: Any = engine.score([Tokens(row, steps=np.array([len(row) // 2, len(row) - 1])) for row in rows])
    for got, own in zip(results, want, strict=True):
        np.testing.assert_allclose(got.steps if own.ndim else got.reward, own, rtol=1e-5, atol=1e-5)
    assert engine.path == "packed+shared" and np.ptp(want) > 0.01
    if "With" in name:
        assert results[0].attributes.shape == (A + 1,) and engine.head.pooling == "last_non_pad"
        with pytest.raises(CheckpointError, match="has a gate"):
            load_critic(ModelConfig(model=str(folder)))
    if "Gating" in name:
        assert "no answer begins in this sample" in str(find_fault(Tokens(np.arange(5, 20)), engine.info))


def test_llama_factorys_route_cuts_the_end(tmp_path: Path, serve: Serve) -> None:
    folder = zoo.tokenizer(released(tmp_path, "LlamaForCausalLM"))
    server, texts = serve(ModelConfig(model=str(folder))), ["What is it? It is four.", "Who? " * 9]
    told = httpx.post(f"{server.http_url}/v1/score/evaluation", json={"messages": texts, "max_length": 20}).json()
    cut: Any = AutoTokenizer.from_pretrained(folder)(texts, truncation=True, max_length=20, add_special_tokens=False)
    want = wanted(folder, "LlamaForCausalLM", [np.array(ids) for ids in cut["input_ids"]])
    np.testing.assert_allclose(told["scores"], want, rtol=1e-5, atol=1e-5)


def test_steps_are_tokenised_apart(tmp_path: Path, serve: Serve) -> None:
    """As `prepare_input` of skywork-o1-prm-inference and TRL's PRMTrainer do: `.` and a line feed would merge."""
    folder = zoo.tokenizer(released(tmp_path, "Qwen2ForPrmModel"))
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    made["model"]["merges"].append([".", "\u010a"])
    made["model"]["vocab"][".\u010a"] = 290
    made["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    path.write_text(json.dumps(made))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prompt, steps, wanted_steps = "What is 1+1?\n", ["1+1 is 2.", "So 2", "The answer is 2."], []
    assert 290 in ids("is 2.\n") and len(ids("\n")) == 1
    row = ids(prompt)
    for step in steps:
        row += [*ids(step), *ids("\n")]
        wanted_steps.append(len(row) - 1)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    head = head_of("Qwen2ForPrmModel")["v_head.summary"]
    with torch.no_grad():
        states = trunk(torch.tensor([row])).last_hidden_state[0]
        want = head(states)[wanted_steps, 0].sigmoid().numpy()
    text = prompt + "".join(f"{step}\n" for step in steps)
    with LocalRewardModel(str(folder), step_separator="\n") as model:
        alone, begun = model.score(texts=[text]), model.score(texts=[text], prompts=[prompt])
    assert (alone.errors, begun.errors) == ([None], [None])
    np.testing.assert_allclose((begun.steps or [])[0], want, rtol=1e-5, atol=1e-5)
    assert len((alone.steps or [])[0]) == len(want) + 1  # without a prompt its own line feed ends a step
    server = serve(ModelConfig(model=str(folder), step_separator="\n"))
    body = {"prompt": prompt, "responses": [text.removeprefix(prompt), "no step"]}
    tried = httpx.post(f"{server.http_url}/dashboard/try", json=body).json()["results"]
    assert [step["index"] for step in tried[0]["steps"]] == wanted_steps and "no step" in tried[1]["error"]
    np.testing.assert_allclose([step["reward"] for step in tried[0]["steps"]], want, rtol=1e-5, atol=1e-5)
