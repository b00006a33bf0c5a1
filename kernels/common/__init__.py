"""What kernel families share: SIMD features, GPU helpers, launches, threads."""
