"""Passes timed on this machine, beside rivals, with what they depend on kept."""
