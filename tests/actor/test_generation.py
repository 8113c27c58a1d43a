"""Rollouts of transformers' models: greedy as `generate` has them, drawn by each one's own numbers."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import zoo
from guerdon.actor.generation import TransformersGenerator, make_generator
from guerdon.actor.rollouts import Prompt, Rollout
from guerdon.engine import generating
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.decoding import Decoding
from guerdon.engine.generating import DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.actors import PolicyConfig, RolloutConfig
from guerdon.settings.config import LanguageModelConfig
from guerdon.training.policy_trainer import PolicyTrainer
from tiers import of_each_kind, slow_but

KINDS = {"llama": "packed", "gpt-oss": "packed", "gptj": "padded", "mamba": "alone"}
"""An architecture of each kind of decoder; gpt-oss has windows and sinks."""
TABLES = ("gpt2", "opt", "gptj")
"""Those that have no position beyond the longest sequence."""
SEED = (3, 1)


class Made:
    """A random policy, its engine and its generator."""

    def __init__(self, name: str, folder: Path, *, max_length: int | None = None, **settings: Any) -> None:
        if not folder.exists():
            zoo.tokenizer(folder)
            zoo.language_model(name, folder, **settings)
        self.folder = folder
        self.policy = load_policy(LanguageModelConfig(model=str(folder), max_length=max_length))
        self.engine = LanguageEngine(self.policy)
        self.generator = TransformersGenerator(self.policy, self.engine)
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._begun = self.generator, self.policy.eos_token_ids, self.engine.max_batch_tokens

    def __call__(self, prompts: list[Prompt], num: int = 1, *, greedy: bool = False, **settings: Any) -> list[Rollout]:
        """All rollouts by group and index."""
        config = RolloutConfig(**{"max_new_tokens": 12, "min_new_tokens": 0, **settings})
        groups = list(self.generator.generate(prompts, num=num, config=config, seed=SEED, greedy=greedy))
        for group in groups:
            assert [rollout.index for rollout in group] == list(range(num))
            assert len({rollout.group for rollout in group}) == 1
        return sorted((r for group in groups for r in group), key=lambda r: (r.group, r.index))

    def reset(self) -> None:
        """Undoes what tests change."""
        self.generator, self.policy.eos_token_ids, self.engine.max_batch_tokens = self._begun
        while self.hooks:
            self.hooks.pop().remove()


Policies = Callable[[str], Made]


@pytest.fixture(scope="module")
def all_made(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    folder = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: Made(name, folder / name))


@pytest.fixture
def make(all_made: Policies) -> Iterator[Policies]:
    """Makes a policy by its architecture, or hands out the one that an earlier test asked for."""
    used: list[Made] = []

    def made(name: str) -> Made:
        used.append(all_made(name))
        return used[-1]

    yield made
    for one in used:
        one.reset()


def prompts(*lengths: int, seed: int = 0) -> list[Prompt]:
    random = np.random.default_rng(seed)
    return [Prompt(i, random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n), "") for i, n in enumerate(lengths)]


def responses(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.tokens[rollout.prompt_length :].tolist() for rollout in rollouts]


def generated(folder: Path, asked: list[Prompt], **settings: Any) -> list[list[int]]:
    """The responses of transformers' own `generate`, each alone and greedy."""
    model, settings, made = AutoModelForCausalLM.from_pretrained(folder).eval(), {"max_new_tokens": 12, **settings}, []
    for prompt in asked:
        tokens = torch.from_numpy(prompt.tokens)[None]
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **settings)
        made.append(out[0, len(prompt.tokens) :].tolist())
    return made


@pytest.mark.parametrize("name", of_each_kind([*zoo.DECODERS, *zoo.LANGUAGE_MODELS]))
def test_greedy_is_what_generate_gives(name: str, make: Policies) -> None:
    made, asked = make(name), prompts(30, 1, 7, 19)
    if name in KINDS:
        assert made.generator._choice.kind == KINDS[name]
    # Windows are of 16 tokens: the longer prompts reach beyond them, and the third one's response.
    want = generated(made.folder, asked)
    assert responses(made(asked, greedy=True)) == want
    assert responses(made(asked, 3, greedy=True)) == [row for row in want for _ in range(3)]


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.8}, {"min_new_tokens": 6}], ids=str)
def test_greedy_settings_are_those_of_generate(settings: dict, make: Policies) -> None:
    made, asked = make("qwen2"), prompts(9, 30, 17)
    free = responses(made(asked, greedy=True))
    made.policy.eos_token_ids = (free[0][2], free[1][3], free[2][1])
    assert max(len(row) for row in responses(made(asked, greedy=True))) < 6
    want = generated(made.folder, asked, eos_token_id=list(made.policy.eos_token_ids), **settings)
    assert responses(made(asked, greedy=True, **settings)) == want != free


def test_tokens_of_the_prompt_are_penalised_too(make: Policies) -> None:
    made, (prompt,) = make("qwen2"), prompts(200)
    (free,) = responses(made([prompt], greedy=True))
    assert free[0] in prompt.tokens
    (want,) = generated(made.folder, [prompt], repetition_penalty=3.0)
    assert responses(made([prompt], greedy=True, repetition_penalty=3.0)) == [want]
    assert want[0] != free[0]


@pytest.mark.parametrize("name", slow_but(("gptj",), KINDS))
def test_what_is_drawn_depends_on_nothing_in_the_same_batch(name: str, make: Policies) -> None:
    made, asked = make(name), prompts(20, 8, 33, 8, 14)
    flat = {"temperature": 10.0}
    want = responses(made(asked, 4, **flat))
    assert len({tuple(row) for row in want}) == 20
    for most in (1, 3, 8):
        made.generator = TransformersGenerator(made.policy, made.engine, most)
        assert responses(made(asked, 4, **flat)) == want, most
    made.reset()
    state = torch.get_rng_state()
    others = [*asked[:2], *prompts(5, 40, 2, seed=9)]
    assert responses(made(others, 4, **flat))[:8] == want[:8]
    assert torch.equal(torch.get_rng_state(), state)
    two = responses(made(asked, 2, **flat))
    assert [two[i] for i in (0, 1, 8, 9)] == [want[i] for i in (0, 1, 16, 17)]


def test_another_seed_draws_others(make: Policies) -> None:
    made, (prompt,) = make("llama"), prompts(5)
    config = RolloutConfig(max_new_tokens=12)
    drawn = [
        responses(next(made.generator.generate([prompt], num=1, config=config, seed=seed)))[0]
        for seed in ((0, 0), (0, 1), (1, 0), (0, 0))
    ]
    assert drawn[0] == drawn[3] and len({tuple(row) for row in drawn}) == 3


@pytest.mark.parametrize("name", slow_but(("llama", "gptj"), KINDS))
def test_first_tokens_have_the_policys_frequencies(name: str, make: Policies) -> None:
    made, (prompt,) = make(name), prompts(11)
    count = 4000
    rollouts = made([prompt], count, max_new_tokens=1, temperature=2.0)
    drawn = torch.tensor([row[0] for row in responses(rollouts)])
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(made.folder).eval()
        want = torch.softmax(model(torch.from_numpy(prompt.tokens)[None]).logits[0, -1] / 2.0, -1) * count
    often = want > 5
    counts = torch.bincount(drawn, minlength=zoo.VOCAB_SIZE)
    surprise = ((counts - want)[often] ** 2 / want[often]).sum()
    assert surprise < often.sum() + 5 * (2 * often.sum()).sqrt()  # chi-squared, five deviations


@pytest.mark.parametrize("name", KINDS)
def test_logprobs_are_the_trainers_at_the_temperature(name: str, make: Policies) -> None:
    made = make(name)
    rollouts = made(prompts(20, 8, 33), 3, temperature=0.7, top_p=0.9, top_k=50, repetition_penalty=1.2)
    rows, lengths = [r.tokens for r in rollouts], np.array([r.prompt_length for r in rollouts])
    with torch.inference_mode():
        for members, logprobs, _ in made.engine.logprobs(rows, lengths, 0.7):
            for i, row in zip(members, logprobs, strict=True):
                own = rollouts[i].logprobs
                assert own.dtype == np.float32 and len(own) == rollouts[i].response_length
                np.testing.assert_allclose(own, row[: len(own)].numpy(), atol=2e-4)


def test_adapters_are_in_place(make: Policies) -> None:
    folder = make("llama").folder
    policy = PolicyTrainer(load_policy(LanguageModelConfig(model=str(folder))), PolicyConfig(model=str(folder), lora=2))
    generator = make_generator(policy, RolloutConfig())
    config, asked = RolloutConfig(max_new_tokens=8), prompts(9, 20)
    before = [r for group in generator.generate(asked, num=2, config=config, seed=SEED) for r in group]
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    generator.sync()
    after = [r for group in generator.generate(asked, num=2, config=config, seed=SEED) for r in group]
    assert responses(before) != responses(after)
    want = policy.logprobs([r.tokens for r in after], np.array([r.prompt_length for r in after])).logprobs.numpy()
    for rollout, row in zip(after, want, strict=True):
        np.testing.assert_allclose(rollout.logprobs, row[: rollout.response_length], atol=2e-4)


def test_eos_ends_a_response_and_not_a_prompt(make: Policies) -> None:
    made = make("llama")
    (prompt,) = prompts(12)
    prompt.tokens[[3, 11]] = zoo.EOS
    (free,) = responses(made([prompt]))
    assert len(free) == 12
    made.policy.eos_token_ids = (zoo.EOS, free[4])
    (rollout,) = made([prompt])
    at = free.index(free[4]) + 1
    assert responses([rollout]) == [free[:at]] and rollout.is_end and rollout.has_eos
    assert rollout.response_length == at == len(rollout.logprobs) and rollout.prompt_length == 12
    made.policy.eos_token_ids = (free[11],)
    assert made([prompt])[0].is_end  # with the last token that it may have
    made.policy.eos_token_ids = ()
    (rollout,) = made([prompt])
    assert not rollout.is_end and not rollout.has_eos


def test_by_default_nothing_is_taken_from_the_policys_distribution(make: Policies) -> None:
    made, (prompt,) = make("llama"), prompts(12)
    ((first, *_),) = responses(made([prompt]))
    made.policy.eos_token_ids = (first,)
    (group,) = made.generator.generate([prompt], num=1, config=RolloutConfig(), seed=SEED)
    assert responses(group) == [[first]] and group[0].is_end


def test_stop_texts_end_a_response_with_the_token_that_completes_them(make: Policies) -> None:
    made, asked = make("llama"), prompts(12, 30)
    # What begins in the middle of one response goes over three tokens.
    text = made.policy.tokenizer.decode(responses(made(asked))[1][4:7])
    rollouts = made(asked, stop=["not there", text])
    assert rollouts[1].is_end and not rollouts[1].has_eos and rollouts[1].response_length == 7
    assert rollouts[1].text == made.policy.tokenizer.decode(rollouts[1].tokens[30:], skip_special_tokens=True)
    assert not rollouts[0].is_end and rollouts[0].response_length == 12


@pytest.mark.parametrize("name", ["llama", *TABLES])
def test_groups_come_when_they_are_finished_and_the_policy_may_be_used_between(name: str, make: Policies) -> None:
    made, asked = make(name), prompts(5, 250, 9, 240)
    want = responses(made(asked, 2, max_new_tokens=30))
    config = RolloutConfig(max_new_tokens=30, min_new_tokens=0)
    computed = count_tokens(made)
    of_prompts = 4 * 250 if made.generator._choice.kind == "padded" else 5 + 250 + 9 + 240
    order, rollouts = [], []
    for group in made.generator.generate(asked, num=2, config=config, seed=SEED):
        order.append((group[0].group, computed[0] - of_prompts))
        rollouts += group
        seen = computed[0]
        scored = list(made.engine.logprobs([r.tokens for r in group], np.array([r.prompt_length for r in group])))
        assert sum(len(members) for members, _, _ in scored) == 2 and scored[0][1].requires_grad
        computed[0] = seen
    # Those of 250 and 240 tokens have room for 6 and 16 more; each comes at once.
    assert [group for group, _ in order][:2] == [1, 3]
    assert order[0][1] == 8 * 5 and order[1][1] < 8 * 15
    assert responses(sorted(rollouts, key=lambda r: (r.group, r.index))) == want
    assert [len(row) for row in want][2:4] == [6, 6] and not rollouts[0].is_end


CHANGE = 48
"""The length beyond which the frequencies of `changing` are others."""


def changing(kind: str, folder: Path) -> Made:
    """A policy whose rotary embedding is another for long sequences; a dynamic one, for each of their lengths."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": CHANGE}
        return Made("phi3", folder, rope_parameters=rope, original_max_position_embeddings=CHANGE)
    zoo.tokenizer(folder)
    zoo.language_model(
        "llama", folder, rope_parameters=rope | {"factor": 2.0}, max_position_embeddings=CHANGE, eos_token_id=None
    )
    return Made("", folder, max_length=200)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_change_with_the_length_are_those_of_each_sequence(kind: str, tmp_path: Path) -> None:
    made = changing(kind, tmp_path / "model")
    made.policy.eos_token_ids = ()
    lengths = [CHANGE - 12, 8, CHANGE + 1, 20, 90, CHANGE - 12] if kind == "longrope" else [CHANGE - 12, 8, 20, 3]
    asked, flat = prompts(*lengths), {"temperature": 5.0}
    assert made.generator._choice.kind == "padded"
    rollouts = made(asked, 2, **flat)
    rows, starts = [r.tokens for r in rollouts], np.array([r.prompt_length for r in rollouts])
    with torch.inference_mode():
        for members, logprobs, _ in made.engine.logprobs(rows, starts, 5.0):
            for i, row in zip(members, logprobs, strict=True):
                np.testing.assert_allclose(rollouts[i].logprobs, row[:12].numpy(), atol=2e-4)
    made(prompts(*lengths[::-1]), **flat)  # whatever ran before
    assert responses(made(asked[:1], 2, **flat)) == responses(rollouts)[:2]
    # A row that has ended before the others goes on behind the change as little.
    made = Made("", made.folder, max_length=CHANGE)
    made.policy.eos_token_ids = ()
    short = prompts(*[8] * 12)
    alone = responses(made(short, greedy=True, max_new_tokens=40))
    assert responses(made([*short, *prompts(CHANGE - 1)], greedy=True, max_new_tokens=40))[:12] == alone


@pytest.mark.parametrize(("kind", "length"), [("longrope", CHANGE - 11), ("longrope", CHANGE), ("dynamic", CHANGE + 1)])
def test_a_response_within_which_the_frequencies_would_change_is_refused(
    kind: str, length: int, tmp_path: Path
) -> None:
    made = changing(kind, tmp_path / "model")
    with pytest.raises(ConfigError, match=f"prompt 0 has {length} tokens, .* changes its frequencies") as refused:
        made(prompts(length))
    assert "rollouts.max_new_tokens" in refused.value.help


@pytest.mark.parametrize("name", ["gptj", "mamba"])
def test_prompts_that_are_computed_at_once_fit_the_token_budget(name: str, make: Policies) -> None:
    made = make(name)
    made.policy.eos_token_ids = ()
    asked = prompts(20, 20, 8, 20, 8, 20) if name == "gptj" else prompts(20, 20, 20, 20)
    want = responses(made(asked, 2))
    made.engine.max_batch_tokens = 64
    shapes: list[tuple[int, ...]] = []
    embeddings = made.policy.trunk.get_input_embeddings()
    made.hooks.append(embeddings.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape))))
    assert responses(made(asked, 2)) == want
    assert [shape for shape in shapes if shape[1] > 1] == [(3, 20)] * (len(asked) // 3) + [(1, 20)] * (len(asked) % 3)
    made.engine.max_batch_tokens = 5
    assert responses(made(asked, 2)) == want


def count_tokens(made: Made) -> list[int]:
    """How many tokens the model has computed so far, in a list of one."""
    total = [0]

    def count(_: Any, inputs: tuple[torch.Tensor]) -> None:
        total[0] += inputs[0].numel()

    made.hooks.append(made.policy.trunk.get_input_embeddings().register_forward_pre_hook(count))
    return total


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_is_computed_once_for_all_its_rollouts(name: str, make: Policies) -> None:
    made = make(name)
    made.policy.eos_token_ids = ()
    computed = count_tokens(made)
    made(prompts(40, 40), 6, max_new_tokens=5)
    assert computed == [2 * 40 + 2 * 6 * 4]  # the last token is drawn and never computed


@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", *TABLES]))
def test_finished_rollouts_leave_the_batch(name: str, make: Policies) -> None:
    made = make(name)
    made.policy.eos_token_ids = ()
    lengths = [253, 254, 255, 250, 8]  # room for 3, 2, 1, 6 and 100 tokens
    alone = [response for prompt in prompts(*lengths) for response in responses(made([prompt], greedy=True))]
    computed = count_tokens(made)
    rollouts = made(prompts(*lengths), 4, max_new_tokens=100)
    of_prompts = 5 * 255 if made.generator._choice.kind == "padded" else sum(lengths)
    wasted = computed[0] - of_prompts - 4 * (2 + 1 + 0 + 5 + 99)
    assert 0 <= wasted <= 4 * 5 * 5  # without leaving it would be about 16 rows times 95
    assert [len(response) for response in responses(rollouts)] == [n for n in (3, 2, 1, 6, 100) for _ in range(4)]
    # Those at the end of the positions disturb nobody.
    together = responses(made(prompts(*lengths), greedy=True, max_new_tokens=100))
    assert [response[:12] for response in together] == alone


def test_the_next_prompts_join_before_the_last_rollout_is_finished(make: Policies) -> None:
    made = make("llama")
    made.generator = TransformersGenerator(made.policy, made.engine, 8)
    made.policy.eos_token_ids = ()
    steps = [0]
    made.hooks.append(made.policy.model.register_forward_pre_hook(lambda *_: steps.__setitem__(0, steps[0] + 1)))
    made(prompts(8, 250, 250, 250), 4, max_new_tokens=40)
    assert steps[0] == 39 + 3  # thrice the prompts' logits; two prompts and two it would be 39 + 5 + 2


@pytest.mark.parametrize(("length", "fits"), [(255, True), (256, False), (0, False)])
def test_a_prompt_needs_a_token_and_room_for_one(length: int, fits: bool, make: Policies) -> None:
    made = make("gpt2")
    if fits:
        assert made(prompts(length))[0].response_length == 1
    else:
        with pytest.raises(ConfigError, match=f"prompt 0 has {length} tokens"):
            made(prompts(length))


def test_a_decoder_that_differs_from_the_plain_forward_is_not_taken(
    make: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("llama")
    with monkeypatch.context() as patch:
        patch.setattr(Decoding, "positions", property(lambda self: np.zeros(self.cohorts[-1].num_rows, np.int64)))
        choice = DecoderChoice(made.policy, made.engine)
    assert choice.kind == "padded" and "packed: differs from the plain forward" in choice.why
    monkeypatch.setattr(generating, "TOLERANCE", {torch.float32: -1.0})
    with pytest.raises(CheckpointError, match="cannot generate token by token: packed: differs"):
        DecoderChoice(made.policy, made.engine)
