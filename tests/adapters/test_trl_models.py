"""Served teachers and references in TRL's real trainers: they compute what they compute with models that they load."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.gkd import GKDConfig, GKDTrainer

import chats
import served
import zoo
from guerdon.adapters.trl_models import ServedReference, ServedTeacher, use_reference
from guerdon.errors import ConfigError, InvalidRequest, UnknownModel
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, TeacherConfig
from served import Serve
from server.keys import ADMIN, SCORE, bearer, keyed

PROMPTS = ["What is 2+2?", "Name a colour.", "Who wrote Faust?", "Say something kind to me."]
GOOD = ["4", "Blue, I think.", "Goethe did.", "You are doing well."]
BAD = ["It is twenty-two.", "No.", "I do not know who wrote it.", "Go away."]
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 0.1, "optim": "sgd",
    "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True, "seed": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, a reference, and a teacher whose logits are scaled."""
    folder = tmp_path_factory.mktemp("models")
    for name, architecture, seed in (("policy", "llama", 1), ("reference", "qwen2", 2), ("teacher", "cohere", 3)):
        zoo.tokenizer(zoo.language_model(architecture, folder / name, seed=seed))
    zoo.tokenizer(zoo.language_model("gemma2", folder / "capped", seed=4, final_logit_softcapping=2.0))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    names = ("reference", "teacher", "capped")
    models: list[Any] = [TeacherConfig(name=name, model=str(folder / name)) for name in names]
    models.append(ModelConfig(model=str(served.reward_model(folder / "rm"))))
    return serve(*models)


def load(folder: Path, name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)


def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")


def train(trainer: Any) -> list[dict[str, float]]:
    """Returns what the trainer has logged of each step."""
    torch.manual_seed(0)
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line]


def assert_same_run(trainer: Any, expected: Any) -> None:
    """Trains both, and asserts that losses, gradients and weights are within 1e-4.

    The server's numbers are within 1e-5 of transformers' own, and plain gradient descent does not enlarge that.
    """
    logs, others = train(trainer), train(expected)
    assert len(logs) == 2
    for line, other in zip(logs, others, strict=True):
        assert line["grad_norm"] > 1e-3
        for name in {"loss", "grad_norm", "kl", "rewards/margins"} & line.keys():
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    for weight, other_weight in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        np.testing.assert_allclose(weight.detach(), other_weight.detach(), rtol=0, atol=1e-4)


def padded(left: bool) -> dict[str, torch.Tensor]:
    rows = [row.tolist() for row in zoo.rows(0, ((20, 2), (9, 1)))]
    return dict(zip(("input_ids", "attention_mask"), (
        trl.trainer.utils.pad([torch.tensor(values) for values in made], 0, "left" if left else "right")
        for made in (rows, [[1] * len(row) for row in rows])
    ), strict=True))  # fmt: skip


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("name", ["reference", "teacher", "capped"])
def test_logits_and_states_are_the_models_own(name: str, left: bool, server: RunningServer, folder: Path) -> None:
    model, batch = load(folder, name).eval(), padded(left)
    teacher = ServedTeacher(server.http_url, name)
    with torch.no_grad():
        logits, states = model(**batch).logits, model.base_model(**batch).last_hidden_state
    known = batch["attention_mask"].bool()
    last = known & (known.cumsum(1) == known.sum(1, keepdim=True))
    for got, wanted in ((teacher(**batch).logits, logits), (teacher.base_model(**batch).last_hidden_state, states)):
        np.testing.assert_allclose(got[known & ~last], wanted[known & ~last], rtol=1e-5, atol=2e-5)
    assert (teacher.base_model(**batch).last_hidden_state[~known | last] == 0).all()
    some = teacher.base_model(**batch, logits_to_keep=7).last_hidden_state
    np.testing.assert_allclose(some[:, -7:-1], (states * (known & ~last)[..., None])[:, -7:-1], rtol=1e-5, atol=2e-5)
    assert (some[:, :-7] == 0).all(), "what is not kept is not fetched"


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_distillation_trainer_learns_as_from_a_loaded_teacher(
    beta: float, server: RunningServer, folder: Path, tmp_path: Path
) -> None:
    def make(teacher: Any) -> Any:
        args = trl.DistillationConfig(output_dir=str(tmp_path), beta=beta, max_completion_length=8, **COMMON)
        rows = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
        return trl.DistillationTrainer(
            model=load(folder, "policy"), teacher_model=teacher, args=args, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(folder),
        )  # fmt: skip

    assert_same_run(make(ServedTeacher(server.http_url)), make(load(folder, "teacher")))


def test_gkd_trainer_learns_as_from_a_loaded_teacher(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    def make(teacher: Any) -> Any:
        args = GKDConfig(output_dir=str(tmp_path), lmbda=0.0, max_new_tokens=8, max_length=64, **COMMON)
        talks = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            for prompt, answer in zip(PROMPTS, GOOD, strict=True)
        ]
        return GKDTrainer(
            model=load(folder, "policy"), teacher_model=teacher, args=args, processing_class=tokenizer(folder),
            train_dataset=Dataset.from_list([{"messages": talk} for talk in talks]),
        )  # fmt: skip

    assert_same_run(make(ServedTeacher(server.http_url, "capped")), make(load(folder, "capped")))


PAIRS = [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in zip(PROMPTS, GOOD, BAD, strict=True)]


@pytest.mark.parametrize("precomputed", [False, True], ids=["in training", "precomputed"])
def test_dpo_trainer_takes_its_reference_from_the_server(
    precomputed: bool, server: RunningServer, folder: Path, tmp_path: Path
) -> None:
    def make(reference: Any) -> Any:
        args = trl.DPOConfig(
            output_dir=str(tmp_path), precompute_ref_log_probs=precomputed, **COMMON | {"learning_rate": 0.01}
        )
        return trl.DPOTrainer(
            model=load(folder, "policy"), ref_model=reference, args=args, train_dataset=Dataset.from_list(PAIRS),
            processing_class=tokenizer(folder),
        )  # fmt: skip

    trainer, expected = make(ServedReference(server.http_url, "reference")), make(load(folder, "reference"))
    if precomputed:
        for column in ("ref_chosen_logps", "ref_rejected_logps"):
            ours, theirs = (np.array(one.train_dataset[column]) for one in (trainer, expected))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
            assert (ours < -10).all()
        other = make(ServedReference(server.http_url, "capped"))
        assert np.abs(np.array(other.train_dataset["ref_chosen_logps"]) - ours).max() > 1, "no cache of another's"
    assert_same_run(trainer, expected)


def test_kto_trainer_takes_its_reference_from_the_server(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    def make(reference: Any) -> Any:
        rows = [{"prompt": one["prompt"], "completion": one["chosen"], "label": i < 2} for i, one in enumerate(PAIRS)]
        return trl.KTOTrainer(
            model=load(folder, "policy"), ref_model=reference, train_dataset=Dataset.from_list(rows),
            args=trl.KTOConfig(output_dir=str(tmp_path), **COMMON), processing_class=tokenizer(folder),
        )  # fmt: skip

    assert_same_run(make(ServedReference(server.http_url, "reference")), make(load(folder, "reference")))


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("form", ["GRPO", "RLOO"])
def test_use_reference_is_trls_own_kl(form: str, server: RunningServer, folder: Path, tmp_path: Path) -> None:
    """TRL's own reference is the policy that training begins with."""

    def make(beta: float) -> Any:
        args = getattr(trl, f"{form}Config")(
            output_dir=str(tmp_path), beta=beta, temperature=0.7, num_generations=4, max_completion_length=8, **COMMON
        )
        return getattr(trl, f"{form}Trainer")(
            model=str(folder / "reference"), reward_funcs=length, args=args, processing_class=tokenizer(folder),
            train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        )  # fmt: skip

    trainer, expected = make(0.0), make(0.5)
    assert trainer.ref_model is None
    reference = ServedReference(server.http_url, "reference")
    with pytest.raises(InvalidRequest, match=r"made with beta=0\.5 and has loaded a reference: make it with beta=0"):
        use_reference(expected, reference, 0.5)
    own = trainer.processing_class
    trainer.processing_class = AutoTokenizer.from_pretrained(chats.save("chatml", tmp_path / "other"))
    with pytest.raises(ConfigError, match="the tokenizer is not that of the reference: their vocabularies differ"):
        use_reference(trainer, reference, 0.5)
    trainer.processing_class = own
    use_reference(trainer, reference, 0.5)
    assert_same_run(trainer, expected)
    assert trainer.state.log_history[1]["kl"] > 1e-6, "the policy has left its reference"


def test_rows_without_labels_and_with_masked_ones(server: RunningServer, folder: Path) -> None:
    """Labels may be masked anywhere; a batch without any asks nothing."""
    batch, reference = padded(True), ServedReference(server.http_url, "reference", temperature=0.7)
    model = load(folder, "reference").eval()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :-9] = -100
    labels[:, -5] = -100
    labels[1] = -100
    with torch.no_grad():
        table = torch.log_softmax(model(**batch).logits[:, :-1] / 0.7, -1)
    wanted = table.gather(2, batch["input_ids"][:, 1:, None])[..., 0].masked_fill(labels[:, 1:] == -100, 0)
    np.testing.assert_allclose(reference(**batch, labels=labels).log_probs, wanted, rtol=1e-6, atol=1e-5)
    assert (reference(**batch, labels=torch.full_like(labels, -100)).log_probs == 0).all()


@pytest.mark.slow
def test_a_swapped_teacher_gives_its_own_head_and_a_swapped_reference_warns(
    folder: Path, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUERDON_API_KEY", SCORE)
    zoo.tokenizer(zoo.language_model("llama", folder / "next", seed=9))
    config = keyed(
        tmp_path, grpc_port=None, models=[TeacherConfig(model=str(folder / "policy"))], model_repository=str(folder)
    )
    batch = padded(False)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    known = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))  # not the last tokens
    with served.running(config=config) as running:
        teacher, reference = ServedTeacher(running.http_url), ServedReference(running.http_url)
        for name in ("policy", "next"):
            with torch.no_grad():
                wanted = load(folder, name).eval()(**batch).logits
            np.testing.assert_allclose(teacher(**batch).logits[known], wanted[known], rtol=1e-5, atol=2e-5)
            reference(**batch, labels=labels)
            changed = [line for line in caplog.messages if "weights changed to" in line]
            assert len(changed) == (0 if name == "policy" else 2)
            if name == "policy":
                load_url = f"{running.http_url}/v2/repository/models/teacher/load"
                body = {"parameters": {"model": "next"}}
                httpx.post(load_url, json=body, headers=bearer(ADMIN), timeout=120).raise_for_status()


@pytest.mark.parametrize(
    "more",
    [{"pixel_values": torch.ones(1, 3, 4, 4)}, {"image_sizes": [(4, 4)]}, {"position_ids": torch.tensor([[0, 1, 0]])}],
)
def test_inputs_that_a_server_does_not_get_are_refused(more: dict[str, Any], server: RunningServer) -> None:
    batch: dict[str, Any] = {"input_ids": torch.tensor([[5, 9, 7]]), "attention_mask": torch.ones(1, 3)}
    labels, harmless = (
        batch["input_ids"],
        {"use_cache": False, "token_type_ids": torch.zeros(1, 3), "image_sizes": None},
    )
    teacher, reference = ServedTeacher(server.http_url), ServedReference(server.http_url, "reference")
    for call in (teacher, teacher.base_model, lambda **given: reference(labels=labels, **given)):
        call(**batch, **harmless)
        with pytest.raises(InvalidRequest, match=f"gives {next(iter(more))}, and a served model takes token ids only"):
            call(**batch, **more)


def test_wrong_models_are_told_at_once(server: RunningServer) -> None:
    with pytest.raises(UnknownModel, match="nobody"):
        ServedTeacher(server.http_url, "nobody")
    with pytest.raises(InvalidRequest, match="'reward_model' is no teacher"):
        ServedReference(server.http_url, "reward_model")
