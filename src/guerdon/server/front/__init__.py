"""Limits, authentication and protocols (HTTP, gRPC, other servers' forms) over one service."""
