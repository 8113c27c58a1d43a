"""Users' functions `module:function`, in this process or in child processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from guerdon.core import ModelInfo
from guerdon.errors import ConfigError
from guerdon.kinds.kind import Kind
from guerdon.settings.config import ModelConfig


class FunctionKind(Kind):
    """A function that gives numbers for texts, responses or token ids; nobody knows where it computes."""

    names = ("function",)
    settings = ModelConfig
    device = "functions"

    def owns(self, config: Any) -> bool:
        """Whether the settings name a function, and no folder."""
        return super().owns(config) and ":" in config.model and not Path(config.model).exists()

    def load(self, config: ModelConfig, ranks: Any) -> Any:
        """Returns the scorer that calls the function; raises ConfigError if adapters stand under it."""
        if config.adapters:
            raise ConfigError(f"adapters is set, but {config.model} is a function", "list them under their base model")
        if config.isolate:
            from guerdon.engine.isolation.isolated import IsolatedScorer

            return IsolatedScorer(config, ranks)
        from guerdon.engine.functions import FunctionScorer

        return FunctionScorer(config)

    def num_children(self, config: ModelConfig) -> int:
        """Returns the number of child processes of an isolated function."""
        return config.num_children if config.isolate else 0

    def why_fixed(self, info: ModelInfo, what: str) -> str:
        """Says that it is code."""
        return f"{info.name} is a function, and cannot be {what}: it is code; restart the server for another"
