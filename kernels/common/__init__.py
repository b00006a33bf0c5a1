"""What kernel families share: SIMD, dense products, elements, GPU helpers, launches, threads, tuning, contracts."""
