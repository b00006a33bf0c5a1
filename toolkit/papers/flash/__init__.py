"""What several of the notebooks of LLM in a flash share."""
