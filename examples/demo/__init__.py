"""The demo: trains a small reward model, serves it, and trains a small policy against it."""
