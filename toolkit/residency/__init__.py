"""The units that stay in memory: policies for neurons and experts, without I/O.

- `base`: a policy decides, for each token, which units are loaded and dropped
- `policies`: LRU, LFU, the sliding window and others, by name; `two_level`: experts, and neurons within each
- `replay`: a trace through a policy, without a disk or a model
"""
