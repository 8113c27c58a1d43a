"""Attention over a packed batch: the entry for transformers, the table of forms, and the forms."""
