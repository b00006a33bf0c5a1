"""The planner: speed and price of every way of running a model on this machine, before any is tried."""
