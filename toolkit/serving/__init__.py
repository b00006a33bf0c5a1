"""An HTTP server with OpenAI's interface in front of one model."""
