"""Weights that live where there is room for them, and the time it takes to bring each to where it computes."""
