"""What a run did and when: spans, their recorder, timelines, and the tables made of them."""
