"""What a client may cost, who it is, and what it speaks: HTTP, gRPC and the forms of others, over one service."""
