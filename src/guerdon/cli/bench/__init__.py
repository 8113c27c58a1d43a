"""`guerdon bench`: a load as RLHF makes it on a running server, and what came of it."""
