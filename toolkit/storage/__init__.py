"""Packed models on disk, and how their bytes come into memory.

Written by `packing` (a model) or `writing` (any ops): shards (`shards`) and an index (`index`) in a folder that appears
whole or not at all. Read back by `store` (what lies where) and `readers` (who fetches it) into aligned
memory (`buffers`), from files opened past the page cache (`files`), by compiled reads (`preads`).
"""
