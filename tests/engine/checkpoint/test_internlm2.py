"""InternLM2-reward and POLAR, converted: their scores are those of a forward written from `modeling_internlm2.py`.

The public file gives a sample's reward as `v_head` of the last token, which has to be `reward_token_id`; POLAR's texts
are those of `RewardModelClient._encode` in XTuner's `xtuner/utils/rm_utils.py`.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import zoo
from guerdon import LocalRewardModel, cli
from guerdon.core import Sequence
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError, Exit
from guerdon.settings.config import ModelConfig
from served import Serve

sentencepiece = pytest.importorskip("sentencepiece")
H, HEADS, GROUPS, LAYERS, FF, EPS, THETA = 32, 4, 2, 2, 48, 1e-5, 1e6
DIM = H // HEADS
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = ("[UNUSED_TOKEN_130]", "[UNUSED_TOKEN_145]", "[UNUSED_TOKEN_146]", "<|reward|>")
TEXTS = [f"The capital of China is Beijing, number {i}: what is {i}+{i}? It is {2 * i}, I think." for i in range(40)]
ASKED = [{"role": "user", "content": "What is the capital of China?"}]
ANSWERS = ["Beijing.", "I think it is Shanghai: 上海."]
CONVERSATIONS = [[*ASKED, {"role": "assistant", "content": answer}] for answer in ANSWERS]


def released(folder: Path, *, polar: bool, bias: bool = False) -> tuple[Path, Any, dict[str, Tensor]]:
    """A random checkpoint in the released layout, its sentencepiece model, and its tensors."""
    folder.mkdir()
    marks = MARKS[: 3 + polar]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(folder / "tokenizer"), model_type="bpe", vocab_size=360,
        byte_fallback=True, add_dummy_prefix=False, user_defined_symbols=list(marks),
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=3, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()
    own = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    ids = {mark: own.piece_to_id(mark) for mark in marks}
    names = {ids[MARKS[1]]: "<|im_end|>", ids[MARKS[2]]: "<|im_start|>", **({ids[MARKS[3]]: MARKS[3]} if polar else {})}
    names |= {ids[MARKS[0]]: MARKS[0]} if polar else {}  # its texts have the token, those of others its id alone
    added = {str(i): {"content": name, "special": True, "normalized": False} for i, name in names.items()}
    config = {"tokenizer_class": "InternLM2Tokenizer", "added_tokens_decoder": added, "chat_template": CHAT}
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 0.2) -> Tensor:
        return torch.randn(shape, generator=random) * scale

    vocab = own.vocab_size()
    state = {"model.tok_embeddings.weight": draw(vocab, H, scale=0.5), "model.norm.weight": 1 + draw(H)}
    state["v_head.weight"] = draw(1, H)
    for i in range(LAYERS):
        layer = {"attention.wqkv.weight": draw((HEADS + 2 * GROUPS) * DIM, H), "attention.wo.weight": draw(H, H)}
        layer |= {"feed_forward.w1.weight": draw(FF, H), "feed_forward.w3.weight": draw(FF, H)}
        layer |= {"feed_forward.w2.weight": draw(H, FF), "attention_norm.weight": 1 + draw(H)}
        layer |= {"ffn_norm.weight": 1 + draw(H)}
        if bias:
            layer |= {"attention.wqkv.bias": draw((HEADS + 2 * GROUPS) * DIM), "attention.wo.bias": draw(H)}
        state |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "model_type": "internlm2", "architectures": ["InternLM2ForRewardModel"], "hidden_size": H,
        "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "rms_norm_eps": EPS, "rope_theta": THETA, "vocab_size": vocab, "bias": bias,
        "hidden_act": "silu", "max_position_embeddings": 256, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
        "reward_token_id": ids[MARKS[0]], "auto_map": {"AutoModel": "modeling_internlm2.InternLM2ForRewardModel"},
        "rope_scaling": {"type": "dynamic", "factor": 2.0} if polar else None, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, own, state


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def turned(x: Tensor) -> Tensor:
    """The rotary embedding of heads `[T,N,D]`."""
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(0, DIM, 2) / DIM)
    angles = torch.cat([angles, angles], -1)[:, None]
    other = torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1)
    return x * angles.cos() + other * angles.sin()


def score(state: dict[str, Tensor], row: list[int]) -> float:
    x, later = state["model.tok_embeddings.weight"][row], torch.ones(len(row), len(row)).triu(1).bool()
    for i in range(LAYERS):
        own = {n.removeprefix(f"model.layers.{i}."): t for n, t in state.items() if n.startswith(f"model.layers.{i}.")}
        mixed = norm(x, own["attention_norm.weight"]) @ own["attention.wqkv.weight"].T + own.get(
            "attention.wqkv.bias", 0
        )
        mixed = mixed.view(len(row), GROUPS, HEADS // GROUPS + 2, DIM)
        q, k, v = mixed[:, :, :-2], turned(mixed[:, :, -2]), mixed[:, :, -1]
        heads = []
        for head in range(HEADS):
            group, within = divmod(head, HEADS // GROUPS)
            weights = turned(q[:, group, within, None])[:, 0] @ k[:, group].T / DIM**0.5
            heads.append(weights.masked_fill(later, -torch.inf).softmax(-1) @ v[:, group])
        x = x + torch.cat(heads, -1) @ own["attention.wo.weight"].T + own.get("attention.wo.bias", 0)
        y = norm(x, own["ffn_norm.weight"])
        gated = torch.nn.functional.silu(y @ own["feed_forward.w1.weight"].T) * (y @ own["feed_forward.w3.weight"].T)
        x = x + gated @ own["feed_forward.w2.weight"].T
    return (norm(x, state["model.norm.weight"]) @ state["v_head.weight"].T)[-1].item()


def convert(folder: Path) -> Path:
    made = folder.with_name("made")
    assert cli.main(["convert", str(folder), str(made)]) == Exit.DONE
    return made


@pytest.mark.parametrize("bias", [False, True])
def test_scores_of_ids_are_those_of_its_own_code(bias: bool, tmp_path: Path) -> None:
    folder, own, state = released(tmp_path / "rm", polar=False, bias=bias)
    with pytest.raises(CheckpointError, match="brings its own Python code") as caught:
        load_reward_model(ModelConfig(model=str(folder)))
    assert "guerdon convert" in caught.value.help
    engine = Engine(load_reward_model(ModelConfig(model=str(convert(folder)))))
    rows = [np.append(row, own.piece_to_id(MARKS[0])) for row in zoo.rows()]
    got = [x.reward for x in engine.score([Sequence(row) for row in rows])]  # type: ignore[union-attr]
    want = [score(state, row.tolist()) for row in rows]
    assert engine.path == "packed+shared" and np.std(want) > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_conversations_end_with_the_token_that_is_read(tmp_path: Path, serve: Serve) -> None:
    """Its `get_score`: the template, then the tokenizer's BOS before it, then the token."""
    folder, own, state = released(tmp_path / "rm", polar=False)
    mark = {name: own.piece_to_id(name) for name in MARKS}
    rows = []
    for conversation in CONVERSATIONS:
        row = [1, 1]
        for m in conversation:
            row += [mark[MARKS[2]], *own.encode(f"{m['role']}\n{m['content']}"), mark[MARKS[1]], *own.encode("\n")]
        rows.append([*row, mark[MARKS[0]]])
    want = [score(state, row) for row in rows]
    made = convert(folder)
    with LocalRewardModel(str(made)) as model:
        np.testing.assert_allclose(model.score(messages=CONVERSATIONS).rewards, want, rtol=1e-5, atol=1e-5)
    server = serve(ModelConfig(model=str(made)))
    body = {"model": "reward_model", "messages": CONVERSATIONS[1]}
    told = httpx.post(f"{server.http_url}/pooling", json=body).json()["data"][0]["data"]
    np.testing.assert_allclose(np.ravel(told), want[1], rtol=1e-5, atol=1e-5)


def test_polar_compares_with_the_label(tmp_path: Path) -> None:
    folder, own, state = released(tmp_path / "polar", polar=True)
    prompt, reference = ASKED[0]["content"], "Beijing."
    between, end = own.piece_to_id(MARKS[3]), own.piece_to_id(MARKS[0])
    rows = [
        [1, *own.encode(f"{prompt}\n{reference}"), between, *own.encode(f"{prompt}\n{answer}"), end]
        for answer in ANSWERS
    ]
    want = [score(state, row) for row in rows]
    with LocalRewardModel(str(convert(folder))) as model:
        got = model.score(messages=CONVERSATIONS, labels=[reference] * 2).rewards
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert "label was not sent" in str(model.score(messages=CONVERSATIONS).errors[0])


def test_what_is_not_internlm2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, state = released(tmp_path / "rm", polar=False)
    save_file(state | {"model.layers.0.extra.weight": torch.ones(2)}, folder / "model.safetensors")
    assert cli.main(["convert", str(folder), str(tmp_path / "out")]) != Exit.DONE
    assert "model.layers.0.extra.weight, which is none of InternLM2's" in capsys.readouterr().err
    zoo.configure(folder, rope_scaling={"type": "yarn", "factor": 2.0})
    save_file(state, folder / "model.safetensors")
    assert cli.main(["convert", str(folder), str(tmp_path / "out")]) != Exit.DONE
    assert "has the rotary embedding yarn" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and open_checkpoint(str(folder)).settings["model_type"] == "internlm2"
