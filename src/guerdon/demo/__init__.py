"""The demo: make a small reward model, serve it, score prompts with several responses each, show the result."""
