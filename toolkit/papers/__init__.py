"""Code that several notebooks of one paper share."""
