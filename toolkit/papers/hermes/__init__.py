"""Code that several of HERMES's notebooks share."""
