"""Questions that no paper asks: each has a notebook in `notebooks/beyond`.

Begin with `notebooks/beyond/real_model_under_a_limit`.

- `requantised`: a GGUF file in another mixture of llama.cpp's types
- `sparse_curve`: zeros among FFN outputs without training
"""

from typing import TYPE_CHECKING

from toolkit.lazy import lazy

if TYPE_CHECKING:
    from toolkit.papers.beyond.input_zeros import InputZeros, factors
    from toolkit.papers.beyond.priced import Texts, in_types, prices, sizes, window_nll
    from toolkit.papers.beyond.sparse_curve import Zeros
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["InputZeros", "Texts", "Zeros", "factors", "in_types", "prices", "sizes", "window_nll"]
