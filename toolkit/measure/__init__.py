"""Passes timed on this machine, beside rivals, and kept together with their circumstances."""
