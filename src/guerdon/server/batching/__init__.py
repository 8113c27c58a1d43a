"""Scheduling: the queue, the threads that compute, and fairness between clients."""
