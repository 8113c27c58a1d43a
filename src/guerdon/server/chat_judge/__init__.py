"""Judges in words: chat completions of other servers, a cache of answers, and their parsing."""
