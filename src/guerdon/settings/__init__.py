"""Every setting, once: YAML keys, flags, help and docs are made from these dataclasses."""
