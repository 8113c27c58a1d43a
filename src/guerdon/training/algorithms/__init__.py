"""Algorithms as pure functions over tensors: they know no model, no file and no network."""
