"""What helps on this machine, with this model: ways of running it, their speed and their price, before any is tried."""
