"""One data plane under every transport."""
