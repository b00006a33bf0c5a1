"""The int8 product for CPUs with SIMD: weights are sign-extended, converted to fp32 and multiplied."""

import torch

from toolkit.kernels.common.products import dense_product

matvec = dense_product(torch.int8)
