"""Experiments whose results are kept and that more than one notebook uses."""
