"""A model with an optimiser: how a critic learns, what is written of it, and what is restored."""
