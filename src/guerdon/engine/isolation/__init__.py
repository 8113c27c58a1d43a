"""Isolation of a user's function in child processes with limits: a failure never ends the server.

`isolated.py` is the server's side. For each isolated function it starts one template process (`template.py`), which
imports the function once. The template forks a keeper (`keeper.py`) for each child, and the keeper forks the child
(`child.py`), which calls the function. A keeper watches one child and all processes that descend from it.
"""
