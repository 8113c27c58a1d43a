"""A model with an optimiser: training, saving and restoring."""
