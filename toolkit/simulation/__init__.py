"""Models of time: what a machine would take."""
