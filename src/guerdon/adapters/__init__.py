"""One trainer's form each, thin over the clients."""
