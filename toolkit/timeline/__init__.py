"""A run's steps and their times: spans, their recorder, timelines, and the tables made of them."""
