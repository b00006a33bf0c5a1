"""A safetensors file taken apart by hand: length, JSON, and slices."""

import json


def read_shard(path):
    """Each tensor's dtype, shape, place in the file and bytes, by name; padding included."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "first": first, "bytes": data[first:last]}
    return found
