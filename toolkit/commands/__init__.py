"""The commands of `python -m toolkit`, a module each: its options, its checks, its work."""
