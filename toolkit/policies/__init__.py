"""Decisions without I/O: how weights are stored and brought to the processor, and where each layer lives."""
