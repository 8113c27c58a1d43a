"""One command, every rank."""
