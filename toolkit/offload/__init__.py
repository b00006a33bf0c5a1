"""The runtime: weights that live on disk, in DRAM or on a GPU, and what brings them to the device that computes."""
