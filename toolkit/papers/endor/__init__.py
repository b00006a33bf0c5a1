"""What several of ENDOR's notebooks share."""
