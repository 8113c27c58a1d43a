"""The forms of other servers' protocols, one module each: JSON without tensors."""

from guerdon.wire.forms import (
    gym,
    label_probs,
    rerank,
    reward_services,
    sglang_logprobs,
    tei,
    tokens,
    trl_logprobs,
    vllm_logprobs,
    vllm_pooling,
)
from guerdon.wire.forms.form import forms_of

FORMS = forms_of(reward_services, vllm_pooling, tei, rerank)
"""The forms that ask for scores, by the path that serves them."""

TEACHER_FORMS = forms_of(vllm_logprobs, sglang_logprobs, trl_logprobs, label_probs)
"""The forms that ask a language model for log-probs, by the path that serves them."""

ENVIRONMENT_FORMS = gym.FORMS | forms_of(gym)
"""The forms that ask for the rewards of rollouts, by the path that serves them."""

TOKEN_FORMS = tokens.FORMS
"""The forms that ask for a model's tokens, by the path that serves them."""

ANSWERS = gym.ANSWERS
"""Answers without a model, by path."""

ALL_FORMS = FORMS | TEACHER_FORMS | ENVIRONMENT_FORMS
