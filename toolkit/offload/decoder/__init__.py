"""A Llama-shaped decoder on NumPy arrays, for GGUF files as they are: no torch, no transformers.

They take two thirds of the memory that a process has beside weights, and most of the time to the first token. Reads,
placement, caches of layers and kernels are those of `toolkit.offload`; what is here is the model itself.
"""
