"""What several of HERMES's notebooks share."""
