"""What the notebooks of one paper share."""
