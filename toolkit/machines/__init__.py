"""Hardware as numbers: the papers' machines from `data/hardware/`, and this machine as probed."""
