"""`guerdon doctor MODEL`: loads a model as a server or an actor would, and describes it.

With `--rubric FILE --rows FILE` it tries the rubric on the file's first rows, and shows what is said.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.cli.console import NEEDS_ENDING
from guerdon.cli.findings import Finding, note, ok, problem
from guerdon.client.jsonl import read_rows, samples_of
from guerdon.core import Message, ScoreRequest
from guerdon.errors import SERVER_MODULES, CheckpointError, InvalidRequest, SampleFailed, StartError, require_modules
from guerdon.judge_core import Pair, Rubric
from guerdon.settings.config import JudgeConfig, LanguageModelConfig, ModelConfig

if TYPE_CHECKING:
    from guerdon.engine.checkpoint.language_models import LoadedPolicy
    from guerdon.engine.checkpoint.text import TextEncoder
    from guerdon.engine.engine import Engine

_GIB = 2**30
_ADAMW_BYTES = 4 + 4 + 8
"""For each trained float32 weight: itself, its gradient, AdamW's two moments."""


def examine_model(model: str) -> Iterator[Finding]:
    """Loads the model, a reward model or else a language model; reports its text side, head, path and memory."""
    logger = logging.getLogger("guerdon")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the findings say it
    try:
        require_modules(*SERVER_MODULES, extra="server")
        yield from _examine(model)
    except StartError as e:
        yield problem(model, str(e), e.help or "docs/models.md lists the architectures")
    finally:
        logger.setLevel(level)


def _examine(model: str) -> Iterator[Finding]:
    from guerdon.engine.checkpoint.language_models import load_policy
    from guerdon.engine.checkpoint.reward_models import load_reward_model
    from guerdon.engine.engine import Engine

    try:
        loaded = load_reward_model(ModelConfig(model=model))
    except CheckpointError as no_reward_model:
        try:
            policy = load_policy(LanguageModelConfig(model=model))
        except CheckpointError:
            raise no_reward_model from None  # what is wrong with the checkpoint itself
        what = f"a causal language model ({policy.trunk.config.model_type}): a policy or a reference"
        yield from _examine_kind(model, what, policy.origin.adapter)
        yield note(f"{model}, reward", str(no_reward_model), no_reward_model.help or "train a reward head for it")
        yield from _examine_policy(model, policy)
        return
    engine = Engine(loaded)
    info, kind = engine.info, "decoder" if engine.causal else "encoder"
    what = f"a {info.kind}, {kind} ({engine.trunk.config.model_type}), outputs {', '.join(info.outputs)}"
    yield from _examine_kind(model, what, loaded.origin.adapter)
    if info.path == "packed+shared" or (info.path == "packed" and not engine.causal):
        yield ok(f"{model}, path", f"{info.path}: {info.why}")
    else:
        yield note(f"{model}, path", f"{info.path}: {info.why}", "it is exact but slower")
    yield from _examine_proofs(model, info.proofs)
    yield from _examine_text(model, engine)
    yield _memory(model, engine.trunk, engine.causal)


def _examine_kind(model: str, what: str, adapter: str) -> Iterator[Finding]:
    yield ok(model, what)
    if adapter:
        yield ok(f"{model}, adapter", f"{adapter}, merged when it is loaded; `guerdon convert` writes it merged")


def _examine_proofs(model: str, proofs: tuple[str, ...]) -> Iterator[Finding]:
    from guerdon.engine.checkpoint.template_check import CHANGES, REMEDY
    from guerdon.engine.fallback import OTHER_BITS

    for proof in proofs:
        if proof.endswith(CHANGES):
            yield note(f"{model}, template", proof, REMEDY)
        elif proof.startswith(OTHER_BITS):
            remedy = "--deterministic computes each sequence alone; with a C++ compiler guerdon is faster, too"
            yield note(f"{model}, bits", proof, remedy)
        else:
            yield ok(f"{model}, proved", proof)


def _examine_text(model: str, engine: Engine) -> Iterator[Finding]:
    head, encoder = engine.head, engine.encoder
    own = engine.trunk.config.get_text_config().eos_token_id
    named = [head.eos_token_id, *(own if isinstance(own, list) else [own])]
    eos = sorted({token for token in named if token is not None})
    takes_messages = None if encoder is None else encoder.takes_messages
    yield _tokenizer(model, takes_messages, eos, head.pad_token_id, "clients must send token ids; copy one for text")
    if encoder is not None and takes_messages:
        yield from _examine_ending(model, encoder, NEEDS_ENDING)
    subject, text = f"{model}, reward", f"read from: {head.rule}"
    if head.rule and head.pooling == "last_non_pad" and head.pad_token_id in eos:
        text += "; pad is an EOS, so the reward of a sequence that ends in it is read before it"
        yield note(subject, text, "nothing, if transformers trained it; --pooling last reads the reward at the EOS")
    elif head.rule:
        yield ok(subject, text)
    elif head.steps is not None:
        yield ok(subject, f"of steps: {head.steps}")


def _tokenizer(
    model: str, takes_messages: bool | None, eos: Sequence[int], pad: int | None, remedy: str, more: str = ""
) -> Finding:
    """Describes the tokenizer, which takes messages or not; None: there is none, and `remedy` says what to do."""
    ids = f"EOS {' and '.join(map(str, eos)) or 'none'}, pad {'none' if pad is None else pad}{more}"
    subject = f"{model}, tokenizer"
    if takes_messages is None:
        return note(subject, f"none; {ids}", remedy)
    if takes_messages:
        return ok(subject, f"with a chat template; {ids}")
    return note(subject, f"without a chat template; {ids}", "clients send text or token ids, not messages")


def _examine_policy(model: str, policy: LoadedPolicy) -> Iterator[Finding]:
    from guerdon.engine.checkpoint.text import TextEncoder
    from guerdon.engine.logprobs import LanguageEngine

    pad, eos = policy.trunk.config.get_text_config().pad_token_id, policy.eos_token_ids
    yield from _examine_proofs(model, LanguageEngine(policy).info.proofs)
    takes_messages = None if policy.tokenizer is None else policy.info.takes_messages
    more, remedy = ", which is an EOS" if pad in eos else "", "copy the checkpoint's tokenizer: actors need one"
    yield _tokenizer(model, takes_messages, eos, pad, remedy, more)
    if policy.info.takes_messages:
        yield from _examine_ending(model, TextEncoder(policy.tokenizer), "an actor appends it to texts and token ids")
    yield _memory(model, policy.model, True)


def _examine_ending(model: str, encoder: TextEncoder, who: str) -> Iterator[Finding]:
    """Says how the chat template ends an answer; `who` appends it, or what happens instead."""
    subject, ending = f"{model}, endings", encoder.ending()
    if isinstance(ending, InvalidRequest):
        help_text = "answers are sent as they are: append what the model was trained with, by `ending` of the adapters"
        yield note(subject, str(ending), help_text)
        return
    yield ok(subject, f"the chat template ends an answer with {ending}; {who}")
    if ending.differs:
        yield note(f"{subject}, differences", ending.differs, "send messages: the reward model's template then decides")


def _memory(model: str, module: Any, is_causal: bool) -> Finding:
    count = sum(parameter.numel() for parameter in module.parameters())
    text = f"{count:,} parameters: weights {4 * count / _GIB:.2f} GiB in float32, {2 * count / _GIB:.2f} in bfloat16"
    if is_causal:
        text += f"; {_ADAMW_BYTES * count / _GIB:.2f} GiB to train all of them with AdamW; activations come on top"
    return ok(f"{model}, memory", text)


def is_model(argument: str) -> bool:
    """Whether an argument of `guerdon doctor` names a model: it is a path, or no URL."""
    return Path(argument).exists() or not ("://" in argument or argument.rpartition(":")[2].isdigit())


NUM_ROWS = 10
ENOUGH = 1 - JudgeConfig().max_other_mass
"""Least probability of the labels of a sample that does not fail by default."""
_BIASED = 0.1
"""Largest mean preference for the first place that is not noted, of 0.5."""


def examine_rubric(model: str, rubric: str, rows: str) -> Iterator[Finding]:
    """Asks the model the rubric's questions about the first rows; reports each answer, and what they have in common."""
    try:
        require_modules(*SERVER_MODULES, extra="server")
        yield from _try_rubric(model, rubric, Path(rows))
    except StartError as e:
        yield problem(rubric, str(e), e.help or "docs/judge.md explains rubrics")


def _try_rubric(model: str, rubric: str, path: Path) -> Iterator[Finding]:
    from guerdon.distributed.ranks import ALONE
    from guerdon.engine.judging import build_judge
    from guerdon.kinds import judges

    lines, request = _read(path)
    judge: Any = build_judge(JudgeConfig(model=model, rubric=rubric, max_other_mass=1.0), ALONE)
    samples = judges.read_samples(judge, request, range(len(request)))
    for line, sample in zip(lines, samples, strict=True):
        if isinstance(sample, InvalidRequest):
            yield problem(f"{path}, line {line}", str(sample), "correct the row, or the rubric's template")
    try:
        plan = judges.make_plan(judge, request, samples)
    except InvalidRequest as e:
        raise StartError(str(e), "take fewer responses") from e
    masses: list[float] = []
    firsts: list[float] = []
    for subject, owner in zip(plan.subjects, plan.owners, strict=True):
        where = f"line {lines[owner]}"
        if isinstance(subject, Pair):
            where += f", response {1 + lines[:owner].count(lines[owner])} first"
        for criterion, text in zip(judge.rubric.criteria_of(subject), judge.render(subject), strict=True):
            finding, mass, value = _ask_judge(
                judge, request, owner, f"{where}, {criterion.name or criterion.text}", text
            )
            yield finding
            if mass is not None:
                masses.append(mass)
                firsts.append(value)
    yield from _summary(judge.rubric, rubric, masses, firsts)


def _ask_judge(
    judge: Any, request: ScoreRequest, owner: int, where: str, text: str | InvalidRequest
) -> tuple[Finding, float | None, float]:
    """Returns the answer to one question as a finding, the labels' probability, and the answer's value."""
    from guerdon.kinds import judges, samples

    ids = text if isinstance(text, InvalidRequest) else judge.text.encode([text], not judge.text.takes_messages)[0]
    if isinstance(ids, InvalidRequest):
        return problem(where, str(ids), "correct the row"), None, 0.0
    asked = judges.make_question(judge, ids, request, owner)
    if fault := samples.find_fault(asked, judge.info) or judges.find_fault(judge, ids):
        return problem(where, str(fault), "shorten the row, or correct the template"), None, 0.0
    (said,) = judge.score([asked])
    if isinstance(said, SampleFailed) or said.answer is None:
        return problem(where, str(said), "docs/judge_labels.md"), None, 0.0
    logprobs = judge.labels.read(said.answer)
    value, _, other, entropy = judge.rubric.read(logprobs[None], "expected")[:, 0].tolist()
    shares = zip(judge.rubric.labels, np.exp(logprobs).tolist(), strict=True)
    shown = ", ".join(f"{label!r} {share:.3f}" for label, share in shares)
    table = f"{shown}; no label {other:.3f}, entropy {entropy:.2f}"
    if 1 - other < ENOUGH:
        return problem(where, table, judge.explain(said.answer)), 1 - other, value
    likeliest = judge.explain(said.answer).partition(";")[0]
    return ok(where, f"{table}; {likeliest}"), 1 - other, value


def _summary(rubric: Rubric, name: str, masses: list[float], firsts: list[float]) -> Iterator[Finding]:
    if not masses:
        yield problem(name, "no question was answered", "docs/judge.md explains what a judge reads")
        return
    text = f"{len(masses)} answers; labels have {min(masses):.3f} to {max(masses):.3f} of the probability"
    few = sum(mass < ENOUGH for mass in masses)
    yield problem(name, f"{text}, below {ENOUGH:g} in {few}", "docs/judge_labels.md") if few else ok(name, text)
    if rubric.compare is not None:
        bias = float(np.mean(firsts)) - 0.5
        said = f"the response that is read first gets {bias:+.3f} beyond an even share, over both orders"
        help_text = "verdicts are made of both orders, which costs certainty: try another template or model"
        yield note(f"{name}, order", said, help_text) if abs(bias) > _BIASED else ok(f"{name}, order", said)


def _read(path: Path) -> tuple[list[int], ScoreRequest]:
    """Returns the line of each sample of the first rows, and the samples; raises StartError."""
    lines: list[int] = []
    messages: list[list[Message]] = []
    labels: list[Any] = []
    for line, row in itertools.islice(read_rows(path), NUM_ROWS):
        for sample in samples_of(row, path, line, template=True):
            said = [{"role": "assistant", "content": sample}] if isinstance(sample, str) else sample
            lines.append(line)
            messages.append(said)
            labels.append(row.get("label"))
    if not lines:
        raise StartError(f"{path} has no rows", "give a JSONL file with prompts and responses")
    return lines, ScoreRequest(messages=messages, references=labels)
