"""Loading a policy: what it is and knows, that it is transformers' own model, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from guerdon.engine.checkpoint.language_models import LoadedPolicy, load_policy
from guerdon.engine.heads import OutputHead
from guerdon.engine.logprobs import LanguageEngine
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import LanguageModelConfig

ROWS = zoo.rows(0, ((40, 3), (20, 2)))
PROMPTS = np.array([40, 40, 40, 20, 20, 4, 40])


def build(folder: Path, **settings: Any) -> LoadedPolicy:
    return load_policy(LanguageModelConfig(model=str(folder), **settings))


# ------------------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "llama4", "gemma2", "mamba"])
def test_it_is_transformers_own_model_and_its_trunk_the_same_modules(name: str, tmp_path: Path) -> None:
    folder = zoo.language_model(name, tmp_path)
    policy, plain = build(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(policy.model) is type(plain) and not policy.model.training
    assert any(child is policy.trunk for child in policy.model.children())
    tokens = torch.from_numpy(ROWS[0])[None]
    with torch.no_grad():
        assert torch.equal(policy.model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
        hidden = policy.trunk(input_ids=tokens, use_cache=False).last_hidden_state[0]
        assert torch.equal(policy.head(hidden), plain(input_ids=tokens).logits[0])


def test_a_loaded_policy_knows_its_limits_and_tokens(tmp_path: Path) -> None:
    policy = build(zoo.tokenizer(zoo.language_model("llama", tmp_path)))
    assert (policy.eos_token_ids, policy.pad_token_id) == ((zoo.EOS,), zoo.PAD)
    assert (policy.vocab_size, policy.max_length) == (zoo.VOCAB_SIZE, zoo.MAX_LENGTH)
    assert policy.tokenizer.eos_token_id == zoo.EOS and policy.info.takes_messages
    assert build(tmp_path, max_length=100).max_length == 100
    with pytest.raises(ConfigError, match="256 positions"):
        build(zoo.language_model("gpt2", tmp_path / "gpt2"), max_length=257)


def test_every_eos_token_that_the_checkpoint_names(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.language_model("llama", tmp_path))
    zoo.configure(folder, eos_token_id=[7, 9])
    zoo.configure(folder, "generation_config.json", eos_token_id=[9, 11])
    policy = build(folder)
    assert policy.eos_token_ids == (7, 9, 11, zoo.EOS)
    assert policy.model.generation_config.eos_token_id == [9, 11]


def test_tokens_that_are_no_ids_of_the_model_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = zoo.tokenizer(zoo.language_model("gpt2", tmp_path))
    zoo.configure(folder, eos_token_id=[7, zoo.VOCAB_SIZE], pad_token_id=zoo.VOCAB_SIZE)
    zoo.configure(folder, "generation_config.json", eos_token_id=[9, -1])
    policy = build(folder)
    assert policy.eos_token_ids == (7, 9, zoo.EOS) and policy.pad_token_id == zoo.PAD
    assert f"ignoring EOS [{zoo.VOCAB_SIZE}, -1]: the ids of the model are 0 to 299" in caplog.text
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    del tokenizer["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    zoo.configure(folder, pad_token_id=-1)
    assert build(folder).pad_token_id == 0


def test_a_checkpoint_without_tokenizer_and_eos(tmp_path: Path) -> None:
    folder = zoo.language_model("llama", tmp_path)
    zoo.configure(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    policy = build(folder)
    assert policy.tokenizer is None and policy.eos_token_ids == () and not policy.info.takes_text


# ------------------------------------------------------------------------------------------- generating with it


def generated(policy: LoadedPolicy) -> list[int]:
    tokens = torch.from_numpy(ROWS[0][:20])[None]
    made = policy.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    return made[0].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mamba"])
def test_it_generates_within_plain_attention_and_runs_packed_again_behind(name: str, tmp_path: Path) -> None:
    policy = build(zoo.language_model(name, tmp_path))
    want = generated(policy)
    engine = LanguageEngine(policy)
    before = [logprobs for _, logprobs, _ in engine.logprobs(ROWS, PROMPTS)]
    with engine.plain_attention():
        assert policy.model.config._attn_implementation != "guerdon_packed"
        assert generated(policy) == want
    with pytest.raises(KeyboardInterrupt), engine.plain_attention():
        raise KeyboardInterrupt
    after = [logprobs for _, logprobs, _ in engine.logprobs(ROWS, PROMPTS)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_computed_one_by_one_it_does_not_matter_what_shares_a_batch(tmp_path: Path) -> None:
    engine = LanguageEngine(build(zoo.language_model("llama", tmp_path), deterministic=True))
    together = {int(at[0]): x[0] for at, x, _ in engine.logprobs(ROWS, PROMPTS)}
    for i, row in enumerate(ROWS):
        ((_, alone, _),) = engine.logprobs([row], PROMPTS[i : i + 1])
        assert torch.equal(together[i][: alone.shape[1]], alone[0])


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", "a LlamaForSequenceClassification, which has a head for rewards"),
        ("bert", r"encoder \(bert\), which generates no text"),
    ],
)
def test_a_reward_model_and_an_encoder_are_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        build(zoo.checkpoint(name, tmp_path))


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight"])
def test_missing_weights_are_never_made_up(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = zoo.language_model("llama", tmp_path)
    tensors = zoo.tensors(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"lack {name}"):
        build(folder)


@pytest.mark.parametrize("what", ["other numbers", "another input", "another shape"])
def test_logits_that_are_not_made_from_hidden_states_alone_are_refused(what: str, tmp_path: Path) -> None:
    policy = build(zoo.language_model("llama", tmp_path))
    plain = policy.model.forward

    def forward(input_ids: Any = None, inputs_embeds: Any = None, **others: Any) -> Any:
        if what == "another input" and input_ids is None:
            raise ValueError("input_ids are needed")
        output = plain(input_ids=input_ids, inputs_embeds=inputs_embeds, **others)
        if what == "other numbers" and input_ids is not None:
            output.logits = output.logits + 0.1 * input_ids[..., None]
        if what == "another shape" and input_ids is None:
            output.logits = output.logits[..., 1:]
        return output

    policy.model.forward = forward
    with pytest.raises(CheckpointError, match="cannot be computed from its last hidden states") as caught:
        OutputHead(policy.model, policy.trunk, policy.origin.folder)
    assert {"other numbers": "differ by", "another input": "ValueError", "another shape": "inf"}[what] in str(
        caught.value
    )
