"""What the tests of all forms share: asking one, and answering it with scores that no model gave."""

from dataclasses import replace
from typing import Any

import orjson

from guerdon.core import ModelInfo, ScoreReply
from guerdon.wire import bodies
from guerdon.wire.forms import FORMS
from guerdon.wire.forms.form import FormRequest

RM = ModelInfo("rm", "sequence-classification", source="org/rm", max_length=512)
MANY = replace(RM, outputs=("rewards", "attributes"), attribute_names=("helpful", "brief", "kind"))
SUM = replace(
    RM, kind="sum", has_components=True, outputs=("rewards", "attributes"), attribute_names=("helpful", "brief")
)
CRITIC = replace(RM, name="critic_infer", outputs=("values",))


def ask(path: str, body: Any, **query: str) -> FormRequest:
    """What a client that sends the body asks."""
    return FORMS[path].read(orjson.dumps(body), query)


def reply_bytes(path: str, body: Any, *results: Any, info: ModelInfo = RM, **query: str) -> bytes:
    """The reply to the body if the model gave the results, each of them of 3 tokens more than its index."""
    lengths = list(range(3, 3 + len(results)))
    reply = ScoreReply(list(results), lengths, "v7", 0.25, 0.5)
    return bodies.write(ask(path, body, **query).to_reply(reply, info))


def reply(path: str, body: Any, *results: Any, info: ModelInfo = RM, **query: str) -> Any:
    """As `reply_bytes`, parsed by the client."""
    return orjson.loads(reply_bytes(path, body, *results, info=info, **query))
