"""What the start proves: rows do not depend on their neighbours, and the quick path computes what the plain does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import zoo
from engine.test_engine import build
from guerdon.assembly import build_scorer
from guerdon.core import MIN_SHARED, Score, Sequence
from guerdon.engine import independence
from guerdon.engine.attention import registry
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.engine.engine import Engine
from guerdon.engine.generating import DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.engine.native.library import find
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import CheckpointError
from guerdon.settings.config import LanguageModelConfig, ModelConfig, TeacherConfig
from tiers import slow_but

_HYBRID = zoo._HYBRID
_LATENT = {
    **zoo._GROUPED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "index_topk": 8,
    "index_head_dim": 16, "index_n_heads": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "zamba": {
        **zoo._GROUPED, "num_hidden_layers": 5, "attention_head_dim": 16, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "n_mamba_heads": 2, "use_mamba_kernels": False,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "recurrent_gemma": {
        **zoo._GROUPED, "num_hidden_layers": 3, "lru_width": 32, "head_dim": 8, "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    **{name: zoo.HYBRIDS[name][1] for name in ("falcon_h1", "lfm2", "qwen3_5_text")},
    "jamba": zoo.ARCHITECTURES["jamba"][1],
    "mamba": zoo.ARCHITECTURES["mamba"][1],
    "falcon_mamba": zoo.ARCHITECTURES["mamba"][1],
    "minimax": {**zoo.HYBRIDS["minimax"][1], "layer_types": ["linear_attention", "full_attention"] * 2},
    "rwkv": {**zoo._IDS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 256},
    "lfm2_moe": {
        **_HYBRID, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "llama": zoo._GROUPED,
    "mixtral": zoo.ARCHITECTURES["mixtral"][1],
    "afmoe": {
        **_HYBRID, "head_dim": 8, "sliding_window": 200, "num_dense_layers": 1, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "hy_v4": _LATENT,
    "deepseek_v4": {
        **zoo.PECULIAR["deepseek-v4"][1], "layer_types": ["compressed_sparse_attention", "sliding_attention"],
        "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2,
    },
}  # fmt: skip


PROVED = "neighbours and siblings change nothing in 6 swaps (0.0)"


def fresh(name: str, folder: Path, *, randomised: bool = False) -> Path:
    """Writes a model as transformers initialises it: what a state carries from row to row is small."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name]))
    if randomised:
        zoo._randomise(model)
    model.generation_config.do_sample = True
    model.save_pretrained(folder)
    return folder


def teacher(folder: Path, dtype: str = "float32") -> TeacherEngine:
    return TeacherEngine(load_policy(TeacherConfig(model=str(folder), dtype=dtype)))  # type: ignore[arg-type]


def logprobs(engine: TeacherEngine, rows: list[np.ndarray]) -> list[np.ndarray]:
    found = []
    for result in engine.score([Sequence(row) for row in rows]):
        assert isinstance(result, Score) and result.answer is not None
        assert result.answer.logprobs is not None
        found.append(result.answer.logprobs)
    return found


@torch.no_grad()
def wanted(folder: Path, rows: list[np.ndarray], *, without_last: bool = False) -> list[np.ndarray]:
    """Each token's log-prob by transformers, given the whole row, or all but its last token."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    made = []
    for row in rows:
        seen = torch.from_numpy(row[:-1] if without_last else row)[None]
        logits = model(input_ids=seen, use_cache=False).logits[0, : len(row) - 1].float()
        made.append(logits.log_softmax(-1).gather(1, torch.from_numpy(row[1:])[:, None])[:, 0].numpy())
    return made


def texts(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in lengths]


# ------------------------------------------------------------------------------------- neighbours and siblings


@pytest.mark.parametrize(
    ("name", "dtype", "randomised", "path"),
    slow_but(
        ("recurrent_gemma", "falcon_h1", "lfm2"),
        [
            ("zamba", "bfloat16", False, "single"),
            ("recurrent_gemma", "bfloat16", True, "single"),
            ("falcon_h1", "bfloat16", False, "shared"),
            ("qwen3_5_text", "bfloat16", False, "shared"),
            ("jamba", "float32", False, "single"),
            ("jamba", "bfloat16", False, "single"),
            ("lfm2", "float32", False, "shared"),
            ("lfm2_moe", "float32", False, "shared"),
        ],
    ),
)
def test_what_runs_from_row_to_row_is_found_below_any_tolerance(
    name: str, dtype: str, randomised: bool, path: str, tmp_path: Path
) -> None:
    engine = teacher(fresh(name, tmp_path, randomised=randomised), dtype)
    assert engine.path == path, engine.info.why
    alone = "neighbours change nothing: each row is computed alone"
    assert engine.info.proofs[-1] == {"single": alone, "shared": PROVED}[path]
    row, *others = texts(12, 9, 12, 30)
    companies = [[row], [others[0], row], [others[1], row, others[2]], [others[2], row]]
    found = [logprobs(engine, company)[min(1, len(company) - 1)] for company in companies]
    assert all(np.array_equal(one, found[0]) for one in found)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "why"),
    slow_but(
        ("mamba", "rwkv", "minimax"),
        [
            *((name, "a response would not read") for name in ("mamba", "falcon_mamba", "jamba", "zamba")),
            ("recurrent_gemma", "returns no cache"),
            ("rwkv", "returns no cache"),
            *((name, "a response would not read") for name in ("minimax", "deepseek_v32", "glm_moe_dsa", "hy_v4")),
        ],
    ),
)
def test_what_does_not_continue_from_its_cache_is_found(name: str, why: str, dtype: str, tmp_path: Path) -> None:
    engine = teacher(fresh(name, tmp_path), dtype)
    assert engine.path == "single" and why in engine.info.why, engine.info.why


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_attention_alone_computes_stays_packed(name: str, dtype: str, tmp_path: Path) -> None:
    engine = teacher(fresh(name, tmp_path), dtype)
    assert engine.path == "packed+shared", engine.info.why
    same = "same bits in any batch" if find()[0] else f"bits may change with the batch: {find()[1]}"
    proved = PROVED.replace(" in 6 swaps", "") if find()[0] else PROVED
    assert engine.info.proofs == ("other later tokens change nothing (0.0)", same, proved)


def test_a_leak_smaller_than_the_tolerance_of_the_dtype_refuses_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that lets a thousandth of the batch's first value into every other row."""
    plain = registry.packed_attention

    def leaking(*given: Any, **more: Any) -> tuple[torch.Tensor, None]:
        out, none = plain(*given, **more)
        return out + 1e-3 * out[:, :1], none

    monkeypatch.setattr(registry, "packed_attention", leaking)
    monkeypatch.setattr(registry, "_registered", False, raising=False)
    registry.register()
    try:
        engine = teacher(fresh("llama", tmp_path), "bfloat16")
    finally:
        monkeypatch.undo()
        registry.register()
    assert engine.path == "shared" and "a row's states change with its neighbours" in engine.info.why


@pytest.mark.slow
def test_experts_may_round_otherwise_but_not_depend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference without a gradient is rounding; with one, however small, it is a dependence."""
    monkeypatch.setattr(independence, "why_bits_differ", lambda *_: "experts round")
    monkeypatch.setattr(independence, "largest_change", lambda got, want: 1e-6)
    engine = teacher(fresh("mixtral", tmp_path))
    assert engine.path == "packed+shared" and "change nothing in 6 swaps (1.0e-06)" in engine.info.proofs[-1]
    monkeypatch.setattr(independence, "largest_change", lambda got, want: 1e-3)
    engine = teacher(tmp_path)
    assert engine.path == "single" and "a row's states change with its neighbours, by 1.0e-03" in engine.info.why


# ------------------------------------------------------------------------------------------------ later tokens

LOOKING_AHEAD = [("llama", {"is_causal": False}), ("gemma3", {"use_bidirectional_attention": True})]


@pytest.mark.parametrize(("name", "settings"), LOOKING_AHEAD)
def test_what_looks_ahead_is_no_critic_and_no_teacher(name: str, settings: dict[str, object], tmp_path: Path) -> None:
    critic = zoo.configure(zoo.checkpoint(name, tmp_path / "critic", "openrlhf-critic"), **settings)
    told = f"is not causal: .*config.json has {next(iter(settings))}: "
    with pytest.raises(CheckpointError, match=told + ".*a value must not depend on what comes after it"):
        Engine(load_critic(ModelConfig(model=str(critic))))
    language = zoo.configure(zoo.language_model(name, tmp_path / "teacher"), **settings)
    with pytest.raises(CheckpointError, match=told + ".*a log-prob must not depend on what comes after it"):
        teacher(language)
    for deterministic in (False, True):
        with pytest.raises(CheckpointError, match=told):
            LanguageEngine(load_policy(LanguageModelConfig(model=str(language), deterministic=deterministic)))


@pytest.mark.parametrize(("name", "settings"), LOOKING_AHEAD)
def test_a_reward_model_that_looks_ahead_is_right_and_shares_no_prompt(
    name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    folder = zoo.configure(zoo.checkpoint(name, tmp_path), **settings)
    engine = build_scorer(ModelConfig(model=str(folder)))
    assert isinstance(engine, Engine) and engine.path == "packed", engine.info.why
    assert engine.info.proofs[0].startswith("prompts are not shared: a later token changes an earlier one's state by")
    rows = zoo.rows(0)
    got = [result.reward for result in engine.score([Sequence(row) for row in rows]) if isinstance(result, Score)]
    want = zoo.reference(folder, rows)
    assert np.abs(got - want).max() <= 1e-4 * want.std()
    causal = zoo.reference(zoo.checkpoint(name, tmp_path / "causal"), rows)
    assert np.abs(causal - want).max() > 1e-2 * want.std(), "the setting counts"


@pytest.mark.parametrize("name", slow_but(("deepseek_v32",), ["deepseek_v32", "glm_moe_dsa", "hy_v4", "deepseek_v4"]))
def test_a_teacher_keeps_the_last_token_if_its_absence_changes_earlier_logits(name: str, tmp_path: Path) -> None:
    folder = fresh(name, tmp_path, randomised=name != "deepseek_v4")
    rows = texts(60, 41, 90, 33, 64)
    want, cut = wanted(folder, rows), wanted(folder, rows, without_last=True)
    assert max(np.abs(a - b).max() for a, b in zip(want, cut, strict=True)) > 1e-3, "dropping it changes them"
    for got, own in zip(logprobs(teacher(folder), rows), want, strict=True):
        np.testing.assert_allclose(got[-len(own) :], own, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- windows


def test_the_probe_reaches_beyond_every_window(tmp_path: Path) -> None:
    """AFMoE's layers view the attention's result in another shape, and did so only beyond the window."""
    folder = fresh("afmoe", tmp_path, randomised=True)
    engine = teacher(folder)
    assert engine.path == "packed+shared", engine.info.why
    assert engine.trunk.config.sliding_window == 200
    rows = texts(250, 210, 30)
    for got, own in zip(logprobs(engine, rows), wanted(folder, rows), strict=True):
        np.testing.assert_allclose(got[-len(own) :], own, atol=1e-4)


@pytest.mark.slow
def test_a_path_that_fails_beyond_the_window_is_found_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(module: Any, query: torch.Tensor, *given: Any, **more: Any) -> Any:
        window = more.get("sliding_window")
        if window is not None and query.shape[2] > window:
            raise RuntimeError("view size is not compatible")
        return plain(module, query, *given, **more)

    plain = registry.packed_attention
    monkeypatch.setattr(registry, "packed_attention", failing)
    registry.register()
    try:
        engine = teacher(fresh("afmoe", tmp_path))
    finally:
        monkeypatch.undo()
        registry.register()
    assert engine.path == "shared" and "view size is not compatible" in engine.info.why


def assert_exact(engine: Engine, folder: Path, lengths: list[int]) -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in lengths]
    want = zoo.reference(folder, rows)
    results = engine.score([Sequence(row) for row in rows])
    assert all(isinstance(result, Score) for result in results), results
    got = np.array([result.reward for result in results])  # type: ignore[union-attr]
    assert np.abs(got - want).max() <= 1e-4 * want.std()


@pytest.mark.parametrize("max_batch_tokens", slow_but((48,), [1, 48]))
def test_a_small_budget_hides_no_state_that_runs_from_row_to_row(max_batch_tokens: int, tmp_path: Path) -> None:
    folder = zoo.checkpoint("jamba", tmp_path / "jamba")
    engine = build(folder, max_batch_tokens=max_batch_tokens)
    assert engine.path == "single", engine.info.why
    assert_exact(engine, folder, [10, 12, 14])
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"), max_batch_tokens=max_batch_tokens)
    assert engine.path == "packed+shared", engine.info.why


@pytest.mark.parametrize(
    ("max_length", "path"), [(MIN_SHARED + 1, "packed+shared"), (MIN_SHARED, "packed"), (2, "packed"), (1, "packed")]
)
def test_nothing_is_shared_that_could_not_be_tried(max_length: int, path: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    engine = build(folder, max_length=max_length)
    assert engine.path == path, engine.info.why
    assert ("share a beginning" in engine.info.why) == (path == "packed")
    assert_exact(engine, folder, [max_length, 1, max_length])


def test_nothing_is_packed_where_no_two_rows_fit_in_a_batch(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama4", tmp_path / "llama4", floor_scale=2, attn_scale=0.5, no_rope_layers=[1, 0])
    engine = build(folder)
    assert engine.path == "shared" and "no two of the sequences tried fit in one batch" in engine.info.why
    assert_exact(engine, folder, [10, 1, 1])


def test_entries_that_a_model_appends_to_the_keys_are_not_left_out(tmp_path: Path) -> None:
    folder = zoo.checkpoint("deepseek-v4", tmp_path / "deepseek")
    # Its files name the trunk's tensors without a prefix.
    state = {name.removeprefix("model."): tensor for name, tensor in zoo.tensors(folder).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    engine = build(folder)
    assert engine.path == "single" and "packed attention does not support" in engine.info.why
    assert_exact(engine, folder, [200, 130, 40])


@pytest.mark.slow
def test_a_small_budget_hides_no_state_that_padding_changes(tmp_path: Path) -> None:
    policy = load_policy(LanguageModelConfig(model=str(zoo.language_model("mamba", tmp_path)), max_batch_tokens=39))
    assert DecoderChoice(policy, LanguageEngine(policy)).kind == "alone"
