"""Code shared by the kernel families: SIMD, elements, dense rows, GPU helpers."""
