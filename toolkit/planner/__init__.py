"""Which ways help on this machine, with this model: their speed and their price, before any is tried."""
