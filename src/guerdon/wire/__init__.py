"""Bytes to nouns and back: pure functions without I/O, on numpy alone."""
