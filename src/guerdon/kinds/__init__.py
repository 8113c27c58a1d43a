"""Kinds of models: what each reads, loads, computes and shows, a file each."""
