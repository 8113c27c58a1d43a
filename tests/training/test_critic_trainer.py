"""What a train request reports, leaves out, survives and refuses."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import LR, build, same, values, weights
from plain import request

import zoo
from guerdon.assembly import build_trainer
from guerdon.core import Sequence
from guerdon.critic_core import TrainRequest
from guerdon.engine.checkpoint import placement
from guerdon.errors import CheckpointError, Offloaded, SampleFailed, ServerFault, StartError, TrainFailed
from guerdon.settings.config import CriticConfig
from guerdon.training import critic_trainer as training_critic
from guerdon.training.critic_trainer import CriticTrainer, global_batches
from tiers import slow_but

ROWS = zoo.rows(0, ((40, 5), (20, 3), (30, 5)))[:15]


def part(whole: TrainRequest, *rows: int) -> TrainRequest:
    """The request with these rows only."""
    at = list(rows)
    return TrainRequest("part", whole.tokens[at], whole.returns[at], whole.prev_values[at], whole.mask[at])


def no_gradients(trainer: CriticTrainer) -> bool:
    return all(p.grad is None for module in (trainer.engine.trunk, trainer.engine.head) for p in module.parameters())


# ------------------------------------------------------------------------------------------- reports


def test_a_report_counts_what_was_done(folder: Path) -> None:
    trainer, asked = build(folder), request(ROWS)
    begun = trainer.weights_version
    report = trainer.train(asked)
    assert (report.id, report.step, report.num_steps, report.num_skipped) == ("first", 3, 3, 0)
    assert report.weights_version == trainer.weights_version
    assert trainer.weights_version.startswith(f"{begun}+3.")
    assert report.num_tokens == (asked.mask > 0).sum()
    assert report.learning_rate == LR
    weight = [asked.mask[i : i + 5].sum() for i in (0, 5, 10)]
    assert report.loss == pytest.approx(np.average(report.losses, weights=weight), rel=1e-6)
    assert 0 < report.clip_fraction < 1 and report.grad_norm > 0
    state = trainer.state()
    assert (state["step"], state["learning_rate"]) == (3, LR)
    assert state["num_parameters"] == state["num_trainable"] == sum(w.numel() for w in weights(trainer).values())
    assert no_gradients(trainer)


def test_the_report_agrees_with_values_asked_for_before(folder: Path) -> None:
    trainer, asked = build(folder, global_batch_size=100), request(ROWS)
    flat = values(trainer, [row[:-1] for row in asked.tokens])
    v, at = flat.reshape(asked.mask.shape).astype(np.float64), asked.mask > 0
    m, ret, prev = asked.mask[at], asked.returns[at].astype(np.float64), asked.prev_values[at]
    v = v[at]
    free, held = (v - ret) ** 2, (prev + np.clip(v - prev, -0.2, 0.2) - ret) ** 2
    report = trainer.train(asked)
    assert report.loss == pytest.approx(0.5 * (m * np.maximum(free, held)).sum() / m.sum(), rel=1e-5)
    assert report.clip_fraction == pytest.approx((m * (held > free)).sum() / m.sum(), rel=1e-5)
    mean = lambda x: (m * x).sum() / m.sum()  # noqa: E731
    var = lambda x: mean(x**2) - mean(x) ** 2  # noqa: E731
    assert report.explained_variance == pytest.approx(1 - var(ret - v) / var(ret), rel=1e-4)
    assert (report.value_mean, report.return_mean) == pytest.approx((mean(v), mean(ret)), rel=1e-5)


def test_validation_measures_and_changes_nothing(folder: Path) -> None:
    trainer, asked = build(folder, global_batch_size=100), request(ROWS)
    before = weights(trainer)
    measured = trainer.validate(asked)
    assert same(weights(trainer), before) and no_gradients(trainer)
    assert (measured.step, measured.num_steps, measured.num_skipped) == (0, 0, 0) and math.isnan(measured.grad_norm)
    trained = trainer.train(asked)
    assert measured.loss == pytest.approx(trained.loss, rel=1e-6)
    assert measured.losses == pytest.approx(trained.losses, rel=1e-6)
    assert measured.explained_variance == pytest.approx(trained.explained_variance, rel=1e-6)
    assert measured.clip_fraction == trained.clip_fraction


def test_validation_after_training_is_of_the_new_weights(folder: Path) -> None:
    trainer, asked = build(folder, loss_clip_val=0.0), request(ROWS)
    losses = [trainer.validate(asked).loss]
    for _ in range(5):
        trainer.train(asked)
        losses.append(trainer.validate(asked).loss)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]


def test_the_model_it_is_served_as(folder: Path) -> None:
    trainer = build(zoo.tokenizer(folder), name="judge")
    info = trainer.info
    assert (info.name, info.outputs, info.path) == ("judge_infer", ("values",), "packed+shared")
    assert trainer.max_batch_tokens == 150 and trainer.encoder is not None


def test_an_onload_that_fails_leaves_it_offloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, asked = build(folder), request(ROWS)
    want = values(trainer, ROWS)
    trainer.offload()
    left: list[str] = []
    offload = trainer.engine.offload

    def full(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as here:
        here.setattr(trainer.engine.head, "to", lambda where: full(where) if not left else None)
        here.setattr(trainer.engine, "offload", lambda: (left.append("gone"), offload()))
        with pytest.raises(torch.OutOfMemoryError):
            trainer.onload()
    assert left == ["gone"]
    with pytest.raises(Offloaded):
        trainer.train(asked)
    trainer.onload()
    np.testing.assert_array_equal(values(trainer, ROWS), want)


def test_the_schedule_counts_steps(folder: Path) -> None:
    trainer = build(folder, lr_schedule="linear", warmup_steps=2, total_steps=8)
    before = weights(trainer)
    rates = [trainer.train(part(request(ROWS), 0, 1)).learning_rate / LR for _ in range(4)]
    assert rates == pytest.approx([0, 0.5, 1, 5 / 6])
    assert trainer.state()["learning_rate"] == pytest.approx(LR * 4 / 6)
    assert not same(weights(trainer), before)


# ------------------------------------------------------------------------------------------- what makes no step


def test_rows_without_a_token_that_counts_change_nothing(folder: Path) -> None:
    asked = request(ROWS)
    whole = part(asked, 0, 1, 2, 3, 4)
    whole.mask[[1, 3]] = 0
    one, other = build(folder), build(folder)
    assert one.train(whole).losses == other.train(part(asked, 0, 2, 4)).losses
    assert same(weights(one), weights(other))


def test_a_batch_without_a_token_that_counts_makes_no_step(folder: Path) -> None:
    asked = request(ROWS)
    asked.mask[5:10] = 0
    one, other = build(folder), build(folder)
    report = one.train(asked)
    assert (report.num_steps, report.num_skipped, report.step, report.losses[1]) == (2, 0, 2, 0.0)
    other.train(part(asked, *range(5), *range(10, 15)))
    assert same(weights(one), weights(other))


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(folder: Path) -> None:
    asked = request(ROWS)
    asked.returns[7] = np.where(asked.mask[7] > 0, 1e30, np.nan)
    one, other = build(folder, warmup_steps=4), build(folder, warmup_steps=4)
    report = one.train(asked)
    assert (report.num_steps, report.num_skipped, report.step) == (2, 1, 2)
    assert report.loss > 1e37 and report.losses[0] < 10 > report.losses[2]
    assert no_gradients(one)
    want = other.train(part(asked, *range(5), *range(10, 15)))
    assert (report.learning_rate, report.weights_version) == (want.learning_rate, want.weights_version)
    assert same(weights(one), weights(other))
    only = one.train(part(asked, 7))
    assert (only.num_steps, only.num_skipped, only.step) == (0, 1, 2) and not math.isfinite(only.grad_norm)
    assert same(weights(one), weights(other))


def test_what_stands_behind_the_last_token_that_counts_is_never_read(folder: Path) -> None:
    asked, other = request(ROWS), request(ROWS)
    for i in range(len(asked)):
        last = int(np.flatnonzero(asked.mask[i])[-1]) if asked.mask[i].any() else -1
        other.tokens[i, last + 1 :] = zoo.PAD
    a, b = build(folder), build(folder)
    assert a.train(asked) == b.train(other)
    assert same(weights(a), weights(b))


# ------------------------------------------------------------------------------------------- faults


@contextmanager
def failing(trainer: CriticTrainer, forward: int) -> Iterator[None]:
    """The trunk fails in its n-th forward pass from now, as where memory runs out."""
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == forward:
            raise torch.OutOfMemoryError("no memory left for this batch")

    handle = trainer.engine.trunk.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("stand", slow_but((1,), [0, 1, 2]))
def test_a_failed_request_keeps_the_steps_before_it(stand: int, folder: Path) -> None:
    trainer, asked = build(folder, max_batch_tokens=1), request(ROWS)
    forwards = []
    trainer.engine.trunk.register_forward_pre_hook(lambda *_: forwards.append(1))
    again = build(folder, max_batch_tokens=1)
    if stand:
        trainer.train(asked, first_batches=stand)
        trainer = build(folder, max_batch_tokens=1)
    with failing(trainer, len(forwards) + 2), pytest.raises(TrainFailed) as caught:
        trainer.train(asked)
    assert caught.value.num_steps == stand
    assert f"global batch {stand + 1} of 3" in str(caught.value) and "no memory left" in str(caught.value)
    assert (f"the {stand} before it are kept" if stand else "nothing was changed") in str(caught.value)
    assert no_gradients(trainer)
    # The journal applies as many steps again, and both go on alike.
    if stand:
        again.train(asked, first_batches=caught.value.num_steps)
    assert same(weights(trainer), weights(again))
    assert trainer.weights_version == again.weights_version
    assert trainer.train(asked, first_batches=1) == again.train(asked, first_batches=1)
    assert same(weights(trainer), weights(again))


def test_the_error_that_is_kept_holds_no_activations(folder: Path) -> None:
    trainer = build(folder)
    with failing(trainer, 2), pytest.raises(TrainFailed) as caught:
        trainer.train(request(ROWS))
    error = caught.value
    assert error.__cause__ is None and error.__context__ is None
    trace = error.__traceback__
    while trace is not None:
        held = trace.tb_frame.f_locals.values() if "guerdon" in trace.tb_frame.f_code.co_filename else ()
        assert not any(isinstance(x, torch.Tensor | Exception) and x is not error for x in held)
        trace = trace.tb_next


def test_first_steps_bounds_the_batches(folder: Path) -> None:
    one, other, asked = build(folder), build(folder), request(ROWS)
    assert one.train(asked, first_batches=2).num_steps == 2
    other.train(part(asked, *range(10)))
    assert same(weights(one), weights(other))


def test_a_step_that_is_half_done_is_never_used(folder: Path, tmp_path: Path) -> None:
    trainer, asked = build(folder), request(ROWS)
    (tmp_path / "kept").mkdir()
    trainer.save(tmp_path / "kept")
    begun = weights(trainer)

    def hook(*_: Any) -> None:
        raise torch.AcceleratorError("the device is gone", 1) if hasattr(torch, "AcceleratorError") else RuntimeError

    handle = trainer._optimiser._adamw.register_step_post_hook(hook)
    with pytest.raises(TrainFailed, match="restart the server") as caught:
        trainer.train(asked)
    assert caught.value.num_steps == 0 and "nothing was changed" not in str(caught.value)
    handle.remove()
    refused: list[Any] = [
        lambda: trainer.train(asked),
        lambda: trainer.validate(asked),
        lambda: trainer.score([Sequence(ROWS[0])]),
        lambda: trainer.save(tmp_path / "other"),
    ]
    for call in refused:
        with pytest.raises(ServerFault, match="corrupt"):
            call()
    trainer.load(tmp_path / "kept")
    assert same(weights(trainer), begun)
    assert trainer.train(asked).num_steps == 3


def test_values_that_are_not_finite_fail_alone(folder: Path) -> None:
    trainer = build(folder)
    poison = zoo.VOCAB_SIZE - 1
    with torch.no_grad():
        trainer.engine.trunk.embed_tokens.weight[poison] = float("nan")
    results = trainer.score([Sequence(np.array([5, 6])), Sequence(np.array([5, poison]))])
    assert [isinstance(r, SampleFailed) for r in results] == [False, True]


# ------------------------------------------------------------------------------------------- off the device


@pytest.mark.slow
def test_an_offloaded_critic_refuses_and_comes_back_unchanged(folder: Path, tmp_path: Path) -> None:
    trainer, other, asked = build(folder), build(folder), request(ROWS)
    trainer.train(asked)
    trainer.offload()
    refused: list[Any] = [
        lambda: trainer.train(asked),
        lambda: trainer.validate(asked),
        lambda: trainer.score([Sequence(ROWS[0])]),
    ]
    for call in refused:
        with pytest.raises(Offloaded, match="onload"):
            call()
    (tmp_path / "kept").mkdir()
    trainer.save(tmp_path / "kept")
    other.offload()
    other.load(tmp_path / "kept")
    for one in (trainer, other):
        one.onload()
    assert trainer.train(asked) == other.train(asked)
    assert same(weights(trainer), weights(other))


def test_the_token_of_a_run_is_in_the_versions_of_what_was_learnt_in_it(folder: Path) -> None:
    trainer = build(folder)
    begun = trainer.weights_version
    trainer.run_token = "abc"
    assert trainer.weights_version == begun
    trainer.train(part(request(ROWS), 0, 1))
    assert trainer.weights_version.startswith(f"{begun}+1.") and trainer.weights_version.endswith("-runabc")


UPDATES_ROWS = zoo.rows(0, ((40, 5), (20, 3), (30, 5)))[:12]
"""Two whole global batches of 5, and a smaller one."""


def passes(count: int, name: str = "first") -> TrainRequest:
    asked = request(UPDATES_ROWS, name=name)
    asked.updates = count
    return asked


def moments(trainer: CriticTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._optimiser.tensors().items()}


def test_two_passes_in_one_request_are_two_requests_bit_for_bit(folder: Path) -> None:
    once, twice = build(folder), build(folder)
    reports = [once.train(passes(1)), once.train(passes(1, "second"))]
    report = twice.train(passes(2))
    assert same(weights(once), weights(twice)) and same(moments(once), moments(twice))
    assert once.weights_version == twice.weights_version == report.weights_version
    assert report.losses == reports[0].losses + reports[1].losses and len(report.losses) == 6
    assert report.pass_losses == [r.loss for r in reports] and report.pass_losses[1] < report.pass_losses[0]
    for name in ("loss", "clip_fraction", "explained_variance"):
        assert getattr(report, name) == getattr(reports[0], name), name
    for name in ("step", "grad_norm", "learning_rate"):
        assert getattr(report, name) == getattr(reports[1], name), name
    for name in ("num_tokens", "num_steps"):
        assert getattr(report, name) == sum(getattr(r, name) for r in reports), name


@pytest.mark.slow
def test_a_request_that_breaks_off_in_its_second_pass_is_done_again_up_to_there(folder: Path) -> None:
    broken, again = build(folder), build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broken, "_add_gradients", _failing(broken, 5))
        with pytest.raises(TrainFailed, match="global batch 5 of 6 failed") as failed:
            broken.train(passes(2))
    assert failed.value.num_steps == 4
    report = again.train(passes(2), first_batches=4)
    assert same(weights(broken), weights(again)) and same(moments(broken), moments(again))
    assert (report.num_steps, len(report.losses), len(report.pass_losses)) == (4, 4, 2)


def _failing(trainer: CriticTrainer, nth: int) -> Any:
    add_gradients, calls = trainer._add_gradients, []

    def add(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == nth:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return add_gradients(batch)

    return add


def test_each_pass_skips_a_step_without_a_finite_gradient(folder: Path) -> None:
    trainer, asked = build(folder), passes(3)
    asked.returns[0][asked.mask[0] > 0] = np.float32(3e38)  # its square is infinite
    report = trainer.train(asked)
    assert (report.num_steps, report.num_skipped) == (6, 3)


NAN = np.nan


def batches_request(mask: list[list[float]]) -> TrainRequest:
    """Tokens 0, 1, 2, ...; prev_values -t and returns t at index t, NaN where nothing counts."""
    m = np.array(mask, np.float32)
    tokens = np.arange(m.shape[0] * (m.shape[1] + 1)).reshape(m.shape[0], -1)
    ramp = np.broadcast_to(np.arange(m.shape[1], dtype=np.float32), m.shape)
    return TrainRequest("r", tokens, np.where(m > 0, ramp, NAN), np.where(m > 0, -ramp, NAN), m)


def test_a_row_ends_with_its_last_token_that_counts() -> None:
    (batch,) = global_batches(batches_request([[0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0.5]]), 3)
    rows, targets = batch.read(with_action=False)
    assert [row.tolist() for row in rows] == [[0, 1, 2, 3], [6], [12, 13, 14, 15, 16]]
    np.testing.assert_array_equal(targets[0], [[NAN, -1, NAN, -3], [NAN, 1, NAN, 3], [0, 1, 0, 1]])
    np.testing.assert_array_equal(targets[1], [[-0.0], [0], [1]])
    assert (batch.sum_mask, batch.num_tokens) == (3.5, 4)


def test_the_action_is_kept_if_the_length_of_a_row_matters() -> None:
    (batch,) = global_batches(batches_request([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0.5]]), 3)
    assert [row.tolist() for row in batch.read(with_action=True)[0]] == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10, 11]]
    np.testing.assert_array_equal(batch.targets[0], [[NAN, -1, NAN, -3, 0], [NAN, 1, NAN, 3, 0], [0, 1, 0, 1, 0]])
    np.testing.assert_array_equal(batch.targets[1][2], [0, 0, 0, 0, 0.5, 0])
    assert (batch.sum_mask, batch.num_tokens) == (2.5, 3)


def test_rows_in_order_and_the_last_batch_smaller() -> None:
    batches = global_batches(batches_request([[1, 1]] * 5), 2)
    assert [[row[0] // 3 for row in batch.rows] for batch in batches] == [[0, 1], [2, 3], [4]]
    assert [batch.sum_mask for batch in batches] == [4, 4, 2]


def test_a_row_without_a_token_that_counts_costs_nothing() -> None:
    batches = global_batches(batches_request([[0, 0], [1, 0], [0, 0], [0, 0]]), 2)
    assert [[row.tolist() for row in batch.read(with_action=False)[0]] for batch in batches] == [[[3]], []]
    assert (batches[1].sum_mask, batches[1].num_tokens) == (0.0, 0)


def test_as_many_rows_as_a_batch_make_one_batch() -> None:
    assert [len(global_batches(batches_request([[1]] * n), 4)) for n in (3, 4, 5, 8)] == [1, 1, 2, 2]


HELPS = ("lora", "adamw_8bit", "activation_checkpointing", "smaller model")


@pytest.mark.parametrize(
    ("settings", "bytes_a_weight"),
    [
        pytest.param({"dtype": "float32"}, 4 + 4 + 8, marks=pytest.mark.slow),  # weights, gradients, moments
        ({"dtype": "bfloat16"}, 2 + 4 + 4 + 8),  # beside them the masters
        pytest.param({"dtype": "bfloat16", "optimizer": "adamw_8bit"}, 2 + 4 + 4 + 2, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "lora": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_that_trains_is_counted_before_anything_is_loaded(
    settings: Any, bytes_a_weight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "optimizer" in settings:
        pytest.importorskip("bitsandbytes")
    folder = zoo.checkpoint("llama", tmp_path)
    needed = bytes_a_weight * sum(math.prod(tensor.shape) for tensor in zoo.tensors(folder).values())
    config = CriticConfig(model=str(folder), device="cpu", **settings)
    monkeypatch.setattr(placement, "_host_bytes", lambda: needed)
    build_trainer(config)
    monkeypatch.setattr(placement, "_host_bytes", lambda: needed - 1)
    with pytest.raises(CheckpointError, match="are free on this machine") as caught:
        build_trainer(config)
    if "lora" not in settings:
        assert "with its optimiser's state" in str(caught.value)
        assert all(word in caught.value.help for word in HELPS)


def test_a_device_that_is_full_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(training_critic, "Optimiser", full)
    folder = zoo.checkpoint("llama", tmp_path)
    with pytest.raises(StartError, match=r"leaves no memory to train it: CUDA out of memory") as caught:
        build_trainer(CriticConfig(model=str(folder)))
    assert all(word in caught.value.help for word in HELPS)
