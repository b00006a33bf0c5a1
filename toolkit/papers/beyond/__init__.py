"""Questions that no paper asks: each has a notebook in `notebooks/beyond`.

Begin with `notebooks/beyond/real_model_under_a_limit`.

- `requantised`: a GGUF file in another mixture of llama.cpp's types
- `sparse_curve`: zeros among FFN outputs without training
"""
