"""Code that several of CORM's notebooks share."""
