"""Bytes on disk and how they come into memory: aligned buffers, direct files, reads that need no interpreter."""
