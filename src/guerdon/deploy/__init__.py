"""The service as other engines run it: replicas are theirs."""
