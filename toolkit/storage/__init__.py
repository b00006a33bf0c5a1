"""Packed models on disk, and how their bytes come into memory.

`packing` writes a model and `writing` writes any ops: shards (`shards`) and an index (`index`), in a folder that is
complete or not there at all. `store` knows what lies where, and `runs` describes what can be read: layers, ops, rows.
`readers` fetch it into aligned memory (`buffers`), from files that are opened past the page cache (`direct`), by
compiled reads (`chunks`).
"""
