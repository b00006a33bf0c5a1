"""Code that several of ENDOR's notebooks share."""
