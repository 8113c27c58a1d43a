"""The model as a function of sequences: loading, packing, attention, heads; knows nothing of servers and transports."""
