"""What kernel families share inside their kernels: SIMD, elements, dense rows, GPU helpers."""
