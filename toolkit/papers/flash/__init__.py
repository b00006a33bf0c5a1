"""Code that several notebooks of LLM in a flash share."""
