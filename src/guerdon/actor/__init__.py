"""The actors, which learn from the servers: a policy that generates, is rewarded, and is updated."""
