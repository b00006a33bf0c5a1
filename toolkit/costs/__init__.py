"""Time from numbers: machines (the papers', and this one as probed) and models of what they take for a token."""
