"""From a checkpoint on disk to a model on its device, and its tokenizer."""
