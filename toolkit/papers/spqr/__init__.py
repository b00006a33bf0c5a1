"""SpQR's inference kernel: what several of its notebooks share."""
