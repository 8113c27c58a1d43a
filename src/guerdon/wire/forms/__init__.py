"""The forms of other servers' protocols, one module each: JSON without tensors."""

from guerdon.wire.forms import openrlhf_reward, sglang, slime, tei, vllm_pooling
from guerdon.wire.forms.form import Form

FORMS: dict[str, Form] = openrlhf_reward.FORMS | slime.FORMS | vllm_pooling.FORMS | sglang.FORMS | tei.FORMS
"""All forms by the path that serves them."""
