"""The forms of other servers' protocols, one module each: JSON without tensors."""

from guerdon.wire.forms import (
    gym,
    label_probs,
    llama_factory,
    openrlhf_reward,
    rerank,
    sglang,
    sglang_logprobs,
    slime,
    tei,
    tokens,
    trl_logprobs,
    vllm_logprobs,
    vllm_pooling,
)
from guerdon.wire.forms.form import Form

FORMS: dict[str, Form] = (
    openrlhf_reward.FORMS
    | slime.FORMS
    | vllm_pooling.FORMS
    | sglang.FORMS
    | tei.FORMS
    | rerank.FORMS
    | llama_factory.FORMS
)
"""The forms that ask for scores, by the path that serves them."""

TEACHER_FORMS: dict[str, Form] = vllm_logprobs.FORMS | sglang_logprobs.FORMS | trl_logprobs.FORMS | label_probs.FORMS
"""The forms that ask a language model for log-probs, by the path that serves them."""

ENVIRONMENT_FORMS: dict[str, Form] = gym.FORMS
"""The forms that ask for the rewards of rollouts, by the path that serves them."""

TOKEN_FORMS = tokens.FORMS
"""The forms that ask for a model's tokens, by the path that serves them."""

ANSWERS = gym.ANSWERS
"""Answers without a model, by path."""

ALL_FORMS = FORMS | TEACHER_FORMS | ENVIRONMENT_FORMS
