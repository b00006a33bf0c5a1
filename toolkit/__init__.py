"""Sparsity-driven offloading of large language models: models, formats, kernels and their measurements."""
