"""Freezes what a forkserver has imported out of the garbage collection: else every child copies it by searching it."""

import gc

gc.collect()
gc.freeze()
