"""Cost models: machines (the papers', and this one as probed), and the time that they take for a token."""
