"""What several of CORM's notebooks share."""
