"""What learns from the servers: a policy that generates, is rewarded, and is updated."""
