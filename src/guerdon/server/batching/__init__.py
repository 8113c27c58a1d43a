"""What is computed next, and what became of it: the queue, the thread that empties it, and whose turn it is."""
