"""ENDOR: pruned weights as a bitmap and their non-zeros, streamed from disk through DRAM to the GPU.

The idea: offloading is bound by bytes over links. Half of the weights are zeros after pruning, so a bitmap with the
other half passes a link in 0.56 of the time, if decoding costs nothing beside the transfer.

Begin with `notebooks/endor/fig04_format_size`, then `tab_e2e_one_pass`. The format itself is the engine's
(`toolkit.formats.endor`, `toolkit.kernels.bitmap`), as are methods and placements (`toolkit.offload`).

- `cost_model`: when each weight is read, copied, decoded and used; `tables`: its times as tables
- `operations`: the same, measured: one layer's operations from a store; `rates`: this machine's rates for the model
- `latency`: figures 2 to 16, modelled beside measured; `passes`: whole models, the paper's maps of layers
"""
